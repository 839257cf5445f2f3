"""IST on quadratics: closed forms against sums over all permutations, against each other, and against long runs."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from isles.papers.ist import (
    Quadratics,
    all_owners,
    homogeneous,
    neighbourhood,
    one_step,
    paths,
    seen_curvature,
    sketches,
    stationary_mean,
)

RATE = 0.1


def random_problem(workers: int, size: int, seed: int = 0) -> Quadratics:
    """Well-conditioned curvatures that differ between the workers."""
    draw = np.random.default_rng(seed)
    roots = draw.standard_normal((workers, size, size)) / np.sqrt(size)
    return Quadratics(
        curvatures=0.5 * roots @ roots.transpose(0, 2, 1) + np.eye(size), slopes=draw.standard_normal((workers, size))
    )


def expected_value(problem: Quadratics, x: np.ndarray, rate: float, spread: float) -> float:
    """E f(x+) after a step with whitened sketches from x, by the identity above. spread: E |g - E g|^2 by Lbar."""
    gradient, lost = problem.gradient(x), problem.optimum - stationary_mean(problem, "whitened")
    steep = gradient @ np.linalg.solve(problem.curvature, gradient)
    off = lost @ problem.curvature @ lost
    descent = -rate * (1 - rate / 2) * steep - rate * (1 - rate) * (gradient @ lost)
    return float(problem.value(x) + descent + rate**2 / 2 * (off + spread))


def unit_diagonal(size: int, seed: int = 1) -> np.ndarray:
    curvature = random_problem(1, size, seed).curvature
    scale = 1 / np.sqrt(np.diag(curvature))
    return curvature * scale[:, None] * scale


def mean_limit(problem: Quadratics, kind: str) -> np.ndarray:
    """Where the mean settles, by the average of a step over all permutations: a linear map, put together from a step at
    0 and at each unit vector.
    """
    diagonals = sketches(problem, all_owners(problem.size, problem.workers), kind)  # type: ignore[arg-type]

    def mean_step(x: np.ndarray) -> np.ndarray:
        return one_step(problem, np.broadcast_to(x, (len(diagonals), len(x))), diagonals, RATE, kind).mean(axis=0)  # type: ignore[arg-type]

    offset = mean_step(np.zeros(problem.size))
    matrix = np.array([mean_step(unit) - offset for unit in np.eye(problem.size)]).T
    return np.linalg.solve(np.eye(problem.size) - matrix, offset)


@pytest.mark.parametrize(("workers", "size"), [(1, 4), (2, 4), (4, 4), (2, 6), (3, 6)])
@pytest.mark.parametrize("kind", ["scaled", "masks"])
def test_the_stationary_mean_is_exact(workers: int, size: int, kind: str) -> None:
    """To 1e-10 where the expectation is the sum over all permutations; one worker finds the optimum."""
    problem = random_problem(workers, size)
    settled = stationary_mean(problem, kind)  # type: ignore[arg-type]
    np.testing.assert_allclose(mean_limit(problem, kind), settled, rtol=0, atol=1e-10)
    if workers == 1:
        np.testing.assert_allclose(settled, problem.optimum, rtol=0, atol=1e-12)
    if workers == size:
        own = np.diag(problem.curvature)
        factor = size if kind == "scaled" else 1
        np.testing.assert_allclose(settled, problem.slopes.mean(axis=0) / own / factor, rtol=0, atol=1e-12)


def test_a_long_run_settles_there() -> None:
    """40,000 rounds of IST with 3 workers and 12 coordinates, after 500 of burn-in: the mean to 0.02."""
    problem = random_problem(3, 12)
    after = list(islice(paths(problem, "masks", rate=RATE, rounds=1000, copies=80), 500, None))
    found = np.concatenate(after)
    assert len(found) == 40_000
    assert np.abs(found.mean(axis=0) - stationary_mean(problem, "masks")).max() < 0.02
    assert np.abs(found.mean(axis=0) - problem.optimum).max() > 0.05  # elsewhere than the optimum, and not by chance


def test_masks_without_curvature_between_coordinates_find_the_optimum() -> None:
    """Diagonal curvatures: what subnets do not see of each other is nothing."""
    plain = random_problem(2, 4)
    problem = Quadratics(curvatures=np.stack([np.diag(np.diag(own)) for own in plain.curvatures]), slopes=plain.slopes)
    np.testing.assert_allclose(stationary_mean(problem, "masks"), problem.optimum, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("workers", "size"), [(2, 4), (2, 6), (4, 4)])
def test_the_expected_curvature(workers: int, size: int) -> None:
    """E B = n (D + rho (Lbar - D)), summed over all permutations."""
    problem = random_problem(workers, size)
    diagonals = sketches(problem, all_owners(size, workers), "scaled")
    seen = np.einsum("pni,nij,pnj->ij", diagonals, problem.curvatures, diagonals) / workers / len(diagonals)
    np.testing.assert_allclose(seen, workers * seen_curvature(problem), rtol=0, atol=1e-10)


def test_whitened_sketches_see_the_identity() -> None:
    """B = I for every permutation, with different curvatures; the entry of L^(-1/2) that the paper prints gives
    something else.
    """
    problem = random_problem(4, 4)
    owners = all_owners(4, 4)
    diagonals = sketches(problem, owners, "whitened")
    seen = np.einsum("pni,nij,pnj->pij", diagonals, problem.curvatures, diagonals) / 4
    np.testing.assert_allclose(seen, np.broadcast_to(np.eye(4), seen.shape), rtol=0, atol=1e-12)
    values, vectors = np.linalg.eigh(problem.curvatures)
    roots = np.einsum("nik,nk,njk->nij", vectors, values**-0.5, vectors)
    printed = np.sqrt(4) * (diagonals > 0) * np.diagonal(roots, axis1=1, axis2=2)
    wrong = np.einsum("pni,nij,pnj->pij", printed, problem.curvatures, printed) / 4
    assert np.abs(np.diagonal(wrong, axis1=1, axis2=2) - 1).max() > 0.01


def test_every_realisation_on_a_unit_diagonal() -> None:
    """x^k = (1-gamma)^k x^0 + (1 - (1-gamma)^k) b / sqrt(n) for whatever permutations are drawn; and with b = 0,
    gamma = 1 solves in one step.
    """
    slope = np.array([1.0, -2.0, 0.5, 3.0])
    problem = homogeneous(unit_diagonal(4), slope, 4)
    x = np.broadcast_to(start := np.array([3.0, 1.0, -1.0, 2.0]), (24, 4))
    diagonals = sketches(problem, all_owners(4, 4), "whitened")
    for k in range(1, 6):
        diagonals = np.random.default_rng(k).permutation(diagonals)
        x = one_step(problem, x, diagonals, 0.3, "whitened")
        expected = 0.7**k * start + (1 - 0.7**k) * slope / 2
        np.testing.assert_allclose(x, np.broadcast_to(expected, x.shape), rtol=0, atol=1e-12)
    still = homogeneous(unit_diagonal(4), np.zeros(4), 4)
    np.testing.assert_allclose(one_step(still, x, diagonals, 1.0, "whitened"), 0, atol=1e-12)


@pytest.mark.parametrize("rate", [0.1, 0.5, 1.0])
def test_the_identity_of_one_step(rate: float) -> None:
    """E f(x+), summed over all permutations, is what the closed form says; so is E g."""
    problem = random_problem(4, 4, seed=3)
    x = np.array([1.0, -1.0, 0.5, 2.0])
    diagonals = sketches(problem, all_owners(4, 4), "whitened")
    after = one_step(problem, np.broadcast_to(x, (24, 4)), diagonals, rate, "whitened")
    steps = (x - after) / rate
    apart = steps - steps.mean(axis=0)
    spread = float(np.einsum("pi,ij,pj->p", apart, problem.curvature, apart).mean())
    assert problem.value(after).mean() == pytest.approx(expected_value(problem, x, rate, spread), abs=1e-12)
    lost = problem.optimum - stationary_mean(problem, "whitened")
    towards = np.linalg.solve(problem.curvature, problem.gradient(x))
    np.testing.assert_allclose(steps.mean(axis=0), towards + lost, rtol=0, atol=1e-12)


@pytest.mark.long
def test_the_neighbourhood_does_not_vanish_with_the_rate() -> None:
    """Theorem 2 holds in the long run, and its floor stays: small rates do not lead to the optimum."""
    problem = random_problem(4, 4, seed=3)
    settled = stationary_mean(problem, "whitened")
    steps = one_step(problem, np.broadcast_to(settled, (24, 4)), sketches(problem, all_owners(4, 4), "whitened"), 1.0,
                     "whitened") - settled  # fmt: skip
    spread = float(np.einsum("pi,ij,pj->p", steps, problem.curvature, steps).mean())
    gradient = problem.gradient(settled)
    floor = float(gradient @ np.linalg.solve(problem.curvature, gradient))
    for rate in (0.2, 0.02, 0.002):
        last = list(paths(problem, "whitened", rate=rate, rounds=round(20 / rate), copies=50))[-1]
        found = np.einsum("pi,ij,pj->p", g := problem.gradient(last), np.linalg.inv(problem.curvature), g).mean()
        assert 0.8 * floor < found < neighbourhood(problem, rate, 0.25, spread)
    with pytest.raises(ValueError, match=r"choose 0 < beta < 0\.5"):
        neighbourhood(problem, 0.9, 0.25, spread)


def test_identity_sketches_are_gradient_descent() -> None:
    """One worker holds all: the usual step."""
    problem = random_problem(1, 5)
    x = np.arange(5.0)
    ones = sketches(problem, np.zeros(5, dtype=int), "scaled")
    expected = x - RATE * problem.gradient(x)
    for kind in ("scaled", "masks"):
        np.testing.assert_allclose(one_step(problem, x, ones, RATE, kind), expected, rtol=0, atol=1e-12)  # type: ignore[arg-type]


def test_descent_is_not_monotone_where_the_condition_fails() -> None:
    """L = [[1, 1.9], [1.9, 4]] and one coordinate each: f may rise on average, and still the iterates go to x* = 0."""
    curvature = np.array([[1.0, 1.9], [1.9, 4.0]])
    problem = homogeneous(curvature, np.zeros(2), 2)
    own = 2 * np.diag(np.diag(curvature))
    values, vectors = np.linalg.eigh((curvature @ own + own @ curvature) / 2)
    assert values[0] < 0
    diagonals = sketches(problem, all_owners(2, 2), "scaled")
    x = np.broadcast_to(vectors[:, 0], (2, 2))
    heights = []
    for _ in range(400):
        x = one_step(problem, x, diagonals, 0.01, "scaled")
        heights.append(float(problem.value(x).mean()))
    assert max(heights) > 1.3 * float(problem.value(vectors[:, 0])) and heights[-1] < 1e-3


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: homogeneous(np.eye(4), np.ones(4), 3), "4 coordinates for 3 workers"),
        (lambda: homogeneous(-np.eye(4), np.ones(4), 2), "not positive definite"),
        (lambda: Quadratics(curvatures=np.zeros((2, 3, 3)), slopes=np.ones((2, 4))), r"give \(2, 4, 4\)"),
        (lambda: sketches(random_problem(2, 4), all_owners(4, 2), "whitened"), "as many workers as coordinates"),
    ],
)
def test_mistakes(make: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()  # type: ignore[operator]
