"""What the summary of every run says whose workers come and go, from what the run has left on record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from isles.comm.elastic.journal import NAME
from isles.comm.elastic.record import EXCHANGES, RoundLine, StartLine, account, from_line, goodput, lives
from isles.parsing import parse_json


def figures(
    journal: Iterable[Mapping[str, Any]],
    lines: Sequence[RoundLine | StartLine],
    counted: int,
    computed: float | None = None,
) -> dict[str, Any]:
    """counted: inner steps whose work is in the weights at the end. computed: seconds of computing of all workers;
    None: those of the rounds that somebody heard of.
    """
    done = account(lines)
    seconds = done.seconds if computed is None else computed
    there = lives(journal, max((line.at for line in lines), default=0.0))
    return {
        "goodput": goodput(counted, done, there),
        "work_lost": max(1 - counted * done.seconds / done.steps / seconds, 0.0) if done.steps and seconds else 0.0,
        "rounds": done.rounds,
        "rounds_alone": done.alone,
        "outcomes": dict(done.outcomes),
        "rounds_out_of_turn": done.out_of_turn,
        "inner_steps": done.steps,
        "inner_steps_counted": counted,
        "joins": there.counts["join"],
        "losses": there.counts["gone"],
        "leaves": there.counts["leave"],
        "views": there.counts["view"],
        "gifts": done.gifts,
        "gift_bytes": done.size,
    }


def recorded(out: Path) -> tuple[list[dict[str, Any]], list[RoundLine | StartLine]]:
    """(the journal's entries, the lines of its exchanges) of the run in `out`; a last line that was not written whole
    is left out. ValueError for any other that is none.
    """
    return [dict(entry) for entry in _lines(out / NAME)], [from_line(line) for line in _lines(out / EXCHANGES)]


def _lines(path: Path) -> list[Any]:
    try:
        whole, _, _ = path.read_bytes().rpartition(b"\n")
    except FileNotFoundError:
        return []
    return [parse_json(line) for line in whole.split(b"\n") if line]
