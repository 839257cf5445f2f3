"""Weights in a subspace: Protocol Models' formulas worked out by hand, and what keeps the stream inside."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isles.models import Decoder, Shape
from isles.models.subspace import (
    Subspace,
    SubspaceForm,
    check_inside,
    drawn_basis,
    drawn_table,
    fold,
    most_outside,
    orthonormal,
    put_inside,
)
from isles.pipeline.boundaries.scheme import Coordinates, Drift, turned
from isles.pipeline.rowwise import RowwiseAdamW, by_rows, settled

D, K, V = 16, 4, 30
SHAPE = Shape(d_model=D, layers=3, heads=2, ffn=24, vocab=V, context=8, tie_embeddings=False)
TOKENS = torch.arange(18).view(2, 9) % V


def subspace(dtype: torch.dtype = torch.float64) -> Subspace:
    like = torch.empty((), dtype=dtype)
    return Subspace(drawn_basis(D, K, 0).to(like), drawn_table(V, D, 0, like))


def model(form: SubspaceForm, dtype: torch.dtype = torch.float64) -> Any:
    made = Decoder(SHAPE, seed=1, dtype=dtype)
    put_inside(made, subspace(dtype), range(2), form)
    return made


def test_what_crosses_and_what_comes_back() -> None:
    """c = (x - table) U; x = c U^T + table; dL/dc = dL/dx U; dL/dx = dL/dc U^T, with numbers worked out by hand."""
    basis = torch.tensor([[1.0, 0.0], [0.0, 0.6], [0.0, 0.8]], dtype=torch.float64)
    table = torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 5.0]], dtype=torch.float64)
    boundary = Coordinates(Subspace(basis, table))
    tokens = torch.tensor([[0, 1, 0]])
    x = torch.tensor([[[3.0, 1.6, 1.8], [2.0, 0.6, 5.8]]], dtype=torch.float64, requires_grad=True)
    c, side = boundary.encode(x, tokens)
    assert side is None
    assert torch.allclose(c, torch.tensor([[[2.0, 1.0], [2.0, 1.0]]], dtype=torch.float64))
    leaf = c.detach().requires_grad_()
    back = boundary.decode(leaf, None, tokens)
    assert torch.allclose(back, x)
    gradient = torch.tensor([[[1.0, 1.0, 1.0], [0.0, 2.0, 0.0]]], dtype=torch.float64)
    back.backward(gradient)
    assert leaf.grad is not None
    assert torch.allclose(leaf.grad, torch.tensor([[[1.0, 1.4], [0.0, 1.2]]], dtype=torch.float64))
    c.backward(leaf.grad)
    assert x.grad is not None
    assert torch.allclose(x.grad[0, 0], torch.tensor([1.0, 0.84, 1.12], dtype=torch.float64))


def test_a_row_has_one_second_moment() -> None:
    """Two steps by hand: g = (3, 4), then (0, 2), of a row that runs along axis 1."""
    row = nn.Parameter(torch.tensor([[1.0, -1.0]], dtype=torch.float64))
    optimizer = RowwiseAdamW([row], lr=0.1, betas=(0.5, 0.75), eps=0.0, weight_decay=0.2, mean_axis=1)
    row.grad = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    optimizer.step()  # v / (1 - b2) = 12.5
    first = torch.tensor([[0.98, -0.98]], dtype=torch.float64) - 0.1 * row.grad / 12.5**0.5
    assert torch.allclose(row, first)
    row.grad = torch.tensor([[0.0, 2.0]], dtype=torch.float64)
    optimizer.step()  # m = .5 (1.5, 2) + .5 (0, 2); v = .75 x 3.125 + .25 x 2
    m, v = torch.tensor([[0.75, 2.0]], dtype=torch.float64) / 0.75, (0.75 * 3.125 + 0.25 * 2) / (1 - 0.75**2)
    assert torch.allclose(row, 0.98 * first - 0.1 * m / v**0.5)
    assert optimizer.state[row]["exp_avg_sq"].shape == (1, 1)


def test_rows_of_full_size_are_rows_of_coordinates_with_a_longer_step() -> None:
    """v of W = U Z is K / D of that of Z, so without eps and decay W takes Z's steps of sqrt(D / K) lr."""
    torch.manual_seed(0)
    basis, z = drawn_basis(D, K, 0), torch.randn(K, 6, dtype=torch.float64)
    small, large = nn.Parameter(z), nn.Parameter(basis @ z)
    settings: Any = {"eps": 0.0, "weight_decay": 0.0, "mean_axis": 0}
    ours = [RowwiseAdamW([small], lr=0.1 * (D / K) ** 0.5, **settings), RowwiseAdamW([large], lr=0.1, **settings)]
    for _ in range(10):
        small.grad = torch.randn(K, 6, dtype=torch.float64)
        large.grad = basis @ small.grad
        for optimizer in ours:
            optimizer.step()
    assert torch.allclose(large, basis @ small, rtol=0, atol=1e-13)


def test_without_rows_it_is_adamw() -> None:
    torch.manual_seed(0)
    one, other = (nn.Parameter(torch.ones(3, 2, dtype=torch.float64)) for _ in range(2))
    ours, theirs = RowwiseAdamW([one], lr=0.1), torch.optim.AdamW([other], lr=0.1)
    for _ in range(5):
        one.grad = torch.randn(3, 2, dtype=torch.float64)
        other.grad = one.grad.clone()
        ours.step()
        theirs.step()
    assert torch.allclose(one, other, rtol=0, atol=1e-14)


def drift(form: SubspaceForm, dtype: torch.dtype, *, plain: bool = False) -> float:
    """Largest share outside after 200 steps of a small model. plain: AdamW as it is, where the form wants another."""
    small = Shape(d_model=D, layers=2, heads=1, ffn=8, vocab=V, context=4, tie_embeddings=False)
    made = Decoder(small, seed=1, dtype=dtype)
    put_inside(made, subspace(dtype), range(1), form)
    groups = [{"params": list(made.parameters())}]
    rows = by_rows(groups, made)
    optimizer: Any = torch.optim.AdamW(made.parameters(), lr=3e-3)
    if not plain:
        optimizer = RowwiseAdamW(rows, lr=3e-3) if rows is not None else settled(optimizer, made)
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        made(torch.randint(0, V, (2, 5), generator=generator)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return most_outside(made)


@pytest.mark.long
def test_weights_stay_inside_for_200_steps() -> None:
    assert drift("coordinates", torch.float64) < 1e-12
    assert drift("row-wise", torch.float32) < 1e-6
    assert drift("projected", torch.float32) < 1e-6


def test_plain_adamw_leaves_the_subspace() -> None:
    assert drift("row-wise", torch.float32, plain=True) > 0.1


def test_coordinates_and_projected_gradients_take_the_same_sgd_steps() -> None:
    one, other = model("coordinates"), model("row-wise")
    losses: list[list[float]] = []
    for made in (one, other):
        optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
        losses.append([])
        for _ in range(20):
            loss = made(TOKENS).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], abs=1e-12)


@pytest.mark.parametrize("form", ["coordinates", "row-wise"])
def test_folded_it_is_a_plain_decoder(form: SubspaceForm) -> None:
    made = model(form)
    logits = made.logits(TOKENS[:, :-1])
    plain = Decoder(SHAPE, seed=9, dtype=torch.float64)
    plain.load_state_dict(fold(made).state_dict())
    assert torch.allclose(plain.logits(TOKENS[:, :-1]), logits, rtol=0, atol=1e-12)


def loss_outside(basis: torch.Tensor, total: torch.Tensor) -> float:
    """tr M - tr(U^T M U)."""
    return float(total.trace() - ((total @ basis) * basis).sum())


def test_the_basis_turns_to_the_best_there_is() -> None:
    torch.manual_seed(0)
    scales, axes = torch.logspace(-1, 1, D).double(), orthonormal(torch.randn(D, D, dtype=torch.float64))
    gradients = torch.randn(500, D, dtype=torch.float64) * scales @ axes.T
    gathered = Drift(D)
    gathered.add(gradients.view(5, 100, D))
    total = gathered.total
    assert torch.allclose(total, gradients.T @ gradients)
    best = float(torch.linalg.eigvalsh(total)[: D - K].sum())
    basis = drawn_basis(D, K, 0)
    before = loss_outside(basis, total)
    assert before == pytest.approx(float((gradients - gradients @ basis @ basis.T).square().sum()))
    for _ in range(1000):
        following = turned(basis, total, 0.5)
        assert loss_outside(following, total) <= loss_outside(basis, total) + 1e-9
        basis = following
    assert loss_outside(basis, total) < 1.01 * best < 0.5 * before
    assert float((basis.T @ basis - torch.eye(K)).abs().max()) < 1e-12


def test_a_small_turn_changes_little() -> None:
    torch.manual_seed(0)
    rows, basis = torch.randn(50, D, dtype=torch.float64), drawn_basis(D, K, 3)
    for rate in (1e-3, 1e-6):
        assert float((turned(basis, rows.T @ rows, rate) - basis).norm()) < 4 * rate
    assert turned(basis, torch.zeros(D, D, dtype=torch.float64), 0.5) is basis


def test_everybody_draws_the_same() -> None:
    assert subspace().checksum == subspace().checksum
    other = subspace()
    other.basis[0, 0] += 1e-15
    assert other.checksum != subspace().checksum


class Outside(nn.Module):
    """A block whose branch ends in `after`, of the stream plus scale x branch."""

    def __init__(self, after: nn.Module, scale: Tensor | None = None, bias: bool = False) -> None:
        super().__init__()
        self.norm, self.out, self.after = nn.LayerNorm(D), nn.Linear(D, D, bias=bias), after
        self.scale = None if scale is None else nn.Parameter(scale)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) to itself."""
        branch = self.after(self.out(self.norm(x)))
        return x + (branch if self.scale is None else branch * self.scale)


class Own(nn.Module):
    """A model in pieces that names its writers."""

    writers, entry = ("out",), "table"

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.table, self.blocks = nn.Embedding(V, D), nn.ModuleList([block, copy.deepcopy(block)])

    def through(self, block: nn.Module, x: Tensor) -> Tensor:
        """As `Cuttable`."""
        return block(x)


class Shifted(nn.Module):
    """Adds numbers that begin as zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        """(..., D)."""
        return x + self.bias


BREAKS = {
    "'after' (RMSNorm)": lambda: Outside(nn.RMSNorm(D)),
    "'after' (LayerNorm)": lambda: Outside(nn.LayerNorm(D, elementwise_affine=False)),
    "'after' (Dropout)": lambda: Outside(nn.Dropout(0.1)),
    "'scale'": lambda: Outside(nn.Identity(), torch.ones(D)),
    "'after' (Shifted)": lambda: Outside(Shifted()),
    "bias of 'out'": lambda: Outside(nn.Identity(), bias=True),
}


def check(block: nn.Module) -> None:
    made, inside = Own(block), subspace(torch.float32)
    put_inside(made, inside, [0], "coordinates")
    check_inside(made, inside, [0], TOKENS)


@pytest.mark.parametrize("named", BREAKS)
def test_what_would_break_the_subspace_is_named(named: str) -> None:
    """Though gains begin as ones, and what is added as zeros."""
    with pytest.raises(ValueError) as error:
        check(BREAKS[named]())
    assert named in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "block", [Outside(nn.RMSNorm(D, elementwise_affine=False)), Outside(nn.Identity(), torch.tensor(0.5))]
)
def test_what_scales_a_token_as_a_whole_is_fine(block: nn.Module) -> None:
    check(block)


def test_a_model_must_name_its_writers() -> None:
    made = Own(Outside(nn.Identity()))
    made.writers = ()  # type: ignore[assignment]
    with pytest.raises(ValueError, match="does not name what writes to its stream"):
        put_inside(made, subspace(), [0], "coordinates")
    made.writers = ("nowhere",)  # type: ignore[assignment]
    with pytest.raises(ValueError, match="'nowhere' of a block is no "):
        put_inside(made, subspace(), [0], "coordinates")
