"""What the runs will be, before they are made: one line a row."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.comparison.cases import Case
from isles.cli.several import estimate
from isles.cli.terminal import print_table


def print_plans(cases: Sequence[Case]) -> None:
    """Steps, tokens, and about how long they take here."""
    print_table(estimate({(" ".join(case.key), case.seed): case.config for case in cases}))
    print("nothing was started or written; a search takes TRIALS times a run, less what pruning saves")
