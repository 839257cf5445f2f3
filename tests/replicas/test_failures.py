"""A lost or late partner: named by default, survived with on_peer_failure = "solo"."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

import isles
from isles.comm.collectives.mean import mean
from isles.comm.errors import WorkerFailed
from isles.comm.mesh import Mesh
from isles.replicas.parts.choices import RandomGroups
from tests.covers import cover, share
from tests.replicas.workers import LINKS, RUNS, Net, counted, held_out, killed, sgd, train_step, weights, wrap

NOLOCO = [name for name in RUNS if name.startswith("noloco")]


# Real processes.


def test_a_killed_worker_is_named_by_default() -> None:
    """SIGKILL of one of four in the middle of a round: whoever needs it raises PeerLost with its rank."""
    results = isles.run_local(killed, 4, args=(30, 8, 2, "raise"), return_errors=True)
    assert isinstance(results[2], WorkerFailed) and "-9" in str(results[2])
    reported = [error for error in results if isinstance(error, isles.PeerLost)]
    assert any(error.rank == 2 for error in reported)
    # Whoever stops for it takes others with it; nobody finishes as if nothing had happened, nobody hangs.
    assert all(isinstance(result, (isles.PeerLost, WorkerFailed)) for result in results)


def test_survivors_of_a_kill_finish_all_steps() -> None:
    """solo: the three others do all 30 steps, learn, and know whom they have lost."""
    results = isles.run_local(killed, 4, args=(30, 8, 2, "solo"), return_errors=True)
    assert isinstance(results[2], WorkerFailed)
    for rank in (0, 1, 3):
        before, after = results[rank]["loss"]
        assert results[rank]["steps"] == 30 and after < 0.9 * before
        assert results[rank]["lost"] == [2]


# The same on the virtual clock.


def ends_early(world: Mesh, name: str, how: str, on_peer_failure: str, steps: int = 30) -> Any:
    model = Net()
    optimizer = wrap(world, name, model, **({"on_peer_failure": on_peer_failure} if on_peer_failure else {}))
    losses = []
    before = held_out(model)
    for step in range(1, steps + 1):
        if world.rank == 2 and step == 8:
            if how == "raises":
                raise KeyError("broken")
            return "early"
        losses.append(train_step(optimizer, world.rank, step))
    optimizer.finish()
    return losses, sorted(optimizer.lost), world.transport.now(), held_out(model) / before  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "how"), cover(["ddp", "localsgd", "diloco", "ist", *NOLOCO], ("raises", "returns"), each=1)
)
def test_by_default_the_lost_worker_is_named(name: str, how: str) -> None:
    """Every method: PeerLost with the rank of the worker that ended, or of one that ended because of it."""
    results = isles.run_virtual(ends_early, 4, links=LINKS, args=(name, how, ""), return_errors=True)
    reported = [result for result in results if isinstance(result, isles.PeerLost)]
    assert len(reported) >= 1 and any(error.rank == 2 for error in reported)
    assert isinstance(results[2], KeyError) if how == "raises" else results[2] == "early"


@pytest.mark.parametrize(("name", "how", "workers"), cover(NOLOCO, ("raises", "returns"), (4, 5), each=1))
def test_survivors_go_on(name: str, how: str, workers: int) -> None:
    """solo: all other workers do all steps and learn; at virtual time nobody waits for the dead."""
    results = isles.run_virtual(ends_early, workers, links=LINKS, args=(name, how, "solo"), return_errors=True)
    undisturbed = isles.run_virtual(ends_early, workers, links=LINKS, args=(name, "", "solo", 7))
    assert len(undisturbed) == workers
    for rank in set(range(workers)) - {2}:
        losses, lost, clock, remains = results[rank]
        assert len(losses) == 30 and remains < 0.9
        assert set(lost) <= {2}
        assert losses[:7] == undisturbed[rank][0]
        assert clock < 30 * 0.1 + 12 * 0.1
    assert any(result[1] for result in results if isinstance(result, tuple))


def test_a_group_with_a_lost_member_is_dissolved_for_the_round() -> None:
    """Groups of three: the two survivors of a group both do the round alone; once they know, nothing is even sent."""

    def worker(world: Mesh) -> Any:
        options = {"group_size": 3, "on_peer_failure": "solo", "prefetch_phi": False}
        optimizer = wrap(world, "noloco", Net(), **options)
        for step in range(1, 31):
            if world.rank == 2 and step == 8:
                return None
            known, before = set(optimizer.lost), counted(world)["messages"]  # type: ignore[attr-defined]
            train_step(optimizer, world.rank, step)
            if step % 3 == 0 and known & set(optimizer.members(step // 3)):  # type: ignore[attr-defined]
                assert counted(world)["messages"] == before
        return sorted(optimizer.lost), world.transport.now()  # type: ignore[attr-defined]

    results = isles.run_virtual(worker, 6, links=LINKS)
    assert all(result[0] == [2] and result[1] < 5.0 for result in results if result)


LATE = isles.Deadlines(outer=1.0)


@pytest.mark.parametrize("name", share(NOLOCO, 0, 3, ("noloco",)))
def test_a_late_worker_is_met_again(name: str) -> None:
    """solo: worker 1 stands still once, for 2.5 deadlines. Its partner goes on alone after the deadline; nobody is
    given up, the others' waiting lets it catch up, and in the end rounds are done together again.
    """

    def worker(world: Mesh) -> Any:
        model = Net()
        before = held_out(model)
        optimizer = wrap(world, name, model, sgd, on_peer_failure="solo")
        clocks = []
        for step in range(1, 91):
            if world.rank == 1 and step == 9:
                world.transport.compute(2.5)
            train_step(optimizer, world.rank, step)
            clocks.append(world.transport.now())
        optimizer.finish()
        return clocks, sorted(optimizer.lost), weights(model), held_out(model) / before  # type: ignore[attr-defined]

    results = isles.run_virtual(worker, 4, links=LINKS, deadlines=LATE)
    assert all(not lost for _, lost, _, _ in results)
    partner = next(p for p in RandomGroups(2, RUNS[name][1].get("seed", 0)).members(3, 4, 1) if p != 1)
    assert 0.99 < results[partner][0][8] - results[partner][0][7] < 1.2  # the deadline, and a step
    ends = [clocks[-1] for clocks, *_ in results]
    assert max(ends) - min(ends) < 0.2  # together again
    assert max(ends) < 90 * 0.1 + 30 * 0.02 + 2.5 + 0.5  # the standstill is waited for once, not every round
    vectors = torch.stack([vector for _, _, vector, _ in results])
    assert float(vectors.std(0).mean() / vectors.std()) < 0.1
    assert all(remains < 0.9 for *_, remains in results)


def test_by_default_a_late_partner_is_named() -> None:
    """raise: DeadlinePassed with the late worker's rank, the channel and the seconds."""

    def worker(world: Mesh) -> None:
        optimizer = wrap(world, "noloco", Net())
        for step in range(1, 13):
            if world.rank == 1 and step == 6:
                world.transport.compute(30.0)
            train_step(optimizer, world.rank, step)

    with pytest.raises(
        isles.DeadlinePassed, match=r"worker 1 did not answer on channel 'outer' within 1 s; .* replica_std"
    ):
        isles.run_virtual(worker, 4, links=LINKS, deadlines=LATE)


def test_a_solo_round_is_the_outer_step_of_one() -> None:
    """What a survivor does in a failed round: its own outer gradient for the mean, no pull."""

    def worker(world: Mesh) -> None:
        model = Net(dtype=torch.float64)
        optimizer = wrap(world, "noloco", model, sgd, on_peer_failure="solo", prefetch_phi=False)
        if world.rank == 1:
            return
        fragment = optimizer.fragments[0]  # type: ignore[attr-defined]
        live: list[torch.Tensor] = []
        optimizer.inner.register_step_post_hook(lambda *_: live.append(weights(model)))
        phi, delta = weights(model), torch.zeros_like(weights(model))
        for step in range(1, 10):
            train_step(optimizer, 0, step)
            if step % 3 == 0:
                delta = 0.5 * delta + 0.7 * (live[-1] - phi)
                phi = phi + delta
                torch.testing.assert_close(fragment.anchor, phi, rtol=0, atol=1e-12)
                torch.testing.assert_close(weights(model), phi, rtol=0, atol=1e-12)

    isles.run_virtual(worker, 2, links=LINKS)


def test_a_checkpoint_knows_who_is_lost() -> None:
    """A run restored without the dead worker does not wait for it: the same weights as the run that went on."""

    def worker(world: Mesh, states: list[Any] | None) -> Any:
        model = Net()
        optimizer = wrap(world, "noloco", model, sgd, on_peer_failure="solo", prefetch_phi=False)
        state = None
        if states is not None:
            model.load_state_dict(states[world.rank][1])
            optimizer.load_state_dict(states[world.rank][0])
            assert optimizer.lost == {2}  # type: ignore[attr-defined]
        while optimizer.steps < 36:
            if world.rank == 2 and optimizer.steps == 7:
                return None
            train_step(optimizer, world.rank, optimizer.steps + 1)
            if optimizer.steps == 30:
                state = optimizer.state_dict(), {key: value.clone() for key, value in model.state_dict().items()}
        return state, weights(model), world.transport.now()

    first = isles.run_virtual(worker, 4, links=LINKS, args=(None,))
    dead = first[0][0]  # any state will do for the seat of the dead: it leaves when it has loaded

    def again(world: Mesh) -> Any:
        if world.rank == 2:
            wrap(world, "noloco", Net(), sgd, on_peer_failure="solo", prefetch_phi=False)
            return None
        return worker(world, [result[0] if result else dead for result in first])

    for rank, result in enumerate(isles.run_virtual(again, 4, links=LINKS)):
        if rank != 2:
            assert torch.equal(result[1], first[rank][1]) and result[2] == first[rank][2]


def test_solo_is_refused_where_addresses_come_round_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vector of 60 segments has addresses for 65,536 rounds, and anchors are sent one round ahead."""
    monkeypatch.setattr(sys.modules[mean.__module__], "_SEGMENT", 1)

    def worker(world: Mesh) -> list[str]:
        model, reported = Net(), []
        for policy, steps in (("solo", 65_536), ("raise", 65_536), ("solo", 65_535)):
            optimizer = isles.NoLoCo(model, sgd(model), world.outer, sync_every=1, on_peer_failure=policy)
            try:
                optimizer.advise(steps)
            except ValueError as error:
                reported.append(str(error))
        return reported

    (reported,) = isles.run_virtual(worker, 1)
    assert (
        len(reported) == 1
        and "come again after 65535 rounds, of which this run has 65536: raise sync_every" in reported[0]
    )
