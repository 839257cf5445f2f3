"""Sites on the map: distances, latencies of the right size, shared lines."""

import pytest

from isles.network.links import ACCESS, WORLD, WORLDWIDE, Site, connect, kilometres, latency

BY_NAME = {site.name: site for site in WORLD}


@pytest.mark.parametrize(
    ("one", "other", "wanted"),
    [
        ("London", "New York", 5570),
        ("Frankfurt", "Singapore", 10270),
        ("Tokyo", "Seoul", 1160),
        ("Sydney", "London", 17000),
        ("Sao Paulo", "Johannesburg", 7440),
    ],
)
def test_distances_are_those_of_an_atlas(one, other, wanted):
    assert kilometres(BY_NAME[one], BY_NAME[other]) == pytest.approx(wanted, rel=0.01)
    assert kilometres(BY_NAME[other], BY_NAME[one]) == kilometres(BY_NAME[one], BY_NAME[other])


@pytest.mark.parametrize(
    ("one", "other", "low", "high"),
    [("London", "New York", 70, 110), ("Frankfurt", "Singapore", 150, 200), ("Sydney", "London", 240, 310)],
)
def test_round_trips_are_of_the_size_that_ping_shows(one, other, low, high):
    """Milliseconds that one commonly sees between homes in these cities."""
    assert low <= 2e3 * latency(BY_NAME[one], BY_NAME[other]) <= high


def test_worldwide():
    assert len(WORLD) == len(BY_NAME) == 12
    assert WORLDWIDE.base_latency(0, 12) == ACCESS  # two homes in one city
    assert WORLDWIDE.base_latency(3, 4) == latency(WORLD[3], WORLD[4])
    assert WORLDWIDE.slowest_rate(12) == 20e6 and WORLDWIDE.rate(13) == WORLD[1].upload


def test_a_household_shares_its_link():
    home = Site(name="a", latitude=0, longitude=0, upload=10e6, download=100e6)
    far = Site(name="b", latitude=0, longitude=90, upload=1e9)
    made = connect([home, far], [2, 1])
    made.check(3)
    assert made.uplinks == (0, 0, 1) and made.slowest_rate(3) == 5e6
    assert made.base_latency(0, 1) < 1e-3 < made.base_latency(0, 2) == latency(home, far)


@pytest.mark.parametrize("key", ["latitude", "longitude", "upload", "download"])
def test_no_such_site(key):
    good = {"name": "a", "latitude": 1.0, "longitude": 1.0, "upload": 1.0, "download": 1.0}
    with pytest.raises(ValueError, match=key):
        Site(**{**good, key: -1000.0})
