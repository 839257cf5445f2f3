"""Links: presets, what is refused, and what a message's latency depends on."""

import math

import numpy as np
import pytest

from isles.network.links import PRESETS, Links, links


@pytest.mark.parametrize("name", PRESETS)
def test_presets_fit_any_number_of_workers(name):
    assert links(name) is links(name)
    for workers in (1, 2, 100):
        links(name).check(workers)
        assert 0 < links(name).slowest_rate(workers) <= links(name).rate(0) and links(name).longest_latency(workers) < 1


def test_unknown_preset_names_the_nearest_and_all():
    with pytest.raises(ValueError, match="did you mean 'home-fibre'") as reported:
        links("home-fiber")
    assert all(name in str(reported.value) for name in PRESETS)
    with pytest.raises(ValueError, match="lan"):
        links("zzz")


def test_a_rate_and_a_latency_are_a_network():
    assert links("1.5 Mbit/s,40ms") == Links(bandwidth=1.5e6, latency=0.04)
    for slip, words in (
        ("fast, 40ms", "links = 'fast'"),
        ("40Mbit/s, soon", "links = 'soon'"),
        ("0bit/s, 1s", "above 0"),
        ("40Mbit/s, 25", "has no unit"),
    ):
        with pytest.raises(ValueError, match=words):
            links(slip)


def test_latency_forms_agree():
    matrix = [[0.0, 0.1, 0.2], [0.3, 0.0, 0.4], [0.5, 0.6, 0.0]]
    forms = [
        Links(bandwidth=1.0, latency=matrix),
        Links(bandwidth=1.0, latency=np.array(matrix)),
        Links(bandwidth=1.0, latency=lambda source, target: matrix[source][target]),
    ]
    for form in forms:
        form.check(3)
        assert [form.base_latency(s, t) for s in range(3) for t in range(3) if s != t] == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    assert Links(bandwidth=1.0, latency=0.7).base_latency(2, 0) == 0.7


def test_uplinks_and_rates():
    shared = Links(bandwidth=[10.0, 20.0], uplinks=[0, 0, 1])
    shared.check(3)
    assert shared.uplink_count(3) == 2
    assert [shared.rate(shared.uplink_of(rank)) for rank in range(3)] == [10.0, 10.0, 20.0]
    own = Links(bandwidth=5.0)
    assert own.uplink_count(3) == 3 and own.uplink_of(2) == 2 and own.rate(2) == 5.0
    assert Links(bandwidth=math.inf).rate(0) == math.inf


def test_downlinks_and_functions_of_the_link():
    made = Links(bandwidth=lambda line: 10.0 * (line + 1), downlink=[8.0, 100.0], uplinks=[0, 0, 1])
    made.check(3)
    assert [made.rate(made.uplink_of(rank)) for rank in range(3)] == [10.0, 10.0, 20.0]
    assert [made.down_rate(line) for line in range(2)] == [8.0, 100.0] and made.slowest_rate(3) == 4.0
    assert Links(bandwidth=1.0).down_rate(0) == math.inf


def test_a_downlink_is_narrow_where_the_others_can_fill_it():
    """What may come: 30 to line 0, from line 1 and between its two ranks; 10 to line 1."""
    for downlink, narrow in (([29.0, 10.0], [0]), ([30.0, 10.0], []), ([30.0, 9.0], [1])):
        assert Links(bandwidth=[10.0, 20.0], downlink=downlink, uplinks=[0, 0, 1]).narrow_downlinks(3) == narrow
    assert Links(bandwidth=math.inf, downlink=1e9).narrow_downlinks(3) == [0, 1, 2]
    assert Links(bandwidth=5.0, downlink=5.0).narrow_downlinks(2) == [] == Links(bandwidth=5.0).narrow_downlinks(9)


def test_links_do_not_follow_the_callers_list():
    rates = [1.0, 2.0]
    made = Links(bandwidth=rates)
    rates[0] = 100.0
    assert made.rate(0) == 1.0
    assert hash(made) == hash(Links(bandwidth=(1.0, 2.0)))


@pytest.mark.parametrize(
    ("fields", "workers", "word"),
    [
        ({"bandwidth": 0.0}, 2, "bandwidth"),
        ({"bandwidth": [1.0, -1.0]}, 2, "bandwidth"),
        ({"bandwidth": []}, 2, "bandwidth"),
        ({"bandwidth": [1.0]}, 2, "bandwidth has 1 values"),
        ({"bandwidth": 1.0, "downlink": -1.0}, 2, "downlink"),
        ({"bandwidth": 1.0, "downlink": [1.0]}, 2, "downlink has 1 values"),
        ({"bandwidth": lambda uplink: -1.0}, 2, "bandwidth must be above 0"),
        ({"bandwidth": 1.0, "latency": -0.1}, 2, "latency"),
        ({"bandwidth": 1.0, "latency": math.nan}, 2, "latency"),
        ({"bandwidth": 1.0, "latency": [[0.0, 1.0]]}, 2, "matrix of 2 x 2"),
        ({"bandwidth": 1.0, "latency": [[0.0, 1.0], [-1.0, 0.0]]}, 2, "from 1 to 0"),
        ({"bandwidth": 1.0, "latency": lambda s, t: math.inf}, 2, "from 0 to 1"),
        ({"bandwidth": 1.0, "jitter": -0.1}, 2, "jitter"),
        ({"bandwidth": 1.0, "uplinks": [0]}, 2, "uplinks names 1 ranks"),
        ({"bandwidth": 1.0, "uplinks": [0, 2]}, 2, "without gaps"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(fields, workers, word):
    with pytest.raises(ValueError, match=word):
        Links(**fields).check(workers)


def test_jitter_is_a_function_of_seed_pair_and_number():
    jittery = Links(bandwidth=1.0, latency=0.5, jitter=0.3)
    base = jittery.message_latency(0, 1, number=4, seed=9)
    assert base == jittery.message_latency(0, 1, number=4, seed=9)
    others = [(1, 0, 4, 9), (0, 2, 4, 9), (0, 1, 5, 9), (0, 1, 4, 8)]
    assert base not in [jittery.message_latency(s, t, number=n, seed=seed) for s, t, n, seed in others]
    assert Links(bandwidth=1.0, latency=0.5).message_latency(0, 1, number=4, seed=9) == 0.5


def test_a_link_for_each_ordered_pair():
    made = Links(bandwidth=[[0.0, 10.0, 20.0], [30.0, 0.0, 40.0], [50.0, 60.0, 0.0]], latency=0.5)
    made.check(3)
    assert made == Links(bandwidth=np.array([[0, 10, 20], [30, 0, 40], [50, 60, 0]]), latency=0.5)
    assert [made.link_rate(made.link_of(s, t)) for s in range(3) for t in range(3) if s != t] == [
        10,
        20,
        30,
        40,
        50,
        60,
    ]
    assert len({made.link_of(s, t) for s in range(3) for t in range(3)}) == made.link_count(3) == 9
    assert made.way_rate(2, 1) == 60 and made.slowest_rate(3) == 10 and not made.narrow_downlinks(3)
    one_each = Links(bandwidth=[1.0, 2.0], downlink=[4.0, 0.5])
    assert one_each.link_of(1, 0) == 1 and one_each.link_count(2) == 2 and one_each.pairs is None
    assert one_each.way_rate(0, 1) == 0.5 and one_each.way_rate(1, 0) == 2.0
    with pytest.raises(ValueError, match="bandwidth must be a matrix of 4 x 4 for 4 workers"):
        made.check(4)
    with pytest.raises(ValueError, match="from every worker to every other"):
        Links(bandwidth=[[0.0, 0.0], [1.0, 0.0]])
    for more in ({"uplinks": [0, 1]}, {"downlink": 3.0}):
        with pytest.raises(ValueError, match="leave uplinks and downlink out"):
            Links(bandwidth=[[0.0, 1.0], [1.0, 0.0]], **more)
