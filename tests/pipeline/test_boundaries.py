"""Boundaries of few bytes against one process: what they compute, and what they send to the byte."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import isles
from isles.comm.codecs import codec
from isles.comm.mesh import Mesh
from isles.models import Decoder
from isles.models.subspace import held_inside
from isles.pipeline.boundaries.names import entries_sent
from isles.pipeline.boundaries.scheme import Crossings, Inside, LargestEntries, crossing, largest, turned
from isles.pipeline.pipeline import BasisTurns
from tests.gloo import run_gloo
from tests.pipeline import bounded
from tests.pipeline.bounded import Bounded
from tests.pipeline.workers import SEQUENCES, SHAPE, Cell, whole

WIDE = Cell(3, 1, 4, dtype=torch.float64)
K = 5
SUBSPACE = [
    Bounded(WIDE, f"subspace:{K}"),
    Bounded(WIDE, f"subspace:{K}", form="row-wise"),
    Bounded(WIDE, f"subspace:{K}", form="projected"),
    Bounded(Cell(3, 2, 4, "random", dtype=torch.float64, recompute=True), f"subspace:{K}"),
]
DCT = [
    Bounded(WIDE, "dct:0.75"),
    Bounded(Cell(3, 1, 2), "dct:0.9"),
    Bounded(Cell(2, 2, 3, "random", home=True, dtype=torch.float64), "dct:0.5"),
]
LEARNED = [Bounded(WIDE, "bottleneck:4"), Bounded(Cell(4, 1, 3, recompute=True), "maxout:8")]
CODED = [
    Bounded(WIDE, f"subspace:{K}", codec="int8", gradient_codec="bf16"),
    Bounded(Cell(3, 1, 4), "none", codec="int8", gradient_codec="int8"),
    Bounded(Cell(3, 1, 4), "dct:0.75", codec="fp16"),
]
ALL = [*SUBSPACE, *DCT, *LEARNED, *CODED]


@cache
def virtual(one: Bounded) -> list[dict[str, Any]]:
    links = isles.Links(bandwidth=1e7, latency=0.02, jitter=0.8)
    size = one.cell.replicas * one.cell.stages
    return [results[0] for results in isles.run_virtual(bounded.train, size, links=links, args=([one],))]


def differences(one: Bounded, model: Any, project: bool = False) -> tuple[float, float]:
    """Largest of a loss and, in relation to its largest entry, of a gradient, against `model` in one process."""
    worst_loss = worst = 0.0
    writers = {id(writer.weight): writer for writer in held_inside(model)}
    named = dict(model.named_parameters())
    for position, done in enumerate(virtual(one)):
        model.zero_grad()
        losses, gradients = whole(one.cell, position, 1, model)
        assert done["losses"].keys() == losses.keys()
        worst_loss = max(worst_loss, *(float((done["losses"][m] - losses[m]).abs()) for m in losses))
        for name, gradient in done["gradients"].items():
            other = gradients[name]
            if project and id(named[name]) in writers:
                gradient, other = (_projected(writers[id(named[name])], one) for one in (gradient, other))
            worst = max(worst, float((gradient - other).abs().max() / other.abs().max().clamp_min(1e-30)))
    return worst_loss, worst


def _projected(writer: Any, gradient: Tensor) -> Tensor:
    return writer.subspace.project(gradient if writer.mean_axis == 0 else gradient.T)


@pytest.mark.parametrize("one", SUBSPACE, ids=str)
def test_a_subspace_loses_nothing(one: Bounded) -> None:
    loss, gradient = differences(one, one.model(), project=one.form == "projected")
    assert loss < 1e-12
    assert gradient < 1e-10


def test_a_mask_keeps_entries_by_their_size() -> None:
    """Negative ones too: of 3, -4, 1/2, -1 the two largest are the first two, of three also the last."""
    x_BTD = torch.tensor([[[3.0, -4.0, 0.5, -1.0]]])
    assert largest(x_BTD, 2).tolist() == [[[0, 1]]]
    assert largest(x_BTD, 3).tolist() == [[[0, 1, 3]]]


def test_full_size_weights_lose_what_only_a_projection_removes() -> None:
    one = SUBSPACE[2]
    assert differences(one, one.model())[1] > 0.1


def test_a_subspace_that_is_everything_changes_nothing() -> None:
    one = Bounded(WIDE, "none", whole_width=True)
    plain = Decoder(SHAPE, seed=1, dtype=torch.float64)
    loss, gradient = differences(one, plain)
    assert loss < 1e-12
    assert gradient < 1e-12


def masked(one: Bounded, model: Any) -> Any:
    """a * mask.detach() behind every block before a cut."""
    entries = entries_sent(SHAPE.d_model, float(one.boundary.partition(":")[2]))

    def hook(module: object, inputs: object, x: Tensor) -> Tensor:
        mask = torch.zeros_like(x).scatter(-1, largest(x, entries), 1.0)
        return x * mask.detach()

    for cut in [*one.cuts, *([SHAPE.layers] if one.cell.home else [])]:
        model.blocks[cut - 1].register_forward_hook(hook)
    return model


@pytest.mark.parametrize("one", DCT, ids=str)
def test_masks_are_those_of_one_process_to_the_bit(one: Bounded) -> None:
    assert differences(one, masked(one, one.model())) == (0.0, 0.0)
    assert differences(one, one.scheme().unsplit(one.model())) == (0.0, 0.0)


def test_a_mask_of_its_own_for_the_gradient_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Bounded(Cell(3, 1, 1, dtype=torch.float64), "dct:0.75")

    class Apart(LargestEntries):
        def decode(self, payload: Tensor, side: Tensor | None, tokens: Tensor) -> Tensor:
            x = super().decode(payload, side, tokens)
            if x.requires_grad:
                x.register_hook(lambda g: torch.zeros_like(g).scatter(-1, largest(g, 4), g.gather(-1, largest(g, 4))))
            return x

    monkeypatch.setattr("isles.pipeline.boundaries.scheme.LargestEntries", Apart)
    assert differences(one, masked(one, Decoder(SHAPE, seed=1, dtype=torch.float64)))[1] > 0.1


def test_a_gradient_has_at_most_k_entries_a_token() -> None:
    x = torch.randn(2, 3, 16, dtype=torch.float64, requires_grad=True)
    boundary = LargestEntries(16, 4)
    payload, side = boundary.encode(x, torch.empty(0))
    (boundary.decode(payload, side, torch.empty(0)) * torch.randn(2, 3, 16)).sum().backward()
    assert x.grad is not None
    assert int((x.grad != 0).sum(-1).max()) <= 4


@pytest.mark.parametrize("one", LEARNED, ids=str)
def test_learned_layers_are_those_of_one_process_to_the_bit(one: Bounded) -> None:
    model = one.model()
    assert any("entering" in name for name, _ in model.named_parameters())
    assert differences(one, one.scheme().unsplit(model)) == (0.0, 0.0)


class Straight(torch.autograd.Function):
    """A codec each way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forth: Any, back: Any) -> Tensor:
        ctx.back = back
        return forth.decode(forth.encode(x.contiguous().view(-1)), x.numel(), x.dtype).view(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        back = ctx.back
        flat = gradient.contiguous().view(-1)
        return back.decode(back.encode(flat), flat.numel(), flat.dtype).view(gradient.shape), None, None


def test_codecs_are_straight_through() -> None:
    one = CODED[1]
    model: Any = one.model()
    forth, back = codec(one.codec), codec(one.gradient_codec)

    class Wire(LargestEntries):
        def encode(self, x_BTD: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
            return Straight.apply(x_BTD, forth, back), None

        def decode(self, payload: Tensor, side: Tensor | None, tokens: Tensor) -> Tensor:
            return payload

    crossing(model, [cut - 1 for cut in one.cuts], Wire(SHAPE.d_model, 1))
    assert differences(one, model) == (0.0, 0.0)


@pytest.mark.parametrize("one", ALL, ids=str)
def test_bytes_are_those_of_the_formula(one: Bounded) -> None:
    """M b (S - 1) ids of n + 1 tokens, and for each of M (S - 1): payload forward, side, gradient back, loss."""
    cell, n, d = one.cell, SHAPE.context, SHAPE.d_model
    kind, _, number = one.boundary.partition(":")
    per_token = {"none": d, "dct": entries_sent(d, float(number)) if kind == "dct" else 0}.get(kind) or int(number)
    e, hops = cell.dtype.itemsize, cell.stages - 1
    entries = SEQUENCES * n * per_token
    places = entries if kind == "dct" else 0  # D is 16: a byte each
    forth = codec(one.codec).wire_bytes(entries, cell.dtype) + places
    back = codec(one.gradient_codec).wire_bytes(entries, cell.dtype) + max(e, 4)
    ids = SEQUENCES * (n + 1)
    crossings = hops * (forth + ids + back) + ((forth + back) if cell.home else 0)
    assert sum(done["sent"] for done in virtual(one)) == cell.replicas * cell.microbatches * crossings
    if kind == "subspace" and one.codec == "none":
        M, b = cell.microbatches * cell.replicas, SEQUENCES
        spec = M * b * hops * (n * (2 * per_token * e + 1) + 1) + max(e, 4) * M * hops
        assert sum(done["sent"] for done in virtual(one)) == spec
        assert spec < 0.5 * M * b * hops * n * 2 * d * e
    if kind == "dct" and not cell.home and one.codec == "none":
        M, b = cell.microbatches * cell.replicas, SEQUENCES
        spec = M * b * n * hops * per_token * (2 * e + 1) + M * hops * (ids + max(e, 4))
        assert sum(done["sent"] for done in virtual(one)) == spec


ON_GLOO = [SUBSPACE[0], SUBSPACE[1], DCT[2], LEARNED[0], CODED[0], CODED[2]]


@pytest.mark.parametrize("chosen", [ON_GLOO, pytest.param(ALL, marks=pytest.mark.long)], ids=["some", "all"])
def test_gloo_computes_the_same_bits_and_sends_the_same_bytes(chosen: list[Bounded]) -> None:
    real = run_gloo(bounded.train, 6, args=(chosen,))
    for number, one in enumerate(chosen):
        for position, ours in enumerate(virtual(one)):
            theirs = real[position][number]
            assert theirs is not None
            assert ours["sent"] == theirs["sent"]
            assert ours["losses"] == theirs["losses"]
            assert all(torch.equal(gradient, theirs["gradients"][name]) for name, gradient in ours["gradients"].items())


def test_places_take_two_bytes_where_a_stream_is_wide() -> None:
    boundary = LargestEntries(1000, 10)
    x = torch.randn(1, 4, 1000)
    payload, side = boundary.encode(x, torch.empty(0))
    assert side is not None
    assert side.numel() == 4 * 10 * 2 == boundary.sizes(1, 4)[1]
    back = boundary.decode(payload, side, torch.empty(0))
    assert torch.equal(back[back != 0].sort().values, payload.flatten().sort().values)
    assert entries_sent(100, 0.99) == 1
    with pytest.raises(isles.comm.errors.Malformed, match="65535"):
        boundary.decode(payload, torch.full_like(side, 255), torch.empty(0))


def test_over_a_narrow_line_seconds_are_in_the_order_of_bytes() -> None:
    """80 Mbit/s, 50 ms."""
    cell = Cell(3, 1, 4)
    forms = [
        Bounded(cell, "none"),
        Bounded(cell, "none", codec="int8", gradient_codec="int8"),
        Bounded(cell, "dct:0.9"),
        Bounded(cell, "subspace:2"),
        Bounded(cell, "subspace:1"),
    ]

    def clock(world: Any, one: Bounded) -> tuple[float, int]:
        [done] = bounded.train(world, [one])
        assert done is not None
        return world.transport.now(), done["sent"]

    links = isles.Links(bandwidth=80e6, latency=0.05)
    found = []
    for one in forms:
        ends = isles.run_virtual(clock, 3, links=links, args=(one,), step_seconds=0.0)
        found.append((max(end for end, _ in ends), sum(sent for _, sent in ends)))
    assert sorted(found) == sorted(found, key=lambda pair: pair[1])
    assert [sent for _, sent in found] == sorted((sent for _, sent in found), reverse=True)


def test_a_turn_by_hand() -> None:
    """U = (1, 0), M = [[1, 1], [1, 1]] of norm 2: U + 2 rate / 2 (0, 1) = (1, rate), made as long as 1."""
    basis, total = torch.tensor([[1.0], [0.0]], dtype=torch.float64), torch.ones(2, 2, dtype=torch.float64)
    wanted = torch.tensor([[0.8], [0.6]], dtype=torch.float64)
    assert torch.allclose(turned(basis, total, 0.75), wanted, rtol=0, atol=1e-12)


def test_gradients_turn_a_subspace_once() -> None:
    """M is of the gradients since the last turn: without any since then the second turn leaves the basis alone."""

    def worker(world: Mesh) -> list[Tensor]:
        scheme = Inside(Crossings(vocab=9, width=6, cuts=(1,), home=False), 2, "coordinates", 0, turns=True)
        stage: Any = SimpleNamespace(subspace=SimpleNamespace(basis=scheme.basis.clone()))
        turns = BasisTurns(scheme, stage, isles.mesh(stage=1), every=2, rate=0.3)
        assert scheme.drift is not None
        scheme.drift.add(torch.arange(18.0).view(1, 3, 6))
        bases = [scheme.basis]
        for step in range(1, 6):
            turns.before(step)
            bases.append(scheme.basis.clone())
        return bases

    _, first, second, third, fourth, fifth = isles.run_virtual(worker, 1)[0]
    assert torch.equal(first, second) and torch.equal(third, fourth)
    assert not torch.equal(second, third)
    assert torch.equal(fourth, fifth)
