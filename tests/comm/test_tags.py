"""Tags, traffic and errors: what addresses, counts and names are made of."""

from __future__ import annotations

import json
import pickle
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isles.comm.errors import CommError, DeadlinePassed, Diverged, PeerLost, WorkerFailed
from isles.comm.tags import CHANNELS, MAX_FRAGMENTS, MAX_PHASES, Tag, pack
from isles.comm.traffic import ChannelTraffic, Traffic

ROUNDS = 2048
tags = st.builds(
    Tag,
    st.sampled_from(CHANNELS),
    st.integers(0, ROUNDS - 1),
    st.integers(0, MAX_FRAGMENTS - 1),
    st.integers(0, MAX_PHASES - 1),
)


@given(tags, tags)
def test_two_tags_never_share_a_number(one: Tag, other: Tag) -> None:
    """pack is injective over fields in range, and fits the wire's 31 bits."""
    assert (pack(one) == pack(other)) == (one == other)
    assert 0 <= pack(one) < 2**31


def test_corners_are_distinct() -> None:
    """The edges of every field at once."""
    edges = list(product(CHANNELS, (0, 1, ROUNDS - 1), (0, 1, MAX_FRAGMENTS - 1), (0, 1, MAX_PHASES - 1)))
    assert len({pack(Tag(*edge)) for edge in edges}) == len(edges)
    assert pack(Tag("outer", 5)) == pack(Tag("outer", 5 + ROUNDS)), "rounds repeat after 2048"
    assert 0 <= pack(Tag("control", -1, 0, 511)) < 2**31


@pytest.mark.parametrize("bad", [(-1, 0), (MAX_FRAGMENTS, 0), (0, -1), (0, MAX_PHASES)])
def test_fields_out_of_range_are_refused(bad: tuple[int, int]) -> None:
    """Rather than running into a neighbouring field."""
    with pytest.raises(ValueError, match="fragment must be below"):
        pack(Tag("outer", 0, *bad))


def test_an_unknown_channel_is_refused() -> None:
    with pytest.raises(ValueError):
        pack(Tag("elsewhere", 0))  # type: ignore[arg-type]


def test_traffic_adds_up_and_survives_a_checkpoint() -> None:
    """Totals by channel and direction; the state is JSON and is restored in place, to the number."""
    traffic = Traffic()
    traffic.sent("outer", 10)
    traffic.sent("outer", 5)
    traffic.received("eval", 7)
    traffic["control"].blocked_seconds = 0.1 + 0.2
    assert traffic["outer"] == ChannelTraffic(bytes_sent=15, messages_sent=2)
    assert traffic.total("bytes_sent") == 15 and traffic.total("bytes_received", "eval", "outer") == 7
    assert traffic.total("messages_received", "outer") == 0

    other = Traffic()
    held = other["outer"]  # somebody's reference from before the load
    other.load_state_dict(json.loads(json.dumps(traffic.state_dict())))
    assert other == traffic and held.bytes_sent == 15


@pytest.mark.parametrize(
    "error",
    [
        PeerLost(3, "connection reset"),
        DeadlinePassed(2, "outer", 1.5),
        Diverged(1, 40, "anchor hash"),
        WorkerFailed(0, "exit code 3"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_travel(error: CommError) -> None:
    """A worker's error is rebuilt in the launcher with its text and its fields."""
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error) and str(back) == str(error) and vars(back) == vars(error)
    assert isinstance(back, CommError)


def test_errors_name_the_peer() -> None:
    assert "worker 3" in str(PeerLost(3)) and "worker 2" in str(DeadlinePassed(2, "outer", 1.5))
    assert "1.5 s" in str(DeadlinePassed(2, "outer", 1.5)) and "'outer'" in str(DeadlinePassed(2, "outer", 1.5))
    for nobody in (PeerLost(-1), DeadlinePassed(-1, "control", 1.0)):  # who it was is not known
        assert "-1" not in str(nobody)
