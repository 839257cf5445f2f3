"""The states that joiners start from, and the means of rounds that they missed, as files with fixed names.

    full       weights, anchors, momenta, the inner optimizer's state: the joiner continues as its donor does
    anchors    anchors and outer momenta only, a third or less of that: its inner optimizer starts anew, and its
               learning rate rises to that of the others over its first `WARM_UP` rounds

A donor copies its state right after a landing; the copy becomes a file and is sent while the donor trains on.

If all members land the same mean, a joiner catches up from its donor's log:

donor     once a copy of its state was requested: the mean of each of the next `RETAINED` landed rounds, as a file
joiner    has the state after round r: fetches the means of r + 1, r + 2, ... and lands them with the same rule,
          until it has the others' round; the hash of its anchor must equal theirs
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from isles.base.parsing import integer
from isles.membership.keys import LIGHTHOUSE
from isles.membership.late_shares import MEAN_HOLDERS, MissedMean
from isles.membership.round_commit import RoundDecision
from isles.membership.state_transfer import (
    ANCHORS,
    BESIDE,
    COPIES,
    STATE,
    FetchRequest,
    StateTransfer,
    StateUnavailable,
    saved_name,
    server_name,
)
from isles.replicas.loop.outer import OuterSync, adopt, donor_state, land_missed
from isles.training.config.world import JoinState
from isles.training.records.shard import StateCopy, first_nan, read_state, write_tensors

FRESH = 2
"""Rounds during which a copied state is sent to new joiners."""
WARM_UP = 2
"""Rounds over which a joiner without moments raises its inner learning rate."""


class States:
    """The states that this worker sends and loads.

    folder: for temporary files. kind: which state this worker requests (`world.elastic.join_state`). last: the last
    round of the run. island_rank: of this worker; it loads states of that rank.

    taken, of, left_out: bytes of the last loaded state, its round, and the views that its donor knew to be left out, by
    member. lacks_moments: whether it came without the inner optimizer's state. are_drawn: whether this worker still has
    its initial weights.
    """

    def __init__(
        self,
        optimizer: OuterSync,
        transfers: StateTransfer,
        folder: Path,
        kind: JoinState,
        last: Callable[[], int],
        island_rank: int = 0,
    ) -> None:
        self._island_rank, self._fetched, self.left_out = island_rank, folder / "taken.safetensors", dict[int, int]()
        self._optimizer, self._transfers, self._folder = optimizer, transfers, folder
        self._joins_with, self._last = STATE if kind == "full" else ANCHORS, last
        self._copied = {STATE: -FRESH, ANCHORS: -FRESH}  # the round of the newest copy
        self.taken, self.of, self.lacks_moments, self.are_drawn = 0, 0, False, True

    @property
    def weights(self) -> int:
        """Bytes of the trained weights."""
        return sum(one.numel() * one.element_size() for one in self._optimizer.parameters)

    def wanted(self) -> list[bool]:
        """Whether `STATE`, and whether `ANCHORS`, was requested from this worker."""
        return [self._transfers.is_requested(what) for what in (STATE, ANCHORS)]

    def landed(self, round: int, left_out: dict[int, int], wanted: Sequence[bool]) -> bool:
        """Right after the landing of `round`: copy the states that are `wanted`; returns whether any was. left_out: by
        member, the view that it is left out of, as known by then.
        """
        done = False
        for what, is_wanted in zip((STATE, ANCHORS), wanted, strict=True):
            if round - self._copied[what] >= FRESH:
                self._transfers.freeze(what)
            if is_wanted:
                self._copied[what], done = round, True
                self._offer(what, round, left_out)
        return done

    def forget(self) -> None:
        """This worker's state is obsolete: do not serve it."""
        for what in (STATE, ANCHORS):
            self._transfers.unpublish(what)
            self._copied[what] = -FRESH

    def _offer(self, what: str, round: int, left_out: dict[int, int]) -> None:
        optimizer = self._optimizer
        state, weights = donor_state(optimizer), optimizer.weights()
        if what == ANCHORS:
            del state["inner"]
            weights = {name: weights[name] for name in self._beside_anchors()}
        copy = StateCopy({"optimizer": state, "model": weights, "round": round})
        facts = {"round": round, "left_out": dict(left_out)}
        self._transfers.publish(what, self._folder / f"{what}-{round}.safetensors", facts, copy.write)

    def _beside_anchors(self) -> set[str]:
        trained = {id(parameter) for parameter in self._optimizer.parameters}
        return set(self._optimizer.weights()) - {
            name
            for name, parameter in self._optimizer.model.named_parameters(remove_duplicate=False)
            if id(parameter) in trained
        }

    def fetch(self, donor: int, seconds: float, *, after: int = -1, wait: float | None = None) -> int:
        """Fetch the state of `donor` (-1: the lighthouse's) into a file for `adopt`.

        seconds, wait, after: as in `FetchRequest`. Returns the round that the donor reports for it, 0 if none.
        StateUnavailable if the transfer fails.
        """
        state_server, what = server_name(donor, self._island_rank), self._joins_with
        if donor < 0:
            state_server, what = LIGHTHOUSE, saved_name(self._island_rank)
        most = COPIES * self.weights + BESIDE
        asked = FetchRequest(
            source=state_server,
            what=what,
            most=most,
            seconds=seconds,
            wait=wait,
            after=after,
            newest=self._last(),
        )
        try:
            facts = self._transfers.fetch(asked, self._fetched)
        except StateUnavailable:
            self._fetched.unlink(missing_ok=True)
            raise
        self.left_out = facts.get("left_out", {})
        return facts.get("round", 0)

    def adopt(self) -> int:
        """Load the fetched state; returns its round. StateUnavailable if it is not of this run."""
        try:
            self.taken = self._fetched.stat().st_size
            self.of = self._adopt(self._fetched)
            return self.of
        finally:
            self._fetched.unlink(missing_ok=True)

    def _adopt(self, path: Path) -> int:
        optimizer, self.are_drawn = self._optimizer, False
        try:
            state: Any = read_state(path)[0]
            if first_nan(state) is not None:
                raise StateUnavailable("it holds values that are not finite")
            round = integer(state, "round", 0, self._last())
            own = {} if "inner" in state["optimizer"] else {"inner": optimizer.inner_state()}
            optimizer.load_weights({**optimizer.weights(), **state["model"]})
            adopt(optimizer, {**own, **state["optimizer"]})
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise StateUnavailable(f"it is not one of this run: {str(error).splitlines()[0][:120]}") from error
        self.lacks_moments = bool(own)
        for fragment in optimizer.fragments:
            if own:
                fragment.flat.write(fragment.anchor)
            if fragment.residual is not None:
                fragment.residual.zero_()  # the donor sends its residual itself: a copy would count it twice
        return round

    def become(self, other: OuterSync) -> None:
        """Copy the state of `other`, a newly created optimizer."""
        self._optimizer.load_weights(other.weights())
        adopt(self._optimizer, other.shared_state())
        self.taken, self.of, self.lacks_moments, self.are_drawn = 0, 0, False, True


RETAINED = 16  # rounds whose means a donor saves for a joiner, which loads and catches up meanwhile
_MEAN = "mean"
_SPARE = 1 << 16  # bytes of a file's header


class CatchUpLog:
    """The means that a donor saves for joiners. folder: for their files."""

    def __init__(self, optimizer: OuterSync, transfers: StateTransfer, folder: Path) -> None:
        self._optimizer, self._transfers, self._folder = optimizer, transfers, folder
        self._offered: list[int] = []
        self._next = math.inf  # the first round whose mean may still be saved here
        transfers.announce(self._comes)

    def begins(self, round: int) -> None:
        """Start: this worker takes part from `round` on."""
        self._next = round

    def forget(self) -> None:
        """This worker loads another's state: stop serving means, so that joiners ask another donor."""
        (fragment,) = self._optimizer.fragments
        fragment.retain_until, self._next = 0, math.inf
        for round in self._offered:
            self._transfers.unpublish(_name(round))
        self._offered = []
        self._transfers.announce(self._comes)

    def _comes(self, what: str) -> bool:
        """Whether the file `what` may still be published: not the mean of a round that is over here."""
        name, _, round = what.rpartition("-")
        return name != _MEAN or not round.isdecimal() or int(round) >= self._next

    def copied(self, round: int) -> None:
        """This worker's state after `round` was copied for a joiner: save the means of the next rounds for it."""
        (fragment,) = self._optimizer.fragments
        fragment.retain_until = round + RETAINED

    def landed(self, round: int, left_out: Mapping[Any, int]) -> None:
        """Right after the landing of `round`: publish its mean, if it was saved. left_out: see `MissedMean`."""
        (fragment,) = self._optimizer.fragments
        answer = fragment.latest
        if fragment.landed_mean is not None and answer is not None:
            path = self._folder / f"{_MEAN}-{round}.safetensors"
            facts = {"round": round, "whole": answer.whole, "participants": answer.participants}
            facts |= {"digest": fragment.digest, "left_out": dict(left_out)}
            tensors = {_MEAN: fragment.landed_mean}
            self._transfers.publish(_name(round), path, facts, lambda path: write_tensors(path, tensors))
            self._offered.append(round)
        self._next = round + 1
        for old in [old for old in self._offered if old <= round - RETAINED]:
            self._transfers.unpublish(_name(old))
            self._offered.remove(old)


def catch_up(
    optimizer: OuterSync, transfers: StateTransfer, donor: str, rounds: range, path: Path, seconds: float
) -> dict[int, int]:
    """Land the means of `rounds`, fetched from `donor`. path: for a temporary file. Returns the members left out
    meanwhile, see `MissedMean`.

    StateUnavailable if one does not arrive within `seconds`, or its landing gives another anchor than the donor's.
    """
    out: dict[int, int] = {}
    for round in rounds:
        mean = _taken(optimizer, transfers, donor, round, path, seconds)
        if land_missed(optimizer, round, mean.mean, mean.participants, whole=mean.whole) != mean.digest:
            raise StateUnavailable(f"the mean of round {round} gives another anchor here than at worker {donor}")
        out |= mean.left_out
    return out


def missed(
    optimizer: OuterSync,
    transfers: StateTransfer,
    decision: RoundDecision,
    path: Path,
    seconds: float,
    is_lost: Callable[[int], bool],
) -> MissedMean | None:
    """The mean of a round that others have landed by `decision`; None if no holder sends it."""
    for member in decision.members[:MEAN_HOLDERS]:
        if not is_lost(member):
            with contextlib.suppress(StateUnavailable):
                return _taken(optimizer, transfers, str(member), decision.round, path, seconds)
    return None


def _taken(
    optimizer: OuterSync, transfers: StateTransfer, donor: str, round: int, path: Path, seconds: float
) -> MissedMean:
    """Fetch the mean of `round` from `donor`. StateUnavailable if that fails."""
    (fragment,) = optimizer.fragments
    try:
        most = fragment.anchor.nbytes + _SPARE
        facts = transfers.fetch(FetchRequest(source=donor, what=_name(round), most=most, seconds=seconds), path)
        mean = load_file(str(path))[_MEAN]
        if mean.shape != fragment.anchor.shape or mean.dtype != fragment.anchor.dtype:
            raise StateUnavailable("it is of another model")
        if not mean.isfinite().all():
            raise StateUnavailable("it holds values that are not finite")
        participants, whole, digest = facts["participants"], facts["whole"], facts["digest"]
    except (SafetensorError, KeyError, ValueError) as error:
        raise StateUnavailable(f"the mean of round {round} is invalid: {str(error).splitlines()[0][:120]}") from error
    finally:
        path.unlink(missing_ok=True)
    return MissedMean(mean, participants, whole, digest, facts.get("left_out", {}))


def _name(round: int) -> str:
    return f"{_MEAN}-{round}"
