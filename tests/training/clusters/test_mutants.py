"""What a join could get wrong is seen: each of these changes makes the test of who comes fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isles.pipeline.ravnest.averaging import ClusterAverage
from isles.training.clusters.stage_server import SharedReading, StageServer
from tests.training.clusters.test_simulated import (
    test_who_comes_makes_clusters_takes_places_and_holds_the_others_bits as who_comes,
)

pytestmark = pytest.mark.long(cases=5)  # all of them: each is another mistake
Patch = pytest.MonkeyPatch


def takes_the_wrong_segment(patch: Patch) -> None:
    """A part of it lies where the one beside it should."""
    transfers = ClusterAverage._transfer_state

    def mutant(own: ClusterAverage, tensors: dict[int, list[Any]]) -> Any:
        counts = {share.number: len(share.parameters) for share in own._shares}
        turned = {key: [*held[1 : counts[key]], held[0], *held[counts[key] :]] for key, held in tensors.items()}
        return transfers(own, turned)

    patch.setattr(ClusterAverage, "_transfer_state", mutant)


def begins_the_optimizer_anew(patch: Patch) -> None:
    """Moments are the others', their count of steps is not."""
    load = ClusterAverage.load
    patch.setattr(ClusterAverage, "load", lambda own, step: load(own, 1))


def counts_twice(patch: Patch) -> None:
    """A cluster of those who came later has double weight in the mean."""
    mean = ClusterAverage._mean

    def mutant(own: ClusterAverage, tensors: list[list[Any]], *more: int) -> Any:
        came = own.agreement.world.rank in own.agreement.assignment.descriptors
        return mean(own, [[2 * held if came else held for held in each] for each in tensors], *more)

    patch.setattr(ClusterAverage, "_mean", mutant)


def reads_what_others_read(patch: Patch) -> None:
    """The order of the text is not shared anew."""
    patch.setattr(SharedReading, "among", lambda own, clusters, step: own)


def begins_the_rate_anew(patch: Patch) -> None:
    """The schedule of who comes is at its beginning."""
    begin = StageServer.begin_after

    def mutant(own: StageServer, updates: int, sequences: int) -> None:
        begin(own, updates, sequences)
        own.schedule.last_epoch = 0

    patch.setattr(StageServer, "begin_after", mutant)


MUTANTS = [
    takes_the_wrong_segment,
    begins_the_optimizer_anew,
    counts_twice,
    reads_what_others_read,
    begins_the_rate_anew,
]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_join_that_goes_wrong_is_seen(mutant: Callable[[Patch], None], tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patched:
        mutant(patched)
        with pytest.raises(AssertionError):
            who_comes(tmp_path, patched)
