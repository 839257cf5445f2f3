"""Balanced assignment: exact capacities, the paper's order, ties, and what is kept on the disk."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from isles.experts.routing import Assignment, assign, capacities, purity


def scores(sequences: int, experts: int, seed: int = 0) -> np.ndarray:
    return -np.random.default_rng(seed).random((sequences, experts))


def total(scores_NE: np.ndarray, chosen_N: np.ndarray) -> float:
    return float(np.take_along_axis(scores_NE, chosen_N[:, None], 1).sum())


@pytest.mark.parametrize("rule", ["greedy", "sequential", "optimal"])
@pytest.mark.parametrize(("sequences", "experts"), [(12, 4), (14, 4), (3, 5), (7, 1)])
def test_every_expert_takes_exactly_its_capacity(rule: str, sequences: int, experts: int) -> None:
    chosen = assign(scores(sequences, experts), rule)  # type: ignore[arg-type]
    assert np.bincount(chosen, minlength=experts).tolist() == capacities(sequences, experts).tolist()
    assert capacities(14, 4).tolist() == [4, 4, 3, 3]


def test_the_most_confident_sequence_chooses_first() -> None:
    # The last row wants expert 0 and nothing else; in the order of the rows it comes too late.
    table = np.array([[-2.0, -2.1, -9.0], [-3.0, -9.0, -3.1], [-1.0, -9.0, -9.0]])
    assert assign(table, "sequential").tolist() == [0, 2, 1]
    assert assign(table).tolist() == [1, 2, 0]
    assert total(table, assign(table)) > total(table, assign(table, "sequential"))


def test_greedy_lies_between_sequential_mistakes_and_the_optimum() -> None:
    for seed in range(10):
        table = scores(6, 3, seed)
        seats = [0, 0, 1, 1, 2, 2]
        best = max(total(table, np.array(order)) for order in set(permutations(seats)))
        assert total(table, assign(table)) <= best + 1e-12
        assert np.isclose(total(table, assign(table, "optimal")), best)
        assert total(table, assign(table, "unbalanced")) >= best - 1e-12


def test_ties_go_to_the_lower_expert_and_the_earlier_sequence() -> None:
    assert assign(np.zeros((4, 2))).tolist() == [0, 0, 1, 1]
    assert assign(np.zeros((4, 2)), "unbalanced").tolist() == [0, 0, 0, 0]


def test_the_key_of_the_order_is_the_raw_score() -> None:
    table = np.array([[-1.0, -5.0], [-2.0, -8.0]])
    assert assign(table).tolist() == [0, 1]
    shifted = table + np.array([[-3.0], [0.0]])  # the first row's wishes are the same, but it now comes second
    assert assign(shifted).tolist() == [1, 0]


def test_scores_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="lower its learning rate"):
        assign(np.array([[0.0, np.nan]]))
    with pytest.raises(ValueError, match="assignment = 'best'"):
        assign(np.zeros((2, 2)), "best")  # type: ignore[arg-type]


def test_an_assignment_travels_as_a_file(tmp_path: Path) -> None:
    made = Assignment(assign(scores(10, 3)), 3)
    made.save(tmp_path / "assignment.npy")
    back = Assignment.load(tmp_path / "assignment.npy")
    assert np.array_equal(back.expert_of, made.expert_of)
    assert back.sha256 == made.sha256 and back.loads == [4, 3, 3]
    assert sorted(np.concatenate([back.rows(e) for e in range(3)]).tolist()) == list(range(10))
    assert (tmp_path / "assignment.npy").stat().st_size < 128 + 10 + 64  # a byte a sequence behind NumPy's header
    np.save(tmp_path / "assignment.npy", np.zeros(10, dtype=np.uint8))
    with pytest.raises(ValueError, match="damaged"):
        Assignment.load(tmp_path / "assignment.npy")
    with pytest.raises(ValueError, match="no assignment can be read"):
        Assignment.load(tmp_path / "other.npy")


def test_purity() -> None:
    label = np.array([0, 0, 1, 1])
    assert purity(np.array([1, 1, 0, 0]), label) == 1.0
    assert purity(np.array([0, 1, 0, 1]), label) == 0.5
