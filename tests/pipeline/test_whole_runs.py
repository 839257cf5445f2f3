"""Replica methods per stage, untouched: runs in stages end with the weights of the unsplit run."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import isles
from tests.covers import share
from tests.pipeline import whole_runs

STEPS, REPLICAS = 6, 2
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("NoSync", {}),
    "ddp": ("DDP", {}),
    "localsgd": ("LocalSGD", {"sync_every": 3}),
    "diloco": ("DiLoCo", {"sync_every": 3, "outer_momentum": 0.5}),
    "noloco": ("NoLoCo", {"sync_every": 3}),
    "delayed": ("DelayedDiLoCo", {"sync_every": 3}),
    "eager": ("EagerDiLoCo", {"sync_every": 3, "outer_momentum": 0.5}),
    "dilocox": ("DiLoCoX", {"sync_every": 3, "rank": 0, "window": 0, "codec": "none"}),
    "dilocox, int8": ("DiLoCoX", {"sync_every": 3, "rank": 0, "window": 0, "codec": "int8"}),
}


@cache
def run(name: str, stages: int, tied: bool = False, norm: float | None = None) -> list[Any]:
    method, options = METHODS[name]
    return isles.run_virtual(
        whole_runs.train,
        REPLICAS * stages,
        args=(method, options, stages, STEPS, tied, norm),
        links="lan",
        step_seconds=0.0,
    )


def apart(name: str, stages: int, tied: bool = False) -> float:
    """The largest difference of a weight from the unsplit run's, after any step and at the end."""
    worst = 0.0
    for replica in range(REPLICAS):
        history, _, final, *_ = run(name, 1, tied)[replica]
        for stage in range(stages):
            own_history, _, own_final, *_ = run(name, stages, tied)[replica * stages + stage]
            for own, theirs in zip([*own_history, own_final], [*history, final], strict=True):
                worst = max(worst, *(float((own[key] - theirs[key]).abs().max()) for key in own))
    return worst


@pytest.mark.parametrize("stages", [2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", share(METHODS, 2, 6, ("ddp", "noloco")))
def test_weights_are_those_of_the_unsplit_run_to_the_bit(name: str, stages: int) -> None:
    assert apart(name, stages) == 0.0


@pytest.mark.parametrize("name", ["diloco", pytest.param("noloco", marks=pytest.mark.long)])
def test_tied_matrices_train_as_unsplit_with_the_loss_at_home(name: str) -> None:
    assert apart(name, 2, tied=True) < 2e-6


@pytest.mark.parametrize("name", ["diloco", pytest.param("ddp", marks=pytest.mark.long)])
def test_clipping_over_the_replica_means_what_it_means_unsplit(name: str) -> None:
    unsplit, split = run(name, 1, norm=0.5), run(name, 2, norm=0.5)
    assert unsplit[0][1] != run(name, 1)[0][1]  # it acts
    for replica in range(REPLICAS):
        assert split[2 * replica][1] == pytest.approx(unsplit[replica][1], abs=1e-5)


def pairs(world: Any) -> list[tuple[int, ...]]:
    """With whom this worker's stage exchanges in each round, by replica."""
    mesh, layer = isles.mesh(stage=2), torch.nn.Linear(2, 2)
    inner = isles.Plain(layer, torch.optim.SGD(layer.parameters(), lr=0.1), peers=mesh.stage, charged=True)
    optimizer: Any = isles.NoLoCo(layer, inner, mesh.outer, sync_every=3)
    return [optimizer.members(round) for round in range(1, 13)]


def test_stages_of_a_replica_meet_the_same_other_replica() -> None:
    """NoLoCo's pairs, of five replicas, so that one is left over."""
    told = isles.run_virtual(pairs, 10, links="lan")
    assert told[::2] == told[1::2]
    assert all(replica in pair for replica, rounds in enumerate(told[::2]) for pair in rounds)
    assert len(set(told[0])) > 3


def test_a_stage_sends_its_own_part_of_the_outer_bytes() -> None:
    unsplit = run("diloco", 1)[0][3]
    parts = [run("diloco", 2)[stage][3] for stage in range(2)]
    headers = sum(parts) - unsplit
    assert 0 <= headers < 1000  # each message of a stage has a header of its own
    assert torch.isfinite(torch.tensor(parts)).all()


@pytest.mark.parametrize(("stages", "tied"), [(2, False), (2, True), pytest.param(4, True, marks=pytest.mark.long)])
def test_stages_are_judged_and_put_together_as_the_one_model(stages: int, tied: bool) -> None:
    for replica in range(REPLICAS):
        *_, judged, state = run("diloco", 1, tied)[replica]
        split = run("diloco", stages, tied)[replica * stages : (replica + 1) * stages]
        assert all(worker[4] == split[0][4] for worker in split)
        assert split[0][4] == pytest.approx(judged, abs=1e-6)
        assert all(worker[5] is None for worker in split[1:])
        assert split[0][5].keys() == state.keys()
        worst = max(float((split[0][5][name] - state[name]).abs().max()) for name in state)
        assert worst < (2e-6 if tied else 1e-30)
        for worker in split:
            assert all(torch.equal(split[0][5][name], tensor) for name, tensor in worker[2].items())
