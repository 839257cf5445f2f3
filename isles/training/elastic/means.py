"""Shadow rounds: how a joiner's state becomes that of members who land one mean together.

donor     after a copy of its state was asked for: the mean of each of the next `KEPT` landed rounds, as a file
joiner    has the state after round r: fetches the means of r + 1, r + 2, ... and lands them with the same rule,
          until it is where the others are; the hash of its anchor must be theirs
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from isles.comm.elastic.ballot import Word
from isles.comm.elastic.gifts.giving import Gifts
from isles.comm.elastic.gifts.taking import GiftRequest, NotGiven
from isles.comm.elastic.quorum.delivery import KEEPERS, Missed
from isles.replicas.loop.joining import follow
from isles.replicas.loop.outer import OuterSync
from isles.training.records.tensors import write_tensors

KEPT = 16
_MEAN = "mean"
_SPARE = 1 << 16  # bytes of a file beside its tensor


class Means:
    """The means that a donor keeps for joiners. folder: for their files."""

    def __init__(self, optimizer: OuterSync, gifts: Gifts, folder: Path) -> None:
        self._optimizer, self._gifts, self._folder = optimizer, gifts, folder
        self._offered: list[int] = []
        self._next = math.inf  # the first round whose mean may still be had here
        gifts.expect(self._comes)

    def begins(self, round: int) -> None:
        """This worker takes part from `round` on."""
        self._next = round

    def forget(self) -> None:
        """This worker is to begin with another's state: who has followed it asks elsewhere."""
        (fragment,) = self._optimizer.fragments
        fragment.keep_until, self._next = 0, math.inf
        for round in self._offered:
            self._gifts.withdraw(_name(round))
        self._offered = []
        self._gifts.expect(self._comes)

    def _comes(self, what: str) -> bool:
        """A round that went on without this worker, or that it has landed and not kept, never does."""
        name, _, round = what.rpartition("-")
        return name != _MEAN or not round.isdecimal() or int(round) >= self._next

    def copied(self, round: int) -> None:
        """This worker's state after `round` has been given to somebody: the means of the next ones are kept for it."""
        (fragment,) = self._optimizer.fragments
        fragment.keep_until = round + KEPT

    def landed(self, round: int, left_out: Mapping[Any, int]) -> None:
        """Right after the landing of `round`: its mean, where it was kept. left_out: see `Missed`."""
        (fragment,) = self._optimizer.fragments
        answer = fragment.latest
        if fragment.kept is not None and answer is not None:
            path = self._folder / f"{_MEAN}-{round}.safetensors"
            facts = {"round": round, "whole": answer.whole, "participants": answer.participants}
            facts |= {"digest": fragment.digest, "left_out": dict(left_out)}
            kept = {_MEAN: fragment.kept}
            self._gifts.offer(_name(round), path, facts, lambda path: write_tensors(path, kept))
            self._offered.append(round)
        self._next = round + 1
        for old in [old for old in self._offered if old <= round - KEPT]:
            self._gifts.withdraw(_name(old))
            self._offered.remove(old)


def shadow(optimizer: OuterSync, gifts: Gifts, donor: str, rounds: range, path: Path, seconds: float) -> dict[int, int]:
    """Land the means of `rounds` as `donor` has. path: for a file that is gone afterwards. Whom the others have left
    out meanwhile, see `Missed`.

    NotGiven where one does not come within `seconds`, or leads elsewhere.
    """
    out: dict[int, int] = {}
    for round in rounds:
        mean = _taken(optimizer, gifts, donor, round, path, seconds)
        if follow(optimizer, round, mean.mean, mean.participants, whole=mean.whole) != mean.digest:
            raise NotGiven(f"with the mean of round {round} this worker is elsewhere than worker {donor}")
        out |= mean.left_out
    return out


def missed(
    optimizer: OuterSync, gifts: Gifts, word: Word, path: Path, seconds: float, is_lost: Callable[[int], bool]
) -> Missed | None:
    """The mean of a round that others have landed on that word; None where none of its keepers gives it."""
    for seat in word.seats[:KEEPERS]:
        if not is_lost(seat):
            with contextlib.suppress(NotGiven):
                return _taken(optimizer, gifts, str(seat), word.round, path, seconds)
    return None


def _taken(optimizer: OuterSync, gifts: Gifts, donor: str, round: int, path: Path, seconds: float) -> Missed:
    """The mean of `round`, as `donor` has it. NotGiven."""
    (fragment,) = optimizer.fragments
    try:
        most = fragment.anchor.nbytes + _SPARE
        facts = gifts.take(GiftRequest(giver=donor, what=_name(round), most=most, seconds=seconds), path)
        mean = load_file(str(path))[_MEAN]
        if mean.shape != fragment.anchor.shape or mean.dtype != fragment.anchor.dtype:
            raise NotGiven("it is of another model")
        if not mean.isfinite().all():
            raise NotGiven("it holds numbers that are none")
        participants, whole, digest = facts["participants"], facts["whole"], facts["digest"]
    except (SafetensorError, KeyError, ValueError) as error:
        raise NotGiven(f"the mean of round {round} is none: {str(error).splitlines()[0][:120]}") from error
    finally:
        path.unlink(missing_ok=True)
    return Missed(mean, participants, whole, digest, facts.get("left_out", {}))


def _name(round: int) -> str:
    return f"{_MEAN}-{round}"
