"""The compute and communication model: limits, invariances, equivalences, closed forms."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from isles.papers.eager import LayeredJob, bandwidth_for, data_parallel, diloco, streaming, utilisation

JOB = LayeredJob(parameters=1e9, layers=24, step_seconds=0.1)
METHODS = {
    "dp": data_parallel(24),
    "diloco": diloco(24, 20),
    "streaming": streaming(24, 24),
    "inner": streaming(24, 24, bits=4, overlap=1),
    "outer": streaming(24, 24, bits=4, overlap=24),
    "eager": diloco(24, 20, overlap=20),
}
RATES = np.logspace(7, 13, 60)


def bound(name):
    """The most that any overlap can reach in the long run: the link must carry the whole model once a period."""
    exchanges = METHODS[name]
    bits = JOB.parameters * exchanges.bits
    return np.minimum(1.0, RATES * exchanges.period * JOB.step_seconds / bits)


@pytest.mark.parametrize("steps", [None, 50])
@pytest.mark.parametrize("name", METHODS)
def test_limits_and_order(name, steps):
    share = utilisation(JOB, METHODS[name], RATES, steps=steps)
    assert (np.diff(share) >= -1e-12).all()
    assert share[0] < (0.2 if steps is None else 1) and share[-1] > 0.99 and (share <= 1 + 1e-12).all()
    assert utilisation(JOB, METHODS[name], np.inf, steps=steps) == pytest.approx(1, abs=1e-12)
    if steps is None:
        assert (share <= bound(name) + 1e-9).all()


def test_more_overlap_never_hurts():
    shares = [utilisation(JOB, streaming(24, 24, overlap=tau), RATES) for tau in (0, 1, 2, 5, 24)]
    assert all((after >= before - 1e-9).all() for before, after in pairwise(shares))


@pytest.mark.parametrize("name", METHODS)
def test_scale(name):
    """Sixteen times the model over sixteen times the rate in the same time: the same bits."""
    larger = LayeredJob(parameters=16e9, layers=24, step_seconds=0.1)
    slower = LayeredJob(parameters=1e9, layers=24, step_seconds=0.4)
    first = utilisation(JOB, METHODS[name], RATES)
    assert (first == utilisation(larger, METHODS[name], 16 * RATES)).all()
    assert (first == utilisation(slower, METHODS[name], RATES / 4)).all()


def test_methods_meet_where_they_are_the_same():
    assert diloco(24, 1) == data_parallel(24)
    assert streaming(24, 20, per_fragment=24) == diloco(24, 20)
    four = replace(METHODS["streaming"], bits=4)
    assert (utilisation(JOB, four, RATES) == utilisation(JOB, METHODS["streaming"], 4 * RATES)).all()


def test_every_layer_is_exchanged_once_a_period():
    for layers, per_fragment in [(24, 3), (61, 3), (5, 5)]:
        made = streaming(layers, 100, per_fragment=per_fragment)
        sent = [layer for step in range(made.period) for layer in made.after(step)]
        assert sorted(sent) == list(range(layers))


def test_closed_forms():
    """Section 3 of the specification; r: steps that the link needs for the model."""
    rates = np.logspace(10, 11.8, 40)
    r, v, layers = JOB.parameters * 16 / (rates * JOB.step_seconds), 1 / 71, 24
    step = np.maximum(layers * v + 2 * v + r, 1 + r / layers + np.maximum(0, r / layers - v))
    assert np.abs(utilisation(JOB, data_parallel(24), rates) - 1 / step).max() < 0.002
    share = utilisation(JOB, diloco(24, 100), rates / 50, steps=20_000)
    long = utilisation(JOB, diloco(24, 100), rates / 50)
    r = 50 * r
    step = np.maximum(layers * v + 2 * v + r, 1 + r / layers + np.maximum(0, r / layers - v))
    assert np.abs(long - 100 / (99 + step)).max() < 1e-4 and np.abs(long - share).max() < 1e-3


def test_overlap_of_a_whole_round_reaches_the_bound():
    share = utilisation(JOB, METHODS["outer"], RATES)
    assert np.allclose(share, bound("outer"), rtol=1e-6)


@pytest.mark.parametrize("name", METHODS)
def test_thresholds_are_exact(name):
    targets = (0.3, 0.5, 0.9, 0.99)
    need = bandwidth_for(targets, JOB, METHODS[name])
    assert (utilisation(JOB, METHODS[name], need * (1 + 2e-6)) >= targets).all()
    assert (utilisation(JOB, METHODS[name], need * (1 - 1e-5)) < targets).all()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: utilisation(JOB, METHODS["dp"], [1e9, -1.0]), "bandwidth must be above 0"),
        (lambda: utilisation(JOB, METHODS["dp"], 1e9, steps=0), "steps = 0"),
        (lambda: LayeredJob(parameters=-1, layers=2, step_seconds=1), "parameters"),
        (lambda: LayeredJob(parameters=1, layers=0, step_seconds=1), "layers"),
        (lambda: LayeredJob(parameters=1, layers=1, step_seconds=0), "step_seconds"),
        (lambda: diloco(24, 0), "every = 0"),
        (lambda: streaming(24, 100, per_fragment=25), "choose 1 to 24"),
        (lambda: streaming(24, 100, overlap=-1), "overlap"),
        (lambda: data_parallel(24, bits=0), "bits"),
        (lambda: bandwidth_for([1.0], JOB, METHODS["dp"]), "between 0 and 1"),
    ],
)
def test_what_makes_no_sense_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()
