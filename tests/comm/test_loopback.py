"""The workers' byte counters against the kernel's, in a network namespace where nothing else is on the line."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from isles.comm.codecs.kinds import CODECS
from tests.netns import Wire, run_isolated, skip_unless_available

MEGABYTE = 1_000_000
FEW = ["none", "int4"]  # codecs: plain, with scales; the rest are long
CASES = {
    "mean": FEW,
    "verb": ["all_to_all", "broadcast"],
    "method": ["ddp", "fsdp", "noloco", "islands"],
    "pipeline": ["random"],
}


@cache
def few() -> dict[str, Any]:
    """All of `CASES` in one namespace, by one set of processes."""
    return run_isolated("tests.comm.loopback_cases:compared", CASES)


@pytest.mark.parametrize("kind", CASES)
def test_counted_bytes_are_those_on_the_wire(kind: str) -> None:
    """Four workers, codecs, verbs and methods, from their construction to `consolidate`: what the interface saw,
    without the headers of its packets, is within 2 % of the sum of the workers' counters; and what was sent was
    received.
    """
    skip_unless_available()
    check(few()[kind])


@pytest.mark.long
def test_counted_bytes_of_every_codec() -> None:
    skip_unless_available()
    check(run_isolated("tests.comm.loopback_cases:compared", {"mean": sorted(CODECS)})["mean"])


def check(cases: dict[str, Any]) -> None:
    for name, (sent, received, wire) in cases.items():
        assert sent == received >= 10 * MEGABYTE, (name, sent, received)
        assert Wire(*wire).agrees_with(sent, 0.02), (name, sent, wire, Wire(*wire).payload / sent)
