"""A network of one's own: both forms of the file, and one clear line for every slip."""

import pytest

from isles.network.links import Site, latency, links
from isles.network.units import parse_rate, parse_seconds

LINES = """
bandwidth = ["40Mbit/s", "1Mbit/s"]
downlink = "0.25 Gbps"
latency = [[0, "25ms", "30ms"], ["25ms", 0, "30ms"], ["30ms", "0.03s", 0]]
jitter = 0.5
uplinks = [0, 0, 1]
"""
SITES = """
jitter = 0.4
[[site]]
name = "Zurich"
latitude = 47.4
longitude = 8.5
upload = "100Mbit/s"
workers = 2
[[site]]
name = "Quito"
latitude = -0.2
longitude = -78.5
upload = "10Mbit/s"
download = "50Mbit/s"
"""


@pytest.fixture
def written(tmp_path):
    def write(text):
        (tmp_path / "my.toml").write_text(text)
        return str(tmp_path / "my.toml")

    return write


def test_links_of_pairs_and_uplinks(written):
    made = links(written(LINES))
    made.check(3)
    assert made.bandwidth == (40e6, 1e6) and made.downlink == 250e6 and made.uplinks == (0, 0, 1)
    assert made.base_latency(0, 1) == 0.025 and made.base_latency(2, 0) == 0.03 and made.jitter == 0.5


def test_sites(written):
    made = links(written(SITES))
    made.check(3)
    zurich = Site(name="", latitude=47.4, longitude=8.5, upload=1)
    quito = Site(name="", latitude=-0.2, longitude=-78.5, upload=1)
    assert made.bandwidth == (100e6, 10e6) and made.uplinks == (0, 0, 1) and made.jitter == 0.4
    assert made.base_latency(1, 2) == latency(zurich, quito)
    assert made.down_rate(1) == 50e6 and made.down_rate(0) == float("inf")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("bandwidth = -1", "bandwidth = -1"),
        ("bandwidth = 0", "above 0 bits per second, such as 200Mbit/s"),
        ('bandwidth = "40MB/s"', "that is 320Mbit/s"),
        ("bandwidth = []", "bandwidth must be above 0"),
        ("bandwidth = 500", "bandwidth = 500.0: has no unit: write 500Mbit/s or 500bit/s"),
        ('bandwidth = "1Mbit/s"\nlatency = 60', "latency = 60.0: has no unit: write 60ms or 60s"),
        ("bandwidth = true", "links.bandwidth"),
        ("bandwith = 1e6", "did you mean 'links.bandwidth'"),
        ("latency = 0.1", "links.bandwidth is missing"),
        ('bandwidth = "1Mbit/s"\nlatency = "-3ms"', "latency = -3ms"),
        ('bandwidth = "1Mbit/s"\nlatency = "3 Mbit/s"', "such as 40ms"),
        ("bandwidth = '1Mbit/s'\njitter = -1", "jitter"),
        ("bandwidth = '1Mbit/s'\nuplinks = [0.5]", "links.uplinks.0"),
        ("bandwidth = ", "not valid TOML"),
        (SITES.replace("47.4", "147.4"), "latitude = 147.4"),
        (SITES.replace('"100Mbit/s"', "-5"), "site 1: upload = -5"),
        (SITES.replace("workers = 2", "workers = 0"), "site 1: workers = 0"),
        (SITES.replace("latitude", "lattitude"), "did you mean 'site 1.latitude'"),
        (SITES.replace('name = "Quito"', ""), "site 2.name is missing"),
        ("latency = '1s'\n" + SITES, "links.latency does not go with [[site]]"),
        (SITES.replace("0.4", '"much"'), "links.jitter"),
        ("site = 3", "write [[site]]"),
    ],
)
def test_a_slip_is_named(written, text, words):
    path = written(text)
    with pytest.raises(ValueError) as reported:
        links(path)
    message = str(reported.value)
    assert message.startswith(f"links = {path}: ") and words in message and "\n" not in message


def test_no_file():
    with pytest.raises(ValueError, match=r"links = absent.toml: cannot be read .* name a TOML file"):
        links("absent.toml")


def test_amounts():
    for text, value in {
        "200Mbit/s": 2e8,
        "1.5 Gbps": 1.5e9,
        "64kbit/s": 64e3,
        "3bits/s": 3,
        "1e6bit/s": 1e6,
    }.items():
        assert parse_rate("x", text) == value
    for text, value in {"40ms": 0.04, "2 s": 2.0, "150us": 150e-6, "0": 0.0}.items():
        assert parse_seconds("x", text) == pytest.approx(value)
    for text in ("", "fast", "1..2Mbit/s", "Mbit/s", "nan", "1e6", "500", "inf", "infMbit/s", 5e8):
        with pytest.raises(ValueError, match=r"^x = "):
            parse_rate("x", text)


def test_a_link_for_each_pair(tmp_path):
    path = tmp_path / "links.toml"
    path.write_text(
        'bandwidth = [["0", "80Mbit/s", "20Mbit/s"], ["8e7bit/s", "0", "40Mbit/s"], ["10Mbit/s", "40Mbit/s", "0"]]\n'
        'latency = [[0, "40ms", "90ms"], ["40ms", 0, "70ms"], ["90ms", "70ms", 0]]\n'
    )
    made = links(str(path))
    made.check(3)
    assert [made.way_rate(s, t) for s in range(3) for t in range(3) if s != t] == [8e7, 2e7, 8e7, 4e7, 1e7, 4e7]
    path.write_text('bandwidth = [["0", "80Mbit"], ["1Mbit/s", "0"]]\n')
    with pytest.raises(ValueError, match=r"links = .*: bandwidth = '80Mbit': write a number and a unit"):
        links(str(path))
    path.write_text("bandwidth = [['0', '1Mbit/s'], ['1Mbit/s', '0']]\ndownlink = '1Mbit/s'\n")
    with pytest.raises(ValueError, match="leave uplinks and downlink out"):
        links(str(path))
