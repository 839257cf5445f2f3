"""What can be a run whose workers come and go, and what is said where it cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from isles.base.parsing import parse_toml
from isles.cli.resume import resume
from isles.membership.data_ledger import batches
from isles.membership.messages import View
from isles.running.run import launch
from isles.training.config.reading import for_members, gather, merged_tables, resolve
from isles.training.elastic.connect import _configuration, as_arguments, with_own
from isles.training.elastic.support import elastic, last_round, rules
from isles.training.elastic.worker import positions
from isles.training.lighthouse.mean import write_mean
from isles.training.lighthouse.rounds import RoundsLighthouseServer
from tests.training.runs import TINY


def config(*more: str) -> Any:
    settings = [one for one in TINY if "backend" not in one]
    return elastic(gather(None, {}, [*settings, "replicas.method=noloco", "replicas.sync_every=5", *more]))


def test_lost_workers_end_nobody() -> None:
    made = config("run.steps=20", "world.workers=3")
    assert made.replicas.on_peer_failure == "solo"
    assert (last_round(made, None), rules(made).founders, rules(made).sync_every) == (4, 3, 5)
    assert made.replicas.on_broken == "leave out" and not rules(made).agrees
    assert rules(elastic(gather(None, {}, ["replicas.method=diloco", "run.steps=20"]))).agrees


def test_a_file_with_all_defaults_will_do() -> None:
    """As `isles config` prints it."""
    with pytest.warns(UserWarning, match='so it is "solo"'):
        assert config("run.steps=20", "replicas.on_peer_failure=raise").replicas.on_peer_failure == "solo"


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (["replicas.method=ddp"], "replicas.method"),
        (["replicas.method=demo"], "replicas.method"),
        (["replicas.method=ist"], "replicas.method"),
        (["replicas.method=eager"], "replicas.outer_delay = 1"),
        (["replicas.method=streaming-diloco"], "replicas.overlap_steps"),
        (["replicas.method=postlocal-sgd"], "every_step_until"),
        (["replicas.method=custom", "replicas.mixing=groups"], 'replicas.mixing = "groups"'),
        (["replicas.method=streaming-noloco"], "replicas."),
        (
            ["replicas.method=diloco", "replicas.on_late=quorum", "world.workers=4", "world.inner=2"],
            "does not go with workers that come and go and islands",
        ),
        (["world.backend=virtual"], "world.backend"),
        (["run.steps=21"], "replicas.sync_every = 5"),
        (["run.loggers=['tensorboard']"], "run.loggers"),
        (["run.start=runs/other"], "run.start"),
        (["world.silence=90"], "world.elastic.lease"),
        (["replicas.method=diloco", "replicas.quorum=0.5"], "on_late"),
        (["world.elastic.lease=0.1"], "lease = 0.1"),
        (["data.split=by_file"], "data.split"),
        (["data.batch_mode=global", "data.batch_size=6"], "data.batch_mode"),
        (["run.keep_checkpoints=5"], "run.keep_checkpoints = 5 .* newest state"),
        (["world.join_deadline=7"], "world.join_deadline = 7.0 .* first round waits"),
        (["world.pipeline_deadline=7"], "world.pipeline_deadline = 7.0 .* no stages"),
        (["memory.vectors=disk", "memory.disk=."], 'memory.vectors = "disk" .* not there yet'),
        (["memory.method=checkpoint"], 'memory.method = "checkpoint" .* not there yet'),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(settings: list[str], key: str) -> None:
    given = [one for one in settings if one.startswith("replicas.method")]
    every = [] if given else ["replicas.sync_every=5"]
    tiny = [one for one in TINY if "backend" not in one]
    method = given or ["replicas.method=noloco"]
    with pytest.raises(ValueError, match=key) as told:
        elastic(gather(None, {}, [*tiny, *method, *every, "run.steps=20", *[o for o in settings if o not in given]]))
    assert "\n" not in str(told.value)


def test_islands_wait_for_their_own_workers() -> None:
    settings = ["world.workers=4", "world.inner=2", "world.join_deadline=7", "run.steps=20"]
    assert elastic(gather(None, {}, [*TINY[:-1], "replicas.method=diloco", *settings])).world.join_deadline == 7


@pytest.mark.parametrize(
    "setting", ["world.elastic.lease=5", "world.elastic.join_state=anchors", "world.elastic.max_members=9"]
)
def test_nobody_joins_a_fixed_world(tmp_path: Path, setting: str) -> None:
    config = gather(None, {}, [*TINY, setting])
    with pytest.raises(ValueError, match="where workers join a lighthouse"):
        launch(resolve(config), tmp_path / "run", lambda line: None, lambda notice: None)


def test_a_lighthouse_names_no_code() -> None:
    """What comes from another machine imports nothing here."""
    with pytest.raises(ValueError, match=r"os:system.* --set model.factory=\.\.\.$"):
        with_own(_configuration(b'[model]\nfactory = "os:system"\n'), {})
    with pytest.raises(ValueError, match=r"data.source = \"os:system\".* --set data.source=\.\.\.$"):
        with_own(_configuration(b'[data]\nsource = "os:system"\n'), {})
    with pytest.raises(ValueError, match=r"os:system.* imports nothing"):
        _configuration(b'[replicas]\nmethod = "os:system"\n')
    for named in (b"replicas.codec", b"replicas.rule", b"pipeline.routing", b"pipeline.boundary.kind"):
        with pytest.raises(ValueError, match="is code of its own, os:system, and a worker that joins imports nothing"):
            _configuration(named + b' = "os:system"\n')
    for damaged in (b"\xff\xfe", b"run = 3\n", b"a." * 100_000 + b"a = 1"):
        with pytest.raises(ValueError, match="configuration is damaged: ") as told:
            _configuration(damaged)
        assert "\n" not in str(told.value)


THEIRS = """
[model]
hf = "/theirs/hf"
device = "cuda"
[data]
path = "/theirs/text"
validation_path = "/theirs/held"
tokenizer = "/theirs/tokenizer.json"
cache = "/theirs/cache"
[world]
threads = 64
[world.virtual]
links = "/theirs/links.toml"
[run]
start = "/theirs/run"
loggers = ["wandb"]
steps = 800
[memory]
disk = "/theirs/disk"
[pipeline.skippipe]
plan = "/theirs/plan.json"
"""


def test_a_joiner_takes_nothing_of_its_own_machine_from_a_lighthouse() -> None:
    """Not one of its paths is left, nor how the machine is used; what the run needs must be typed here."""
    needed = ["model.hf", "data.path", "data.validation_path", "data.tokenizer"]
    own: dict[str, Any] = {}
    for name in needed:
        with pytest.raises(ValueError, match=f"the run has {name} = .* --set {name}="):
            with_own(parse_toml(THEIRS), own)
        own.setdefault(name.split(".")[0], {})[name.split(".")[1]] = "/mine"
    found = with_own(parse_toml(THEIRS), own)
    assert "/theirs" not in str(found)
    assert found == {
        "model": {"hf": "/mine"},
        "data": {"path": "/mine", "validation_path": "/mine", "tokenizer": "/mine"},
        "world": {"virtual": {}},
        "memory": {},
        "pipeline": {"skippipe": {}},
        "run": {"steps": 800},
    }
    made = with_own({"model": {"factory": "their:model"}}, merged_tables(None, {}, ["model.factory=my:model"]))
    assert made == {"model": {"factory": "my:model"}}
    ids = {"tokenizer": "ids", "vocab": 400, "ids_dtype": "uint32"}  # is no path: all join with ids
    assert with_own({"data": {"path": "/theirs/a.bin", **ids}}, {"data": {"path": "/mine"}}) == {
        "data": {"path": "/mine", **ids}
    }


def test_what_a_machine_has_for_itself_goes_on_to_its_other_workers() -> None:
    """As words of a command, which are read back to the same tables."""
    told = {
        "model": {"factory": "my:model", "options": {"width": 8, "deep": {"a": [1, "x"]}}},
        "data": {"path": "a 'b'"},
    }
    typed = as_arguments({**told, "run": {"steps": 3, "start": ""}})
    assert typed[::2] == ["--set"] * 3 and merged_tables(None, {}, typed[1::2]) == told


def test_cells_are_read_in_passes() -> None:
    """With accumulation a worker reads what it would have read in a batch of that size; together all of it, once."""
    made = config("run.steps=20", "world.workers=3", "inner.accumulation=2")
    view = View(0, 1, (4, 7, 9), (5, 5, 5))
    cells = [batches({0: view}, view, 1, place) for place in range(3)]
    passes = [list(positions(made, member, cell, 0)) for member, cell in zip(view.members, cells, strict=True)]
    read = [np.concatenate(each) for each in passes]
    assert all(len(each) == 10 for each in passes)
    assert sorted(np.concatenate(read).tolist()) == list(range(3 * 5 * 2 * 2))
    out_of_turn = np.concatenate(list(positions(made, 7, [], 0)))
    assert out_of_turn.min() > 1 << 50 and len(set(out_of_turn.tolist())) == 20
    shares = [np.concatenate(list(positions(made, 4, cells[0], 0, (number, 2)))) for number in range(2)]
    assert not set(shares[0].tolist()) & set(shares[1].tolist())  # of an island's two workers


def test_the_mean_of_models(tmp_path: Path) -> None:
    for number in range(3):
        save_file({"w": torch.full((2,), float(number)), "n": torch.tensor([7])}, tmp_path / f"{number}")
    write_mean([tmp_path / str(number) for number in range(3)], tmp_path / "mean")
    found = load_file(tmp_path / "mean")
    assert found["w"].tolist() == [1.0, 1.0] and found["n"].tolist() == [7]
    (tmp_path / "new").touch()
    assert (tmp_path / "mean").stat().st_mode == (tmp_path / "new").stat().st_mode  # as the umask says
    save_file({"w": torch.tensor([1.0, float("nan")]), "n": torch.tensor([7])}, tmp_path / "bad")
    with pytest.raises(ValueError, match="not finite"):
        write_mean([tmp_path / "0", tmp_path / "bad"], tmp_path / "mean")
    (tmp_path / "damaged").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="no safetensors"):
        write_mean([tmp_path / "damaged"], tmp_path / "mean")


def test_a_run_of_a_lighthouse_is_lit_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`isles resume` says how, where it cannot know; one that is complete is not begun anew."""
    (tmp_path / "members.jsonl").touch()
    for text in (None, "{", '{"host": "a", "port": 70000, "workers": 1}'):
        if text is not None:
            (tmp_path / "lighthouse.json").write_text(text)
        with pytest.raises(ValueError, match="isles lighthouse"):
            resume(tmp_path)
    with pytest.raises(ValueError, match="--step"):
        resume(tmp_path, step=3)
    (tmp_path / "summary.json").touch()
    keeper = RoundsLighthouseServer(config("run.steps=20"), tmp_path, "127.0.0.1:1", lambda token: None, print, print)
    with pytest.raises(ValueError, match="complete"):
        keeper.run()


def test_members_are_sent_no_key_that_is_at_its_default() -> None:
    """Which one of the former version may not know; what they make of it is the run's configuration."""
    made = config("run.steps=20", "world.trust_ratio=7")
    tables = parse_toml(for_members(made))
    assert tables["world"] == {"trust_ratio": 7.0} and resolve(tables) == made
    apart = config("run.steps=20", "run.seed=3", "replicas.seed=0")  # without the key it would be 3
    assert parse_toml(for_members(apart))["replicas"]["seed"] == 0 and resolve(parse_toml(for_members(apart))) == apart
