"""DeMo against its update rule written out with SciPy's transform, its limits, and the bytes it sends."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.fft
import torch
from torch import Tensor, nn

import isles
from isles.comm.mesh import Mesh
from isles.replicas.methods.demo.config import DeMoConfig
from isles.replicas.methods.demo.momentum import (
    HEADER_BYTES,
    Blocks,
    Momentum,
    Packing,
    drawn,
    edge,
    fixed,
    largest,
    orthogonalised,
    snapped,
)
from isles.running.run import launch
from isles.training.config.reading import read_config
from tests.replicas.workers import LINKS, Net, bits, counted, loss_of, sgd, train_step, weights, wrap

CPU = torch.device("cpu")
SHAPES = [(257, 96), (96,), (288, 96), (3, 5, 70), (130,), (), (1, 1), (64, 3)]
RATE = 0.02
PLAIN = {"transform": "identity", "value_dtype": "fp32", "zero_tol": 0.0}
WHOLE = {"compression_topk": 64, "compression_chunk": 8}  # every coefficient of every block


def run(worker: Any, workers: int = 1, *args: Any) -> list[Any]:
    return isles.run_virtual(worker, workers, links=LINKS, args=args)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# The rule written out: one tensor, NumPy's blocks, SciPy's transform.


def blocks_of(tensor: np.ndarray, chunk: int) -> tuple[list[np.ndarray], tuple[int, ...]]:
    """A matrix or vector as a list of blocks, filled up with zeros; and the shape that it was filled up to."""
    matrix = tensor.reshape(1, -1) if tensor.ndim == 1 else tensor
    edges = [edge(size, chunk, True) for size in matrix.shape]
    filled = [-(-size // one) * one for size, one in zip(matrix.shape, edges, strict=True)]
    matrix = np.pad(matrix, [(0, more - size) for more, size in zip(filled, matrix.shape, strict=True)])
    rows = [matrix[i : i + edges[0]] for i in range(0, filled[0], edges[0])]
    return [row[:, j : j + edges[1]] for row in rows for j in range(0, filled[1], edges[1])], tuple(filled)


def joined(blocks: list[np.ndarray], filled: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
    """The inverse."""
    wide = filled[1] // blocks[0].shape[1]
    rows = [np.concatenate(blocks[i : i + wide], axis=1) for i in range(0, len(blocks), wide)]
    whole = np.concatenate(rows)
    return whole[: shape[0], : shape[1]] if len(shape) == 2 else whole[0, : shape[0]]


class Written:
    """DeMo for one tensor and all workers, in a loop over them; blocks filled up keep what they have there."""

    def __init__(self, start: Tensor, workers: int, config: DeMoConfig) -> None:
        self.x, self.config = start.numpy().copy(), config
        blocks, self.filled = blocks_of(np.zeros_like(self.x), config.compression_chunk)
        self.momenta = [[block.copy() for block in blocks] for _ in range(workers)]

    def transformed(self, block: np.ndarray, inverse: bool) -> np.ndarray:
        if self.config.transform == "identity":
            return block
        return (scipy.fft.idctn if inverse else scipy.fft.dctn)(block, norm="ortho")

    def step(self, gradients: list[Tensor], rate: float) -> None:
        beta, k, alpha = self.config.compression_decay, self.config.compression_topk, self.config.subtract
        reduce = self.config.reduce
        sums = [np.zeros_like(block) for block in self.momenta[0]]
        counts = [np.zeros_like(block) for block in self.momenta[0]]
        for momentum, gradient in zip(self.momenta, gradients, strict=True):
            for i, own in enumerate(blocks_of(gradient.numpy(), self.config.compression_chunk)[0]):
                momentum[i] = np.float32(beta) * momentum[i] + np.float32(rate) * own
                found = self.transformed(momentum[i], inverse=False)
                per_block = np.zeros(found.size, dtype=bool)
                per_block[np.argsort(-np.abs(found), axis=None, kind="stable")[:k]] = True
                per_block = per_block.reshape(found.shape)
                sent = np.where(per_block, found, np.float32(0))
                momentum[i] = momentum[i] - np.float32(alpha) * self.transformed(sent, inverse=True)
                sums[i] += sent
                counts[i] += per_block
        decoded = [
            self.transformed(total / (len(gradients) if reduce == "world" else np.maximum(count, 1)), inverse=True)
            for total, count in zip(sums, counts, strict=True)
        ]
        update = joined(decoded, self.filled, self.x.shape)
        self.x -= np.float32(rate) * (np.sign(update) if self.config.base == "sign" else update)


@pytest.mark.parametrize(
    ("options", "exact"),
    [
        ({**PLAIN, "base": "sign"}, True),
        ({**PLAIN, "base": "sign", "subtract": 0.3}, True),
        ({"value_dtype": "fp32", "base": "sgd", "fold_lr": False, "zero_tol": 0.0}, False),
        ({"value_dtype": "fp32", "base": "sgd", "fold_lr": False, "reduce": "world"}, False),
        ({"value_dtype": "fp32", "base": "sgd", "fold_lr": False, "subtract": 0.4, "compression_decay": 0.7}, False),
    ],
)
@pytest.mark.parametrize("shape", [(11, 7), (9,), (8, 12)])
def test_it_is_its_update_rule(options: dict[str, Any], exact: bool, shape: tuple[int, ...]) -> None:
    """Three workers that speak, against a loop over workers and blocks: to the bit where nothing is transformed, to
    1e-5 where SciPy does it. Dimensions above the chunk of 4 are filled up (11, 7, 9) or not (8, 12).
    """
    config = DeMoConfig(compression_topk=3, compression_chunk=4, **options)
    fold = config.fold_lr

    def gradient(worker: int, step: int) -> Tensor:
        return normal(*shape, seed=10 * step + worker)

    def worker(world: Mesh) -> list[Tensor]:
        model = nn.Module()
        model.w = nn.Parameter(normal(*shape, seed=99))
        optimizer = isles.DeMo(model, sgd(model, RATE), world.outer, config)
        log = []
        for step in range(1, 7):
            model.w.grad = gradient(world.rank, step)
            optimizer.step()
            log.append(model.w.detach().clone())
        return log

    results = run(worker, 3)
    rule = Written(normal(*shape, seed=99), 3, config)
    for step in range(1, 7):
        gradients = [gradient(rank, step) for rank in range(3)]
        if fold:
            rule.step(gradients, RATE)
        else:  # a step of the rate, of momenta without it
            rule.step([g / RATE for g in gradients], RATE)
        for result in results:
            assert torch.equal(result[step - 1], results[0][step - 1])
            tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-5, "atol": 1e-6}
            torch.testing.assert_close(result[step - 1], torch.from_numpy(rule.x), **tolerance)


# Blocks and their transform.


@pytest.mark.parametrize(
    ("size", "plain", "filled"),
    [(257, 1, 52), (127, 1, 64), (97, 1, 49), (1000, 50, 50), (50257, 29, 64), (96, 48, 48), (288, 48, 48), (5, 5, 5)],
)
def test_edges(size: int, plain: int, filled: int) -> None:
    """The authors' divisors (spec 3.2), and what replaces the thin ones."""
    assert (edge(size, 64, False), edge(size, 64, True)) == (plain, filled)


@pytest.mark.parametrize("chunk", [64, 8, 1])
@pytest.mark.parametrize("padding", [True, False])
def test_a_tensor_there_and_back_again(chunk: int, padding: bool) -> None:
    """Every entry has one place, entries that fill up are few, and blocks are the matrix's own."""
    blocks = Blocks([torch.Size(shape) for shape in SHAPES], chunk, padding)
    numel = sum(torch.Size(shape).numel() for shape in SHAPES)
    assert numel <= blocks.entries <= (1.6 if padding else 1) * numel
    flat = torch.zeros(blocks.entries)
    tensors = [normal(*shape, seed=i) for i, shape in enumerate(SHAPES)]
    for i, tensor in enumerate(tensors):
        for view, part in zip(blocks.views(flat, i), blocks.cut(tensor, i), strict=True):
            assert view.shape == part.shape and not view.any()
            view.copy_(part)
    assert int((flat != 0).sum()) == numel
    for i, tensor in enumerate(tensors):
        again = torch.zeros_like(tensor)
        for view, part in zip(blocks.views(flat, i), blocks.cut(again, i), strict=True):
            part.copy_(view)
        assert torch.equal(again, tensor)
    first = blocks.groups[0]
    a, b = first.edges
    assert torch.equal(flat[: first.entries].view(a, b), tensors[0][:a, :b])
    pieces = list(blocks.pieces(CPU))
    assert [pieces[0].first, *(piece.last for piece in pieces)] == [
        0,
        *(piece.first for piece in pieces[1:]),
        len(flat),
    ]


def test_columns_of_a_transposed_gradient() -> None:
    """Strides are the tensor's own business: only dimensions are split."""
    blocks = Blocks([torch.Size((10, 6))], 5, True)
    tensor = normal(6, 10).t()
    flat = torch.zeros(blocks.entries)
    torch._foreach_copy_(blocks.views(flat, 0), blocks.cut(tensor, 0))
    assert torch.equal(flat[:15].view(5, 3), tensor[:5, :3])


@pytest.mark.parametrize("edges", [(64, 64), (48, 64), (1, 64), (7, 1), (1, 1)])
def test_transforms(edges: tuple[int, int]) -> None:
    """DCT: SciPy's orthonormal one, and so C_a^T B C_b. All: there and back to 2e-6, norms kept; random bases differ
    from step to step.
    """
    x = normal(5, *edges)
    dct = fixed("dct", [edges], CPU).forward(x)
    expected = scipy.fft.dctn(x.numpy(), axes=(1, 2), norm="ortho").reshape(5, -1)
    torch.testing.assert_close(dct, torch.from_numpy(expected), rtol=1e-5, atol=2e-6)
    for transform in (fixed("dct", [edges], CPU), drawn([edges], 0, 3, CPU), fixed("identity", [edges], CPU)):
        there = transform.forward(x)
        torch.testing.assert_close(transform.inverse(there, edges), x, rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(there.norm(), x.norm(), rtol=2e-6, atol=0)
    if edges == (64, 64):
        one, same, other = (drawn([edges], 0, step, CPU).bases[64] for step in (3, 3, 4))
        assert torch.equal(one, same) and not torch.equal(one, other)


@pytest.mark.parametrize(("entries", "k"), [(4096, 32), (4096, 1), (4096, 256), (55, 32), (64, 1), (16, 16), (1, 1)])
def test_the_largest_are_the_largest(entries: int, k: int) -> None:
    """Sizes as torch finds them; every place once."""
    rows = normal(9, entries)
    indices = largest(rows, k)
    assert all(len(set(row.tolist())) == k for row in indices)
    found = rows.gather(1, indices).abs().sort(dim=1).values
    assert torch.equal(found, rows.abs().topk(k, dim=1).values.sort(dim=1).values)


@pytest.mark.parametrize("options", [{}, {"transform": "random"}, {"value_dtype": "int8"}, {"subtract": 0.3}, PLAIN])
def test_what_is_sent_leaves_the_momentum(options: dict[str, Any]) -> None:
    """M + alpha T^-1(what the others decode) = beta M + lr G, with T^-1 by matrices of its own, at every step."""
    config = DeMoConfig(compression_topk=3, compression_chunk=8, compression_decay=0.9, **options)
    momentum = Momentum([torch.Size((16, 24))], config, CPU)
    for step in range(4):
        gradient, before = normal(16, 24, seed=step), momentum.vector.clone()
        momentum.begin(step)
        momentum.add([(0, gradient)], RATE)
        values, indices = momentum.extract()
        sent = momentum.packing.unpack(momentum.packing.pack(step, 0, values, indices))
        assert torch.equal(sent.indices, indices) and (sent.step, sent.digest) == (step, 0)
        momentum.subtract(sent.values, indices)
        dense = torch.zeros(6, 64).scatter_(1, indices.view(6, 3), sent.values.view(6, 3)).view(6, 8, 8)
        basis = momentum.transform.bases.get(8, torch.eye(8))
        whole = torch.zeros(momentum.blocks.entries)
        torch._foreach_copy_(momentum.blocks.views(whole, 0), momentum.blocks.cut(gradient, 0))
        after = momentum.vector + config.subtract * torch.einsum("ab,nbc,dc->nad", basis, dense, basis).reshape(-1)
        torch.testing.assert_close(after, 0.9 * before + RATE * whole, rtol=1e-6, atol=1e-6)


# Limits that are simpler methods.


def steps_of(world: Mesh, inner: Any, options: dict[str, Any], steps: int = 8) -> Tensor:
    model = Net()
    optimizer = isles.DeMo(model, inner(model), world.outer, **options)
    for step in range(1, steps + 1):
        train_step(optimizer, world.rank, step)
    return weights(model)


@pytest.mark.parametrize("decay", [0.0, 0.999])
@pytest.mark.parametrize("workers", [1, 3])
def test_all_coefficients_are_sign_descent(workers: int, decay: float) -> None:
    """k of a whole block and alpha = 1: nothing is left for a momentum. To the bit without a transform; with one up to
    few entries whose mean gradient is near zero.
    """
    options = {**WHOLE, "compression_decay": decay}

    def reference() -> Tensor:
        model = Net()
        for step in range(1, 9):
            each = [
                torch.autograd.grad(loss_of(model, rank, step), list(model.parameters())) for rank in range(workers)
            ]
            for parameter, *gradients in zip(model.parameters(), *each, strict=True):
                total = sum(RATE * gradient for gradient in gradients) / workers
                parameter.data -= RATE * torch.sign(total)
        return weights(model)

    plain = run(steps_of, workers, lambda model: sgd(model, RATE), {**options, **PLAIN})
    assert all(torch.equal(result, reference()) for result in plain)
    dct = run(steps_of, workers, lambda model: sgd(model, RATE), {**options, "value_dtype": "fp32"})
    apart = (dct[0] - reference()).abs() > 1e-6
    assert int(apart.sum()) <= 0.02 * len(apart)


def test_alone_without_compression_it_is_sgd() -> None:
    """base = sgd, all entries, no transform: SGD's own steps, to the bit where the rate is not folded in."""

    def plain(world: Mesh) -> Tensor:
        model = Net()
        inner = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.05)
        for step in range(1, 9):
            loss_of(model, 0, step).backward()
            inner.step()
            inner.zero_grad()
        return weights(model)

    def inner(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.05)

    (expected,) = run(plain)
    options = {**WHOLE, **PLAIN, "base": "sgd"}
    assert torch.equal(run(steps_of, 1, inner, {**options, "fold_lr": False})[0], expected)
    torch.testing.assert_close(run(steps_of, 1, inner, options)[0], expected, rtol=1e-6, atol=1e-6)


def test_nothing_subtracted_is_signum() -> None:
    """alpha = 0, all entries: the sign of SGD's momentum buffer."""

    def signum(world: Mesh) -> Tensor:
        model = Net()
        buffers = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for step in range(1, 9):
            loss_of(model, 0, step).backward()
            for parameter, buffer in zip(model.parameters(), buffers, strict=True):
                buffer.mul_(0.9).add_(parameter.grad, alpha=RATE)  # type: ignore[arg-type]
                parameter.data -= RATE * torch.sign(buffer)
                parameter.grad = None
        return weights(model)

    options = {**WHOLE, **PLAIN, "subtract": 0.0, "compression_decay": 0.9}
    assert torch.equal(run(steps_of, 1, lambda model: sgd(model, RATE), options)[0], run(signum)[0])


def test_muon_makes_matrices_orthogonal() -> None:
    """Singular vectors stay, values go to about 1, whatever the scale; a vector becomes its sign."""
    wide, tall, vector = normal(2, 6, 9) * 1e-5, normal(12, 5, seed=1), normal(7, seed=2)
    together = [wide[0].clone(), vector.clone(), wide[1].clone(), tall.clone()]
    orthogonalised(together)
    assert torch.equal(together[1], vector.sign())
    for before, after in ((wide[0], together[0]), (wide[1], together[2]), (tall, together[3])):
        left, _, right = torch.linalg.svd(before, full_matrices=False)
        rotated = left.T @ after @ right.T
        values = rotated.diagonal()
        assert float(values.min()) > 0.6 and float(values.max()) < 1.3
        torch.testing.assert_close(rotated, torch.diag(values), rtol=0, atol=1e-3)


@pytest.mark.parametrize("scale", [1e-24, 1e-38, 1e-43, 0.0])
def test_muon_of_next_to_nothing_is_finite(scale: float) -> None:
    """What rounding leaves of a momentum without gradients: squares of its entries are zero in float32."""
    small, empty = normal(6, 9) * scale, torch.empty(0, 5)
    orthogonalised([small, empty])
    assert small.isfinite().all() and float(small.norm()) < 3
    assert scale < 1e-40 or float(small.norm()) > 1


def test_what_is_nothing_in_its_block_is_snapped_by_its_own_largest() -> None:
    """One in a hundred of 1, and of 1e-4."""
    blocks = snapped(torch.tensor([[1.0, 2e-3, -0.1], [-1e-4, 2e-6, 2e-7]]), 0.01)
    assert torch.equal(blocks, torch.tensor([[1.0, 0.0, -0.1], [-1e-4, 2e-6, 0.0]]))


def test_rows_without_a_gradient_move_with_their_block() -> None:
    """By the full rate, with the usual 32 coefficients: rows of tokens that no batch held, beside others of it."""

    def worker(world: Mesh) -> float:
        model = nn.Module()
        model.w = nn.Parameter(torch.zeros(64, 64))
        optimizer = isles.DeMo(model, sgd(model, RATE), world.outer)
        model.w.grad = normal(64, 64)
        model.w.grad[:32] = 0.0
        optimizer.step()
        return float(((model.w[:32].abs() - RATE).abs() < 1e-6).float().mean())

    assert run(worker)[0] > 0.95


def test_zeros_stay_zeros() -> None:
    """Rounding of the transform makes no step of what has no gradient (spec 3.3); with zero_tol = 0 it does."""

    def worker(world: Mesh, tolerance: float) -> int:
        model = nn.Module()
        model.w = nn.Parameter(torch.zeros(64, 64))
        options: Any = {"compression_topk": 4096, "value_dtype": "fp32"}
        optimizer = isles.DeMo(model, sgd(model), world.outer, **options, zero_tol=tolerance)
        gradient = normal(64, 64)
        gradient[:32] = 0.0  # rows of tokens that nobody read
        model.w.grad = gradient
        optimizer.step()
        assert (model.w[32:] != 0).all()
        return int((model.w[:32] != 0).sum())

    assert run(worker, 1, 1e-6) == [0] and run(worker, 1, 0.0)[0] > 100


# Bytes.


@pytest.mark.parametrize("value_dtype", ["fp32", "bf16", "int8", "sign"])
@pytest.mark.parametrize("k", [3, 32, 5000])
@pytest.mark.parametrize("chunk", [64, 16, 128])
def test_the_message_is_as_long_as_the_formula(value_dtype: Any, k: int, chunk: int) -> None:
    """Spec 2.5: pairs times (value + place), to the byte, and decodes to what was packed. Shapes (257, 96), (96,),
    (288, 96), whose blocks are worked out by hand.
    """
    blocks = Blocks([torch.Size(shape) for shape in ((257, 96), (96,), (288, 96))], chunk, True)
    by_hand = {  # number of blocks, entries of one
        64: [(5 * 2, 52 * 48), (2, 48), (6 * 2, 48 * 48)],
        16: [(17 * 6, 16 * 16), (6, 16), (18 * 6, 16 * 16)],
        128: [(3, 86 * 96), (1, 96), (3, 96 * 96)],
    }[chunk]
    pairs, indices = 0, 0.0
    for entries in {entries for _, entries in by_hand}:
        count = sum(number * min(k, entries) for number, size in by_hand if size == entries)
        pairs += count
        if k < entries:
            indices += count if entries <= 256 else 3 * -(-count // 2) if entries <= 4096 else 2 * count
    values = {"fp32": 4 * pairs, "bf16": 2 * pairs, "int8": pairs + 4 * -(-pairs // 256), "sign": -(-pairs // 8)}
    packing = Packing(blocks, k, value_dtype)
    assert packing.nbytes == HEADER_BYTES + values[value_dtype] + indices
    chosen = [
        torch.rand(group.blocks, group.entries).argsort(1)[:, :per_block]
        for group, per_block in zip(blocks.groups, packing.per_block, strict=True)
    ]
    numbers = normal(pairs)
    wire = packing.pack(7, -5, numbers, torch.cat([each.reshape(-1) for each in chosen]))
    assert wire.dtype == torch.uint8 and len(wire) == packing.nbytes
    shifted = torch.cat((torch.zeros(1, dtype=torch.uint8), wire))[1:]  # as a row of a gathered matrix may lie
    sent = packing.unpack(shifted)
    assert (sent.step, sent.digest) == (7, -5)
    for index, each in enumerate(chosen):
        if packing.is_listed(index):
            assert torch.equal(sent.indices[packing.of(index, 0, len(each))], each.reshape(-1))
    if value_dtype == "sign":
        assert torch.equal(sent.values, torch.where(numbers >= 0, 1.0, -1.0))
    else:
        torch.testing.assert_close(sent.values, numbers, rtol=4e-3, atol=2e-2 if value_dtype == "int8" else 0)


def test_indices_of_the_largest_block_fit() -> None:
    """65,536 of them, in two bytes each."""
    packing = Packing(Blocks([torch.Size((256, 256))], 256, True), 4, "fp32")
    indices = torch.tensor([0, 32767, 32768, 65535])
    assert torch.equal(packing.unpack(packing.pack(1, 0, normal(4), indices)).indices, indices)


@pytest.mark.parametrize("workers", [1, 2, 3, 10])
def test_bytes_of_a_step(workers: int) -> None:
    """Counters, properties and formula agree; ten gather by doubling."""

    def worker(world: Mesh) -> None:
        optimizer: Any = wrap(world, "demo", Net(), compression_topk=4, compression_chunk=16)
        assert optimizer.data_transmit == 0
        for step in range(1, 4):
            train_step(optimizer, world.rank, step)
        # 11 x 5, 11 and 7 x 11 are a block each: 12 values of 2 bytes, 12 places of one
        assert optimizer.payload_bytes == 16 + 24 + 12
        assert optimizer.data_transmit == (workers - 1) * 52
        assert counted(world)["sent"] == counted(world)["received"] == 3 * (workers - 1) * 52

    run(worker, workers)


# Gradients and weights of every kind.


class Branches(nn.Module):
    """A layer that only even workers use, and one that nobody does."""

    def __init__(self) -> None:
        super().__init__()
        self.common, self.even, self.never = (nn.Parameter(normal(5, 3, seed=i)) for i in range(3))

    def forward(self, x: Tensor, even: bool) -> Tensor:
        return x @ self.common + (x @ self.even if even else 0.0)


def test_a_gradient_that_is_missing_counts_as_zero() -> None:
    """Workers stay equal, what one worker alone used moves everywhere, what nobody uses only decays; what a momentum
    still holds goes on being sent.
    """

    def worker(world: Mesh) -> list[Tensor]:
        model = Branches()
        inner = torch.optim.SGD(model.parameters(), lr=RATE, weight_decay=0.5)
        optimizer = isles.DeMo(model, inner, world.outer, compression_topk=4)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        model(normal(2, 5), world.rank % 2 == 0).sum().backward()
        assert model.never.grad is None
        optimizer.step()
        assert not torch.equal(model.even, before[1]) and model.never.grad is not None
        torch.testing.assert_close(model.never.detach(), before[2] * (1 - 0.5 * RATE))
        optimizer.zero_grad()
        decayed = model.even.detach() * (1 - 0.5 * RATE)
        model(normal(2, 5), False).sum().backward()
        optimizer.step()
        assert float((model.even.detach() - decayed).abs().max()) > 0.9 * RATE
        return [parameter.detach() for parameter in model.parameters()]

    results = run(worker, 3)
    assert all(torch.equal(a, b) for result in results for a, b in zip(result, results[0], strict=True))


def test_what_is_frozen_later_stands_still() -> None:
    """Its momentum goes on being sent and moves nothing, and neither does the weight decay."""

    def worker(world: Mesh) -> None:
        model = Net()
        optimizer: Any = wrap(world, "demo", model)

        def held() -> Tensor:
            momentum = optimizer.momentum
            return torch.cat([view.reshape(-1) for view in momentum.blocks.views(momentum.vector, 2)])

        train_step(optimizer, world.rank, 1)
        spent = float(held().norm())
        model.second.requires_grad_(False)
        before = model.second.clone(), model.first.detach().clone()
        train_step(optimizer, world.rank, 2)
        assert torch.equal(model.second, before[0]) and not torch.equal(model.first, before[1])
        assert 0 < float(held().norm()) < 0.9 * spent

    run(worker, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weights_of_other_types(dtype: torch.dtype) -> None:
    """Momentum and transform are float32 beside any weights; workers stay equal at every step, on unequal data."""

    def worker(world: Mesh) -> list[str]:
        model = Net(dtype=dtype)
        optimizer: Any = wrap(world, "demo", model, check_every=1)
        log = []
        for step in range(1, 5):
            train_step(optimizer, world.rank, step)
            log.append(bits(weights(model)))
        assert optimizer.momentum.vector.dtype == torch.float32
        return log

    results = run(worker, 3)
    assert results[0] == results[1] == results[2] and len(set(results[0])) == 4


def test_clipping_is_each_worker_s_own() -> None:
    """max_norm holds for the worker's gradient before it enters the momentum."""

    def worker(world: Mesh) -> None:
        model = Net()
        optimizer: Any = isles.DeMo(model, sgd(model, RATE), world.outer, max_norm=1e-3, subtract=0.0, fold_lr=False)
        (loss_of(model, world.rank, 1) * 100).backward()
        alone = torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()]).norm()  # type: ignore[union-attr]
        optimizer.step()
        assert float(optimizer.gradient_norm) == pytest.approx(float(alone), rel=1e-5)
        assert float(optimizer.momentum.vector.norm()) == pytest.approx(1e-3, rel=1e-3)

    run(worker, 2)


def test_a_rate_of_zero_is_no_division_by_it() -> None:
    """A warm-up that begins at 0: nothing moves, nothing is NaN."""

    def worker(world: Mesh) -> None:
        model = Net()
        optimizer = isles.DeMo(model, sgd(model, 0.0), world.outer, base="sgd")
        before = weights(model)
        train_step(optimizer, 0, 1)
        assert torch.equal(before, weights(model))

    run(worker)


# What is refused, and what ends a run.


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"compression_decay": 1.0}, "compression_decay = 1.0: choose 0 <= compression_decay < 1"),
        ({"compression_topk": 0}, "compression_topk = 0: choose 1 or more"),
        ({"compression_chunk": 0}, "compression_chunk = 0: choose 1 to 256"),
        ({"compression_chunk": 257}, "compression_chunk = 257: choose 1 to 256"),
        ({"subtract": 1.5}, "subtract = 1.5: choose 0 to 1"),
        ({"zero_tol": 1.0}, "zero_tol = 1.0"),
        ({"check_every": -1}, "check_every = -1: choose 0 or more"),
        ({"base": "adam"}, "unknown base 'adam'"),
        ({"transform": "fft"}, "unknown transform 'fft'"),
        ({"value_dtype": "fp16"}, "unknown value_dtype 'fp16'"),
        ({"reduce": "sum"}, "unknown reduce 'sum'"),
        ({"value_dtype": "sign", "base": "sgd"}, "one bit has no size"),
    ],
)
def test_settings_that_make_no_sense(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError) as reported:
        DeMoConfig(**options)
    assert says in str(reported.value) and "\n" not in str(reported.value)


def test_the_inner_optimizer_is_plain_sgd() -> None:
    """Anything else would put a second momentum on top: refused, also where a scheduler brings it later."""

    def worker(world: Mesh) -> None:
        model = Net()
        with pytest.raises(ValueError, match=r"not AdamW: wrap that one \(isles train: inner.optimizer = \"sgd\"\)"):
            isles.DeMo(model, torch.optim.AdamW(model.parameters()), world.outer)
        with pytest.raises(ValueError, match="give its inner SGD momentum = 0"):
            isles.DeMo(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), world.outer)
        optimizer = isles.DeMo(model, sgd(model), world.outer)
        torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
        with pytest.raises(ValueError, match="cycle_momentum=False"):
            train_step(optimizer, 0, 1)
        with pytest.raises(ValueError, match="DeMo does not make its workers one replica"):
            isles.DiLoCo(model, isles.DeMo(model, sgd(model), world.outer), world.outer)

    run(worker)


def test_gradients_that_are_averaged_already_are_refused() -> None:
    """A DistributedDataParallel, also inside of another module."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.parallel.DistributedDataParallel(nn.Linear(3, 3)))
        with pytest.raises(ValueError, match=r"give it the model itself, model\.module"):
            isles.DeMo(model, sgd(model), isles.run_virtual(lambda world: world.outer, 1)[0])
    finally:
        torch.distributed.destroy_process_group()


def test_sparse_gradients_are_refused() -> None:
    def worker(world: Mesh) -> None:
        model = nn.Embedding(5, 3, sparse=True)
        optimizer = isles.DeMo(model, sgd(model), world.outer)
        model(torch.tensor([1])).sum().backward()
        with pytest.raises(ValueError, match="make its layer with sparse=False"):
            optimizer.step()

    run(worker)


@pytest.mark.parametrize("what", ["weights", "step", "gradient"])
def test_a_worker_that_is_elsewhere_is_named(what: str) -> None:
    """Weights that drifted show at the next comparison of hashes, another step at once; a gradient that is no number
    goes no further than its worker.
    """

    def worker(world: Mesh) -> None:
        optimizer = wrap(world, "demo", Net(), check_every=2)
        for step in range(1, 7):
            if step == 3 and world.rank == 1:
                if what == "weights":
                    optimizer.parameters[0].data[0, 0] += 1e-6
                elif what == "step":
                    optimizer.steps += 1
            loss_of(optimizer.model, world.rank, step).backward()
            if step == 3 and world.rank == 1 and what == "gradient":
                optimizer.parameters[1].grad[2] = float("nan")  # type: ignore[index]
            optimizer.step()
            optimizer.zero_grad()

    errors = isles.run_virtual(worker, 2, links=LINKS, return_errors=True)
    if what == "gradient":
        assert isinstance(errors[1], isles.WorkerFailed) and "not finite at inner step 3" in str(errors[1])
    else:
        assert isinstance(errors[0], isles.Diverged) and errors[0].peer == 1 and f"step {3 - 1}" in str(errors[0])


def test_advice() -> None:
    """Bytes beyond data parallel's, whole blocks, nothing subtracted, thin blocks; silence where nothing is odd."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.token = nn.Parameter(torch.zeros(512, 512)), nn.Parameter(torch.zeros(257, 64))

    def worker(world: Mesh, **options: Any) -> list[str]:
        model = Wide()
        return isles.DeMo(model, sgd(model), world.outer, **options).advise(10)

    assert run(worker, 4) == [[]] * 4
    for options, says in (
        ({"compression_topk": 3000}, "data parallel 1671552: lower compression_topk (now 3000)"),
        ({"compression_topk": 4096}, "sends most blocks whole"),
        ({"subtract": 0.0}, "subtract = 0"),
        ({"padding": False}, "dimensions of 257 are cut into thin blocks"),
    ):
        notices = run(lambda world, options=options: worker(world, **options), 4)[0]
        assert any(says in notice for notice in notices), notices


def test_every_setting_is_checked_and_saved() -> None:
    """In the state, so that a run goes on with its own."""

    def worker(world: Mesh) -> None:
        saved = wrap(world, "demo", Net(), compression_topk=3)
        state = saved.state_dict()
        assert set(state["config"]) == {field.name for field in dataclasses.fields(DeMoConfig)}
        with pytest.raises(ValueError, match="compression_topk = 32, but the state was saved with 3: set it back"):
            wrap(world, "demo", Net()).load_state_dict(state)

    run(worker)


@pytest.mark.long(cases=0)
def test_losses_come_in_the_papers_order(tmp_path: Path) -> None:
    """66 thousand parameters over bytes, 300 steps: fewer coefficients learn less; without a transform, or with nothing
    subtracted, far less; one bit a value and random bases make no great difference.
    """
    base = {"inner.lr": 2e-3, "inner.weight_decay": 0.0, "run.steps": 300, "replicas.method": "demo"}
    settings = str(Path(__file__).resolve().parents[2] / "benchmarks" / "orderings.toml")

    def loss(**options: Any) -> float:
        flags = base | {f"replicas.{key}": value for key, value in options.items()}
        out = tmp_path / "-".join(f"{key}{value}" for key, value in options.items())
        return launch(read_config(settings, flags, []), out, lambda line: None, lambda notice: None)["val_loss"]

    whole, many, few, one = (loss(compression_topk=k) for k in (4096, 32, 8, 1))
    assert whole + 0.05 < many and many + 0.05 < few and few + 0.05 < one
    assert loss(compression_topk=8, transform="identity") > few + 0.4
    assert loss(compression_topk=8, subtract=0.0) > few + 0.15
    for near in ({"value_dtype": "sign"}, {"transform": "random"}):
        assert loss(compression_topk=8, **near) == pytest.approx(few, abs=0.08)
