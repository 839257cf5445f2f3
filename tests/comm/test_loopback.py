"""The workers' byte counters against the kernel's, in a network namespace where nothing else is on the line."""

from __future__ import annotations

import pytest

from isles.comm.codecs import CODECS
from isles.replicas import METHODS
from tests.netns import run_isolated, skip_unless_available

MEGABYTE = 1_000_000


@pytest.mark.parametrize(
    ("kind", "names", "arguments"),
    [
        ("mean", sorted(CODECS), [2_000_001]),
        ("verb", ["all_gather", "all_to_all", "exchange", "broadcast", "mail"], [1_000_001]),
        ("method", ["none", "ddp", "localsgd", "diloco", "noloco"], []),
    ],
    ids=["mean", "verbs", "methods"],
)
def test_counted_bytes_are_those_on_the_wire(kind: str, names: list[str], arguments: list[int]) -> None:
    """Within 2 %: gloo's own headers, the rendezvous and the store are all that is not counted."""
    skip_unless_available()
    assert kind != "method" or set(names) <= set(METHODS)
    for name, seen in run_isolated("tests.comm.loopback_cases:compared", kind, names, *arguments).items():
        assert seen["sent"] == seen["received"] >= MEGABYTE, (name, seen)
        assert seen["sent"] <= seen["wire"] <= 1.02 * seen["sent"], (name, seen)
