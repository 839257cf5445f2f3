"""How a run of one's own ends: what all are said to hold is proven, and workers that did other numbers of inner steps
end together where they did as many rounds, or are told.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import isles
from isles.comm.errors import CommError
from isles.comm.mesh import Mesh
from tests.covers import cover, share
from tests.gloo import run_gloo
from tests.replicas.workers import RUNS, Net, Whole, bits, loss_of, sgd, train_step, usual_inner, weights, wrap

APART = [name for name in RUNS if RUNS[name][0] in ("none", "noloco", "streaming-noloco", "eager", "sparta")]
ALIKE = [name for name in RUNS if name not in APART]


def run(worker: Any, workers: int = 2, *args: Any, **options: Any) -> list[Any]:
    return isles.run_virtual(worker, workers, args=args, **options)


# The end is proven.


def spoiled(world: Mesh, name: str, call: str) -> str:
    """What a run is told in which one weight of the last worker is not what its method made it."""
    model, last = Net(), world.rank == world.size - 1
    optimizer = wrap(world, name, model)
    for step in range(1, 7):
        train_step(optimizer, world.rank, step)
    land, together = optimizer.land_all, optimizer.together

    def land_all() -> None:
        land()
        with torch.no_grad():
            model.second.view(-1)[3] += 1e-3 * last

    def with_another_mean(collective: Any) -> Any:
        found = together(collective)
        if isinstance(found, Tensor):
            found[-1] += 1e-3 * last
        return found

    optimizer.land_all = land_all  # type: ignore[method-assign]
    if name in APART:
        optimizer.together = with_another_mean  # type: ignore[method-assign]
    with pytest.raises(isles.Diverged, match="second differ where all must be equal") as reported:
        getattr(optimizer, call)()
    return str(reported.value)


@pytest.mark.parametrize("name", share(RUNS, 2, 9, ["ddp", "diloco", "noloco"]))
def test_the_end_is_proven(name: str) -> None:
    """One entry of one worker that is not the others' is told by worker and name, the same by all."""
    if name.startswith("ist"):
        pytest.skip("its weights are made anew where it is consolidated")
    calls = ["consolidate"] if name in APART else ["finish", "consolidate"]
    for workers, call in zip((3, 2), calls, strict=False):
        reported = run(spoiled, workers, name, call)
        assert all(text.startswith(f"worker {workers - 1} diverged at step 6: ") for text in reported)


def spoiled_whole(world: Mesh, name: str) -> str:
    """The same of a model that is put together of parts that workers hold."""
    model = Net()
    if name == "fsdp":
        model = isles.shard(model, world.outer)  # type: ignore[assignment]
    optimizer = wrap(world, name, model, sgd, **({} if name == "fsdp" else {"sync_every": 3}))
    for step in range(1, 5):
        train_step(optimizer, world.rank, step)
    prove = optimizer._prove

    def after_memory_failed(tensors: dict[str, Tensor]) -> None:
        if world.rank == 1 and "second" in tensors:
            with torch.no_grad():
                tensors["second"].view(-1)[0] += 1
        prove(tensors)

    optimizer._prove = after_memory_failed  # type: ignore[assignment, method-assign]
    with pytest.raises(isles.Diverged) as reported:
        optimizer.consolidate()
    return str(reported.value)


@pytest.mark.parametrize("name", ["fsdp", "ist"])
def test_a_model_put_together_is_proven(name: str) -> None:
    for text in (run_gloo if name == "fsdp" else isles.run_virtual)(spoiled_whole, args=(name,)):
        assert text == ("worker 1 diverged at step 4: second differ where all must be equal; check memory and versions")


def test_the_end_is_proven_over_gloo() -> None:
    assert run_gloo(spoiled, args=("diloco", "finish"))[0].startswith("worker 1 diverged at step 6: second differ")


def test_islands_are_proven_inside_and_across() -> None:
    def worker(world: Mesh, changed: int) -> str:
        mesh, model = isles.mesh(outer=2, inner=2), Net()
        optimizer = isles.DiLoCo(model, isles.DDP(model, sgd(model), mesh.inner), mesh.outer, sync_every=3)
        for step in range(1, 4):
            train_step(optimizer, world.rank, step)
        land = optimizer.land_all

        def land_all() -> None:
            land()
            with torch.no_grad():
                model.second.view(-1)[0] += 1e-3 * (world.rank == changed)

        optimizer.land_all = land_all  # type: ignore[method-assign]
        try:
            optimizer.consolidate()
        except CommError as error:
            return str(error)
        return ""

    differs = "diverged at step 3: second differ where all must be equal; check memory and versions"
    reported = run(worker, 4, 3)  # a row for which worker 2 answers
    assert reported[2] == reported[3] == f"worker 3 {differs}" and reported[:2] == ["", ""]
    reported = run(worker, 4, 2)
    assert reported[0] == reported[2] == f"worker 2 {differs}"


SOLO = {"on_peer_failure": "solo"}
ENDING = {"ddp": 16, "demo": 16, "localsgd": 16, "diloco, topk": 16, "ist": 16, "noloco": 8, "none": 0}


@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in ENDING), ("noloco", SOLO)])
def test_what_finish_costs(name: str, options: dict[str, Any]) -> None:
    """Bytes to each other worker on "control": 8 that all have done as many rounds, or have equal settings; 8 for the
    hash of what all hold. Nothing where workers may be lost.
    """

    def worker(world: Mesh) -> int:
        optimizer = wrap(world, name, Whole(0) if name == "ist" else Net(), **options)
        for step in range(1, 4):
            train_step(optimizer, world.rank, step)
        before = world.world.traffic["control"].bytes_sent
        optimizer.finish()
        return world.world.traffic["control"].bytes_sent - before

    assert run(worker, 3) == [0 if options else 2 * ENDING[name]] * 3


# Other numbers of inner steps.


def uneven(world: Mesh, name: str, steps: tuple[int, int], still: bool) -> str:
    """The consolidated bits of workers that do as many steps each. still: the shorter one does the others' too, on
    gradients of zero.
    """
    model = Net()
    optimizer = wrap(world, name, model, sgd, **({"sync_every": 5} if "sync_every" in RUNS[name][1] else {}))
    for step in range(1, (max(steps) if still else steps[world.rank]) + 1):
        (loss_of(model, world.rank, step) * (step <= steps[world.rank])).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.finish()
    if name not in APART:
        assert optimizer.steps == max(steps)
    return bits(weights(optimizer.consolidate()))


ROUNDS = [name for name in RUNS if "sync_every" in RUNS[name][1]]
OVERLAPPED = ("streaming, int4", "streaming-diloco", "streaming-noloco", "eager, int8")  # which send amid a round
MAIN = ["localsgd", "diloco", "noloco", "ist"]
OTHERS = [name for name in ROUNDS if name not in MAIN]
UNEVEN = [(12, 11), (14, 10), (10, 12)]


@pytest.mark.parametrize(
    ("name", "steps"), [*cover(MAIN, UNEVEN, each=1), *cover(OTHERS, UNEVEN, each=1, of=7, turn=3)]
)
def test_workers_that_did_as_many_rounds_end_together(name: str, steps: tuple[int, int]) -> None:
    """As if the shorter one had stood still: to the bit."""
    if name in OVERLAPPED:
        steps = (9, 8)
    assert run(uneven, 2, name, steps, False) == run(uneven, 2, name, steps, True)


@pytest.mark.parametrize("name", ["localsgd", "noloco"])
def test_a_worker_without_any_step_ends_with_the_others(name: str) -> None:
    assert run(uneven, 2, name, (4, 0), False) == run(uneven, 2, name, (4, 0), True)


@pytest.mark.parametrize("name", share(["ddp", "demo", "localsgd", "diloco", "sparseloco"], 1, 2))
def test_a_run_goes_on_after_its_end(name: str) -> None:
    """Finished, or consolidated, after a round: as if nobody had looked."""

    def worker(world: Mesh, call: str) -> str:
        optimizer = wrap(world, name, Net())
        for step in range(1, 9):
            train_step(optimizer, world.rank, step)
            if step == 3 and call:
                getattr(optimizer, call)()
        return bits(weights(optimizer.consolidate()))

    assert run(worker, 2, "finish") == run(worker, 2, "consolidate") == run(worker, 2, "")


def test_workers_that_did_as_many_rounds_end_together_over_gloo() -> None:
    assert run_gloo(uneven, args=("diloco", (14, 10), False)) == run(uneven, 2, "diloco", (14, 10), True)


def test_a_step_skipped_on_one_worker() -> None:
    """What a loop does where a loss is not finite: the round waits for it, and so does the end."""

    def worker(world: Mesh) -> str:
        model = Net()
        optimizer = wrap(world, "diloco", model, sync_every=5)
        for step in range(1, 13):
            if (world.rank, step) == (1, 4):
                continue
            train_step(optimizer, world.rank, step)
        return bits(weights(optimizer.consolidate()))

    first, second = run(worker)
    assert first == second


def told_of(world: Mesh, name: str, steps: tuple[int, ...], seed: int = 0) -> str:
    optimizer = wrap(world, name, Net(), usual_inner(name), **({"sync_every": 5} if name in ROUNDS else {}))
    try:
        for step in range(1, steps[world.rank] + 1):
            train_step(optimizer, world.rank, step)
        optimizer.consolidate()
    except CommError as error:
        return str(error)
    return ""


HINT = "give all workers the same number of inner steps: drop the rest of the longer loader"


LATE = {
    (12, 9): ("worker 1 did not answer on channel 'outer'", isles.Deadlines(outer=2.0)),
    (15, 10): ("worker 0 did not answer on channel 'control'", isles.Deadlines(control=2.0)),
}


@pytest.mark.parametrize(
    ("name", "steps"), cover(["localsgd", "noloco", "ist", "ddp", "dct-dp", "demo"], list(LATE), each=1)
)
def test_workers_in_other_rounds_are_reported(name: str, steps: tuple[int, int]) -> None:
    """Whoever gives up first says the mend, in a round or at the end; the other one hears that it is gone."""
    first, deadlines = LATE[steps]
    message = run(told_of, 2, name, steps, deadlines=deadlines)
    reported = message["control" in first]
    assert reported.startswith(first) and HINT in reported and "\n" not in reported
    assert message["control" not in first] == f"worker {int('control' in first)} is lost (it has returned)"


def test_who_was_alone_in_the_last_round_is_reported_at_the_end() -> None:
    """Of three workers in pairs one does a round by itself, and all come to the end."""
    for text in run(told_of, 3, "noloco", (10, 10, 15)):
        assert text.startswith("worker 2 diverged") and "it ends after 15 inner steps" in text and HINT in text


def test_who_waits_in_another_call_is_reported() -> None:
    """One asks for the spread alone, while the other ends the run."""

    def worker(world: Mesh) -> None:
        optimizer = wrap(world, "localsgd", Net(), sgd)
        train_step(optimizer, world.rank, 1)
        optimizer.finish() if world.rank else optimizer.replica_std()

    errors = run(worker, return_errors=True, deadlines=isles.Deadlines(outer=5.0, control=5.0, eval=5.0))
    assert any("is it in another call? finish(), consolidate() and replica_std() are for all" in str(e) for e in errors)
