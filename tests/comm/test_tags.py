"""Tags, traffic and errors: what addresses, counts and names are made of."""

from __future__ import annotations

import json
import pickle
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isles.comm.collectives.mean import phases
from isles.comm.errors import CommError, DeadlinePassed, Diverged, Elsewhere, PeerLost, WorkerFailed
from isles.comm.tags import CHANNELS, MAX_FRAGMENTS, MAX_MICROBATCHES, MAX_PHASES, Tag, pack, rounds_apart
from isles.comm.traffic import ChannelTraffic, Traffic

AROUND = [
    (1, 12, 2**21),
    (1, 100, 2**18),
    (1, 484, 2**16),
    (32, 12, 2**16),
    (32, 100, 2**13),
    (32, 484, 2**11),
    (256, 12, 2**13),
    (256, 484, 2**8),
]
"""(fragments, phases, rounds after which an address comes again)"""
numbers = st.integers
rounds = st.builds(
    Tag,
    st.sampled_from([channel for channel in CHANNELS if channel != "pipeline"]),
    numbers(0, 255),
    numbers(0, MAX_FRAGMENTS - 2),
    numbers(0, MAX_PHASES - 1),
    st.just(0),
    st.just(0),
)
microbatches = st.builds(
    lambda place, number, phase: Tag(place[0], number, place[1], phase),
    st.sampled_from([("pipeline", 0), ("eval", MAX_FRAGMENTS - 1)]),
    numbers(0, MAX_MICROBATCHES - 1),
    numbers(0, 63),
)
tags = rounds | microbatches


@given(tags, tags)
def test_two_tags_never_share_a_number(one: Tag, other: Tag) -> None:
    """pack is injective over fields in range, and fits the wire's 31 bits."""
    assert (pack(one) == pack(other)) == (one == other)
    assert 0 <= pack(one) < 2**31


@pytest.mark.parametrize(("fragments", "phases", "apart"), AROUND)
def test_corners_are_distinct(fragments: int, phases: int, apart: int) -> None:
    """The edges of every field at once, among those of all widths, until the rounds come again."""
    assert rounds_apart(fragments, phases) == apart
    channels = [channel for channel in CHANNELS if channel != "pipeline"]
    edges = set(product(channels, (0, 1, apart - 1), {0, fragments - 1}, {0, 1, phases - 1}))
    edges |= set(product(channels, (0, 1, 255), (254,), (0, 511)))
    edges |= set(product(["pipeline"], (0, 1, MAX_MICROBATCHES - 1), (0,), (0, 63)))
    edges |= set(product(["eval"], (0, 1, MAX_MICROBATCHES - 1), (255,), (0, 63)))
    edges = {edge for edge in edges if edge[2] < 255 or (edge[0] == "eval" and edge[3] < 64)}
    assert len({pack(Tag(*edge)) for edge in edges}) == len(edges)
    last = min(fragments, 255) - 1, phases - 1
    assert pack(Tag("outer", 5, *last)) == pack(Tag("outer", 5 + apart, *last))
    assert 0 <= pack(Tag("control", -1, 0, 511)) < 2**31


@pytest.mark.parametrize(
    ("elements", "apart"), [(1, 2**21), (4 << 20, 2**21), (3 << 22, 2**18), (1 << 28, 2**16), (1 << 40, 2**16)]
)
def test_small_models_have_the_most_rounds(elements: int, apart: int) -> None:
    """4 Mi parameters are one segment, two shots each, of four parts, and a header; there are 60 segments at most."""
    assert rounds_apart(1, phases(elements)) == apart


@pytest.mark.parametrize(
    "bad",
    [
        Tag("pipeline", MAX_MICROBATCHES),
        Tag("pipeline", -1),
        Tag("pipeline", 0, 1),
        Tag("pipeline", 0, 0, 64),
        Tag("eval", 0, 255, 64),
        Tag("outer", 0, view=1),
    ],
)
def test_what_the_wire_has_no_room_for_is_refused(bad: Tag) -> None:
    with pytest.raises(ValueError, match=r"microbatches|does not change"):
        pack(bad)


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
        Elsewhere(2, 3, 4),
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
