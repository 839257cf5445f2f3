"""Messages go through JSON unchanged, and what is none is refused in one line."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from isles.membership import messages
from isles.membership.messages import (
    Ack,
    Admitted,
    Beat,
    BeatReply,
    Done,
    Load,
    PeerReport,
    Proposal,
    Refusal,
    SampleRange,
    View,
)
from isles.membership.round_commit import RoundDecision

VIEW = View(3, 17, (0, 4, 9), (8, 8, 3), 120, (SampleRange(1, 2, 5, 8), SampleRange(2, 0, 0, 3)))
PROPOSAL = Proposal(4, 3, 21, (0, 4), (9,))
BEAT = Beat(7, 0, 3, (5, 6), ((4, 6), (9, 2)), 0.25)


@pytest.mark.parametrize(
    "message",
    [
        VIEW,
        PROPOSAL,
        BEAT,
        Ack(4, True, BEAT),
        BeatReply(7, 4, 3, 9, (VIEW,), PROPOSAL, 1),
        BeatReply(7, 4, -1, 9, (), None, 0),
        Admitted(3),
        Load(1, -1),
        Done(3, 1, 4_000_000_000),
        PeerReport(3, 0, 9, "refused", "NaN"),
        Refusal("no"),
        RoundDecision(5, "land", 1, (0, 4), 3),
    ],
)
def test_there_and_back(message: object) -> None:
    assert messages.decode(messages.encode(message)) == message


def beat(**values: object) -> dict[str, object]:
    return {**messages.plain(BEAT), **values}


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        "beat",
        {},
        {"kind": 3},
        {"kind": "exec"},
        {"kind": "__class__"},
        {"kind": "ack", "number": 1},
        beat(round=True),
        beat(round="7"),
        beat(round=1.5),
        beat(round=10**30),
        beat(round=None),
        beat(skipped=5),
        beat(skipped={"0": 1}),
        beat(skipped=[[1]]),
        beat(skipped=["a"] * 10_000),
        beat(seen=[[1]]),
        beat(seen=[[1, 2, 3]]),
        beat(seconds=10**400),
        beat(seconds=True),
        {"kind": "refusal", "reason": "\x1b[2J"},
        {"kind": "refusal", "reason": "one\ntwo"},
        {"kind": "refusal", "reason": "x" * 5000},
        {"kind": "accusation", "round": 1, "attempt": 0, "member": 1, "charge": "ugly", "reason": ""},
        {"kind": "ack", "number": 1, "promised": 1, "beat": messages.plain(BEAT)},
        {"kind": "ack", "number": 1, "promised": True, "beat": None},
        {**messages.plain(VIEW), "backlog": [[1, 2, 3]]},
        {**messages.plain(VIEW), "backlog": [{"view": 1}]},
    ],
)
def test_what_is_no_message_is_one_line(value: object) -> None:
    with pytest.raises(ValueError) as refused:
        messages.decode(json.dumps(value).encode())
    text = str(refused.value)
    assert "\n" not in text and "\x1b" not in text and len(text) < 200


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"{",
        b"[" * 60_000,
        b'{"a":' * 10_000,
        b'{"kind":"beat","round":NaN}',
        b"x" * (64 << 10) + b"x",
    ],
)
def test_bytes_that_are_no_message(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"^a message|^Beat"):
        messages.decode(data)


def test_no_list_is_longer_than_any_that_is_said() -> None:
    longest = [0] * (1 << 16)
    assert len(messages.from_plain(beat(skipped=longest)).skipped) == 1 << 16
    with pytest.raises(ValueError, match=r"^Beat\.skipped: "):
        messages.from_plain(beat(skipped=[*longest, 0]))


def test_a_worker_may_send_only_what_workers_send() -> None:
    with pytest.raises(ValueError, match="unknown kind"):
        messages.decode(messages.encode(VIEW), {"beat": Beat})


def test_another_minor_version_has_more_fields_or_fewer() -> None:
    """Also in a message that is part of another one."""
    ack = messages.plain(Ack(4, True, BEAT)) | {"since": 3}
    ack["beat"] = {key: part for key, part in messages.plain(BEAT).items() if key != "seconds"} | {"more": [1]}
    assert messages.from_plain(ack) == Ack(4, True, replace(BEAT, seconds=0.0))


@pytest.mark.parametrize(
    ("lighthouse", "member", "fits"),
    [
        ((0, 2), (0, 2), True),
        ((0, 3), (0, 2), True),
        ((0, 2), (0, 3), False),
        ((0, 4), (0, 2), False),
        ((1, 0), (0, 9), False),
        ((0, 2), (), False),
        ((0, 2), (0,), False),
        ((), (), False),
    ],
)
def test_a_lighthouse_takes_its_own_and_the_former_minor_version(
    lighthouse: tuple[int, ...], member: tuple[int, ...], fits: bool
) -> None:
    assert messages.takes(lighthouse, member) == fits
