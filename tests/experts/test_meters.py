"""What experts cost: the papers' numbers and the budget rule."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from isles.cli import app
from isles.experts.meters import Share, bytes_of, check_budget, score_bytes
from isles.experts.smalltalk import table
from isles.models import Shape, non_embedding_parameters


@pytest.mark.parametrize(
    ("expert", "experts", "training", "overhead"),
    [
        ("335M", 4, 31.02, 0.22),
        ("335M", 8, 62.03, 0.75),
        ("335M", 16, 124.06, 2.71),
        ("335M", 32, 248.12, 10.28),
        ("1.3B", 4, 221.33, 0.36),
        ("1.3B", 16, 885.32, 4.87),
        ("1.3B", 32, 1770.65, 18.94),
    ],
)
def test_table_3_of_smalltalk(expert: str, experts: int, training: float, overhead: float) -> None:
    (row,) = [row for row in table() if (row["expert"], row["experts"]) == (expert, experts)]
    assert round(row["training"] / 1e19, 2) == pytest.approx(training, abs=0.011)
    assert round(row["training_overhead"] / 1e19, 2) == overhead
    assert round(row["inference"] / 1e12, 2) == (0.79 if expert == "335M" else 2.81)
    assert round(row["inference_overhead"] / 1e12, 2) == {4: 0.01, 8: 0.02, 16: 0.04, 32: 0.08}[experts]


def test_the_command_prints_the_papers_table() -> None:
    def plan(*words: str) -> Any:
        return CliRunner().invoke(app, ["experts", "plan", *words])

    shown = plan("smalltalk", "--paper")
    assert shown.stdout.splitlines()[-1].split() == ["1.3B", "32", "1770.65", "18.94", "2.81", "0.08"]
    assert json.loads(plan("smalltalk", "--paper", "--json").stdout) == table()
    for words in (["hdee", "--paper"], ["smalltalk", "--paper", "--quick"]):
        assert "--paper is smalltalk's table" in str(plan(*words).exception)


def shape(ffn: int) -> Shape:
    return Shape(d_model=768, layers=12, heads=12, ffn=ffn, vocab=128_002, context=1024, tie_embeddings=False)


def test_the_papers_sizes_and_steps_balance() -> None:
    small, medium, large = (non_embedding_parameters(shape(ffn)) for ffn in (2304, 3072, 3840))
    assert small + large == 2 * medium
    reference = Share(shape(3072), 400)
    sizes = {str(ffn): Share(shape(ffn), 400) for ffn in (2304, 3072, 3840)}
    assert check_budget("sizes", sizes, reference) == pytest.approx(1, abs=1e-12)
    steps = {str(t): Share(shape(3072), t) for t in (300, 400, 500)}
    assert check_budget("steps", steps, reference) == pytest.approx(1, abs=1e-12)
    with pytest.raises(ValueError, match=r"^steps: the budget does not balance: the experts cost 1\.083 times"):
        check_budget("steps", {**steps, "500": Share(shape(3072), 600)}, reference)


def test_bytes_of_a_round_of_scores() -> None:
    assert score_bytes(1_000_000, 32) == {"made": 2_000_000, "sent": 62_000_000, "received": 62_000_000}


def test_bytes_of_a_token_where_experts_stay_apart() -> None:
    """Of three: two scores of 4 bytes, or two distributions over 50 tokens; the own one stays where it is."""
    traffic = bytes_of([7, 7, 7], [9, 9, 9], vocab=50, serving=3)
    assert (traffic.between_experts, traffic.scoring_per_token, traffic.generating_per_token) == (0, 8, 400)
