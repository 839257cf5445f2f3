"""Legal orders of stages: known counts, brute force, and the words for what is wrong."""

import itertools

import pytest

from isles.network.routing.problem import PathRules, faults, legal_orders


def by_hand(order):
    """SkipPipe's rules once more, as the authors' code has them."""
    highest, swaps = 0, []
    for stage in order[1:]:
        if stage < highest:
            swaps.append(highest - stage)
        elif stage > highest + 4:
            return False
        highest = max(highest, stage)
    return all(swap <= 1 for swap in swaps) and len(swaps) <= 2


def test_counts():
    assert len(legal_orders(6, 4, PathRules())) == 22
    assert sum(1 for _ in itertools.permutations(range(1, 6), 3)) == 60
    assert legal_orders(4, 1, PathRules()) == [(0,)]
    assert legal_orders(3, 3, PathRules(swaps=0)) == [(0, 1, 2)]
    assert legal_orders(3, 2, PathRules(jump=1)) == [(0, 1)]


@pytest.mark.parametrize("stages", range(1, 8))
def test_all_of_them_are_found(stages):
    for length in range(1, stages + 1):
        everything = [(0, *rest) for rest in itertools.permutations(range(1, stages), length - 1)]
        expected = [order for order in everything if by_hand(order)]
        assert legal_orders(stages, length, PathRules()) == expected
        assert all(bool(faults(order, PathRules())) != by_hand(order) for order in everything)


@pytest.mark.parametrize(
    ("order", "reported"),
    [
        ((1, 2), "does not begin with stage 0"),
        ((), "does not begin with stage 0"),
        ((0, 2, 2), "runs stage 2 twice"),
        ((0, 6), "jumps from stage 0 to 6, at most 4 is allowed"),
        ((0, 3, 1), "swaps stages 2 apart, at most 1 is allowed"),
        ((0, 2, 1, 4, 3, 6, 5), "has 3 swaps of distance 3 in all, at most 2 of 2 are allowed"),
    ],
)
def test_faults_are_named(order, reported):
    assert reported in faults(order, PathRules())


def test_bad_rules():
    for bad in ({"swaps": -1}, {"jump": 0}, {"total": -2}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            PathRules(**bad)
