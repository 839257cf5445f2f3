"""The great comparison and the sweep over sizes: make the runs that are missing, then write a page about all of them.

    python -m benchmarks.comparison [--out runs/comparison] [--page OUT/comparison.md] [--at-once 2]
        [--parts methods,scaling] [--methods LABEL,...] [--steps 400]
        [--sizes 0.12M,0.53M,2M] [--scaling-steps 150] [--device cpu|cuda]
        [--seeds 0,1,2] [--set section.key=value]... [--quick] [--dry-run] [--page-only]

methods     every row of `cases.ROWS` on the embedded run: four workers, equal tokens; seed i on topology i
scaling     ddp, diloco, streaming-diloco and eager on models of several sizes: the gap to ddp

The page gets its pictures in `pictures/` beside it. Claims about who beats whom are printed too. Stop it at any time
and give the same command again: what is finished is not run again, unless its settings are others by now.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.comparison.cases import QUICK, ROWS, SIZES, Case, method_cases, sweep_cases
from benchmarks.comparison.claims import Judged, judge
from benchmarks.comparison.figures import collect
from benchmarks.comparison.page import Asked, page
from benchmarks.comparison.pictures import bytes_picture, gap_picture
from benchmarks.comparison.planned import print_plans
from benchmarks.comparison.runs import run_missing
from isles.cli.several.rows import names
from isles.cli.several.running import seeds_of

PARTS = ("methods", "scaling")


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.comparison", description="All methods on one job.")
    parser.add_argument("--out", type=Path, default=Path("runs/comparison"), help="folder of the runs")
    parser.add_argument("--page", type=Path, help="where the page goes (default: OUT/comparison.md)")
    parser.add_argument("--at-once", type=int, default=1, help="runs at a time, a process each (default: 1)")
    parser.add_argument("--parts", default=",".join(PARTS), help="methods, scaling, or both (default)")
    parser.add_argument("--methods", help="rows, separated by commas (default: all)")
    parser.add_argument("--steps", type=int, help="inner steps of a row (default: 400)")
    parser.add_argument("--sizes", help=f"of the sweep (default: {','.join(SIZES)})")
    parser.add_argument("--scaling-steps", type=int, help="inner steps of the sweep (default: 150)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the models (default: cpu)")
    parser.add_argument("--seeds", help="separated by commas (default: 0,1,2)")
    parser.add_argument("--set", dest="set_", action="append", default=[], metavar="SECTION.KEY=VALUE",
                        help="any setting, over those of the rows; repeatable")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="few rows, tiny models, few steps: seconds, no result")
    parser.add_argument("--dry-run", action="store_true", help="say what the runs will be, and stop")
    parser.add_argument("--page-only", action="store_true", help="run nothing: the page of what is there")
    return parser


def cases_of(asked: argparse.Namespace) -> list[Case]:
    """All runs that are asked for. ValueError for anything that is not as it should be."""
    quick, parts = asked.quick, names(asked.parts, "--parts")
    if unknown := set(parts) - set(PARTS):
        raise ValueError(f"--parts {asked.parts}: {', '.join(sorted(unknown))} is none of {', '.join(PARTS)}")
    if asked.at_once < 1:
        raise ValueError(f"--at-once {asked.at_once}: choose 1 or more")
    over: dict[str, Any] = {"model.device": asked.device, **(QUICK if quick else {})}
    seeds = seeds_of(asked.seeds or ("0,1" if quick else "0,1,2"))
    steps, scaling_steps = asked.steps or (8 if quick else 400), asked.scaling_steps or (8 if quick else 150)
    cases: list[Case] = []
    if "methods" in parts:
        labels = names(asked.methods, "--methods") if asked.methods else ["ddp", "diloco"] if quick else list(ROWS)
        cases += method_cases(labels, seeds, steps, over, asked.set_)
    if "scaling" in parts:
        sizes = names(asked.sizes, "--sizes") if asked.sizes else ["0.12M"] if quick else list(SIZES)
        cases += sweep_cases(sizes, seeds, scaling_steps, over, asked.set_)
    return cases


def write(cases: Sequence[Case], out: Path, target: Path, command: str) -> list[Judged]:
    """The page and its pictures, from the runs that are there; what became of the claims."""
    found = collect(cases, out)
    methods = {key[0]: row for key, row in found.items() if len(key) == 1}
    sweep = {key: row for key, row in found.items() if len(key) > 1}
    judged, pictures = judge(methods), {}
    for name, png in (("bytes", bytes_picture(methods)), ("gap", gap_picture(sweep))):
        if png:
            pictures[name] = f"pictures/{target.stem}-{name}.png"
            (target.parent / "pictures").mkdir(parents=True, exist_ok=True)
            (target.parent / pictures[name]).write_bytes(png)
    seeds = sorted({case.seed for case in cases})
    asked = Asked(methods=methods, sweep=sweep, judged=judged, seeds=seeds, command=command, pictures=pictures)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page(asked), encoding="utf-8")
    return judged


def main(words: Sequence[str]) -> int:
    """Run what is missing, write, and say which claims hold. words: of the command line."""
    asked = parser().parse_args(words)
    try:
        cases = cases_of(asked)
        if asked.dry_run:
            print_plans(cases)
            return 0
        if not asked.page_only:
            run_missing(cases, asked.out, asked.at_once)
    except ValueError as error:
        print(f"comparison: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("comparison: stopped; the same command goes on", file=sys.stderr)
        return 130
    target = asked.page or asked.out / "comparison.md"
    said = shlex.join(word for word in words if word != "--page-only")
    for one in write(cases, asked.out, target, f"python -m benchmarks.comparison {said}".rstrip()):
        found = f"{one.mean:+.3f}" if one.found else ""
        print(f"{one.verdict:<13}  {found:>6}  {one.claim.words}")
    print(f"page  {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
