"""Shadow rounds: how a joiner's state becomes that of members who land one mean together.

donor     after a copy of its state was asked for: the mean of each of the next `KEPT` landed rounds, as a file
joiner    has the state after round r: fetches the means of r + 1, r + 2, ... and lands them with the same rule,
          until it is where the others are; the hash of its anchor must be theirs
"""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file

from isles.comm.elastic.gifts import Gifts, NotGiven
from isles.replicas.loop.agreed import AgreedCourier
from isles.replicas.loop.joining import follow
from isles.replicas.loop.outer import OuterSync
from isles.training.records.tensors import write_tensors

KEPT = 16
_MEAN = "mean"
_SPARE = 1 << 16  # bytes of a file beside its tensor


class Means:
    """At a donor. folder: for the files."""

    def __init__(self, optimizer: OuterSync, gifts: Gifts, folder: Path) -> None:
        self._optimizer, self._gifts, self._folder = optimizer, gifts, folder
        self._offered: list[int] = []

    def copied(self, round: int) -> None:
        """This worker's state after `round` has been given to somebody."""
        if isinstance(courier := self._optimizer.courier, AgreedCourier):
            courier.keep_until = round + KEPT

    def landed(self, round: int) -> None:
        """Right after the landing of `round`."""
        courier, (fragment,) = self._optimizer.courier, self._optimizer.fragments
        if isinstance(courier, AgreedCourier) and courier.kept is not None:
            answer = fragment.latest
            assert answer is not None, "it has just landed"
            path = self._folder / f"{_MEAN}-{round}.safetensors"
            facts = {"round": round, "whole": answer.whole, "participants": answer.participants}
            kept = {_MEAN: courier.kept}
            facts |= {"digest": fragment.digest}
            self._gifts.offer(_name(round), path, facts, lambda path: write_tensors(path, kept))
            self._offered.append(round)
        for old in [old for old in self._offered if old <= round - KEPT]:
            self._gifts.withdraw(_name(old))
            self._offered.remove(old)


def shadow(optimizer: OuterSync, gifts: Gifts, donor: str, rounds: range, path: Path, seconds: float) -> None:
    """Land the means of `rounds` as `donor` has. path: for a file that is gone afterwards.

    NotGiven where one does not come within `seconds`, or leads elsewhere.
    """
    (fragment,) = optimizer.fragments
    for round in rounds:
        try:
            facts = gifts.take(donor, _name(round), path, most=fragment.anchor.nbytes + _SPARE, seconds=seconds)
            mean = load_file(str(path))[_MEAN]
            if mean.shape != fragment.anchor.shape or mean.dtype != fragment.anchor.dtype:
                raise NotGiven("it is of another model")
            if not mean.isfinite().all():
                raise NotGiven("it holds numbers that are none")
            participants, whole, digest = facts["participants"], facts["whole"], facts["digest"]
            if not (isinstance(participants, int) and isinstance(whole, bool) and isinstance(digest, int)):
                raise NotGiven("what is said of it makes no sense")
        except (SafetensorError, KeyError, ValueError) as error:
            raise NotGiven(f"the mean of round {round} is none: {str(error).splitlines()[0][:120]}") from error
        finally:
            path.unlink(missing_ok=True)
        if follow(optimizer, round, mean, participants, whole=whole) != digest:
            raise NotGiven(f"with the mean of round {round} this worker is elsewhere than worker {donor}")


def _name(round: int) -> str:
    return f"{_MEAN}-{round}"
