"""The kinds of worlds: another one is a class and a line of the table."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from isles.comm.layout import Layout
from isles.plan.run_plan import plan_run, refuse
from isles.running.backends import PRELOAD
from isles.training import kinds
from isles.training.config.sections import Config
from isles.training.kinds import Lazy, WorldKind, kind_of, layout_of
from isles.training.records.reshard import prepare
from isles.training.worker import train_worker
from tests import forked
from tests.training.runs import VirtualWorkers, run, tiny, write_text

STAGES = ["model.layers=2", "model.tie_embeddings=false", "pipeline.microbatches=2"]


def planned(config: Config) -> Any:
    """A plan of this kind."""
    raise ValueError("a ring is not planned yet")


def trained(world: Any, config: Config, *_: object) -> Any:
    """What a worker of a ring does: says where it is."""
    return world.coordinate.replica, world.size


class Ring(WorldKind):
    """Workers in a row, each a replica."""

    has_peers = True
    plan = Lazy(f"{__name__}:planned")
    refuse = Lazy(f"{__name__}:planned")
    train = Lazy(f"{__name__}:trained")

    def replicas(self, config: Config) -> int:
        return 2

    def layout(self, config: Config) -> Layout:
        return Layout.columns([list(range(config.world.workers))])


def test_a_fifth_kind_is_a_class_and_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kinds._KINDS, "random", f"{__name__}:Ring")
    text = write_text(tmp_path / "text.txt")
    config = tiny(text, "pipeline.stages=2", "pipeline.routing=random", *STAGES, workers=4)
    assert isinstance(kind_of(config.pipeline), Ring)
    assert config.replicas_in_all == 2 and config.survives
    assert layout_of(config) == Layout.columns([[0, 1, 2, 3]])
    for asked in (plan_run, refuse):
        with pytest.raises(ValueError, match="a ring is not planned yet"):
            asked(config)
    assert VirtualWorkers(train_worker, 4, config, (config,)).join() == [(rank, 4) for rank in range(4)]


def test_every_place_of_a_kind_is_there() -> None:
    for kind in (WorldKind, kinds.SwarmWorld, kinds.ClusterWorld):
        for name, value in vars(kind).items():
            if isinstance(value, Lazy):
                assert callable(getattr(kind(), name)), name


def test_a_fork_server_has_loaded_what_workers_train_with(tmp_path: Path) -> None:
    """Else every worker would, for seconds."""
    assert forked.Process(preload, folder=tmp_path).end() == (0, "loaded\n", "")


def preload() -> None:
    forked.forget_isles()
    for name in PRELOAD:
        importlib.import_module(name)
    kinds = importlib.import_module("isles.training.kinds")
    for kind in (kinds.WorldKind, kinds.SwarmWorld, kinds.ClusterWorld):
        for name in {"train", "trainer"} & vars(kind).keys():
            assert vars(kind)[name].target.partition(":")[0] in sys.modules, vars(kind)[name].target
    print("loaded")


def test_a_swarm_goes_on_with_as_many_peers(tmp_path: Path) -> None:
    """Which are its places' own: with more or fewer nobody could say who goes on from what."""
    text, out = write_text(tmp_path / "text.txt"), tmp_path / "run"
    more = ["pipeline.stages=2", "pipeline.routing=swarm", *STAGES, "run.checkpoint_every=2"]
    run(tiny(text, *more, method="none", workers=4, steps=3), out)
    for name in ("summary.json", "model.safetensors"):
        (out / name).unlink()
    assert prepare(out, 4).step == prepare(out, None).step == 2
    for workers in (3, 5):
        with pytest.raises(
            ValueError, match="only workers 0, 1, 2, 3 saved; clusters and swarms resume with the same workers"
        ):
            prepare(out, workers)
