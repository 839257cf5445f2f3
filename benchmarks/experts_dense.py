"""Experts against dense models, each at the best of some learning rates: a table of docs/experts.md.

    python -m benchmarks.experts_dense [hdee|smalltalk] --tune      then commit tuned.jsonl
    python -m benchmarks.experts_dense [hdee|smalltalk] [--write]

The built-in runs of `isles experts`. Each row is trained at RATES with seed 1000 and judged on the validation text that
gives the cached prior, "prior"; at the best of them it is judged once on the other half, "test", with other seeds:
0 to 2, and for SMALLTALK, whose routers were set on these, 3 to 5. Experts of HDEE are joined by their posterior, those
of SMALLTALK by its routers. Loss: nats a byte, the mean over the domains that are trained on.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks._once import JUDGED, SEED, TUNED, Found, kept
from benchmarks._pages import written
from benchmarks.comparison.text import table
from isles.experts import mixture
from isles.experts.domains import DomainPart
from isles.experts.forest import score
from isles.experts.hdee import Hdee
from isles.experts.jobs import JobProgress
from isles.experts.planning import opened, settings
from isles.experts.reading import read
from isles.experts.routing import route
from isles.experts.smalltalk_run import Smalltalk
from isles.report.comparison import paired
from isles.training.records.saved_run import load_saved

PAGE, ROOT = "experts.md", Path("runs", "experts-dense")
EXPERTS = "experts"
SHARED = (
    *("mixture", "seed-f192", "pool", "routers", "routers.json", "segments"),
    *("held.npy", "held.json", "assignment.npy", "assignment.json"),
)
"""What of the folder of a seed does not hang on the rate."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One of the systems. rate: the key of the learning rate that is tried. seeds: those that are judged."""

    words: tuple[str, ...]
    rate: str
    rates: tuple[float, ...]
    seeds: tuple[int, ...]


SYSTEMS = {
    "hdee": Asked(
        words=('hdee.variants=["m-ho-i-ho"]', 'hdee.baselines=["dense"]'),
        rate="hdee.lr",
        rates=(1.5e-3, 3e-3, 6e-3, 1.2e-2),
        seeds=(0, 1, 2),
    ),
    "smalltalk": Asked(words=(), rate="inner.lr", rates=(3e-3, 6e-3, 1.2e-2, 2.4e-2, 4.8e-2), seeds=(3, 4, 5)),
}


def system_of(name: str, seed: int, rate: float) -> Hdee | Smalltalk:
    """In a directory of its own, with what does not hang on the rate if another rate's has it."""
    asked = SYSTEMS[name]
    words = [*asked.words, f"{name}.seeds=[{seed}]", f"{asked.rate}={rate:g}"]
    out, folder = ROOT / f"{name}-{seed}-{rate:g}", f"seed-{seed}"
    for other in sorted(ROOT.glob(f"{name}-{seed}-*")) if not out.exists() else ():
        for one in SHARED:
            place, there = out / folder / one, other / folder / one
            if there.is_dir():
                shutil.copytree(there, place, dirs_exist_ok=True)
            elif there.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(there, place)
    system = opened(read(name, settings(name), None, words), out)
    assert isinstance(system, Hdee | Smalltalk)
    return system


def rows_of(system: Hdee | Smalltalk, seed: int) -> dict[str, tuple[str, ...]]:
    """Names of the runs of each row."""
    if isinstance(system, Hdee):
        plan = system.plan(seed)
        return {EXPERTS: plan.forests["m-ho-i-ho"][-1], "dense": (plan.dense,)}
    experts = tuple(f"expert-{number}" for number in range(system.own.experts))
    return {EXPERTS: experts} | {f"dense, 4 x {form}": (f"dense-{form}",) for form in system.own.dense}


def losses(name: str, row: str, seed: int, rate: float, part: DomainPart) -> dict[str, float]:
    """Train the row's runs, and judge them: nats a byte by domain."""
    system = system_of(name, seed, rate)
    names, folder = rows_of(system, seed)[row], system.out / f"seed-{seed}"
    jobs = system.jobs()
    needed = [f"seed-{seed}/{one}" for one in names]
    needs = [f"seed-{seed}/{need}" for one in needed for need in jobs[one][0].needs]
    if left := [one for one in dict.fromkeys([*needs, *needed]) if jobs[one][1] != "done"]:
        system.train(JobProgress(), left)
    runs = [load_saved(folder / one) for one in names]
    found = {}
    for domain, text in system.texts.items():
        tokens = text.sequences(part, system.own.sequences)
        scores_ENT = torch.stack([score(run, tokens) for run in runs])
        found[domain] = float(-_joined(system, seed, scores_ENT, tokens).mean())
    return found


def _joined(system: Hdee | Smalltalk, seed: int, scores_ENT: Tensor, tokens: Tensor) -> Tensor:
    if len(scores_ENT) == 1:
        return scores_ENT[0]
    if isinstance(system, Hdee):
        return mixture.mix(scores_ENT, mixture.posterior(scores_ENT, mixture.uniform(len(scores_ENT))))
    chosen = route(system.seeds[f"seed-{seed}"].gate(), tokens, system.own.prefix)
    return scores_ENT[chosen, torch.arange(len(tokens), device="cpu")]


def line(name: str, row: str, seed: int, rate: float, *, is_judged: bool) -> Found:
    """Of the file of tuning, or of the judged ones."""

    def make() -> Found:
        by_domain = losses(name, row, seed, rate, "test" if is_judged else "prior")
        system = system_of(name, seed, rate)
        trained = [text.domain.name for text in system.trained]
        return {"loss": fsum(by_domain[domain] for domain in trained) / len(trained), "by_domain": by_domain}

    key: dict[str, Any] = {"page": PAGE, "row": f"{name}, {row}", "rate": rate, "seed": seed}
    return kept(JUDGED if is_judged else TUNED, key, make, settings=TUNED if is_judged else None)


def best_rate(name: str, row: str) -> float:
    """By the runs that are not judged."""
    rates = SYSTEMS[name].rates
    found = {rate: line(name, row, SEED, rate, is_judged=False)["loss"] for rate in rates}
    return min(rates, key=found.__getitem__)


def tables(name: str, rows: Sequence[str]) -> str:
    """Of tuning, and of what was judged."""
    asked = SYSTEMS[name]
    tried = []
    for row in rows:
        own = [line(name, row, SEED, rate, is_judged=False)["loss"] for rate in asked.rates]
        tried.append([row, *(f"**{loss:.3f}**" if loss == min(own) else f"{loss:.3f}" for loss in own)])
    judged = {row: [line(name, row, s, best_rate(name, row), is_judged=True) for s in asked.seeds] for row in rows}
    made = []
    for row, own in judged.items():
        domains = [fsum(one["by_domain"][domain] for one in own) / len(own) for domain in own[0]["by_domain"]]
        ahead = paired([theirs["loss"] - mine["loss"] for mine, theirs in zip(judged[EXPERTS], own, strict=True)])
        behind = "-" if row == EXPERTS else f"{ahead.mean:+.3f} ± {ahead.half:.3f}"
        loss = fsum(one["loss"] for one in own) / len(own)
        made.append([f"{row}, {best_rate(name, row):g}", f"{loss:.3f}", behind, *(f"{each:.3f}" for each in domains)])
    first = table([f"`{asked.rate}`, seed {SEED}", *(f"{rate:g}" for rate in asked.rates)], tried)
    heads = ["row, rate", f"trained domains, seeds {', '.join(map(str, asked.seeds))}", "experts are ahead by"]
    return f"{first}\n\n{table([*heads, *judged[EXPERTS][0]['by_domain']], made)}"


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("system", nargs="?", choices=list(SYSTEMS), default="hdee")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = list(rows_of(system_of(given.system, SEED, SYSTEMS[given.system].rates[0]), SEED))
    if given.tune:
        print({row: best_rate(given.system, row) for row in rows})
        return 0
    text = tables(given.system, rows)
    print(text)
    if given.write:
        written(PAGE, f"benchmarks.experts_dense {given.system}", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
