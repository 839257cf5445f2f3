"""Links files that are measured pair by pair."""

from __future__ import annotations

from pathlib import Path

import pytest

from isles.network.links import read_links
from isles.network.measured_links import refuse_file, write_pair
from isles.network.routing.plan import delays_of


def test_pairs_make_a_network(tmp_path: Path) -> None:
    """Three nodes from three measurements; without the last the file is no network yet."""
    path = str(tmp_path / "links.toml")
    assert write_pair(path, 0, 1, out=80e6, back=20e6, latency=0.04) == []
    assert read_links(path).way_rate(1, 0) == 20e6
    assert write_pair(path, 2, 0, out=5e6, back=6e6, latency=0.1) == [(1, 2)]
    with pytest.raises(ValueError, match="bandwidth") as refusal:
        read_links(path)
    assert "\n" not in str(refusal.value)
    assert write_pair(path, 1, 2, out=1e6, back=2e6, latency=0.001) == []
    found = read_links(path)
    rates = [[found.way_rate(u, v) for v in range(3) if v != u] for u in range(3)]
    assert rates == [[80e6, 6e6], [20e6, 1e6], [5e6, 2e6]]
    assert delays_of(found, 3, 1e6)[2][0] == pytest.approx(0.1 + 8 / 5)


def test_what_was_there_stays(tmp_path: Path) -> None:
    path = tmp_path / "links.toml"
    path.write_text('bandwidth = [["0", "1Gbit/s"], ["2Gbit/s", 0]]\nlatency = "7ms"\njitter = 0.5\n')
    write_pair(str(path), 0, 2, out=3e6, back=4e6, latency=0.03)
    write_pair(str(path), 1, 2, out=5e6, back=6e6, latency=0.02)
    found = read_links(str(path))
    assert (found.way_rate(0, 1), found.way_rate(1, 0), found.jitter) == (1e9, 2e9, 0.5)
    assert [found.base_latency(0, 1), found.base_latency(2, 0)] == [0.007, 0.03]
    write_pair(str(path), 0, 1, out=9e6, back=8e6, latency=0.01)
    again = read_links(str(path))
    assert (again.way_rate(0, 1), again.way_rate(1, 0), again.base_latency(1, 0)) == (9e6, 8e6, 0.01)
    assert again.way_rate(2, 1) == 6e6


def test_a_folder_that_is_not_there_is_reported_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no folder"):
        refuse_file(str(tmp_path / "nowhere" / "links.toml"))


@pytest.mark.parametrize(
    "text",
    [
        'bandwidth = "40Mbit/s"',
        'bandwidth = [["0", "1Mbit/s"]]',
        'bandwidth = [["0", "1Mbit/s"], ["1Mbit/s", "0"]]\nuplinks = [0, 1]',
        'bandwidth = [["0", "1Mbit/s"], ["1Mbit/s", "0"]]\nlatency = [[0]]',
        "[[site]]\nname = 'Zurich'",
    ],
)
def test_other_networks_are_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "links.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"links\.toml: has no link of its own for each pair") as refusal:
        write_pair(str(path), 0, 1, out=1.0, back=1.0, latency=0.1)
    assert "\n" not in str(refusal.value) and path.read_text() == text
