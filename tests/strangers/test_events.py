"""A machine that has the token and lies during the run: what it says is data, its machine is lost by name."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isles.base.parsing import Unfit
from isles.comm.errors import NodeLost
from isles.comm.sockets import loop
from isles.comm.sockets.connection import LinkLost, packed
from isles.launch.handles import NodeHandle, order
from isles.launch.nodes import Link, NodeGroup
from isles.running.virtual import train
from isles.training.records.events import Schema, begun, checks_host_messages, committed
from tests.strangers.callers import ESCAPES
from tests.strangers.test_frames import JSON
from tests.training.runs import tiny, write_text

LINE = {
    "step": 2, "worker": 1, "loss": float("nan"), "lr": 0.1, "tokens": 8, "bytes_sent": 1, "bytes_received": 1,
    "blocked_seconds": 0.1, "compute_seconds": -0.1, "clock_seconds": 3.0, "val_loss": None, "skipped_rounds": 0,
}  # fmt: skip
SPAN = {"step": 2, "worker": 1, "kind": "compute", "channel": "", "start": 0.0, "end": 1.0}
RESULT: dict[str, Any] = dict.fromkeys((
    "tokens", "parameters", "replica_std", "bytes_sent", "bytes_received", "ddp_bytes",
    "compute_seconds", "blocked_seconds", "train_seconds", "virtual_seconds"), 1)  # fmt: skip
RESULT |= {"val_loss": None, "val_loss_replica": 2.5, "corpus_sha256": "ab" * 32, "memory": None}
COUNTS = {"bytes_sent": 1, "bytes_received": 2, "blocked_seconds": 0.5}
RESULT["channels"] = {"outer": COUNTS}
SAMPLE = {"sample": "AAAAAA==", "weights": 3, "step": 0, "worker": 1}
GOOD: list[tuple[str, Any]] = [
    ("event", {"notice": "words"}), ("event", {"checkpoint": 4, "worker": 1}),
    ("event", {"corpus": "0" * 64, "rank": 1}), ("event", SAMPLE),
    ("event", {"spans": [SPAN, SPAN | {"kind": "forward", "microbatch": 3}]}), ("event", LINE),
    ("held", 3), ("done", RESULT), ("done", None),
]  # fmt: skip
EVIL = "20/../../../victim/checkpoints/step-260"
BAD: list[tuple[str, Any]] = [
    ("event", {"checkpoint": EVIL, "worker": 1}), ("event", {"checkpoint": 10**30, "worker": 1}),
    ("event", {"checkpoint": True, "worker": 1}), ("event", {"checkpoint": 4.0, "worker": 1}),
    ("event", {"checkpoint": 4, "worker": 0}), ("event", {"checkpoint": 4, "worker": "1"}), ("event", {"lost": 0}),
    ("event", {"lost": 0, "notice": "x"}), ("event", {"corpus": "../x", "rank": 1}), ("event", {"notice": 3}),
    ("event", SAMPLE | {"sample": "!"}), ("event", SAMPLE | {"sample": "AAA="}), ("event", SAMPLE | {"weights": 0}),
    ("event", {"spans": [SPAN | {"kind": "forward", "microbatch": -1}]}),
    ("event", {"spans": [SPAN | {"kind": "<script>"}]}), ("event", {"spans": [SPAN] * 5000}), ("event", {"spans": [1]}),
    ("event", {"spans": [SPAN | {"end": float("inf")}]}), ("event", LINE | {"step": 10**9}),
    ("event", LINE | {"worker": 0}),
    ("event", LINE | {"a\x1b": 1}), ("event", LINE | {"x": ESCAPES}), ("event", LINE | {"x": [1]}), ("event", []),
    ("event", {}), ("event", {key: value for key, value in LINE.items() if key != "loss"} | {"loss": "low"}),
    ("held", "x"), ("held", -1), ("held", 10**30), ("done", []), ("done", {}), ("done", RESULT | {"tokens": None}),
    ("done", RESULT | {"tokens": "many"}), ("done", RESULT | {"more": 1}), ("done", RESULT | {"memory": {"a": {}}}),
    ("done", RESULT | {"channels": 1}), ("done", RESULT | {"channels": {"outer": COUNTS | {"bytes_sent": "x"}}}),
]  # fmt: skip


@pytest.fixture(scope="module")
def schema(tmp_path_factory: pytest.TempPathFactory) -> Schema:
    text = write_text(tmp_path_factory.mktemp("text") / "text.txt")
    return Schema(tiny(text, "run.steps=8", "world.workers=2"))


@pytest.mark.parametrize(("kind", "value"), GOOD, ids=lambda value: str(value)[:24])
def test_what_isles_says_is_taken_as_it_is(schema: Schema, kind: str, value: Any) -> None:
    assert str(schema(kind, json.loads(json.dumps(value)), (1,))) == str(value)


@pytest.mark.parametrize(("kind", "value"), BAD, ids=lambda value: ascii(value)[:24])
def test_anything_else_is_unfit(schema: Schema, kind: str, value: Any) -> None:
    with pytest.raises(Unfit):
        schema(kind, json.loads(json.dumps(value)), (1,))


def test_notices_are_one_line(schema: Schema) -> None:
    assert schema("event", {"notice": ESCAPES}, (1,))["notice"].isprintable()


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(st.sampled_from([*LINE, "checkpoint", "corpus", "rank", "sample", "spans", "notice", "lost"]), JSON)
)
def test_fuzzed_events_are_fit_or_unfit(schema: Schema, event: dict[str, Any]) -> None:
    try:
        taken = schema("event", event, (1,))
    except Unfit:
        return
    assert "lost" not in taken and all(type(taken[key]) is int for key in ("step", "checkpoint") if key in taken)


@pytest.fixture
def line() -> Iterator[tuple[Link, socket.socket]]:
    """A link, and the bare other end of its connection."""
    ours, theirs = socket.socketpair()

    async def begin() -> Link:
        return Link(*await asyncio.open_connection(sock=ours))

    link = loop.run(begin())
    yield link, theirs
    link.close()
    theirs.close()


@pytest.mark.parametrize(
    "said",
    [
        [1, "event", {"checkpoint": EVIL, "worker": 1}], [0, "done", None], [True, "done", None],
        [1, "interrupt", None], [-1, "done", None], [1, "close", None], [1, ["event"], {}], [1, "event"], "x", 7,
        {"over": None}, [[], [], []],
    ],
    ids=lambda value: str(value)[:24],
)  # fmt: skip
def test_who_says_what_isles_does_not_is_lost(schema: Schema, line: tuple[Link, socket.socket], said: Any) -> None:
    """On node 0: its workers count as failed, in one line that names it."""
    link, theirs = line
    handle = NodeHandle(1, (1,), link, schema)
    theirs.sendall(packed(said))
    messages: list[Any] = []
    while not messages:
        link.wait(1.0)
        messages = handle.read()
    ((rank, kind, error),) = messages
    assert (rank, kind) == (1, "error") and isinstance(error, NodeLost)
    assert "it sends something else than isles messages" in str(error) and str(error).isprintable()


def test_node_0_is_a_peer_too(schema: Schema, tmp_path: Path) -> None:
    """Its orders and facts are looked at as well: none becomes a path."""
    text = write_text(tmp_path / "text.txt")
    config = tiny(text, "run.steps=8", "world.workers=2")
    assert committed({"commit": 4, "ranks": [0, 1]}, config) == (4, [0, 1]) and begun({"resume": 4}, config) == 4
    for command in (
        {"commit": EVIL, "ranks": [0]},
        {"commit": 4, "ranks": ["../0"]},
        {"commit": 4},
        {"ranks": [0]},
    ):
        with pytest.raises(NodeLost, match="node 0 says what isles does not say"), checks_host_messages():
            committed(command, config)
    with pytest.raises(NodeLost), checks_host_messages():
        begun({"resume": EVIL}, config)
    assert order("hold") == "hold" and order(["stop", 3]) == ("stop", 3) and order({"command": 1}) is None
    for command in ("x", ["stop", EVIL], ["stop"], 3, [["hold"]]):
        with pytest.raises(LinkLost):
            order(command)


def test_all_that_real_workers_say_is_fit(tmp_path: Path) -> None:
    """Every event and result of a run with validation, checkpoints and gauges, as JSON carries it."""
    text = write_text(tmp_path / "text.txt")
    words = [
        "run.steps=6",
        "world.workers=2",
        "run.checkpoint_every=2",
        "replicas.method=diloco",
        "replicas.sync_every=2",
    ]
    config = tiny(text, *words, "replicas.codec=int8", "replicas.error_feedback=local")
    said: list[Any] = []
    results = train(config, tmp_path, None, NodeGroup()).join(said.append)
    schema, kinds = Schema(config), set()
    for event in said:
        sent = json.loads(json.dumps(event))
        assert str(schema("event", sent, (0, 1))) == str(sent)
        kinds |= set(event)
    assert {"checkpoint", "corpus", "sample", "spans", "loss", "feedback_ratio"} <= kinds
    for result in results:
        sent = json.loads(json.dumps(result))
        assert schema("done", sent, (0,)) == sent
