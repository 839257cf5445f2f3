"""A plan changes where bytes are and when they move, and not one bit of what is trained."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isles.memory.costs import ACTIVATIONS, PLACES, Placement
from isles.memory.engines.inline import Inline
from isles.memory.engines.paced import Paced
from isles.memory.plan import table
from tests.memory.loops import DECODER, TIED, UNITS, Left, Task, plan_of, profiled, train

LEAST = 0.9  # of the planned peak
LEAST_OF_CONVOLUTIONS = 0.8  # what two blocks save (one's output, the next one's input) is counted for both
PURE = [(Placement(place, one),) * UNITS for place in PLACES[:3] for one in ACTIVATIONS]
FIRST = (0, 4, 8, 9, 10, 11)  # each place and each way with activations alone, and three mixed plans; the rest is long


def _case(number: int) -> tuple[tuple[Placement, ...], dict[str, Any], bool]:
    rng = random.Random(number)
    plan = tuple(Placement(rng.choice(PLACES[:3]), rng.choice(ACTIVATIONS)) for _ in range(UNITS))
    settings = {
        "max_norm": rng.choice([1.0, None]),
        "accumulation": rng.choice([1, 2]),
        "autocast": rng.choice(["none", "bf16"]),
    }
    return PURE[number] if number < len(PURE) else plan, settings, rng.random() < 0.5


@cache
def _plain(name: str, settings: tuple[tuple[str, Any], ...]) -> Left:
    return train(TASKS[name], steps=3, **dict(settings))


def _compare(
    name: str, plan: tuple[Placement, ...], threads: bool = True, update: str = "exact", **settings: Any
) -> None:
    wanted = _plain(name, tuple(settings.items()))
    got = train(TASKS[name], plan, engine=Paced() if threads else Inline(), update=update, steps=3, **settings)
    assert got.losses == wanted.losses
    assert got.same(wanted)
    least = LEAST_OF_CONVOLUTIONS if name == "resnet" else LEAST
    assert least * got.planned <= got.peak <= got.planned
    made = profiled(TASKS[name], settings.get("autocast", "none"))
    rows = table(plan_of(made, plan, accumulation=settings.get("accumulation", 1)), made)
    assert got.moved is not None
    steps = 3
    assert got.moved["down"] == steps * sum(row["down"] for row in rows)
    # What stays from one pass to the next of the same weights does not come up again.
    assert got.moved["up"] <= steps * sum(row["up"] for row in rows)


@pytest.mark.parametrize("number", [k if k in FIRST else pytest.param(k, marks=pytest.mark.long) for k in range(60)])
def test_a_decoder(number: int) -> None:
    plan, settings, threads = _case(number)
    update = "early" if settings["max_norm"] is None and number % 2 else "exact"
    _compare("decoder", plan, threads, update, **settings)


def test_tied_embeddings() -> None:
    plan, _, _ = _case(20)
    _compare("tied", plan, max_norm=1.0, accumulation=2)


@pytest.mark.parametrize("number", [3, *(pytest.param(k, marks=pytest.mark.long) for k in range(9, 17))])
@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.long), "gpt2"])
def test_models_of_transformers_as_they_are(name: str, number: int) -> None:
    plan, settings, threads = _case(number)
    pytest.importorskip("transformers")
    _compare(name, plan, threads, **settings)


@pytest.mark.parametrize(
    "number", [k if k == 6 else pytest.param(k, marks=pytest.mark.long) for k in (*range(9), 15, 16, 17)]
)
def test_batch_norms_move_once(number: int) -> None:
    plan, settings, threads = _case(number)
    _compare("resnet", plan, threads, **(settings | {"autocast": "none"}))


@pytest.mark.parametrize("after", [Placement("host", "swap"), None])
def test_a_run_goes_on_under_another_plan_or_none(after: Placement | None) -> None:
    whole = train(DECODER, steps=4)
    halfway: list[Any] = []
    train(DECODER, (Placement("optimizer", "recompute"),) * UNITS, steps=2, ends_with=halfway)
    plan = None if after is None else (after,) * UNITS
    rest = train(DECODER, plan, steps=2, first=2, start=tuple(halfway))
    assert rest.losses == whole.losses[2:]
    assert all(map(torch.equal, rest.weights, whole.weights))
    assert all(map(torch.equal, rest.state, whole.state))


# ---------------------------------------------------------------------------------------------------------------------
# Models


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + x)


class _ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.ModuleList(_Residual(16) for _ in range(UNITS))
        self.head = nn.Linear(16, 10)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.stem(pixels)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def _pictures(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(4, 3, 16, 16, generator=generator), torch.randint(0, 10, (4,), generator=generator)


def _picture_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=UNITS,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=256,
            max_position_embeddings=64,
            attn_implementation="sdpa",
            attention_dropout=0.1,
        )
    )


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            n_embd=64,
            n_layer=UNITS,
            n_head=4,
            vocab_size=256,
            n_positions=64,
            resid_pdrop=0.1,
            attn_pdrop=0.1,
            embd_pdrop=0.1,
        )
    )


def _text_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(input_ids=batch, labels=batch, use_cache=False).loss


def _task(make: Callable[[], nn.Module], loss: Callable[[nn.Module, Any], Tensor], batch: Callable[[int], Any]) -> Task:
    return Task(make, batch, loss)


TASKS = {
    "decoder": DECODER,
    "tied": TIED,
    "llama": _task(_llama, _text_loss, DECODER.batch),
    "gpt2": _task(_gpt2, _text_loss, DECODER.batch),
    "resnet": _task(_ResNet, _picture_loss, _pictures),
}
