"""The virtual backend and real gloo processes compute the same bits: losses, weights, bytes, messages.

One `run_local` for each world size runs every method in turn; the same processes also go on from a checkpoint.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

import isles
from isles.comm.mesh import Mesh
from tests.gloo import run_gloo
from tests.replicas.hook_workers import beside_the_hook
from tests.replicas.workers import LINKS, RUNS, local_checkpoint, train_all

NATIVE = "ddp, native"  # gloo's own sums: another order, so not among those that are equal to the bit
STEPS, SAVE_AT = 11, 4  # three rounds of three, and a shorter one at the end; a checkpoint in the middle of a round
SAVED = ["ddp, small buckets", "localsgd", "diloco, int8", "noloco", "noloco, lossy", "noloco, single vector"]
SAVED += ["ddp, low rank", "dct-dp", "streaming, int4", "eager, int8", "diloco, topk", "demo"]


# On gloo at every size; more of them at three workers, and all at all sizes among the long tests. So with checkpoints.
FEW = ["ddp", "diloco, int8", "noloco"]
MORE = ["ddp, small buckets", "dct-dp", "streaming, int4", "noloco, lossy", "ist", "custom, low rank"]


def on_gloo(size: int) -> list[str]:
    return FEW + MORE if size == 3 else FEW


def saved(size: int) -> list[str]:
    return ["eager, int8", "demo"] if size == 3 else ["noloco"]


SLOTTED = ["ddp, small buckets", "noloco, lossy"]
ON_GLOO = [(size, name) for size in (2, 3) for name in on_gloo(size)]
ON_GLOO += [pytest.param(size, name, marks=pytest.mark.long) for size in (1, 4) for name in on_gloo(size)]


def both(world: Mesh) -> tuple[Any, ...]:
    """What the processes of one world do."""
    hook = beside_the_hook(world) if world.size == 2 else None
    trained = train_all(world, [*on_gloo(world.size), NATIVE], STEPS)
    return trained, local_checkpoint(world, saved(world.size), STEPS, SAVE_AT), hook


@cache
def real(size: int) -> list[Any]:
    return run_gloo(both, size)


@cache
def virtual(size: int) -> list[Any]:
    """Those of `on_gloo`, and what the tests of slots and of one model want."""
    return simulated(size, [*on_gloo(size), *(SLOTTED if size == 4 else ())])


def simulated(size: int, names: list[str]) -> list[Any]:
    jittery = isles.Links(bandwidth=1e7, latency=0.02, jitter=0.8)
    speeds = [1.0 + rank for rank in range(size)]
    return isles.run_virtual(train_all, size, links=jittery, args=(names, STEPS), compute_jitter=0.4, speeds=speeds)


@pytest.mark.parametrize(("size", "name"), ON_GLOO)
def test_virtual_and_gloo_are_equal_to_the_bit(size: int, name: str) -> None:
    """Losses, weights (running, finished, evaluated, consolidated), bytes, messages and spread of every worker."""
    for rank in range(size):
        assert virtual(size)[rank][name] == real(size)[rank][0][name], f"worker {rank}"


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_other_methods_are_equal_to_the_bit_at_all_sizes(size: int) -> None:
    others = [name for name in RUNS if name not in on_gloo(size)]
    simulation = simulated(size, others)
    for mine, theirs in zip(run_gloo(train_all, size, args=(others, STEPS)), simulation, strict=True):
        assert mine == theirs
    assert size == 1 or all(len({own[name]["weights"][-1] for own in simulation}) == 1 for name in others)


@pytest.mark.parametrize(("size", "name"), [(size, name) for size in (2, 3) for name in saved(size)])
def test_a_checkpoint_goes_on_with_the_same_bits_on_gloo(size: int, name: str) -> None:
    """Through torch.save and torch.load(weights_only=True): the same losses, weights and bytes as without a stop."""
    for rank in range(size):
        check_checkpoint(real(size)[rank][1][name])


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_other_checkpoints_go_on_with_the_same_bits_on_gloo(size: int) -> None:
    others = [name for name in SAVED if name not in saved(size)]
    for results in run_gloo(local_checkpoint, size, args=(others, STEPS, SAVE_AT)):
        for name in others:
            check_checkpoint(results[name])


def check_checkpoint(result: Any) -> None:
    before, went_on, restored = result
    assert went_on[SAVE_AT:] == restored
    assert before["sent"] <= went_on[-1][0]["sent"]


@pytest.mark.parametrize("size", [2, 3])
def test_the_backend_s_own_reduction_is_near(size: int) -> None:
    """ddp with reduction = "native": equal on all workers, and equal to two_shot's up to the order of the sums."""
    own, two_shot = ([result[0][name] for result in real(size)] for name in (NATIVE, "ddp"))
    assert len({result["weights"][0] for result in own}) == 1
    for mine, theirs in zip(own, two_shot, strict=True):
        assert mine["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
        assert mine["bytes"]["sent"] == mine["planned"]


def test_torch_s_powersgd_hook_agrees() -> None:
    """Same rank, bases and error: five steps of ddp with codec = "powersgd:2" give the hook's gradients, to 1e-5."""
    assert max(result[2] for result in real(2)) < 1e-5


@pytest.mark.parametrize("size", [2, 3])
def test_consolidated_models_are_equal_on_all_workers(size: int) -> None:
    """`consolidate` gives every worker the one model."""
    for name in virtual(size)[0]:
        assert len({result[name]["weights"][-1] for result in virtual(size)}) == 1, name


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("name", SLOTTED)
def test_slots_change_no_bit(slots: int, name: str) -> None:
    """Two workers that compute at once compute what one after the other does."""
    again = isles.run_virtual(train_all, 4, links=LINKS, args=([name], STEPS), slots=slots)
    for rank in range(4):
        assert again[rank][name] == virtual(4)[rank][name]
