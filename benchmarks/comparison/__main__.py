"""The great comparison: settings by one budget a row, then judged runs, then a page about all of them; in blocks.

    python -m benchmarks.comparison --block tune [--minutes 20]   searches that are missing -> settings.jsonl; commit it
    python -m benchmarks.comparison --block run [--minutes 20]    judged runs that are missing -> rows.jsonl; commit it
    python -m benchmarks.comparison --block page --page docs/comparison.md

        [--parts long,ladder,short] [--rows LABEL,...] [--seeds 0,1,2,3,4] [--at-once 2] [--out runs/comparison]
        [--records benchmarks/comparison] [--trials 8] [--set section.key=value]... [--quick]

A block ends after its minutes, also in the middle of a run, and says what is left (exit 75); the same command goes on.
What has a line is not made again, here or on another machine. `run` refuses settings that are not committed, and a seed
that was judged with other ones.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.comparison.cases import FIRST, HERE, PARTS, QUICK, REGIMES, Case, cases_of, tuned_settings
from benchmarks.comparison.claims import Judged, judge
from benchmarks.comparison.figures import collect
from benchmarks.comparison.page import Asked, page
from benchmarks.comparison.pictures import bytes_picture, gap_picture
from benchmarks.comparison.planned import print_plans
from benchmarks.comparison.runs import missing, run_missing
from benchmarks.comparison.tuning import TRIALS, committed, tune_missing, untuned
from isles.cli.several import names, seeds_of

BLOCKS = ("tune", "run", "page", "plan")
LEFT = 75  # as sysexits.h calls it: try again


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.comparison", description="All methods on one job.")
    parser.add_argument("--block", choices=BLOCKS, default="page", help="what to do (default: the page)")
    parser.add_argument("--minutes", type=float, default=20.0, help="after which the block ends (default: 20)")
    parser.add_argument("--parts", default=",".join(FIRST), help=f"of {', '.join(PARTS)} (default: {', '.join(FIRST)})")
    parser.add_argument("--rows", help="separated by commas (default: all)")
    parser.add_argument("--seeds", help="judged ones, separated by commas (default: 0,1,2,3,4)")
    parser.add_argument("--at-once", type=int, default=1, help="runs at a time, a process each (default: 1)")
    parser.add_argument("--out", type=Path, default=Path("runs/comparison"), help="folder of the runs")
    parser.add_argument("--records", type=Path, default=HERE, help="folder of settings.jsonl and rows.jsonl")
    parser.add_argument("--page", type=Path, help="where the page goes (default: OUT/comparison.md)")
    parser.add_argument("--trials", type=int, default=TRIALS, help=f"of a search (default: {TRIALS})")
    parser.add_argument("--set", dest="set_", action="append", default=[], metavar="SECTION.KEY=VALUE",
                        help="any setting, over those of the rows; repeatable")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="tiny models, 12 steps, two seeds: seconds, no result")
    return parser


def asked_cases(asked: argparse.Namespace) -> list[Case]:
    """All runs that are asked for. ValueError for anything that is not as it should be."""
    parts = names(asked.parts, "--parts")
    if unknown := set(parts) - set(PARTS):
        raise ValueError(f"--parts {asked.parts}: {', '.join(sorted(unknown))} is none of {', '.join(PARTS)}")
    if asked.at_once < 1 or not asked.minutes > 0 or asked.trials < 1:
        raise ValueError(f"--at-once {asked.at_once}, --minutes, --trials: choose 1 or more")
    if asked.quick and asked.records == HERE:
        raise ValueError("--quick is no result: give --records another folder")
    over = {**QUICK, "run.steps": 12} if asked.quick else {}
    seeds = seeds_of(asked.seeds or ("0,1" if asked.quick else "0,1,2,3,4"))
    labels = names(asked.rows, "--rows") if asked.rows else None
    return cases_of(parts, labels, seeds, over, asked.set_, tuned_settings(asked.records / "settings.jsonl"))


@contextlib.contextmanager
def limited(minutes: float) -> Iterator[None]:
    """What is within ends as by Ctrl-C after so long."""
    timer = threading.Timer(60 * minutes, os.kill, (os.getpid(), signal.SIGINT))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def write(cases: Sequence[Case], rows: Path, target: Path, command: str) -> list[tuple[str, Judged]]:
    """The page and its pictures, from the lines that are there; what became of the claims, by part."""
    found, pictures = collect(cases, rows), dict[str, str]()
    parts = {part: {key[1]: row for key, row in found.items() if key[0] == part} for part in REGIMES}
    ladder = {key[1:]: row for key, row in found.items() if key[0] == "ladder"}
    judged = judge(parts)
    drawn = {f"bytes-{part}": bytes_picture(methods) for part, methods in parts.items() if methods}
    for name, png in {**drawn, "gap": gap_picture(ladder)}.items():
        if png:
            pictures[name] = f"pictures/{target.stem}-{name}.png"
            (target.parent / "pictures").mkdir(parents=True, exist_ok=True)
            (target.parent / pictures[name]).write_bytes(png)
    asked = Asked(parts=parts, ladder=ladder, judged=judged, command=command, pictures=pictures)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page(asked), encoding="utf-8")
    return judged


def main(words: Sequence[str]) -> int:
    """One block. words: of the command line."""
    asked = parser().parse_args(words)
    settings, rows = asked.records / "settings.jsonl", asked.records / "rows.jsonl"
    try:
        cases = asked_cases(asked)
        if asked.block == "plan":
            print_plans(cases)
            return 0
        with limited(asked.minutes):
            if asked.block == "tune":
                tune_missing(cases, asked.out, settings, asked.trials, asked.at_once)
                return 0
            if asked.block == "run":
                untuned(missing(cases, rows), settings)
                run_missing(cases, asked.out, rows, asked.at_once, committed(settings))
                return 0
    except ValueError as error:
        print(f"comparison: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("comparison: the block has ended; the same command goes on", file=sys.stderr)
        return LEFT
    target = asked.page or asked.out / "comparison.md"
    for part, one in write(cases, rows, target, f"python -m benchmarks.comparison {shlex.join(words)}".rstrip()):
        found = "" if one.found is None else f"{one.found.mean + one.claim.margin:+.3f}"
        print(f"{part:<6} {one.verdict:<13}  {found:>6}  {one.claim.words}")
    print(f"page  {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
