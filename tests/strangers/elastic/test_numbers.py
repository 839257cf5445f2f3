"""Numbers that a member of a run says: what is no whole number of this run is refused before it is used."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save

from isles.base.parsing import Unfit
from isles.comm.errors import Malformed
from isles.membership.coordinator import RoundsCoordinator
from isles.membership.effects import Rules
from isles.membership.keys import LIGHTHOUSE, MemberKeys
from isles.membership.messages import Ack, Beat, Delivered, Later, Load, PeerReport, Silent
from isles.membership.round_commit import RoundDecision
from isles.membership.run_log import RoundRecord, StartRecord, read_record
from isles.membership.state_transfer import STATE, StateServer, StateUnavailable, _facts
from isles.membership.tls_session import open_session
from isles.pipeline.ravnest.agreement import ClusterWelcome
from isles.training.clusters.member import _restore
from isles.training.clusters.node import ClusterWorker
from isles.training.lighthouse.rounds import RoundsLighthouseServer
from isles.training.records.checkpoint import Checkpoints
from isles.training.records.events import Schema
from isles.training.records.shard import read_state, write_state
from isles.training.swarm.trainer import _read
from tests.membership.sessions import router
from tests.membership.test_gifts import Known
from tests.training.elastic.test_support import config

HUGE = 1 << 61
WRONG = ["7", 7.5, True, None, [7], -1, HUGE]


def run_of(members: int) -> RoundsCoordinator:
    """All in round 5 of 20."""
    run = RoundsCoordinator(Rules(founders=members, sync_every=5, last=20, agrees=True, quorum=0.5))
    for member in range(members):
        run.join(0.0, "text")
        run.hear(0.0, member, Beat(ready=0))
    for member in range(members):
        run.hear(0.0, member, Beat(5, 0, 0))
    return run


@pytest.mark.parametrize(
    "said",
    [
        Beat(21, 0, 0),
        Beat(5, 0, 0, seconds=1e299),
        Ack(1, True, Beat(5, 0, 0, seconds=-1.0)),
        PeerReport(5, 0, 9, "refused"),
        *(Delivered(round, 5, 1.0) for round in (-1, 0, 9, HUGE)),
        *(Delivered(5, steps, 1.0) for steps in (-1, 0, 101, HUGE)),
        *(Delivered(5, 5, seconds) for seconds in (-1.0, 1e299)),
    ],
)
def test_words_of_members(said: Any) -> None:
    run = run_of(3)
    with pytest.raises(ValueError, match=r"impossible seconds|unknown member|this run does not have|no member is in"):
        run.hear(1.0, 1, said)
    assert not run.ballots.are_open
    assert run.hear(1.0, 1, Delivered(5, 5, 1.0)) is not None and run.ballots.are_open


def test_words_that_no_member_says_are_nobody_s() -> None:
    """Whatever they hold: of every kind that there is."""
    run = run_of(3)
    for said in (RoundDecision(5, "land", 0, (1,), steps=(5,)), Later(1e300, "x"), Load(0, HUGE, -1.0), Silent(HUGE)):
        assert run.hear(1.0, 1, said) is None


@pytest.mark.parametrize("key", ["round", "step", "parts", "participants", "digest", "size", "number", "crc32"])
def test_what_is_said_beside_a_file(key: str) -> None:
    good = {"size": 9, "number": 1, "crc32": 5, "round": 7, "step": 7, "parts": 2, "participants": 3, "digest": -5}
    good |= {"whole": True, "left_out": {"3": 1}}
    assert _facts(json.dumps(good).encode(), range(6, 8)) == good | {"left_out": {3: 1}}
    fine = {"digest": (-1, HUGE), "size": (HUGE,)}.get(key, ())
    for wrong in [*(one for one in WRONG if one not in fine), HUGE**2]:
        with pytest.raises(StateUnavailable, match=f"{key} is no whole number"):
            _facts(json.dumps(good | {key: wrong}).encode(), range(6, 8))


@pytest.mark.parametrize(
    "more",
    [
        {"round": 5},  # older than what was asked for
        {"round": 8},
        {"whole": 1},
        {"left_out": [3]},
        {"left_out": {"9" * 5000: 1}},
        {"left_out": {"-3": 1}},
        {"left_out": {"3": True}},
        {"left_out": {"3": 1 << 60}},
    ],
)
def test_what_else_is_said_beside_a_file(more: dict[str, Any]) -> None:
    with pytest.raises(StateUnavailable, match="its facts are invalid"):
        _facts(json.dumps({"size": 9, "number": 1, "crc32": 5, **more}).encode(), range(6, 8))


class Lying(StateServer):
    """says: of which round its file is."""

    says: Any = 5

    def _signed(self, asked: bytes, receiver: int, data: bytes) -> bytes:
        claim = b'"round": ' + json.dumps(self.says).encode()
        return super()._signed(asked, receiver, data.replace(b'"round": 5', claim))


def test_a_state_of_no_round_deletes_none_and_ends_nobody(tmp_path: Path) -> None:
    """Six members say that theirs is of a text, of a path, of 2^61, of 2^61 + 1; the seventh's is kept."""
    keys, folder = MemberKeys(tmp_path), tmp_path / "states"
    rounds = [HUGE, HUGE + 1, "../../5", 9, True, "5", 5]
    with router(tmp_path) as (mine, address, host):
        end = open_session(mine.token, address)
        try:
            kept = Checkpoints(tmp_path, "states")
            for round in (3, 4):

                def before(island_rank: int, path: Path, round: int = round) -> int:
                    write_state(path, {"w": torch.zeros(2)})
                    return round

                assert kept.take_in([0], before) == round
            notices: list[str] = []
            made = RoundsLighthouseServer(config("run.steps=20"), tmp_path, address, print, print, notices.append)
            made.session, made.keys, made._states = host, keys, kept
            made.coordinator = run_of(len(rounds))
            made.coordinator.hear(0.0, 0, Beat(20, 0, 0))  # one of them alone says that it is there
            made.lighthouse = SimpleNamespace(look=lambda at: at(0.0))  # type: ignore[assignment]
            made.state_server = StateServer(host, LIGHTHOUSE, print)
            for member, told in enumerate(rounds):
                path = tmp_path / f"given-{member}"
                write_state(path, {"w": torch.full((2,), float(member))})
                state_server = Lying(end, str(member), print, peer_keys=Known(keys, member))
                state_server.says = told
                state_server.publish(STATE, path, {"round": 5})
            assert made._save()
        finally:
            end.close()
    assert sorted(path.name for path in folder.iterdir()) == ["step-4", "step-5"]
    assert read_state(folder / "step-5" / "worker-0.safetensors")[0]["w"].tolist() == [6, 6]


def test_lines_of_rounds_that_this_run_has_not(tmp_path: Path) -> None:
    line = RoundRecord(
        member=1, round=4, view=0, spare=0, steps=5, seconds=1.0, members=(0, 1), outcome="whole", at=1.0
    )
    assert read_record(asdict(line)) == line
    for key in ("round", "steps", "spare", "view"):
        for wrong in ["7", 7.5, True, None, [7], -2, HUGE]:
            with pytest.raises(ValueError, match=key):
                read_record(asdict(line) | {key: wrong})
    made = RoundsLighthouseServer(config("run.steps=20"), tmp_path, "127.0.0.1:1", print, print, print)  # 4 rounds
    made.coordinator = RoundsCoordinator(made.rules)
    start = StartRecord(member=1, first=4, donor=0, copied=3, has=1 << 39, size=5, at=1.0)
    for told in (asdict(line) | {"round": 1 << 39}, asdict(start)):
        with pytest.raises(ValueError, match="beyond the end of this run"):
            made._note(1, told)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -1, -1.0, None, True, "7"])
@pytest.mark.parametrize("key", ["parameters", "tokens", "bytes_sent", "compute_seconds", "replica_std"])
def test_figures_of_a_result(key: str, wrong: Any) -> None:
    names = "tokens parameters replica_std bytes_sent bytes_received ddp_bytes compute_seconds blocked_seconds"
    good = dict.fromkeys([*names.split(), "train_seconds", "virtual_seconds"], 1)
    good |= {"val_loss": None, "val_loss_replica": float("nan"), "corpus_sha256": "", "memory": None, "channels": {}}
    schema = Schema(config("run.steps=20"))
    assert schema("done", good, {1})[key] == 1
    with pytest.raises(Unfit):
        schema("done", good | {key: wrong}, {1})


def state(**more: Any) -> torch.Tensor:
    """Of a swarm's stage, as another peer gives it."""
    text = json.dumps({"steps": 3, "norm": 1.0} | more).encode()
    data = save({"__structure__": torch.frombuffer(bytearray(text), dtype=torch.uint8), "w": torch.zeros(2)})
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def test_a_stage_s_state_that_is_none() -> None:
    assert _read(state(), 20)["steps"] == 3
    bad = [state(steps=wrong) for wrong in [*WRONG, 21]] + [state(norm=wrong) for wrong in ("1", None, True, -1)]
    for given in [*bad, torch.zeros(3, dtype=torch.uint8), state()[:-1]]:
        with pytest.raises(Malformed, match="an invalid state of a stage"):
            _read(given, 20)


def test_clusters_begin_at_a_step_of_the_run() -> None:
    """Not after 2^61 updates of a schedule, one by one."""
    begun: list[tuple[int, int]] = []
    run = SimpleNamespace(steps=20)
    worker: Any = SimpleNamespace(
        config=SimpleNamespace(run=run), begin_after=lambda *at: begun.append(at), server=None
    )
    for step, read in ((HUGE, 5), (21, 5), (-1, 5), (3, -1), (3.5, 5.0), ("3", 5), (3, None), (True, 5)):
        with pytest.raises(ValueError, match="whole number"):
            _restore(worker, {"step": step, "read": read, "parameters": {}})
    for held in (None, [], {"w": 3}):
        with pytest.raises(ValueError, match="not of a run in clusters"):
            _restore(worker, {"step": 3, "read": 5, "parameters": held})
    _restore(worker, {"step": 3, "read": 5, "parameters": {}})
    assert begun == [(3, 5)]
    good = {"step": 3, "since": 0, "before": 0, "most": 4, "judges": 1}
    for more in ({"step": HUGE}, {"since": 21}, {"step": True}, {"before": 1 << 60}):
        welcome = ClusterWelcome(epoch=1, assignment=None, facts=good | more)  # type: ignore[arg-type]
        with pytest.raises(Unfit):
            ClusterWorker.join(worker, welcome)
