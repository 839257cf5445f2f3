"""Whoever is lost while the model is put together, written and judged at the end: it is there, and it is that model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from isles.comm.mesh import Mesh
from isles.data import load_corpus
from isles.training import trainer
from isles.training.config.sections import Config
from isles.training.worker import train_worker
from tests.cli.command import isles
from tests.pipeline.swarm import killing
from tests.training.swarm.test_swarm import config, fragile, furthest, train

WORKERS = 7
DECIDED = 60
"""So many messages before its end, or earlier, no other peer knows that the first one has written the model."""


def settings(consistency: str, *more: str) -> Config:
    return config("run.steps=2", "run.validate_every=0", f"pipeline.swarm.consistency={consistency}", *more)


def counted(read: Config, out: Path, deaths: dict[int, int], worker: Callable[..., Any] = train_worker) -> list[Any]:
    out.mkdir()
    args = (read, out, None, load_corpus(read.data))
    return killing.run(worker, WORKERS, args, deaths, links="home-fibre", step_seconds=0.1)


@pytest.mark.long
@pytest.mark.parametrize(
    ("consistency", "more"),
    [
        ("exact", ()),
        ("strict", ("pipeline.swarm.delay_updates=1",)),
        ("relaxed", ("replicas.method=diloco", "replicas.sync_every=2")),
    ],
)
def test_a_first_peer_lost_at_its_last_messages(tmp_path: Path, consistency: str, more: tuple[str, ...]) -> None:
    """Of which the very last ones say that all is written: before, whoever comes next writes it again."""
    read = settings(consistency, *more)
    whole = tmp_path / "whole"
    messages = counted(read, whole, {})[0][1]
    model = load_file(str(whole / "model.safetensors"))
    for back in (1, 20, *range(DECIDED, 2 * DECIDED, 10)):
        out = tmp_path / str(back)
        done = counted(read, out, {0: messages - back})
        assert done[0] is None and all(each is not None for each in done[1:])
        assert furthest(load_file(str(out / "model.safetensors")), model) < 1e-12
        told = [each[0]["parameters"] > 0 for each in done[1:]]
        assert told == [back >= DECIDED, False, False, False, False, False], back


@pytest.mark.long
@pytest.mark.parametrize("writers", [1, 2])
def test_who_is_lost_while_it_writes(writers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first so many peers of stage 0 that write die of it."""
    read = settings("strict", *(["pipeline.swarm.peers=[3,2,2]"] if writers == 2 else []))
    worlds, died = dict[int, Mesh](), list[int]()
    save = trainer.save_model

    def dies(model: Any, path: Path) -> None:
        world = worlds[threading.get_ident()]
        if len(died) < writers:
            died.append(world.rank)
            path.write_bytes(b"half of")
            killing.die(world)
        save(model, path)

    def worker(world: Mesh, *args: Any) -> Any:
        worlds[threading.get_ident()] = world
        return train_worker(world, *args)

    monkeypatch.setattr(trainer, "save_model", dies)
    out = tmp_path / "run"
    done = counted(read, out, {}, worker)
    assert died == list(range(writers)) and [rank for rank, each in enumerate(done) if each is None] == died
    monkeypatch.undo()
    expected = train(read, tmp_path / "whole")[1]
    assert furthest(load_file(str(out / "model.safetensors")), expected) < 1e-12


@pytest.mark.long
def test_a_process_that_is_killed_as_it_writes(tmp_path: Path) -> None:
    (tmp_path / "plain.toml").write_text("")
    found = {}
    for name, after in (("well", 0), ("killed", -1)):
        words = fragile(tmp_path / name, 0, after, "pipeline.swarm.consistency=strict", "run.steps=2")
        code, _, error = isles("train", "plain.toml", "--out", f"run-{name}", *words, folder=tmp_path)
        assert code == 0 and (tmp_path / name).exists() == (name == "killed"), error
        found[name] = load_file(str(tmp_path / f"run-{name}" / "model.safetensors"))
    assert "the others go on without it" in error
    assert furthest(found["well"], found["killed"]) < 1e-12
