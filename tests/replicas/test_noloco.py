"""NoLoCo against the rule of its paper (arXiv 2506.10911): a golden vector, bitwise and algebraic invariants, bytes."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isles
from isles.comm.mesh import Mesh
from isles.replicas.methods.noloco import DeltaPhi
from isles.replicas.parts.choices import RandomGroups
from isles.replicas.parts.interfaces import Answer, Composition, RuleState
from tests.replicas.workers import LINKS, RUNS, Net, batch, bits, sgd, train_step, weights, wrap

FORMS = ["delta+phi", "delta+phi, prefetched", "single_vector", "theta_only"]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Unstable gammas are used on purpose; their warning has a test of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def form(name: str) -> dict[str, Any]:
    return {"exchange": name.partition(",")[0], "prefetch_phi": "prefetched" in name}


class Drift(nn.Module):
    """One vector whose gradient a test sets itself."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.x = nn.Parameter(start.clone())


class Recorder:
    """Anchor, momentum and live weights just before each exchange, and anchors after it."""

    def __init__(self, optimizer: isles.ReplicaSync) -> None:
        self.optimizer = optimizer
        self.before: list[tuple[Tensor, Tensor]] = []
        self.after: list[Tensor] = []
        optimizer.inner.register_step_post_hook(self.keep)

    def keep(self, *_: Any) -> None:
        fragment = self.optimizer.fragments[0]  # type: ignore[attr-defined]
        self.before.append((fragment.anchor.clone(), weights(self.optimizer.model)))

    def landed(self) -> None:
        self.after.append(self.optimizer.fragments[0].anchor.clone())  # type: ignore[attr-defined]


def drift(world: Mesh, rounds: int, dtype: torch.dtype, inner_steps: int = 2, entries: int = 9, **options: Any) -> Any:
    """Rounds of random inner progress, different on every worker, with a little pull to zero."""
    generator = torch.Generator().manual_seed(17)
    model = Drift(torch.randn(entries, generator=generator, dtype=torch.float64).to(dtype))
    optimizer = wrap(world, "noloco", model, sgd, **{"sync_every": inner_steps, **options})
    record = Recorder(optimizer)
    for step in range(1, rounds * inner_steps + 1):
        noise = torch.Generator().manual_seed(1000 * world.rank + step)
        push = torch.randn(entries, generator=noise, dtype=torch.float64).to(dtype)
        model.x.grad = push + 0.3 * model.x.detach()
        optimizer.step()
        record.landed()
    every = slice(inner_steps - 1, None, inner_steps)
    assert torch.equal(weights(model), record.after[-1])  # theta <- phi
    return record.before[every], record.after[every]


# The outer step itself.


@pytest.mark.parametrize(
    ("name", "gamma"),
    [(name, gamma) for name in FORMS for gamma in (0.7, 1.0) if name != "theta_only" or gamma == 0.7],  # gamma = beta
)
def test_golden_outer_step(name: str, gamma: float) -> None:
    """Oracle: the authors' code on two workers (6.1), through messages; 1e-6."""
    phi = torch.tensor([[1.0, -2.0, 0.5], [3.0, 0.0, -1.5]])
    theta = torch.tensor([[0.6, -1.0, 0.25], [2.4, -0.5, -0.75]])
    delta = torch.tensor([[0.2, -0.4, 0.1], [-0.3, 0.6, -0.2]])
    delta_after = {
        0.7: torch.tensor([[0.45, 0.675, -0.475], [-1.2, -0.225, 0.775]]),
        1.0: torch.tensor([[0.75, 0.975, -0.775], [-1.5, -0.525, 1.075]]),
    }[gamma]

    def worker(world: Mesh) -> tuple[Tensor, Tensor, Tensor]:
        model, rank = Drift(torch.zeros(3)), world.rank
        optimizer = wrap(world, "noloco", model, lambda m: sgd(m, 1.0), sync_every=1, gamma=gamma, **form(name))
        fragment = optimizer.fragments[0]  # type: ignore[attr-defined]
        fragment.anchor.copy_(phi[rank])
        fragment.vectors["momentum"].copy_(delta[rank])
        if fragment.ahead is not None:
            fragment.ahead = optimizer.round_exchange.send_anchor(fragment, 1, optimizer.steps)  # type: ignore[attr-defined]
        model.x.data.copy_(phi[rank])
        model.x.grad = phi[rank] - theta[rank]
        optimizer.step()
        return fragment.vectors["momentum"], fragment.anchor, model.x.detach()

    for rank, (momentum, anchor, live) in enumerate(isles.run_virtual(worker, 2, links=LINKS)):
        torch.testing.assert_close(momentum, delta_after[rank], rtol=0, atol=1e-6)
        torch.testing.assert_close(anchor, phi[rank] + delta_after[rank], rtol=0, atol=1e-6)
        assert torch.equal(live, anchor)


def run_drift(workers: int, rounds: int, dtype: torch.dtype = torch.float64, **options: Any) -> list[Any]:
    return isles.run_virtual(lambda world: drift(world, rounds, dtype, **options), workers, links=LINKS)


@pytest.mark.parametrize("gamma", [0.1, 0.7, 1.4, 2.9])
@pytest.mark.parametrize("prefetch", [True, False])
def test_a_pair_alone_stays_equal_and_is_heavy_ball(gamma: float, prefetch: bool) -> None:
    """Oracle: N = n = 2 gives bitwise equal anchors for any gamma, and single-process heavy ball bitwise."""
    one, two = run_drift(2, 8, torch.float32, gamma=gamma, prefetch_phi=prefetch)
    phi = one[0][0][0]
    delta = torch.zeros_like(phi)
    for round in range(8):
        change = ((one[0][round][1] - phi) + (two[0][round][1] - phi)) / 2
        delta.mul_(0.5).add_(change, alpha=0.7)
        phi = phi + delta
        assert torch.equal(one[1][round], two[1][round])
        assert torch.equal(one[1][round], phi)


@pytest.mark.parametrize("gamma", [0.2, 1.1])
@pytest.mark.parametrize("workers", [3, 4])
def test_a_group_of_everyone_is_heavy_ball_diloco(workers: int, gamma: float) -> None:
    """Oracle: n = N equals delta <- alpha delta + beta mean Delta, phi <- phi + delta on all workers; 1e-12."""
    runs = run_drift(workers, 6, gamma=gamma, group_size=workers)
    phi = runs[0][0][0][0]
    delta = torch.zeros_like(phi)
    for round in range(6):
        delta = 0.5 * delta + 0.7 * torch.stack([run[0][round][1] - phi for run in runs]).mean(0)
        phi = phi + delta
        for run in runs:
            torch.testing.assert_close(run[1][round], phi, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", FORMS[:3])
def test_one_worker_is_lookahead_with_momentum(name: str) -> None:
    """Oracle: N = 1 is delta <- alpha delta + beta (theta - phi); gamma does not matter."""
    (before, after), (_, other) = (run_drift(1, 8, gamma=gamma, **form(name))[0] for gamma in (0.2, 1.3))
    phi = before[0][0]
    delta = torch.zeros_like(phi)
    for round in range(8):
        delta = 0.5 * delta + 0.7 * (before[round][1] - phi)
        phi = phi + delta
        torch.testing.assert_close(after[round], phi, rtol=0, atol=1e-12)
        torch.testing.assert_close(other[round], phi, rtol=0, atol=1e-12)
        if name != "single_vector":  # gamma (phi - phi) is exactly nothing there
            assert torch.equal(other[round], after[round])


@pytest.mark.parametrize(
    ("workers", "group_size"),
    [(5, 2), (7, 3), *(pytest.param(*one, marks=pytest.mark.long) for one in [(4, 2), (6, 3), (9, 4)])],
)
@pytest.mark.parametrize("name", FORMS)
def test_the_mean_of_all_replicas_ignores_pairing_and_gamma(workers: int, group_size: int, name: str) -> None:
    """Oracle: mean conservation, mu_delta <- alpha mu_delta + beta mean Delta whatever the groups and gamma; 1e-12."""
    gamma = 0.7 if name == "theta_only" else 0.2 + 0.17 * workers
    runs = run_drift(workers, 10, gamma=gamma, group_size=group_size, seed=workers, **form(name))
    mean = runs[0][0][0][0]
    delta = torch.zeros_like(mean)
    for round in range(10):
        changes = torch.stack([run[0][round][1] - run[0][round][0] for run in runs])
        delta = 0.5 * delta + 0.7 * changes.mean(0)
        mean = mean + delta
        anchors = torch.stack([run[1][round] for run in runs])
        torch.testing.assert_close(anchors.mean(0), mean, rtol=0, atol=1e-12)
    assert anchors.std(0).max() > 1e-3  # they are not simply equal


@pytest.mark.parametrize("name", FORMS)
def test_without_momentum_it_is_pairwise_averaging(name: str) -> None:
    """Oracle: alpha = 0, beta = gamma = 1 is classical gossip, phi' = mean of the group's theta; 1e-12."""
    options = {"outer_momentum": 0.0, "outer_lr": 1.0, "gamma": 1.0, "seed": 3}
    runs = run_drift(5, 6, **options, **form(name))
    for round in range(6):
        for position in range(5):
            members = RandomGroups(2, 3).members(round + 1, 5, position)
            mean = torch.stack([runs[member][0][round][1] for member in members]).mean(0)
            torch.testing.assert_close(runs[position][1][round], mean, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("workers", [pytest.param(4, marks=pytest.mark.long), 5])
@pytest.mark.parametrize("gamma", [0.7, 0.4])
def test_exchange_forms_agree(workers: int, gamma: float, dtype: torch.dtype, error: float) -> None:
    """Oracle: the reductions of 2.5 are exact; float64 1e-12, float32 1e-5 relative to the weights' size."""
    names = [name for name in FORMS if gamma == 0.7 or name != "theta_only"]
    first, *others = (run_drift(workers, 6, dtype, gamma=gamma, **form(name)) for name in names)
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            for a, b in zip(mine[1], theirs[1], strict=True):
                assert float((a - b).abs().max()) <= error * max(1.0, float(a.abs().max()))


@pytest.mark.parametrize("workers", [2, 5])
def test_prefetch_changes_no_bit(workers: int) -> None:
    """Sending anchors early or late, with lossy codecs too: the same losses and weights."""
    for codecs in ({}, {"codec": "int8", "anchor_codec": "bf16"}):

        def worker(world: Mesh, prefetch: bool, codecs: dict[str, str] = codecs) -> Any:
            model = Net(seed=world.rank)
            optimizer = wrap(world, "noloco", model, prefetch_phi=prefetch, **codecs)
            losses = [train_step(optimizer, world.rank, step) for step in range(1, 14)]
            optimizer.finish()
            return losses, bits(weights(model))

        early, late = (isles.run_virtual(worker, workers, links=LINKS, args=(prefetch,)) for prefetch in (True, False))
        assert early == late


@pytest.mark.parametrize("anchor_codec", ["none", "bf16", "int8"])
@pytest.mark.parametrize("prefetch", [True, False])
def test_lossy_anchors_do_not_pull_to_the_codec_s_grid(anchor_codec: str, prefetch: bool) -> None:
    """The pull compares what was decoded with what was decoded: equal anchors stay where they are, to the bit, and the
    mean of a pair's anchors moves by the outer gradient alone (float64, 1e-12).
    """

    def still(world: Mesh) -> bool:
        model = Net()
        before = weights(model)
        optimizer = wrap(world, "noloco", model, sgd, sync_every=1, anchor_codec=anchor_codec, prefetch_phi=prefetch)
        for _ in range(5):
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
        return torch.equal(before, weights(model))

    assert all(isles.run_virtual(still, 4, links=LINKS))

    runs = run_drift(5, 8, anchor_codec=anchor_codec, prefetch_phi=prefetch)
    for round in range(1, 8):
        start, now = (torch.stack([run[1][r] for run in runs]) for r in (round - 1, round))
        before = torch.stack([run[1][round - 2] if round > 1 else run[0][0][0] for run in runs])
        change = torch.stack([run[0][round][1] - run[0][round][0] for run in runs])
        expected = 0.5 * (start - before).mean(0) + 0.7 * change.mean(0)
        torch.testing.assert_close((now - start).mean(0), expected, rtol=0, atol=1e-12)


# Groups.


@pytest.mark.parametrize("group_size", [2, 3, 4])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 9, 31, 64])
def test_every_position_is_in_one_group_that_all_agree_on(size: int, group_size: int) -> None:
    """6.2: the same table on all ranks, every rank once, partner(partner(i)) = i; what does not divide is alone."""
    mixing = RandomGroups(group_size, seed=11)
    for round in range(1, 20):
        table = [mixing.members(round, size, position) for position in range(size)]
        for position, members in enumerate(table):
            assert position in members and list(members) == sorted(set(members))
            assert all(table[member] == members for member in members)
        sizes = [len(group) for group in set(table)]
        assert sizes.count(group_size) == size // group_size
        assert sizes.count(1) == size % group_size
        assert len(sizes) == size // group_size + size % group_size


def test_groups_differ_by_round_and_seed_and_are_uniform() -> None:
    """New partners every round, all equally often; the solo round of an odd world goes round."""
    meetings, mixing = Counter[tuple[int, int]](), RandomGroups(2, 5)
    for round in range(1, 4201):
        for position in range(7):
            members = mixing.members(round, 7, position)
            meetings[position, members[0] if members[-1] == position else members[-1]] += 1
    # 1/7 alone (with itself), 6/7 spread over six partners
    assert len(meetings) == 49 and all(abs(met / 4200 - 1 / 7) < 0.03 for met in meetings.values())
    first = [RandomGroups(2, seed).members(1, 16, 0) for seed in range(20)]
    assert len(set(first)) > 5


@pytest.mark.parametrize("workers", [4, 5])
def test_the_partner_is_known_in_advance(workers: int) -> None:
    """`members(round)` says before a round whom it will be with: nobody else's bytes arrive."""

    def worker(world: Mesh) -> Any:
        optimizer = wrap(world, "noloco", Net(), prefetch_phi=False)
        log = []
        for step in range(1, 13):
            before = world.world.traffic["outer"].messages_sent
            train_step(optimizer, world.rank, step)
            log.append(world.world.traffic["outer"].messages_sent - before)
        return [optimizer.members(round) for round in range(1, 5)], log  # type: ignore[attr-defined]

    for members, sent in isles.run_virtual(worker, workers, links=LINKS):
        assert sent == [
            0 if step % 3 else 4 * (len(members[step // 3 - 1]) - 1) for step in range(1, 13)
        ]  # header and vector, twice


def test_a_group_larger_than_the_world_is_refused() -> None:
    """group_size = 4 among 3 would mean that nobody ever exchanges; one worker alone is fine."""

    def worker(world: Mesh) -> None:
        wrap(world, "noloco", Net(), group_size=4)

    with pytest.raises(ValueError, match=r"group_size = 4 in a world of 3.*choose group_size <= 3"):
        isles.run_virtual(worker, 3, links=LINKS)
    isles.run_virtual(worker, 1, links=LINKS)


# Bytes.


@pytest.mark.parametrize(
    ("name", "vectors"),
    [("noloco, no prefetch", 2), ("noloco", 2), ("noloco, single vector", 1), ("noloco, theta only", 1)],
)
def test_bytes_are_two_vectors_a_round_or_one(name: str, vectors: int) -> None:
    """Oracle: 2.6, 2 P b or P b a round each way, plus a header of 32 bytes a vector."""
    parameters = sum(p.numel() for p in Net().parameters())

    def worker(world: Mesh) -> tuple[int, int]:
        optimizer = wrap(world, name, Net())
        for step in range(1, 16):  # 5 rounds
            train_step(optimizer, world.rank, step)
        optimizer.finish()
        traffic = world.world.traffic["outer"]
        return traffic.bytes_sent, traffic.bytes_received

    # Prefetched anchors: none before round 1, for they are equal; those for round 6 are on their way at the end.
    expected = 5 * vectors * (4 * parameters + 32)
    assert isles.run_virtual(worker, 4, links=LINKS) == [(expected, expected)] * 4
    assert RUNS[name][1]["sync_every"] == 3


# What would go wrong.


class PrintedSign(DeltaPhi):
    """The paper's eq. 2 as printed: - (beta / n) sum Delta."""

    def apply(self, anchor: Tensor, answer: Answer, state: RuleState, round: int) -> None:
        answer.mean.neg_()
        super().apply(anchor, answer, state, round)


class Mutant(isles.NoLoCo):
    def compose(self) -> Composition:
        return replace(super().compose(), rule=PrintedSign(beta=0.7, momentum=0.5, gamma=0.7))


@pytest.mark.parametrize(("method", "falls"), [(isles.NoLoCo, True), (Mutant, False)])
def test_the_printed_sign_climbs(method: type[isles.NoLoCo], falls: bool) -> None:
    """3.1: with the paper's sign the loss explodes while the replicas stay together; with ours it falls."""

    def worker(world: Mesh) -> tuple[float, float, float]:
        model = Net(seed=0)
        optimizer = method(model, sgd(model, 0.05), world.outer, sync_every=2)
        x, y = batch(99, 0, 64)
        first = float((model(x) - y).square().mean())
        for step in range(1, 41):
            train_step(optimizer, world.rank, step)
        spread = optimizer.replica_std() / float(weights(model).square().mean().sqrt())
        return first, float((model(x) - y).square().mean()), spread

    for first, last, spread in isles.run_virtual(worker, 4, links=LINKS):
        assert (last < 0.9 * first) if falls else (last > 1.5 * first)
        assert spread < 0.2  # a monitor of the replicas' spread would not have noticed


def test_replicas_gather_when_gamma_pulls_and_drift_without() -> None:
    """6.4: gamma = 0 never shrinks the spread; 0.7 keeps it small."""

    def spread(gamma: float) -> float:
        runs = run_drift(4, 30, torch.float32, gamma=gamma)
        return float(torch.stack([run[1][-1] for run in runs]).std(0).mean())

    assert spread(0.7) < 0.5 * spread(0.0)
