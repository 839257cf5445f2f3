"""Runs that are hit: see `harness`. Some for every fault, and 50 drawn ones; more by the command of `harness`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from isles.training.config import world
from tests.faults.harness import Bench, table
from tests.faults.trials import Trial, drawn

CHOSEN = [
    Trial(method="ddp", kind="KILL", moment="join", worker=0),
    Trial(method="diloco", kind="SEGV", moment="first round"),
    Trial(method="diloco", kind="thread", moment="validation"),
    Trial(method="diloco", kind="NaN", moment="round"),
    Trial(method="diloco", kind="length", moment="round"),
    Trial(method="diloco", kind="disk", moment="checkpoint", worker=2),
    Trial(method="noloco", kind="TERM", moment="round", worker=2, launcher="two nodes"),
    Trial(method="diloco", kind="KILL", moment="round", worker=0, launcher="run_local"),
]
DEARER = [
    Trial(method="diloco", kind="KILL", moment="round", worker=2),
    Trial(method="solo", kind="KILL", moment="end", worker=0),
    Trial(method="noloco", kind="SEGV", moment="first round"),
    Trial(method="ist", kind="thread", moment="validation"),
    Trial(method="none", kind="NaN", moment="round"),
    Trial(method="streaming-diloco", kind="disk", moment="checkpoint", worker=2),
    Trial(method="sparta", kind="TERM", moment="checkpoint"),
    Trial(method="demo", kind="STOP", moment="round", worker=0),
    Trial(method="diloco", kind="KILL", moment="checkpoint", worker=2, launcher="two nodes"),
    Trial(method="solo", kind="STOP", moment="join", worker=2, launcher="run_local"),
    Trial(method="ddp", kind="KILL", moment="checkpoint", launcher="torchrun"),
    Trial(method="solo", kind="STOP", moment="validation", launcher="torchrun"),
]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world, "_LEAST_SILENCE", world._LEAST_SILENCE)  # put back at the end
        yield Bench(tmp_path_factory.mktemp("trials"))


@pytest.mark.parametrize(
    "trial", [*CHOSEN, *(pytest.param(trial, marks=pytest.mark.long) for trial in DEARER)], ids=str
)
def test_it_ends_as_promised(bench: Bench, trial: Trial) -> None:
    """In its stated time, no process is left, one line names the cause, it resumes to the same bits; or it finishes."""
    outcome = bench.hold(trial)
    assert not outcome.wrong, outcome


@pytest.mark.long
@pytest.mark.parametrize("seed", range(50))
def test_drawn_trials_end_as_promised(bench: Bench, seed: int) -> None:
    """Method, fault, moment, worker and launcher by the seed."""
    outcome = bench.hold(drawn(seed))
    assert not outcome.wrong, (drawn(seed), outcome)


def test_the_table_has_a_cell_for_each(bench: Bench) -> None:
    """A row a kind, a column a moment."""
    rows = table([]).splitlines()
    assert len(rows) == 11 and all(row.count("|") == 8 for row in rows)
