"""How far a reader walks: files, functions and calls below one call of a marked function, and moves between files.

    python -m benchmarks.walks [words of a walk's name] [--json]

Each walk is a run on the virtual clock, traced by `sys.setprofile` in every thread; a worker is a thread, so what
others do meanwhile is not counted; of a generator all parts count, and what is done between them. Of a function that is
called many times the call through the most files is told, or the median one. Marks are found by name and file: rename
them here with the code. Exit code 2 where one is not there.
"""

from __future__ import annotations

import argparse
import ast
import dis
import inspect
import json
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import isles
from benchmarks._named_runs import NONE, SMALL, STAGES, SWARM, TWOS, UNTIED, VIRTUAL, method
from benchmarks.same_bits import command, made, write_text

ROOT = Path(isles.__file__).resolve().parent.parent
TRACE = '{"at": 1.2, "join": 1}\n{"at": 2.1, "kill": 1}\n{"at": 3.0, "leave": 0}\n'

TRAIN, CHURN = ("train",), ("simulate", "--churn", "{home}/churn.jsonl")
TWO, LONG = ["world.workers=2"], ["world.workers=3", "run.steps=60", "run.log_every=5", "run.validate_every=0"]
FIXED = [*SMALL, *VIRTUAL]
MEMORY = [*FIXED, *method("ddp"), *TWO, "memory.method=auto", "memory.machine=RTX 3060"]
STEP = "isles/training/trainer.py", "Trainer.step"
EXCHANGE = "isles/replicas/loop/outer.py", "OuterSync._exchange"
ROUND = "isles/training/elastic/leader.py", "Participant._round"
SWARM_STEP = "isles/pipeline/swarm/swarm.py", "Swarm.step"
AGREE = "isles/pipeline/peers/agreement.py", "Agreement.agree"
PREPARED = "isles/training/memory/plans.py", "prepared"


@dataclass(frozen=True)
class Mark:
    """A function (file, qualified name), and the run in which its calls are watched. median: tell the median call."""

    function: tuple[str, str]
    settings: Sequence[str]
    words: Sequence[str] = TRAIN
    median: bool = False


MARKS: dict[str, Mark] = {
    "plain inner step, fixed world (median)": Mark(STEP, [*FIXED, *method("diloco"), *TWO], median=True),
    "outer exchange, DiLoCo, fixed, 2 workers": Mark(EXCHANGE, [*FIXED, *method("diloco"), *TWO]),
    "whole step with it": Mark(STEP, [*FIXED, *method("diloco"), *TWO]),
    "outer exchange, NoLoCo, fixed, 2 workers": Mark(EXCHANGE, [*FIXED, *method("noloco"), *TWO]),
    "churned round of 5 steps, DiLoCo, 3 workers": Mark(ROUND, [*SMALL, *method("diloco", sync_every=5), *LONG], CHURN),
    "churned round of 5 steps, NoLoCo, 3 workers": Mark(ROUND, [*SMALL, *method("noloco", sync_every=5), *LONG], CHURN),
    "SWARM step, 2 stages of 2 peers": Mark(SWARM_STEP, [*FIXED, *NONE, *SWARM, *TWOS]),
    "of it one Agreement.agree": Mark(AGREE, [*FIXED, *NONE, *SWARM, *TWOS]),
    "step of a fixed pipeline of 2 stages": Mark(STEP, [*FIXED, *NONE, *UNTIED, *STAGES, *TWO, "data.batch_size=4"]),
    "memory plan made": Mark(PREPARED, MEMORY),
}


@dataclass
class Walk:
    """What one call of a marked function goes through, in its thread."""

    frame: FrameType
    functions: set[tuple[str, str]] = field(default_factory=set)
    calls: int = 0
    moves: int = 0
    stack: list[str] = field(default_factory=list)

    def enter(self, file: str, name: str) -> None:
        self.functions.add((file, name))
        self.calls += 1
        self.moves += bool(self.stack) and self.stack[-1] != file
        self.stack.append(file)

    @property
    def files(self) -> int:
        return len({file for file, _ in self.functions})


def walks(marked: tuple[str, str], words: Sequence[str]) -> list[Walk]:
    """Of every call of `marked` in `isles WORDS`."""
    found: list[Walk] = []
    known: dict[str, str] = {}  # by path, the file as marks name it; "": not of Isles
    here = threading.local()

    def file_of(path: str) -> str:
        if path not in known:
            known[path] = str(Path(path).relative_to(ROOT)) if Path(path).is_relative_to(ROOT / "isles") else ""
        return known[path]

    def watch(frame: FrameType, event: str, _: Any) -> None:
        code, walk = frame.f_code, getattr(here, "walk", None)
        if not (file := file_of(code.co_filename)):
            return
        if event == "call":
            if walk is None and marked == (file, code.co_qualname):
                walk = here.walk = Walk(frame)
            if walk is not None:
                walk.enter(file, code.co_qualname)
        elif event == "return" and walk is not None:
            if walk.stack:  # who called a generator's first part goes on before its last one
                walk.stack.pop()
            if frame is walk.frame and not yields(frame):
                found.append(walk)
                here.walk = None

    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        command(*words)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return found


def yields(frame: FrameType) -> bool:
    """Whether a frame that is left will be gone on with: that of a generator between its first part and its last."""
    code = frame.f_code
    return bool(code.co_flags & inspect.CO_GENERATOR) and dis.opname[code.co_code[frame.f_lasti]] != "RETURN_VALUE"


def names_in(tree: ast.AST, inside: str = "") -> Iterator[str]:
    """Qualified names of the functions and methods of a module."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield inside + node.name
        elif isinstance(node, ast.ClassDef):
            yield from names_in(node, f"{inside}{node.name}.")


def missing(marks: dict[str, Mark]) -> list[str]:
    """What of the marks is not in its file."""
    functions = sorted({mark.function for mark in marks.values()})
    return [
        f"{file} has no {name}: follow it to where it is now, and rename the mark in benchmarks/walks.py"
        for file, name in functions
        if not (ROOT / file).is_file() or name not in names_in(ast.parse((ROOT / file).read_text()))
    ]


def row(mark: Mark, home: Path) -> dict[str, int]:
    """The figures of a mark."""
    out = Path(tempfile.mkdtemp(dir=home)) / "run"
    found = walks(mark.function, made([*mark.words, "--out", "{run}"], mark.settings, run=out, home=home))
    if not found:
        raise SystemExit(f"walks: {mark.function[1]} was not called in its run: see MARKS in benchmarks/walks.py")
    found.sort(key=lambda walk: (walk.files, len(walk.functions), walk.calls))
    walk = found[len(found) // 2] if mark.median else found[-1]
    return {"files": walk.files, "functions": len(walk.functions), "calls": walk.calls, "moves": walk.moves}


def main() -> int:
    parser = argparse.ArgumentParser(description="How far a reader walks through the files of Isles.")
    parser.add_argument("only", nargs="*", help="words of a walk's name; default: all walks")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    marks = {name: mark for name, mark in MARKS.items() if all(word in name for word in options.only)}
    if gone := missing(marks):
        print("\n".join(gone), file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        write_text(home / "text.txt")
        (home / "churn.jsonl").write_text(TRACE)
        rows = {name: row(mark, home) for name, mark in marks.items()}
    if options.json:
        print(json.dumps(rows, indent=1))
        return 0
    print("| what is watched | files | functions | calls | moves from file to file |\n|---|---|---|---|---|")
    for name, told in rows.items():
        print(f"| {name} | {' | '.join(f'{value:,}' for value in told.values())} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
