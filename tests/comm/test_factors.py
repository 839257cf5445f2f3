"""Low-rank means (PowerSGD): exactness, conservation, bytes, warm start, and torch's own hook as an oracle."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isles
from isles.comm.codecs import form
from isles.comm.codecs.lowrank import LowRank
from isles.comm.collectives.averaging import Factors, averaging
from isles.comm.collectives.basic import Stamp
from isles.comm.mesh import Mesh
from tests.gloo import run_gloo

LINKS = isles.Links(bandwidth=1e8, latency=0.01)
SHAPES = [(7,), (48, 20), (3, 2), (24, 4, 8), (5,)]  # two of them are worth compressing with rank 2
SIZE = 7 + 48 * 20 + 6 + 24 * 32 + 5


def factors(wanted: LowRank, dtype: torch.dtype = torch.float32) -> Factors:
    made = averaging(wanted, SHAPES, dtype, torch.device("cpu"))
    assert isinstance(made, Factors)
    return made


def noise(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def one_round(
    world: Mesh, means: Factors, buffer: Tensor, residual: Tensor | None = None, round: int = 1, step: int = 0
) -> bool:
    """`buffer` becomes the mean; the bytes are those that were promised."""
    group = world.outer
    promised, before = means.sent_bytes(round, group.size, group.rank), world.world.traffic["outer"].bytes_sent
    whole = group.start(means.mean(group.call(round=round), buffer, Stamp(step), None, residual, 0)).wait()
    assert world.world.traffic["outer"].bytes_sent - before == promised
    return whole


def test_what_is_compressed_is_chosen_by_what_it_saves() -> None:
    """rank (m + n) min_compression_rate < m n, as in torch's hook; vectors never."""
    wanted = LowRank(rank=2)
    assert [wanted.matrix(shape) for shape in SHAPES] == [None, (48, 20), None, (24, 32), None]
    assert LowRank(rank=8).matrix((48, 20)) is None and LowRank(rank=6).matrix((48, 20)) == (48, 20)
    assert LowRank(rank=20, min_compression_rate=0).matrix((48, 20)) == (48, 20)
    assert LowRank(rank=2).matrix((0, 4)) is None


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["powersgd:2", "powersgd:2+int4", "powersgd:3+fp16"])
def test_residuals_and_mean_hold_what_was_put_in(name: str, workers: int) -> None:
    """Sum of residuals + N mean = sum of buffers, tensor by tensor (dilocox.md V5); all members get the same bits, also
    the bases of the next round; a second round with what is left works too.
    """

    def worker(world: Mesh) -> Any:
        wanted = form(name)
        assert isinstance(wanted, LowRank)
        means, log = factors(wanted), []
        for round in (1, 2):
            buffer = noise(10 * round + world.rank)
            residual = buffer.clone()
            assert one_round(world, means, buffer, residual, round)
            log.append((buffer, residual))
        return log, means.bases

    results = isles.run_virtual(worker, workers, links=LINKS)
    for round in (1, 2):
        means = [log[round - 1][0] for log, _ in results]
        assert all(torch.equal(mean, means[0]) for mean in means)
        put_in = sum(noise(10 * round + rank).double() for rank in range(workers))
        held = sum(log[round - 1][1].double() for log, _ in results) + workers * means[0].double()
        for one, other in zip(held.split([7, 960, 6, 768, 5]), put_in.split([7, 960, 6, 768, 5]), strict=True):
            assert float((one - other).norm() / other.norm()) < 1e-6
    assert all(torch.equal(a, b) for _, bases in results for a, b in zip(bases, results[0][1], strict=True))


@pytest.mark.parametrize("rank", [3, 64])
def test_what_has_few_ranks_is_exact(rank: int) -> None:
    """A mean of rank 3 in one round with rank 3; any mean with all ranks (V6, C8). What is left over
    is what tells the members apart, and adds up to nothing.
    """

    def worker(world: Mesh) -> tuple[Tensor, Tensor, Tensor]:
        means = factors(LowRank(rank=rank, min_compression_rate=0))
        buffer = noise(world.rank)
        if rank == 3:  # the same rows for everyone, so that the mean has no more ranks than each
            rows = torch.randn(3, 48, generator=torch.Generator().manual_seed(5))
            for a in (matrix.of(buffer) for matrix in means.matrices if matrix.columns > 3):
                a.copy_(a[:, :3].clone() @ rows[:, : a.shape[1]])
        mine, residual = buffer.clone(), buffer.clone()
        one_round(world, means, buffer, residual)
        return mine, buffer, residual

    results = isles.run_virtual(worker, 3, links=LINKS)
    expected = sum(mine for mine, _, _ in results) / 3
    assert all(float((mean - expected).norm() / expected.norm()) < 1e-5 for _, mean, _ in results)
    assert float(sum(residual for _, _, residual in results).norm() / expected.norm()) < 1e-5


def test_a_warm_start_follows_a_constant_subspace() -> None:
    """One power step a round on the same input: the error never grows and comes to that of the best rank."""

    def worker(world: Mesh) -> list[list[float]]:
        means, target = factors(LowRank(rank=4)), noise(0)
        errors: list[list[float]] = [[] for _ in means.matrices]
        for round in range(1, 41):
            buffer = target.clone()
            one_round(world, means, buffer, round=round)
            for log, matrix in zip(errors, means.matrices, strict=True):
                log.append(float((matrix.of(buffer) - matrix.of(target)).norm()))
        return errors

    means = factors(LowRank(rank=4))
    for errors, matrix in zip(isles.run_virtual(worker, 2, links=LINKS)[0], means.matrices, strict=True):
        assert all(later <= earlier * (1 + 1e-5) for earlier, later in pairwise(errors))
        best = float(torch.linalg.svdvals(matrix.of(noise(0)))[4:].square().sum().sqrt())
        assert best <= errors[-1] * (1 + 1e-5) and errors[-1] < 1.02 * best < 0.98 * errors[0]


def test_rounds_at_the_start_travel_dense_and_zeros_harm_nothing() -> None:
    """start = 1: the first round is the dense mean, bases wait; a matrix of zeros (no orthonormal basis of its own)
    stays zero and finite, and the next round is as good as any.
    """

    def worker(world: Mesh) -> None:
        means = factors(LowRank(rank=2, start=1))
        bases = [basis.clone() for basis in means.bases]
        buffer = noise(world.rank)
        one_round(world, means, buffer)
        torch.testing.assert_close(buffer, (noise(0) + noise(1)) / 2)
        assert all(map(torch.equal, bases, means.bases))
        buffer = torch.zeros(SIZE)
        one_round(world, means, buffer, round=2)
        assert not buffer.any() and all(basis.isfinite().all() for basis in means.bases)
        buffer = noise(7)
        one_round(world, means, buffer, round=3)
        assert buffer.isfinite().all() and buffer.norm() > 0.1 * noise(7).norm()

    isles.run_virtual(worker, 2, links=LINKS)


def test_a_broken_share_is_in_no_basis() -> None:
    """A member with nothing of use is left out of the factors, which all have in common; where nobody has anything,
    bases are those of before.
    """

    def worker(world: Mesh, broken: tuple[int, ...]) -> tuple[list[Tensor], list[Tensor], tuple[int, ...]]:
        means, group = factors(LowRank(rank=2)), world.outer
        before = [basis.clone() for basis in means.bases]
        buffer, stamp = noise(world.rank), Stamp(1, broken=world.rank in broken)
        if stamp.broken:
            buffer.fill_(7.0)  # whatever it sends
        transfer = group.start(means.mean(group.call(round=1), buffer, stamp, None, None, 0))
        return before, means.bases, transfer.wait()

    three = isles.run_virtual(worker, 3, links=LINKS, args=((1,),))
    assert [usable for *_, usable in three] == [(0, 2)] * 3
    assert all(torch.equal(a, b) for _, bases, _ in three for a, b in zip(bases, three[0][1], strict=True))
    for before, bases, usable in isles.run_virtual(worker, 2, links=LINKS, args=((0, 1),)):
        assert usable == () and all(map(torch.equal, before, bases))


class Toy(nn.Module):
    """Two matrices and a vector."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(3)
        self.first = nn.Parameter(torch.randn(40, 30, generator=draw))
        self.bias = nn.Parameter(torch.randn(40, generator=draw))
        self.second = nn.Parameter(torch.randn(24, 40, generator=draw))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.first.T + self.bias) @ self.second.T


def inputs(rank: int, step: int) -> Tensor:
    return torch.randn(6, 30, generator=torch.Generator().manual_seed(100 * rank + step))


def beside_the_hook(world: Mesh, rank: int, steps: int) -> float:
    """The largest difference between the gradients that torch's hook and ours hand out, relative to theirs."""
    import torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook as power
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(Toy())
    state = power.PowerSGDState(None, rank, start_powerSGD_iter=2, min_compression_rate=2)
    wrapped.register_comm_hook(state, power.powerSGD_hook)
    names = ["first", "bias", "second"]
    model = Toy()
    own = [getattr(model, name) for name in names]
    wanted = LowRank(rank=rank)
    means = averaging(wanted, [p.shape for p in own], torch.float32, torch.device("cpu"))
    assert isinstance(means, Factors)
    error = torch.zeros(sum(p.numel() for p in own))
    worst = 0.0
    for step in range(steps):
        wrapped.zero_grad()
        loss = wrapped(inputs(world.rank, step)).square().mean()
        if step == 3:  # theirs are drawn in the hook's first round, in the order of the bucket; ours take them over
            means.bases = [q.clone() for q in bases_of(state, means)]
        loss.backward()
        theirs = torch.cat([getattr(wrapped.module, name).grad.reshape(-1) for name in names])
        if step >= 3:  # from here on both start from the same bases and the same error
            model.zero_grad()
            model(inputs(world.rank, step)).square().mean().backward()
            ours = torch.cat([p.grad.reshape(-1) for p in own]) + error
            put_in = ours.clone()
            world.outer.start(means.mean(world.outer.call(round=step), ours, Stamp(step), None, None, 0)).wait()
            error = put_in - ours
            worst = max(worst, float((ours - theirs).norm() / theirs.norm()))
        if step == 2:
            (theirs_error,) = state.error_dict.values()
            error = placed(theirs_error, wrapped, names)
    return worst


def bases_of(state: Any, means: Factors) -> list[Tensor]:
    """The hook's Q of each of our matrices, found by shape."""
    (flat,) = state.q_memory_dict.values()
    shapes = [tuple(basis.shape) for basis in means.bases]
    found, start = {}, 0
    for shape in reversed(shapes):  # the bucket holds gradients in the order in which backward makes them
        found[shape] = flat[start : start + shape[0] * shape[1]].view(shape)
        start += shape[0] * shape[1]
    return [found[shape] for shape in shapes]


def placed(bucket: Tensor, wrapped: Any, names: list[str]) -> Tensor:
    """The hook's flat error, in our order."""
    pieces, start = {}, 0
    for name in reversed(names):
        size = getattr(wrapped.module, name).numel()
        pieces[name] = bucket[start : start + size]
        start += size
    return torch.cat([pieces[name] for name in names])


def test_torch_s_hook_agrees() -> None:
    """Same rank, same bases, same error: the gradients of torch's PowerSGD hook (global error feedback) to 1e-5."""
    assert max(run_gloo(beside_the_hook, 2, args=(2, 8))) < 1e-5
