"""Meshes: who is where. The environment of torchrun, and a process group that is the user's own."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import isles
from isles.comm.codecs import codec
from isles.comm.layout import Coordinate, Layout
from isles.comm.mesh import Mesh, arrange
from isles.comm.transport import Deadlines
from tests.gloo import in_a_process

ROOT = Path(__file__).resolve().parents[2]


def member(rank: int, size: int, **axes: int) -> Mesh:
    return arrange(SimpleNamespace(rank=rank, size=size), **axes)  # type: ignore[arg-type]


def test_every_rank_of_two_by_two_by_two() -> None:
    """rank = (outer * 2 + stage) * 2 + inner; every axis group holds the ranks that differ in that axis alone."""
    for rank in range(8):
        mesh = member(rank, 8, outer=2, stage=2, inner=2)
        o, s, i = rank // 4, rank // 2 % 2, rank % 2
        assert mesh.world.ranks == tuple(range(8)) and (mesh.rank, mesh.size) == (rank, 8)
        assert mesh.outer.ranks == (2 * s + i, 4 + 2 * s + i) and mesh.outer.rank == o
        assert mesh.stage.ranks == (4 * o + i, 4 * o + 2 + i) and mesh.stage.rank == s
        assert mesh.inner.ranks == (4 * o + 2 * s, 4 * o + 2 * s + 1) and mesh.inner.rank == i
        assert mesh.pipeline.ranks == (i, 2 + i, 4 + i, 6 + i) and mesh.pipeline.rank == 2 * o + s
        assert mesh.reader == (2 * o + i, 4)  # both stages of a replica
        channels = [group.channel for group in (mesh.world, mesh.outer, mesh.stage, mesh.inner, mesh.pipeline)]
        assert channels == ["control", "outer", "pipeline", "inner", "pipeline"]


@pytest.mark.parametrize(("outer", "stage", "inner"), [(6, 1, 1), (1, 6, 1), (1, 1, 6), (3, 2, 1), (1, 2, 3)])
def test_groups_are_the_same_for_all_their_members(outer: int, stage: int, inner: int) -> None:
    """Any shape: members agree about their group and its order, and each axis splits the world."""
    meshes = [member(rank, 6, outer=outer, stage=stage, inner=inner) for rank in range(6)]
    for axis, size in (("outer", outer), ("stage", stage), ("inner", inner), ("pipeline", outer * stage)):
        groups = [getattr(mesh, axis) for mesh in meshes]
        assert all(group.size == size for group in groups)
        assert all(groups[member].ranks == group.ranks for group in groups for member in group.ranks)


def test_coordinates_are_data_and_columns_may_be_ragged() -> None:
    """Stage 0 has three workers, stage 1 two, anywhere in the world; a worker is missing in one island."""
    places = [(7, 1, 0), (0, 0, 0), (2, 0, 0), (7, 0, 0), (0, 1, 0), (0, 0, 1)]
    layout = Layout(tuple(Coordinate(*place) for place in places))
    meshes = [member(rank, 6).arranged(layout) for rank in range(6)]
    assert [mesh.outer.ranks for mesh in meshes] == [(4, 0), (1, 2, 3), (1, 2, 3), (1, 2, 3), (4, 0), (5,)]
    assert [mesh.stage.ranks for mesh in meshes] == [(3, 0), (1, 4), (2,), (3, 0), (1, 4), (5,)]
    assert [mesh.inner.ranks for mesh in meshes] == [(0,), (1, 5), (2,), (3,), (4,), (1, 5)]
    assert {mesh.pipeline.ranks for mesh in meshes} == {(1, 4, 2, 3, 0), (5,)}
    assert [mesh.reader for mesh in meshes] == [(3, 4), (0, 4), (2, 4), (3, 4), (0, 4), (1, 4)]


def test_a_layout_is_of_all_workers_each_at_its_own_coordinates() -> None:
    with pytest.raises(ValueError, match="two ranks have the same coordinates"):
        Layout((Coordinate(0, 0, 0), Coordinate(0, 0, 0)))
    with pytest.raises(ValueError, match="layout of 4 workers in a world of 6"):
        member(0, 6).arranged(Layout.grid(2, 2))


def test_what_listens_stays_when_workers_are_arranged() -> None:
    reported: list[object] = []
    mesh = replace(member(3, 4), report=reported.append, stop_here=lambda step: step == 7, local_rank=1)
    other = mesh.arranged(Layout.grid(1, 2, 2))
    other.report("here")
    assert reported == ["here"] and other.stop_here(7) and other.local_rank == 1
    assert (mesh.stage.size, other.stage.size, other.world) == (1, 2, mesh.world)


def test_what_is_left_goes_to_outer() -> None:
    mesh = member(5, 12, stage=3, inner=2)
    assert (mesh.outer.size, mesh.stage.size, mesh.inner.size) == (2, 3, 2)
    assert arrange(SimpleNamespace(rank=0, size=1)).outer.ranks == (0,)  # type: ignore[arg-type]


@pytest.mark.parametrize("axes", [{"outer": 3}, {"stage": 3}, {"inner": 8}, {"outer": 4, "stage": 2}, {"outer": 1}])
def test_a_product_that_is_not_the_world_is_refused(axes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="the world has 4"):
        member(0, 4, **axes)


@pytest.mark.parametrize("axes", [{"stage": 0}, {"inner": 0}, {"outer": 0}, {"outer": -2, "stage": -2}])
def test_axes_below_one_are_refused(axes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1 worker"):
        member(0, 4, **axes)


def test_deadlines_reach_every_group() -> None:
    deadlines = Deadlines(outer=1.0, pipeline=2.0)
    mesh = arrange(SimpleNamespace(rank=0, size=4), stage=2, deadlines=deadlines)  # type: ignore[arg-type]
    assert all(group.deadlines is deadlines for group in (mesh.world, mesh.outer, mesh.stage, mesh.inner))
    assert mesh.outer.among([0]).deadlines is deadlines
    assert [deadlines.of(channel) for channel in ("outer", "pipeline")] == [1.0, 2.0]


def test_one_worker_alone_needs_no_process_group() -> None:
    """No environment: a world of one, in which every verb works."""
    in_a_process(alone)


def alone() -> None:
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    world, x = isles.init(), torch.ones(5)
    world.outer.mean(x, codec("none"))
    world.world.barrier()
    world.world.broadcast(x)
    assert (world.rank, world.size, len(world.outer.all_gather(x))) == (0, 1, 1) and (x == 1).all()
    assert not torch.distributed.is_initialized()
    world.close()
    world.close()


GIVE_UP = """
from isles.comm.collectives import basic as collectives
for number in range(5):  # rounds that never meet: their receives are still posted when the script ends
    call = world.outer.call("eval", round=10 * number + world.rank)
    world.outer.start(collectives.exchange(call, 1 - world.rank, torch.zeros(10)), deadline=0.01)
world.world.barrier()
"""

PLAIN = (
    """
import torch, isles
world = isles.init()
assert (world.size, world.outer.size) == (2, 2)
assert int(world.outer.exchange(1 - world.rank, torch.tensor([world.rank]))) == 1 - world.rank
staged = isles.mesh(stage=2)
assert [int(x) for x in staged.stage.all_gather(torch.tensor([10 + staged.rank]))] == [10, 11]
if world.rank == 0:
    print("well done", flush=True)
"""
    + GIVE_UP
)  # and no close: the script just ends

OWN_GROUP = (
    """
import time, torch, isles
from datetime import timedelta
import torch.distributed as dist
dist.init_process_group("gloo")
dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), dist.group.WORLD)
world = isles.init()
if world.rank == 1:
    time.sleep(2.5)  # longer than the user's own group would wait
assert int(world.outer.exchange(1 - world.rank, torch.tensor([world.rank]))) == 1 - world.rank
"""
    + GIVE_UP
    + """
world.close()
dist.distributed_c10d._set_pg_timeout(timedelta(seconds=60), dist.group.WORLD)
total = torch.ones(1)
dist.all_reduce(total)
assert total == 2 and dist.is_initialized()
if world.rank == 0:
    print("well done", flush=True)
dist.destroy_process_group()
"""
)


@pytest.mark.long
@pytest.mark.parametrize(
    "script",
    [PLAIN, OWN_GROUP],
    ids=["plain", "beside the user's process group"],
)
def test_torchrun(tmp_path: Path, script: str) -> None:
    """`isles.init()` finds the world that torchrun describes; a process group of the user's own, with its own time-out,
    is neither used nor closed. A script may just end, after its last message or with transfers given up: exit code 0.
    """
    path = tmp_path / "script.py"
    path.write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", "2", str(path)]
    environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "well done" in done.stdout


def test_init_finds_the_same_world_twice() -> None:
    """In one process without an environment: one transport, whose numbers all worlds share."""
    with ThreadPoolExecutor(1) as pool:  # a thread of its own: what it finds stays with it
        one, two = pool.submit(lambda: (isles.init(), isles.mesh())).result()
    assert one.transport is two.transport and one.world.ledger is two.outer.ledger


def _device_of_torchruns(local_rank: int, begun: bool, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What `isles.init()` makes the current GPU of two, in a process that torchrun has started. No GPU is here."""
    taken: list[int] = []
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: begun)
    monkeypatch.setattr("torch.cuda.set_device", taken.append)
    with ThreadPoolExecutor(1) as fresh:  # what `init` finds belongs to the thread
        world = fresh.submit(isles.init).result(10)
    assert world.local_rank == Mesh(world=world.world, layout=world.layout).local_rank == local_rank
    return taken


def test_init_takes_the_gpu_of_torchruns_local_rank_unless_one_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _device_of_torchruns(3, False, monkeypatch) == [1]
    assert _device_of_torchruns(3, True, monkeypatch) == []
