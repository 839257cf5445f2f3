"""Paired differences, intervals and Holm's correction against numbers of textbooks."""

from __future__ import annotations

import pytest

from isles.report.comparison import claims_table, holm, paired


def test_the_interval_is_student_s() -> None:
    """t of 4 degrees of freedom at 97.5 % is 2.776; p as scipy's own paired test has it."""
    from scipy import stats  # half a second

    first, second = [1.0, 1.1, 1.2, 1.3, 1.4], [1.05, 1.12, 1.31, 1.36, 1.42]
    differences = [b - a for a, b in zip(first, second, strict=True)]
    found = paired(differences)
    assert found.mean == pytest.approx(0.052)
    assert found.half == pytest.approx(2.7764 * stats.sem(differences), rel=1e-4)
    assert found.p == pytest.approx(stats.ttest_rel(second, first).pvalue)
    assert (paired([0.0, 0.0]).p, paired([0.1, 0.1]).p) == (1.0, 0.0)  # the same mathematics, the same bits


def test_holm() -> None:
    """Of four: times 4, 3, 2, 1, in order of size, never falling (Holm 1979)."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0] and holm([]) == []


def test_claims() -> None:
    """Rows that never talk are judged by their own losses; seeds that only one row has are left out."""

    def row(method: str, *losses: float) -> list[dict[str, object]]:
        return [
            {"method": method, "workers": 2, "seed": seed, "val_loss": loss, "val_loss_replicas": loss + 1}
            for seed, loss in enumerate(losses)
        ]

    table = claims_table({"ddp": row("ddp", 1.0, 1.1, 1.05), "none": row("none", 0.3, 0.4, 0.35), "x": row("x", 1.0)})
    assert [cells[:3] for cells in table.rows] == [["ddp", "none", "+0.3000"]] and table.rows[0][-1] == "ddp"
