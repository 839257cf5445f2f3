"""DiLoCoX's outer step: dilocox.md V1, V3, V4, V8, V10.

V5 and V6 are in tests/comm/test_factors.py, V9 in benchmarks/netns.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isles
from isles.comm.mesh import Mesh
from isles.replicas.methods.dilocox.config import DiLoCoXConfig
from isles.replicas.methods.dilocox.dilocox import Adaptive, factors_form, ranks_used, resized, usual_width
from tests.replicas.workers import LINKS, Net, adamw, loss_of, sgd, train_step, weights

PLAIN: dict[str, Any] = {"rank": 0, "codec": "none", "error_feedback": "none"}
STEPS = 16


def run(world: Mesh, name: str, options: dict[str, Any]) -> tuple[list[float], Tensor, int]:
    """Losses, the weights at the end, bytes."""
    model = Net(seed=world.rank)
    before = world.world.traffic["outer"].bytes_sent
    optimizer = isles.method(name)(model, adamw(model), world.outer, sync_every=3, **options)
    losses = [train_step(optimizer, world.rank, step) for step in range(1, STEPS + 1)]
    optimizer.finish()
    return losses, weights(model), world.world.traffic["outer"].bytes_sent - before


def ran(name: str, workers: int = 3, **options: Any) -> list[tuple[list[float], list[float], int]]:
    results = isles.run_virtual(run, workers, links=LINKS, args=(name, options))
    return [(losses, ended.tolist(), nbytes) for losses, ended, nbytes in results]


@pytest.mark.parametrize("delay", ["none", "carry"])
def test_one_worker_alone_trains_as_without(delay: str) -> None:
    """V1: identity, no momentum, rate 1: every loss, and the weights at the end, of plain training to 1e-6."""
    ((losses, ended, _),) = ran("dilocox", 1, delay=delay, outer_lr=1.0, outer_momentum=0.0, **PLAIN)
    ((plain, plainly_ended, _),) = [
        (losses, ended.tolist(), 0) for losses, ended, _ in isles.run_virtual(alone, 1, links=LINKS)
    ]
    assert losses == pytest.approx(plain, rel=1e-6)
    torch.testing.assert_close(torch.tensor(ended), torch.tensor(plainly_ended), rtol=1e-6, atol=1e-6)


def alone(world: Mesh) -> tuple[list[float], Tensor, int]:
    model = Net()
    inner, losses = adamw(model), []
    for step in range(1, STEPS + 1):
        inner.zero_grad()
        loss = loss_of(model, 0, step)
        loss.backward()
        inner.step()
        losses.append(float(loss.detach()))
    return losses, weights(model), 0


@pytest.mark.parametrize(("delay", "other"), [("none", "diloco"), ("restart", "delayed")])
def test_without_compression_it_is_a_simpler_method(delay: str, other: str) -> None:
    """V3, and V4 of restart: to the bit, with the same bytes."""
    rates = {"outer_lr": 0.4, "outer_momentum": 0.8}
    assert ran("dilocox", delay=delay, **rates, **PLAIN) == ran(other, **rates)


def test_delayed_or_not_the_bytes_are_the_same() -> None:
    """V8: low rank in 4 bits with its dense start: the planned bytes, whatever the delay."""
    options = {"rank": 1, "window": 0, "start_compress": 2}
    sent = [[nbytes for _, _, nbytes in ran("dilocox", delay=delay, **options)] for delay in ("carry", "none")]
    assert sent[0] == sent[1]


def test_carry_is_its_oracle() -> None:
    """V4: W(t+1) = outer(W(t), mean delta(t-1)), a round starts at W - delta: three workers, plain SGD inside, against
    a loop over lists in one process, to 1e-6; anchors equal to the bit.
    """
    rate, mu, every, rounds = 0.4, 0.8, 2, 6

    def worker(world: Mesh) -> list[Tensor]:
        model = Net()
        options = {"outer_lr": rate, "outer_momentum": mu, "sync_every": every, **PLAIN}
        optimizer: Any = isles.DiLoCoX(model, sgd(model), world.outer, **options)
        log = []
        for step in range(1, every * rounds + 1):
            train_step(optimizer, world.rank, step)
            if step % every == 0:
                log.append(torch.stack((optimizer.fragments[0].anchor, weights(model))))
        return log

    anchor = weights(Net())
    momentum, pending = torch.zeros_like(anchor), torch.zeros_like(anchor)
    starts = [anchor.clone() for _ in range(3)]
    expected: list[list[Tensor]] = [[] for _ in range(3)]
    for round in range(rounds):
        deltas = []
        for rank, start in enumerate(starts):
            model = Net()
            torch.nn.utils.vector_to_parameters(start.clone(), model.parameters())
            inner = sgd(model)
            for step in range(round * every + 1, round * every + every + 1):
                inner.zero_grad()
                loss_of(model, rank, step).backward()
                inner.step()
            deltas.append(start - weights(model))
        momentum = mu * momentum + pending
        anchor = anchor - rate * (pending + mu * momentum)
        starts = [anchor - delta for delta in deltas]
        pending = sum(deltas, torch.zeros_like(anchor)) / 3
        for rank, start in enumerate(starts):
            expected[rank].append(torch.stack((anchor, start)))
    results = isles.run_virtual(worker, 3, links=LINKS)
    for seen, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(torch.stack(seen), torch.stack(wanted), rtol=1e-6, atol=1e-6)
        assert all(torch.equal(one[0], other[0]) for one, other in zip(seen, results[0], strict=True))


class Wide(nn.Module):
    """One matrix that is worth compressing at rank 8."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(64, 48, generator=torch.Generator().manual_seed(1)))


def adapting(world: Mesh, ranks: int, stop: int | None, state: Any) -> tuple[list[tuple[int, int, int, float]], Any]:
    """(step, rank, H, feedback ratio) of every round, with gradients of so many ranks; a state after step `stop`."""
    model = Wide()
    options = {"rank": 8, "sync_every": 16, "start_compress": 0, "window": 3, "codec": "none"}
    optimizer: Any = isles.DiLoCoX(model, sgd(model, 0.01), world.outer, **options)
    log, saved = [], None
    if state is not None:
        model.load_state_dict(state[world.rank][1])
        optimizer.load_state_dict(state[world.rank][0])
    draw = torch.Generator().manual_seed(7)
    left, right = torch.randn(64, ranks, generator=draw), torch.randn(ranks, 48, generator=draw)
    while optimizer.steps < 150:
        scale = torch.randn(ranks, generator=torch.Generator().manual_seed(optimizer.steps + 1000 * world.rank))
        model.w.grad = (left * (3 + scale)) @ right
        rounds = optimizer.fragments[0].rounds
        optimizer.step()
        if optimizer.fragments[0].rounds > rounds:
            reported = optimizer.gauges()
            assert reported["rank"] == optimizer.fragments[0].averaging.bases[0].shape[1]
            log.append(
                (optimizer.steps, int(reported["rank"]), int(reported["sync_every"]), reported["feedback_ratio"])
            )
        if optimizer.steps == stop:
            saved = optimizer.state_dict(), {key: value.clone() for key, value in model.state_dict().items()}
    return log, saved


def test_rank_and_h_follow_what_the_means_use() -> None:
    """V10: outer gradients of rank 2 drive the rank from 8 to 2 and H from 16 to 4, the same on all workers; every
    tenth round looks again with 8; a restored run takes the same rounds.
    """
    results = isles.run_virtual(adapting, 3, links=LINKS, args=(2, 61, None))
    logs = [log for log, _ in results]
    assert all([entry[:3] for entry in log] == [entry[:3] for entry in logs[0]] for log in logs)
    log = logs[0]
    settled = [(rank, every) for _, rank, every, _ in log[4:]]
    assert set(settled) <= {(2, 4), (8, 16)} and settled.count((2, 4)) > 2 * settled.count((8, 16)) > 0
    again = isles.run_virtual(adapting, 3, links=LINKS, args=(2, None, [saved for _, saved in results]))
    assert again[0][0] == [entry for entry in log if entry[0] > 61]


def test_full_ranks_are_saved() -> None:
    """Gradients of more ranks than there are columns: rank and H stay near the first ones."""
    log, _ = isles.run_virtual(adapting, 2, links=LINKS, args=(40, None, None))[0]
    assert all(rank >= 5 for _, rank, *_ in log)


@pytest.mark.parametrize(
    "options", [{"rank": 4}, {"rank": 1, "error_feedback": "none"}], ids=["nothing to compress", "not a number"]
)
def test_there_is_nothing_to_adapt_to(options: dict[str, Any]) -> None:
    """No matrix shrinks at that rank: everything travels dense, and the user is told. Bases that are no numbers, which
    nothing holds back without error feedback, are not decomposed: the run is told of by its loss.
    """

    def worker(world: Mesh) -> None:
        model = Net()
        optimizer = isles.DiLoCoX(model, sgd(model), world.outer, sync_every=2, start_compress=0, **options)
        assert any("lower the rank" in notice for notice in optimizer.advise(100)) == (options["rank"] == 4)
        for step in range(1, 13):
            if step == 5 and options["rank"] == 1:
                model.first.data[0, 0] = float("nan")
            train_step(optimizer, world.rank, step)

    isles.run_virtual(worker, 2, links=LINKS)


def test_ranks_and_bases() -> None:
    """The pieces: energy counts, shrinking keeps the strongest directions, growing keeps all of them."""
    q, _ = torch.linalg.qr(torch.randn(30, 5, generator=torch.Generator().manual_seed(0)))
    basis = q * torch.tensor([4.0, 3.0, 1.0, 0.1, 0.01])
    assert [ranks_used(basis, energy) for energy in (0.5, 0.95, 0.97, 1 - 1e-6)] == [1, 2, 3, 5]
    assert ranks_used(torch.zeros(30, 5), 0.95) == 0
    two = resized(basis, 2, seed=1)
    torch.testing.assert_close(two @ two.T, q[:, :2] @ q[:, :2].T, atol=1e-5, rtol=0)
    nine = resized(basis, 9, seed=1)
    assert torch.equal(nine[:, :5], basis) and torch.linalg.matrix_rank(nine) == 9
    assert torch.equal(nine, resized(basis, 9, seed=1)) and resized(basis, 50, seed=1).shape == (30, 30)
    adaptive = Adaptive(first_rank=16, first_every=100, window=2, energy=0.95, last=16)
    assert (adaptive.rank(1), adaptive.every(16)) == (16, 100)
    adaptive.seen = [0.0]
    assert (adaptive.rank(2), adaptive.rank(20), adaptive.every(2)) == (2, 16, 25)
    adaptive.seen = [3.0, 8.5]
    assert (adaptive.rank(2), adaptive.every(6)) == (6, 38)


def test_the_rank_left_out_is_an_eighth_of_the_usual_width() -> None:
    assert usual_width([(256, 64), (64, 64), (64,), (176, 64), (64, 176)]) == 64
    assert factors_form(DiLoCoXConfig(), [(256, 64), (64, 64)]).name == "powersgd:8+int4"
    assert usual_width([(5,)]) == 1 and factors_form(DiLoCoXConfig(rank=0, codec="int8"), []).name == "int8"


@pytest.mark.parametrize(
    ("given", "reported"),
    [
        ({"delay": "later"}, "delay"),
        ({"rank": -1}, "rank = -1"),
        ({"rank": 0, "window": 3}, "window = 3 has no low rank"),
        ({"rank": 0, "start_compress": 3}, "start_compress = 3 has no low rank"),
        ({"codec": "powersgd:4"}, "unknown codec"),
        ({"energy": 0.0}, "energy = 0"),
        ({"energy": 0.9, "window": 0}, "energy = 0.9 is of a rank that adapts"),
        ({"rank": 0, "min_compression_rate": 4.0}, "min_compression_rate = 4.0 has no low rank"),
        ({"codec": "topk:64"}, "leaves out entries of factors"),
        ({"error_feedback": "none", "feedback_decay": 0.9}, "feedback_decay"),
    ],
)
def test_settings_that_make_no_sense(given: dict[str, Any], reported: str) -> None:
    with pytest.raises(ValueError, match=reported):
        DiLoCoXConfig(**given)


@pytest.mark.parametrize("form", ["local", "global"])
def test_low_rank_with_feedback_is_its_oracle(form: str) -> None:
    """Seven rounds of three workers, rank 2 of 9 x 6 and a vector, against Algorithm 1 of PowerSGD and error feedback
    written out for one process: anchors to 1e-5.
    """
    rate, mu, rounds = 0.4, 0.8, 7

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            draw = torch.Generator().manual_seed(2)
            self.w, self.b = (nn.Parameter(torch.randn(*shape, generator=draw)) for shape in ((9, 6), (4,)))

    def gradients(rank: int, step: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(50 * rank + step)
        return torch.randn(9, 6, generator=draw), torch.randn(4, generator=draw)

    def worker(world: Mesh) -> tuple[Tensor, list[Tensor]]:
        model = Two()
        options = {"outer_lr": rate, "outer_momentum": mu, "sync_every": 1, "delay": "none", "error_feedback": form}
        low = {"rank": 2, "codec": "none", "start_compress": 0, "window": 0, "min_compression_rate": 0.0}
        optimizer: Any = isles.DiLoCoX(model, sgd(model, 0.1), world.outer, **options, **low)
        first, log = optimizer.fragments[0].averaging.bases[0].clone(), []
        for step in range(rounds):
            model.w.grad, model.b.grad = gradients(world.rank, step)
            optimizer.step()
            log.append(optimizer.fragments[0].anchor.clone())
        return first, log

    q, seen = isles.run_virtual(worker, 3, links=LINKS)[0]
    model = Two()
    anchor = [model.w.detach().clone(), model.b.detach().clone()]
    momentum = [torch.zeros(9, 6), torch.zeros(4)]
    errors = [torch.zeros(9, 6) for _ in range(3)]
    for step in range(rounds):
        shares = [gradients(rank, step) for rank in range(3)]
        sums = [0.1 * share[0] + error for share, error in zip(shares, errors, strict=True)]
        p = torch.linalg.qr(sum(a @ torch.linalg.qr(q).Q for a in sums) / 3).Q  # type: ignore[arg-type]
        q = sum(a.T @ p for a in sums) / 3  # type: ignore[assignment]
        errors = [a - p @ (a.T @ p).T if form == "local" else a - p @ q.T for a in sums]
        for i, mean in enumerate((p @ q.T, 0.1 * sum(share[1] for share in shares) / 3)):
            momentum[i] = mu * momentum[i] + mean
            anchor[i] = anchor[i] - rate * (mean + mu * momentum[i])
        torch.testing.assert_close(seen[step], torch.cat([part.reshape(-1) for part in anchor]), rtol=1e-5, atol=1e-5)
