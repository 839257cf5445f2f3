"""`isles methods` and its two tables."""

from __future__ import annotations

import pytest

from isles.cli.settings import methods
from isles.replicas import METHODS
from isles.replicas.parts.legal import AXES, BY_NUMBERS, TABLE
from isles.training.config.conflicts import conflicts


def test_all_methods_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    methods(legal=False, memory=False)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == list(METHODS)


def test_the_legal_table_tells_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    """Every member of every axis, every row with its reason and its mend, and what numbers decide."""
    methods(legal=True, memory=False)
    told = capsys.readouterr().out
    assert all(member in told for members in AXES.values() for member in members)
    assert all(f"{row.title}\n      {row.because}; choose {row.instead}\n" in told for row in TABLE)
    assert all(f"{when}\n      {because}\n" in told for _, when, because in BY_NUMBERS)
    assert all(f"      {row.what}: {row.because}; {row.mend}\n" in told for row in conflicts())


def test_the_memory_table_is_the_formulas(capsys: pytest.CaptureFixture[str]) -> None:
    """A line a method. Bytes a parameter by the specs: an anchor and a momentum of 4 each, error feedback and a
    reference 4 more; a round's payload 4. (tests/training/test_plan.py counts what is allocated, of every method.)
    """
    methods(legal=False, memory=True)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[4:]]
    assert [row[0] for row in rows] == list(METHODS)
    always = {row[0]: float(row[1]) for row in rows}
    by_bytes = {
        0: "none",
        4: "ddp localsgd fedavg postlocal-sgd demo",
        8: "diloco streaming-diloco delayed eager noloco streaming-noloco slowmo sparta sparseloco custom",
        12: "fedadam fedyogi dct-dp",
        16: "dilocox",
    }
    for expected, names in by_bytes.items():
        assert all(expected <= always[name] < expected + 0.2 for name in names.split())
