"""What boundaries of few bytes cost in loss.

    python -m benchmarks.boundaries forms|rate|widths [--seeds 0,1,2] [--steps N] [--runs FILE] [--page]

A decoder of 4 blocks over bytes, on the library's own text, with 3 boundaries, in one process: what a pipeline computes
is that to 1e-12 (tests/pipeline/test_boundaries.py). Learning rate 3e-3.

    forms     d 64, 600 steps of 16 x 64 tokens: every boundary, and largest entries chosen anew for the gradient
    rate      d 256, 400 steps of 8 x 64 tokens: 99 % left out, all at about equal bytes
    widths    d 64, 128, 256, 400 steps of 8 x 64 tokens, one seed: what part of the width a subspace needs

Every run is a line of FILE as soon as it is done, and is not done again. --page: print what FILE has as tables of
docs/pipelines.md. Bytes are of a token and boundary, there and back, with its id.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isles.comm.codecs import codec
from isles.data import DataConfig, Loader, load_corpus
from isles.models import Decoder, Shape
from isles.models.subspace import Subspace, SubspaceForm, most_outside
from isles.pipeline.boundaries.base import Boundary
from isles.pipeline.boundaries.dct import largest
from isles.pipeline.boundaries.names import boundary_name
from isles.pipeline.boundaries.scheme import Crossings, Inside, Scheme, crossing, scheme_of
from isles.training.config.inner import InnerConfig, inner_optimizer, lr_factor

CUTS = (1, 2, 3)
INNER = InnerConfig(lr=3e-3, warmup_steps=30)


@dataclass(frozen=True)
class Variant:
    """name: of the row. boundary: of [pipeline]. form: of a subspace. codec: both ways. apart: entries of largest size
    that each direction chooses for itself. layers: blocks of the model; 1: nothing but ids crosses to the last stage.
    """

    name: str
    boundary: str = "none"
    form: SubspaceForm = "coordinates"
    codec: str = "none"
    apart: int = 0
    layers: int = 4

    def nbytes(self, width: int) -> float:
        """Of a token and boundary, both ways, with its id."""
        if self.layers == 1:
            return 1
        if self.apart:
            return 1 + 2 * self.apart * (4 + (1 if width <= 256 else 2))
        shape, side = self.scheme(width, 0).boundary(_Sketch(width, self.rank)).sizes(16, 64)
        numbers = shape[0] * shape[1] * shape[2]
        return 1 + (side + 2 * codec(self.codec).wire_bytes(numbers, torch.float32)) / (shape[0] * shape[1])

    @property
    def rank(self) -> int:
        """Numbers a token."""
        return boundary_name(self.boundary).rank

    def scheme(self, width: int, seed: int) -> Scheme:
        """Of a decoder."""
        place = Crossings(cuts=CUTS if self.layers > 1 else (), home=False, width=width, vocab=256)
        name = boundary_name(self.boundary)
        return scheme_of(name, place, form=self.form, seed=seed)


class _Sketch:
    """A stage whose messages are only counted."""

    def __init__(self, width: int, rank: int) -> None:
        self.blocks, self.subspace = [nn.Identity()], Subspace(torch.empty(width, rank), None)


class Coded(Boundary):
    """The stream through a codec, straight through."""

    def __init__(self, name: str) -> None:
        self.codec = codec(name)

    def encode(self, x_BTD: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        return _Coded.apply(x_BTD, self.codec), None

    def decode(self, payload: Tensor, side: Tensor | None, tokens: Tensor) -> Tensor:
        return payload

    def sizes(self, sequences: int, length: int) -> tuple[tuple[int, ...], int]:
        raise NotImplementedError


class Apart(Coded):
    """Entries of largest size, and other ones of the gradient."""

    def __init__(self, kept: int) -> None:
        self.kept = kept

    def encode(self, x_BTD: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        return _Apart.apply(x_BTD, self.kept), None


class _Coded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, form: Any) -> Tensor:
        ctx.form = form
        return _through(x, form)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _through(gradient, ctx.form), None


class _Apart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: int) -> Tensor:
        ctx.kept = kept
        return _masked(x, kept)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _masked(gradient, ctx.kept), None


def _through(x: Tensor, form: Any) -> Tensor:
    flat = x.detach().contiguous().view(-1)
    return form.decode(form.encode(flat), flat.numel(), flat.dtype).clone().view(x.shape)


def _masked(x: Tensor, kept: int) -> Tensor:
    places = largest(x, kept)
    return torch.zeros_like(x).scatter(-1, places, x.gather(-1, places))


FORMS = [
    Variant("dense"),
    Variant("bf16", codec="bf16"),
    Variant("fp16", codec="fp16"),
    Variant("int8", codec="int8"),
    Variant("subspace d/2", "subspace:32"),
    Variant("subspace d/4", "subspace:16"),
    Variant("subspace d/8", "subspace:8"),
    Variant("subspace d/4, row-wise", "subspace:16", form="row-wise"),
    Variant("subspace d/4, projected", "subspace:16", form="projected"),
    Variant("dct 0.75", "dct:0.75"),
    Variant("dct 0.90", "dct:0.90"),
    Variant("dct 0.95", "dct:0.95"),
    Variant("bottleneck d/4", "bottleneck:16"),
    Variant("maxout d/4", "maxout:16"),
    Variant("masks apart, d/4", apart=16),
    Variant("masks apart, d/8", apart=8),
    Variant("last stage alone", layers=1),
]
RATE = [
    Variant("dense"),
    Variant("subspace, k 3", "subspace:3"),
    Variant("masks apart, 3 entries", apart=3),
    Variant("dct, 3 entries", "dct:0.989"),
    Variant("int8", codec="int8"),
    Variant("last stage alone", layers=1),
]
PARTS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4)


@dataclass(frozen=True)
class Table:
    """variants: with the widths that they run at."""

    runs: Sequence[tuple[int, Variant]]
    steps: int
    sequences: int


TABLES = {
    "forms": Table([(64, variant) for variant in FORMS], 600, 16),
    "rate": Table([(256, variant) for variant in RATE], 400, 8),
    "widths": Table(
        [
            (width, variant)
            for width in (64, 128, 256)
            for variant in (
                Variant("dense"),
                *(Variant(f"subspace {part:g} d", f"subspace:{int(width * part)}") for part in PARTS),
            )
        ],
        400,
        8,
    ),
}


@cache
def _corpus(sequences: int) -> Any:
    return load_corpus(DataConfig(batch_size=sequences, validation_sequences=128))


def run(width: int, variant: Variant, seed: int, steps: int, sequences: int) -> dict[str, float]:
    """Losses on held-out text, nats a byte: as trained, and of the model without what its boundaries leave out."""
    data = DataConfig(batch_size=sequences, validation_sequences=128)
    ffn = 256 if width == 64 else 2 * width
    shape = Shape(d_model=width, layers=variant.layers, heads=4, ffn=ffn, vocab=256, context=64, tie_embeddings=False)
    loader = Loader(_corpus(sequences), data, context=64, seed=seed)
    model, scheme = Decoder(shape, seed=seed), variant.scheme(width, seed)
    scheme.fit(model)
    if not isinstance(scheme, Inside):  # whose boundaries change nothing
        scheme.unsplit(model)
    if variant.apart or variant.codec != "none":
        crossing(model, [cut - 1 for cut in CUTS], Apart(variant.apart) if variant.apart else Coded(variant.codec))
    optimizer = inner_optimizer(model, INNER, "adamw")
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = INNER.lr * lr_factor(step, steps, INNER)
        model(next(loader)).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    found = {"loss": judged(model, loader), "outside": most_outside(model)}
    for block in model.blocks:
        block._forward_hooks.clear()
    return found | {"bare": judged(model, loader)}


@torch.no_grad()
def judged(model: nn.Module, loader: Loader) -> float:
    """Mean loss on held-out text."""
    batches = list(loader.validation_batches())
    return float(sum(model(batch).loss * len(batch) for batch in batches) / sum(map(len, batches)))


def all_runs(kind: str, seeds: Sequence[int], steps: int | None, path: Path) -> list[dict[str, Any]]:
    """Those of FILE, and of it the ones that were not there."""
    table = TABLES[kind]
    done = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    known = {(one["table"], one["width"], one["name"], one["seed"]) for one in done}
    for seed, (width, variant) in product(seeds, table.runs):
        if (kind, width, variant.name, seed) in known:
            continue
        found = run(width, variant, seed, steps or table.steps, table.sequences)
        one = {"table": kind, "width": width, "name": variant.name, "seed": seed, **found}
        with path.open("a") as file:
            file.write(json.dumps(one) + "\n")
        print(one, file=sys.stderr, flush=True)
        done.append(one)
    return [one for one in done if one["table"] == kind]


if __name__ == "__main__":
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--runs", type=Path, default=Path("boundaries.jsonl"))
    given = parser.parse_args()
    all_runs(given.table, [int(seed) for seed in given.seeds.split(",")], given.steps, given.runs)
