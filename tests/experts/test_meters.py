"""What experts cost: the papers' numbers and the budget rule."""

from __future__ import annotations

import pytest

from isles.experts.meters import PaperModel, PaperRun, Share, check_budget, score_bytes
from isles.models import Shape, non_embedding_parameters

ROUTER = PaperModel(hidden=96, layers=12, ffn=384, vocab=32_000)
SMALL = PaperModel(hidden=1024, layers=24, ffn=4096, vocab=32_000)
LARGE = PaperModel(hidden=2048, layers=24, ffn=8192, vocab=32_000)


@pytest.mark.parametrize(
    ("expert", "steps", "experts", "training", "overhead"),
    [
        (SMALL, 256_000, 4, 31.02, 0.22),
        (SMALL, 256_000, 8, 62.03, 0.75),
        (SMALL, 256_000, 16, 124.06, 2.71),
        (SMALL, 256_000, 32, 248.12, 10.28),
        (LARGE, 512_000, 4, 221.33, 0.36),
        (LARGE, 512_000, 16, 885.32, 4.87),
        (LARGE, 512_000, 32, 1770.65, 18.94),
    ],
)
def test_table_3_of_smalltalk(expert: PaperModel, steps: int, experts: int, training: float, overhead: float) -> None:
    run = PaperRun(
        experts=experts,
        expert=expert,
        steps=steps,
        batch=128,
        router=ROUTER,
        router_steps=128_000,
        router_batch=32,
        length=1024,
        prefix=256,
    )
    assert round(run.training() / 1e19, 2) == pytest.approx(training, abs=0.011)
    assert round(sum(run.overhead(router_length=1024).values()) / 1e19, 2) == overhead
    serving, routing = run.inference()
    assert round(serving / 1e12, 2) == (0.79 if expert is SMALL else 2.81)
    assert round(routing / 1e12, 2) == {4: 0.01, 8: 0.02, 16: 0.04, 32: 0.08}[experts]


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
