"""Units: parts of a model are taken and put back, and a part on its own computes what it should."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from isles.models import Decoder, Shape
from isles.models.subnet import Axes, Axis, fit, layers_of, put, split_axes, take
from isles.replicas.methods.ist.store import Division

SHAPE = Shape(d_model=12, layers=2, heads=3, ffn=10, vocab=16, context=8, tie_embeddings=True)
MODELS: dict[str, Callable[[], nn.Module]] = {
    "decoder": lambda: Decoder(SHAPE, dtype=torch.float64),
    "one hidden layer": lambda: nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3)).double(),
    "two hidden layers": lambda: nn.Sequential(
        nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 6, bias=False), nn.Sigmoid(), nn.Linear(6, 3)
    ).double(),
    "batch norm": lambda: nn.Sequential(
        nn.Linear(4, 7, bias=False),
        nn.BatchNorm1d(7, track_running_stats=False),
        nn.ReLU(),
        nn.Linear(7, 6),
        nn.BatchNorm1d(6, track_running_stats=False),
        nn.ReLU(),
        nn.Linear(6, 3, bias=False),
        nn.BatchNorm1d(3, affine=False, track_running_stats=False),
    ).double(),
}


def divided(model: nn.Module, workers: int, split: str = "all") -> Division:
    axes = split_axes(model, split)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return Division(axes=axes, shapes=shapes, workers=workers, sampler="random", server="partitioned", seed=3)


def subnet(make: Callable[[], nn.Module], full: nn.Module, division: Division, worker: int, round: int) -> nn.Module:
    """A narrow model of its own with the values of `full`."""
    narrow = make()
    narrow.load_state_dict(full.state_dict())
    for name, parameter in narrow.named_parameters():
        if name in division.axes:
            units = division.trained_units(name, worker, round)
            parameter.data = take(parameter.data, division.axes[name], units)
    fit(narrow)
    return narrow


def batch(kind: str) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    if kind == "decoder":
        return torch.randint(16, (3, 9), generator=draw)
    return torch.randn(5, 4, dtype=torch.float64, generator=draw)


def output(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).logits if isinstance(model, Decoder) else model(x)


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("kind", MODELS)
def test_what_is_taken_apart_and_put_back_is_the_model(kind: str, workers: int) -> None:
    """Of every parameter, also where workers do not divide the units. Where one dimension is divided, every entry has
    one holder; where two are, sum_i |I_l^i| |I_(l-1)^i| entries are held.
    """
    model = MODELS[kind]()
    division = divided(model, workers)
    for name, parameter in model.named_parameters():
        axes = division.axes.get(name)
        if axes is None:
            continue
        trained, again = torch.zeros(parameter.shape), torch.full_like(parameter, torch.nan)
        total = 0
        for worker in range(workers):
            units = division.trained_units(name, worker, round=5)
            part = take(parameter.data, axes, units)
            total += part.numel()
            assert part.numel() == division.trained_numel(name, worker)
            put(again.data, axes, units, part)
            put(trained, axes, units, torch.ones(part.shape))
        assert trained.sum() == total and trained.max() == 1  # nobody holds what another does
        assert torch.equal(again[trained == 1], parameter[trained == 1])
        twice = sum(axis is not None for axis in axes) == 2
        assert (trained.sum() == trained.numel()) == (not twice or workers == 1)
        if twice:
            sides = [[len(u) for u in division.trained_units(name, w, 5) if u is not None] for w in range(workers)]
            assert total == sum(rows * columns for rows, columns in sides)


@pytest.mark.parametrize("kind", MODELS)
def test_a_subnet_is_the_full_model_with_all_other_units_masked(kind: str) -> None:
    """Outputs, and the gradients of what it holds, in float64. Oracle: the full model with zeros in every column that
    reads a unit which the subnet has not.
    """
    make, x = MODELS[kind], batch(kind)
    full = make()
    division = divided(full, 2)
    narrow = subnet(make, full, division, worker=1, round=2)
    masked = make()
    masked.load_state_dict(full.state_dict())
    masks = {}
    for name, parameter in masked.named_parameters():
        if name in division.axes:
            stored = torch.zeros_like(parameter)
            put(stored, division.axes[name], units := division.trained_units(name, 1, 2), torch.ones_like(
                take(stored, division.axes[name], units)))  # fmt: skip
            masks[name] = stored.bool()
            parameter.data *= stored
    torch.testing.assert_close(output(narrow, x), output(masked, x), rtol=0, atol=1e-12)
    for model in (narrow, masked):
        output(model, x).square().sum().backward()
    whole = dict(masked.named_parameters())
    for name, parameter in narrow.named_parameters():
        expected = whole[name].grad
        if name in division.axes:
            expected = take(expected, division.axes[name], division.trained_units(name, 1, 2))  # type: ignore[arg-type]
        torch.testing.assert_close(parameter.grad, expected, rtol=0, atol=1e-12)


def test_kinds_of_the_decoder() -> None:
    """heads and ffn, alone or together; whole heads with rows of query, key and value and columns of the output."""
    model = Decoder(SHAPE)
    assert set(layers_of(split_axes(model, "ffn"))) == {"blocks.0.ffn", "blocks.1.ffn"}
    assert split_axes(model, "heads+ffn") == split_axes(model, "all")
    axes = split_axes(model, "heads")
    rows = take(
        torch.arange(36)[:, None].expand(36, 12), axes["blocks.0.attention.qkv.weight"], (torch.tensor([1]), None)
    )
    assert rows[:, 0].tolist() == [4, 5, 6, 7, 16, 17, 18, 19, 28, 29, 30, 31]
    columns = take(torch.arange(12).expand(12, 12), axes["blocks.0.attention.out.weight"], (None, torch.tensor([0, 2])))
    assert columns[0].tolist() == [0, 1, 2, 3, 8, 9, 10, 11]


UNIT = Axis(layer="own.unit", units=3)


class Says(nn.Linear):
    """A module (3, 4) with an opinion of its own on its units."""

    def __init__(self, axes: dict[str, Axes]) -> None:
        super().__init__(4, 3)
        self.axes = axes

    def split_axes(self) -> dict[str, Axes]:
        return self.axes


def shared_layer(hidden: nn.Module) -> nn.Sequential:
    """Its inputs are units of the first layer, then its own."""
    return nn.Sequential(nn.Linear(2, 3), hidden, nn.Tanh(), hidden, nn.Linear(3, 1))


def tied_weights() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    model[2].weight = model[1].weight
    return model


def test_an_activation_may_come_twice() -> None:
    """It has no units of its own."""
    act = nn.Tanh()
    assert split_axes(nn.Sequential(nn.Linear(2, 3), act, nn.Linear(3, 3), act, nn.Linear(3, 1)))


@pytest.mark.parametrize(
    ("model", "split", "says"),
    [
        (lambda: Decoder(SHAPE), "block", "this model has no 'block' to divide; its units: heads, ffn"),
        (lambda: nn.Linear(3, 3), "all", "Isles cannot divide a Linear"),
        (lambda: nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 3)), "all", "1: .* a LayerNorm"),
        (
            lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)),
            "all",
            "track_running_stats=False",
        ),
        (lambda: nn.Sequential(nn.Linear(3, 4)), "all", "no hidden units to divide"),
        (lambda: shared_layer(nn.Linear(3, 3)), "all", "a layer comes twice in this Sequential"),
        (lambda: tied_weights(), "all", "2.weight is another parameter too, and would be divided twice"),
        (lambda: Says({"w": (UNIT, None)}), "all", "names 'w', which is no parameter"),
        (lambda: Says({"weight": (UNIT,)}), "all", "weight has the shape .3, 4.: split_axes.. must give"),
        (lambda: Says({"weight": (None, UNIT)}), "all", "whose repeats x units x width is its size"),
    ],
)
def test_what_cannot_be_divided_is_reported(model: Callable[[], nn.Module], split: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        split_axes(model(), split)
