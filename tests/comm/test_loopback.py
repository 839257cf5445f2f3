"""The workers' byte counters against the kernel's, in a network namespace where nothing else is on the line."""

from __future__ import annotations

import pytest

from isles.comm.codecs import CODECS
from tests.netns import Wire, run_isolated, skip_unless_available

MEGABYTE = 1_000_000


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("mean", sorted(CODECS)),
        ("verb", ["all_gather", "all_to_all", "exchange", "broadcast"]),
        ("method", ["none", "ddp", "fsdp", "localsgd", "diloco", "noloco", "islands"]),
    ],
    ids=["mean", "verbs", "methods"],
)
def test_counted_bytes_are_those_on_the_wire(kind: str, names: list[str]) -> None:
    """Four workers, every codec, verb and method, from their construction to `consolidate`: what the interface saw,
    without the headers of its packets, is within 2 % of the sum of the workers' counters; and what was sent was
    received.
    """
    skip_unless_available()
    for name, (sent, received, wire) in run_isolated("tests.comm.loopback_cases:compared", kind, names).items():
        assert sent == received >= 10 * MEGABYTE, (name, sent, received)
        assert Wire(*wire).agrees_with(sent, 0.02), (name, sent, wire, Wire(*wire).payload / sent)
