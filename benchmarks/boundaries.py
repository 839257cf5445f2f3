"""What boundaries of few bytes cost in loss, and take in seconds.

    python -m benchmarks.boundaries forms|rate|widths|rates [--seeds 0,1,2] [--steps N] [--runs FILE] [--write] [--json]
    python -m benchmarks.boundaries links [--runs FILE] [--plot FILE.png]

A decoder of 4 blocks over bytes, on the library's own text, with 3 boundaries, in one process: what a pipeline computes
is that to 1e-12 (tests/pipeline/test_boundaries.py). Learning rate 3e-3, where a row says no other one.

    forms     d 64, 600 steps of 16 x 64 tokens: every boundary, and largest entries chosen anew for the gradient
    rate      d 256, 400 steps of 8 x 64 tokens: 99 % left out, all at about equal bytes
    widths    d 64, 128, 256, 400 steps of 8 x 64 tokens: what part of the width a subspace needs
    rates     the learning rate of `forms`, on a seed and on text that are not judged: BEST is read off it
    links     seconds of a step of `forms` in four stages on the simulated clock, 80 Mbit/s and 50 ms, beside the losses

Every run is a line of FILE (benchmarks/boundaries.jsonl) as soon as it is done, and is not done again: take lines out
that a change of the code has made old, or mark them as "copied": they are done again, and stand in tables until then.
--write puts the table into docs/boundaries.md; `--seeds "" --write` only that.
Bytes are of a token and boundary, there and back, with its id.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any, Literal

import torch
from torch import Tensor, nn

import isles
from benchmarks import _boundary_docs
from benchmarks._boundary_docs import losses_of
from benchmarks._measure import Row, report
from benchmarks._once import TEXT
from benchmarks.comparison.tuning import SEED, training_text
from isles.comm.codecs import codec
from isles.data import DataConfig, Loader, load_corpus
from isles.models import Decoder, Shape
from isles.models.subspace import Subspace, SubspaceForm, most_outside
from isles.pipeline.boundaries.base import Boundary
from isles.pipeline.boundaries.names import boundary_name
from isles.pipeline.boundaries.scheme import Crossings, Inside, Scheme, crossing, largest, scheme_of
from isles.pipeline.config import BoundaryConfig, PipelineConfig
from isles.training.config.inner import InnerConfig, lr_factor
from isles.training.optimizer import inner_optimizer

CUTS = (1, 2, 3)
INNER = InnerConfig(lr=3e-3, warmup_steps=30)
RATES = (1.5e-3, 3e-3, 6e-3, 1.2e-2)
BEST = {"dense": 6e-3, "subspace d/4": 6e-3}
"""Of RATES, by the table `rates`; committed before the rows that take it were run."""


@dataclass(frozen=True)
class Variant:
    """name: of the row. boundary: of [pipeline]. form: of a subspace. codec: both ways. apart: entries of largest size
    that each direction chooses for itself. layers: blocks of the model; 1: nothing but ids crosses to the last stage.
    rate: of learning. beside: as many steps as fit into the seconds of the row of that name (`step_seconds`).
    """

    name: str
    boundary: str = "none"
    form: SubspaceForm = "coordinates"
    codec: Literal["none", "fp16", "bf16", "int8"] = "none"
    apart: int = 0
    layers: int = 4
    rate: float = INNER.lr
    beside: str = ""

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
        self.blocks, self.subspace = nn.ModuleList([nn.Identity()]), Subspace(torch.empty(width, rank), None)


class Coded(Boundary):
    """The stream through a codec, straight through."""

    def __init__(self, name: str) -> None:
        self.codec = codec(name)

    def encode(self, x_BTD: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        return _BothWays.apply(x_BTD, partial(_through, form=self.codec)), None

    def decode(self, payload: Tensor, side: Tensor | None, tokens: Tensor) -> Tensor:
        return payload

    def sizes(self, sequences: int, length: int) -> tuple[tuple[int, ...], int]:
        raise NotImplementedError


class Apart(Coded):
    """Entries of largest size, and other ones of the gradient."""

    def __init__(self, kept: int) -> None:
        self.kept = kept

    def encode(self, x_BTD: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        return _BothWays.apply(x_BTD, partial(_masked, kept=self.kept)), None


class _BothWays(torch.autograd.Function):
    """The same made of a tensor forward and of its gradient backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, way: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.way = way
        return way(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.way(gradient), None


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
    Variant("dense, best rate", rate=BEST["dense"]),
    Variant("subspace d/4, best rate", "subspace:16", rate=BEST["subspace d/4"]),
    Variant("dense, in the seconds of subspace d/8", beside="subspace d/8"),
]
RATE = [
    Variant("dense"),
    Variant("subspace, k 3", "subspace:3"),
    Variant("masks apart, 3 entries", apart=3),
    Variant("dct, 3 entries", "dct:0.989"),
    Variant("int8", codec="int8"),
    Variant("last stage alone", layers=1),
]
PARTS = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4)


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
    "rates": Table(
        [
            (64, Variant(f"{name}, rate {rate:g}", boundary, rate=rate))
            for name, boundary in (("dense", "none"), ("subspace d/4", "subspace:16"))
            for rate in RATES
        ],
        600,
        16,
    ),
}


@cache
def corpus(sequences: int, *, apart: bool = False) -> Any:
    """The library's own text; apart: that part of it that judged runs train on, whose own end is kept out."""
    data = DataConfig(batch_size=sequences, validation_sequences=128)
    return load_corpus(replace(data, path=str(training_text(data, TEXT))) if apart else data)


def run(width: int, variant: Variant, seed: int, steps: int, sequences: int) -> dict[str, float]:
    """Losses on held-out text, nats a byte: as trained, and of the model without what its boundaries leave out."""
    data = DataConfig(batch_size=sequences, validation_sequences=128)
    ffn = 256 if width == 64 else 2 * width
    shape = Shape(d_model=width, layers=variant.layers, heads=4, ffn=ffn, vocab=256, context=64, tie_embeddings=False)
    loader = Loader(corpus(sequences, apart=seed == SEED), data, context=64, seed=seed)
    model, scheme = Decoder(shape, seed=seed), variant.scheme(width, seed)
    scheme.fit(model)
    if not isinstance(scheme, Inside):  # whose boundaries change nothing
        scheme.unsplit(model)
    if variant.apart or variant.codec != "none":
        crossing(model, [cut - 1 for cut in CUTS], Apart(variant.apart) if variant.apart else Coded(variant.codec))
    optimizer = inner_optimizer(model, replace(INNER, lr=variant.rate), "adamw")
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = variant.rate * lr_factor(step, steps, INNER)
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


def known(path: Path) -> list[dict[str, Any]]:
    """The runs of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def all_runs(kind: str, seeds: Sequence[int], steps: int | None, path: Path) -> list[dict[str, Any]]:
    """Those of FILE, and of it the ones that were not there."""
    table = TABLES[kind]
    done = known(path)
    have = {(one["table"], one["width"], one["name"], one["seed"]) for one in done if not one.get("copied")}
    for seed, (width, variant) in product(seeds, table.runs):
        if (kind, width, variant.name, seed) in have:
            continue
        found = run(width, variant, seed, steps_of(variant, steps or table.steps), table.sequences)
        one = {"table": kind, "width": width, "name": variant.name, "seed": seed, **found}
        with path.open("a") as file:
            file.write(json.dumps(one) + "\n")
        print(one, file=sys.stderr, flush=True)
        done.append(one)
    return [one for one in done if one["table"] == kind]


def rows(kind: str, runs: Sequence[dict[str, Any]]) -> Iterator[Row]:
    """Means over the seeds, with all of them; then the bounds of the issue."""
    for width, variant in TABLES[kind].runs:
        own, bare = (losses_of(runs, width, variant.name, key) for key in ("loss", "bare"))
        if own:
            name = f"d {width}: {variant.name}, {variant.nbytes(width):g} bytes"
            without = f"; without what stays behind {mean(bare.values()):.3f}"
            more = without if variant.boundary.startswith("dct") else ""
            yield Row(name, mean(own.values()), "nats", None, ", ".join(f"{loss:.3f}" for loss in own.values()) + more)

    def apart(one: str, other: str, width: int) -> float:
        first, second = (losses_of(runs, width, name) for name in (one, other))
        return mean(first.values()) - mean(second.values())

    if kind == "forms":
        yield Row("subspace d/4 above dense", apart("subspace d/4", "dense", 64), "nats", ("<=", 0.15))
        yield Row("subspace d/8 above dense", apart("subspace d/8", "dense", 64), "nats", ("<=", 0.30))
        for part in ("d/4", "d/8"):
            ahead = apart(f"masks apart, {part}", f"subspace {part}", 64)
            yield Row(f"subspace {part} ahead of masks apart", ahead, "nats", (">=", 0.5))
        yield Row("dct 0.90 above 0.75", apart("dct 0.90", "dct 0.75", 64), "nats", (">=", 0.0))
        yield Row("dct 0.95 above 0.90", apart("dct 0.95", "dct 0.90", 64), "nats", (">=", 0.0))
        for sparsity in ("0.75", "0.90", "0.95"):
            masked, bare = (mean(losses_of(runs, 64, f"dct {sparsity}", key).values()) for key in ("loss", "bare"))
            yield Row(f"dct {sparsity}, unmasked above masked", bare - masked, "nats", (">=", 0.0))
        yield Row("int8 above dense", apart("int8", "dense", 64), "nats", ("<=", 0.02))
    if kind == "rate":
        ahead = apart("masks apart, 3 entries", "subspace, k 3", 256)
        yield Row("subspace ahead of masks apart", ahead, "nats", (">=", 0.0))


LINKED = ("dense", "int8", "dct 0.90", "subspace d/4", "subspace d/8")


def step_seconds(variant: Variant) -> float:
    """Of a step of four microbatches in four stages, computing charged with 50 ms."""

    def clock(_: object) -> float:
        world = isles.mesh(stage=4)
        boundary = BoundaryConfig(kind=variant.boundary, codec=variant.codec, gradient_codec=variant.codec)
        config = PipelineConfig(stages=4, boundary=boundary)
        shape = Shape(d_model=64, layers=4, heads=4, ffn=256, vocab=256, context=64, tie_embeddings=False)
        pipeline = isles.Pipeline(Decoder(shape), world, batch_size=16, context=64, vocab=256, config=config)
        begun = world.transport.now()
        for _ in range(3):
            pipeline.step(torch.zeros(16, 65, dtype=torch.int64) if pipeline.reads else None)
        return (world.transport.now() - begun) / 3

    links = isles.Links(bandwidth=80e6, latency=0.05)
    return max(isles.run_virtual(clock, 4, links=links, step_seconds=0.05))


def linked(runs: Sequence[dict[str, Any]], plot: Path | None) -> list[Row]:
    """Seconds of 600 steps, with the losses that there are; the picture of both."""
    found = []
    for variant in FORMS:
        if variant.name in LINKED:
            losses = losses_of([one for one in runs if one["table"] == "forms"], 64, variant.name).values()
            seconds = 600 * step_seconds(variant)
            loss = mean(losses) if losses else math.nan
            found.append((variant, seconds, loss))
    if plot is not None:
        _picture(found, plot)
    in_order = [seconds for _, seconds, _ in sorted(found, key=lambda one: one[0].nbytes(64))]
    return [
        *(
            Row(f"{variant.name}, {variant.nbytes(64):g} bytes", seconds, "s", None, f"{loss:.3f} nats")
            for variant, seconds, loss in found
        ),
        Row("seconds out of the order of bytes", float(in_order != sorted(in_order)), "", ("<=", 0.0)),
    ]


def steps_of(variant: Variant, steps: int) -> int:
    """Of a row, beside others of `steps`."""
    if not variant.beside:
        return steps
    other = next(one for one in FORMS if one.name == variant.beside)
    return round(steps * step_seconds(other) / step_seconds(variant))


def _picture(found: Sequence[tuple[Variant, float, float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    for variant, seconds, loss in found:
        axes.plot(seconds, loss, "o")
        axes.annotate(variant.name, (seconds, loss), xytext=(5, 5), textcoords="offset points")
    axes.set(xlabel="seconds of 600 steps, 4 stages, 80 Mbit/s, 50 ms", ylabel="nats a byte")
    axes.margins(0.2)
    figure.savefig(path, dpi=120)


def main() -> int:
    """The command."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=[*TABLES, "links"])
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--runs", type=Path, default=Path(__file__).with_suffix(".jsonl"))
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.table == "links":
        return report(linked(known(given.runs), given.plot), given.json)
    seeds = [SEED] if given.table == "rates" else [int(seed) for seed in given.seeds.split(",") if seed]
    runs = all_runs(given.table, seeds, given.steps, given.runs)
    if given.write:
        _boundary_docs.put(f"benchmarks.boundaries {given.table}", written(given.table, runs))
    return report(list(rows(given.table, runs)), given.json)


def written(kind: str, runs: Sequence[dict[str, Any]]) -> list[str]:
    """The table for docs/boundaries.md."""
    if kind == "rates":
        return list(_boundary_docs.rates(runs, TABLES[kind].runs))
    if kind == "widths":
        return list(_boundary_docs.widths(runs, PARTS))
    lines = list(_boundary_docs.listing(runs, TABLES[kind].runs))
    return [*lines, "", *_boundary_docs.verdict(runs, 256)] if kind == "rate" else lines


if __name__ == "__main__":
    sys.exit(main())
