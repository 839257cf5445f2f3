"""What leaving out stages costs in loss, and what such models are worth with stages missing.

    python -m benchmarks.partial_models [--tune] [--steps 300] [--seeds 0,1,2] [--runs FILE] [--known] [--write]

A decoder of 6 blocks, of width 48 and 128, over bytes, on the library's own text; every block is a stage. A step is 30
rows of 64 bytes, two for each of 15 slots, in one process: each slot runs the model in the order of its path, which is
what a pipeline does to the bit (tests/pipeline/test_plans.py). Rates are swept for the kinds `SWEPT`, on a seed and on
text that are not judged (--tune: these alone, to be committed before the others are run); each then takes its best one,
the others that of "plan".

    full                all slots run all stages
    plan                orders of our plan for the second instance (4 of 6 stages)
    full, equal time    as many steps as fit into the seconds of "plan" on the second instance's links
    4 blocks            a model of 4 blocks, all of which run: as many operations as "plan"
    legal               15 legal orders drawn, all later stages visited alike, the same ones for the whole run
    anew                the same, drawn anew in every step: no slot always leaves out the same stage
    stage 0 left out, swaps of 2, swaps of 3, uneven    as "legal", one guideline broken (benchmarks/_skip_orders.py)
    plan, visits        "plan" with gradients = "visits"

Width 128 has "full" and "plan". Then stages are dropped, or left early, with no further training. Losses in nats a byte
on held-out text. Every run is a line of FILE (benchmarks/partial_models.jsonl) as soon as it is done, and is not done
again: take lines out of it to measure them anew. --write puts the tables into docs/partial-pipelines.md.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from itertools import chain, product
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch

from benchmarks._measure import Row, report
from benchmarks._once import TEXT
from benchmarks._pages import written
from benchmarks._skip_orders import LENGTH, SLOTS, STAGES, Order, drawn, planned, seconds
from benchmarks.comparison.tuning import SEED, training_text
from isles.data import DataConfig, Loader, load_corpus
from isles.models import Decoder, Shape
from isles.models.decoder import next_token_loss
from isles.training.config.inner import InnerConfig, lr_factor
from isles.training.optimizer import inner_optimizer
from isles.training.scoring import dropped, order_loss

SHAPES = {
    width: Shape(d_model=width, layers=STAGES, heads=4, ffn=ffn, vocab=256, context=64, tie_embeddings=True)
    for width, ffn in ((48, 128), (128, 336))
}
DATA = DataConfig(batch_size=2 * SLOTS, validation_sequences=128)
RATES = {48: (6e-3, 1.2e-2, 2e-2, 3e-2), 128: (2e-3, 3e-3, 4e-3, 6e-3)}
"""Peak learning rates of the sweeps, by width."""
WARMUP_STEPS = 60
BROKEN = ("stage 0 left out", "swaps of 2", "swaps of 3", "uneven")
SWEPT = ("full", "plan", "full, equal time", "4 blocks")
KINDS = (*SWEPT, "legal", "anew", *BROKEN, "plan, visits")
KINDS_AT = {48: KINDS, 128: ("full", "plan")}
"""What is trained, by width."""


class Case(NamedTuple):
    """One run."""

    width: int
    kind: str
    rate: float
    seed: int


Losses = Mapping[str, float]
"""Nats a byte by what runs: "dropped 2" and the like, means over the orders of that kind."""
Runs = dict[Case, Losses]


class SlotOrders:
    """The orders of the slots, step after step. ValueError where they are those of a plan without its instance."""

    def __init__(self, kind: str, seed: int) -> None:
        self._kind, self._rng = kind, random.Random(seed)
        self._layers = LENGTH if kind == "4 blocks" else STAGES
        self._fixed = self._chosen()

    def __call__(self) -> Sequence[Order]:
        return self._chosen() if self._kind == "anew" else self._fixed

    def _chosen(self) -> Sequence[Order]:
        if self._kind.startswith("full") or self._kind == "4 blocks":
            return [tuple(range(self._layers))] * SLOTS
        if self._kind.startswith("plan"):
            orders = planned()
            if orders is None:
                raise ValueError("no reference instances: their file is not beside the repository")
            return orders
        return drawn("legal" if self._kind == "anew" else self._kind, self._rng)


def steps_of(kind: str, steps: int) -> int:
    """Of a run of this kind beside others of `steps`."""
    skip, full = seconds("plan"), seconds("full")
    if kind != "full, equal time" or skip is None or full is None:
        return steps
    return round(steps * skip / full)


def trained(case: Case, steps: int, loader: Loader) -> Decoder:
    """A model after so many steps."""
    shape = SHAPES[case.width]
    if case.kind == "4 blocks":
        shape = replace(shape, layers=LENGTH)
    inner = InnerConfig(lr=case.rate, warmup_steps=WARMUP_STEPS)
    model, orders_now = Decoder(shape, seed=case.seed), SlotOrders(case.kind, case.seed)
    optimizer = inner_optimizer(model, inner, "adamw")
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = case.rate * lr_factor(step, steps, inner)
        orders = orders_now()
        for order, rows in _by_order(next(loader), orders).items():
            loss = next_token_loss(model.logits(rows[:, :-1], order=order), rows[:, 1:])
            (loss * len(rows) / DATA.batch_size).backward()
        _complete(model, orders, shared="visits" in case.kind)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


def _by_order(batch: torch.Tensor, orders: Sequence[Order]) -> dict[Order, torch.Tensor]:
    """The rows of the slots with one order together: the mean loss over all is the same, in fewer passes."""
    parts: defaultdict[Order, list[torch.Tensor]] = defaultdict(list)
    for rows, order in zip(batch.split(len(batch) // len(orders)), orders, strict=True):
        parts[order].append(rows)
    return {order: torch.cat(rows) for order, rows in parts.items()}


def _complete(model: Decoder, orders: Sequence[Order], *, shared: bool) -> None:
    """Zeros where nobody came by; shared: means over those who came by (gradients = "visits")."""
    visits = Counter(chain(*orders))
    for stage, block in enumerate(model.blocks):
        for own in block.parameters():
            own.grad = torch.zeros_like(own) if own.grad is None else own.grad
            if shared and visits[stage]:
                own.grad *= len(orders) / visits[stage]


def judged(model: Decoder, loader: Loader) -> Losses:
    """Losses with stages dropped, and left early."""
    batches = list(loader.validation_batches())
    loss = partial(order_loss, model, batches, autocast=nullcontext())
    stages = len(model.blocks)
    found = {}
    for count in range(stages):
        orders = dropped(stages, count)
        found[f"dropped {count}"] = mean(loss(blocks=order) for order in orders)
        found[f"left early {count}"] = loss(blocks=range(stages - count))
    return found


@cache
def _corpus(*, apart: bool) -> Any:
    return load_corpus(replace(DATA, path=str(training_text(DATA, TEXT))) if apart else DATA)


def known_runs(steps: int, path: Path) -> Runs:
    """Those of FILE."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {Case(*(one[key] for key in Case._fields)): one["losses"] for one in lines if one["steps"] == steps}


def all_runs(steps: int, seeds: Sequence[int], path: Path) -> Runs:
    """Those of FILE, and then the ones that were not there: first the sweeps."""
    done = known_runs(steps, path)
    for width, kinds in KINDS_AT.items():
        for kind, rate in product([kind for kind in SWEPT if kind in kinds], RATES[width]):
            _do(Case(width, kind, rate, SEED), steps, path, done)
        for kind, seed in product(kinds, seeds):
            _do(Case(width, kind, best_rate(done, width, kind), seed), steps, path, done)
    return done


def _do(case: Case, steps: int, path: Path, done: dict[Case, Losses]) -> None:
    """Run it, unless it has been."""
    if case in done:
        return
    loader = Loader(_corpus(apart=case.seed == SEED), DATA, context=SHAPES[case.width].context, seed=case.seed)
    losses = judged(trained(case, steps_of(case.kind, steps), loader), loader)
    with path.open("a") as file:
        file.write(json.dumps({**case._asdict(), "steps": steps, "losses": losses}) + "\n")
    print(*case, losses["dropped 0"], file=sys.stderr, flush=True)
    done[case] = losses


def best_rate(runs: Runs, width: int, kind: str) -> float:
    """With which the swept kind has the least loss in its sweep; of kinds that are not swept, that of "plan"."""
    swept = kind if kind in SWEPT else "plan"
    tried = [case for case in runs if (case.width, case.kind, case.seed) == (width, swept, SEED)]
    return min(tried, key=lambda case: runs[case]["dropped 0"]).rate


def chosen(runs: Runs, width: int) -> dict[tuple[str, int], Losses]:
    """By kind and seed, each at its best rate."""
    return {
        (case.kind, case.seed): losses
        for case, losses in runs.items()
        if case.width == width and case.seed != SEED and case.rate == best_rate(runs, width, case.kind)
    }


def rows(runs: Runs) -> list[Row]:
    """Means over seeds with the smallest and the largest, and the bounds."""
    return [row for width in KINDS_AT for row in _rows_of(f"{width}: ", chosen(runs, width))]


def _rows_of(prefix: str, runs: Mapping[tuple[str, int], Losses]) -> list[Row]:
    means = averages(runs)
    made = []
    for kind, losses in means.items():
        for what in losses:
            each = [one[what] for (name, _), one in runs.items() if name == kind]
            made.append(Row(f"{prefix}{kind}: {what}", mean(each), "nats", None, f"{min(each):.3f} to {max(each):.3f}"))
    full, skip = means["full"], means["plan"]
    rise = [one["dropped 2"] - one["dropped 0"] for one in (full, skip)]
    made += [
        Row(f"{prefix}plan above full", skip["dropped 0"] - full["dropped 0"], "nats", ("<=", 0.10)),
        Row(f"{prefix}rise with 2 dropped, plan / full", rise[1] / rise[0], "", ("<=", 0.5)),
        Row(f"{prefix}perplexity with 3 dropped, plan", _percent(skip), "% more", None, "the paper: 7"),
        Row(f"{prefix}perplexity with 3 dropped, full", _percent(full), "% more"),
    ]
    if "full, equal time" in means:
        ahead = skip["dropped 0"] - means["full, equal time"]["dropped 0"]
        made.append(Row(f"{prefix}plan above full, equal time", ahead, "nats", ("<=", 0.0)))
    return made


def averages(runs: Mapping[tuple[str, int], Losses]) -> dict[str, dict[str, float]]:
    """By kind, what runs: means over seeds."""
    found: dict[str, dict[str, float]] = {}
    for kind in KINDS:
        each = [losses for (name, _), losses in runs.items() if name == kind]
        if each:
            found[kind] = {what: mean(one[what] for one in each) for what in each[0]}
    return found


def _percent(losses: Losses) -> float:
    return 100 * math.expm1(losses["dropped 3"] - losses["dropped 0"])


def tables(runs: Runs) -> str:
    """In Markdown: rates, stages missing by width, and what each guideline buys."""
    parts = ["", *_sweep(runs)]
    for width in KINDS_AT:
        parts += [*_missing(width, averages(chosen(runs, width))), ""]
    return "\n".join([*parts, *_guidelines(runs), ""])


def _sweep(runs: Runs) -> Iterator[str]:
    for width, kinds in KINDS_AT.items():
        yield f"| width {width}, peak rate | {' | '.join(f'{rate:g}' for rate in RATES[width])} |"
        yield f"|{'---|' * (1 + len(RATES[width]))}"
        for kind in (kind for kind in SWEPT if kind in kinds):
            found = [runs.get(Case(width, kind, rate, SEED)) for rate in RATES[width]]
            cells = ["" if losses is None else f"{losses['dropped 0']:.3f}" for losses in found]
            yield f"| {kind} | {' | '.join(cells)} |"
        yield ""


def _missing(width: int, means: Mapping[str, Losses]) -> Iterator[str]:
    yield f"| width {width} | all | 1 dropped | 2 | 3 | 1 left early | 2 | 3 | 4 | 5 |"
    yield f"|{'---|' * 10}"
    shown = [f"dropped {count}" for count in range(4)] + [f"left early {count}" for count in range(1, 6)]
    for kind in (kind for kind in ("full", "plan", "4 blocks") if kind in means):
        cells = [f"{means[kind][what]:.3f}" if what in means[kind] else "" for what in shown]
        yield f"| {kind} | {' | '.join(cells)} |"


def _guidelines(runs: Runs) -> Iterator[str]:
    yield "| | seeds | rate | loss | from, to | above full | 2 dropped | seconds of a step |"
    yield f"|{'---|' * 8}"
    for width in KINDS_AT:
        own = chosen(runs, width)
        for kind, losses in averages(own).items():
            each = [one["dropped 0"] for (name, _), one in own.items() if name == kind]
            above = mean(each) - mean(own["full", seed]["dropped 0"] for name, seed in own if name == kind)
            takes = seconds(kind.split(",")[0])
            cells = [
                f"{len(each)}",
                f"{best_rate(runs, width, kind):g}",
                f"{losses['dropped 0']:.3f}",
                f"{min(each):.3f} to {max(each):.3f}",
                f"{above:+.3f}",
                f"{losses['dropped 2']:.3f}",
                "-" if takes is None else f"{takes:.1f}",
            ]
            yield f"| {kind}{'' if width == 48 else f', width {width}'} | {' | '.join(cells)} |"


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--runs", type=Path, default=Path(__file__).with_suffix(".jsonl"))
    parser.add_argument("--known", action="store_true", help="only what FILE has")
    parser.add_argument("--tune", action="store_true", help="only the sweeps of the rates")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if seconds("plan") is None:
        print("not measured: SkipPipe's instances are not beside the repository")
        return 0
    seeds = [] if given.tune else [int(seed) for seed in given.seeds.split(",")]
    runs = known_runs(given.steps, given.runs) if given.known else all_runs(given.steps, seeds, given.runs)
    if given.tune:
        print(*_sweep(runs), sep="\n")
        return 0
    if given.write:
        written("partial-pipelines.md", "benchmarks.partial_models", tables(runs))
    return report(rows(runs), given.json)


if __name__ == "__main__":
    sys.exit(main())
