"""The states that joiners begin with, and the means of rounds that they missed, as files under names that all know.

    full       weights, anchors, momenta, the inner optimizer's state: the joiner trains on as its donor does
    anchors    anchors and outer momenta alone, a third or less of that: its inner optimizer begins anew, and its rate
               rises to that of the others over its first `WARM_UP` rounds

A donor copies its state once, right after a landing; the copy becomes a file and is sent while the donor trains on.

Where members land one mean together, a joiner catches up from its donor's log:

donor     after a copy of its state was asked for: the mean of each of the next `RETAINED` landed rounds, as a file
joiner    has the state after round r: fetches the means of r + 1, r + 2, ... and lands them with the same rule,
          until it is where the others are; the hash of its anchor must be theirs
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
"""Rounds for which a copied state is sent to new joiners."""
WARM_UP = 2
"""Rounds in which the inner rate of a joiner rises that has no moments."""


class States:
    """The states that this worker sends and loads.

    folder: for files on their way. kind: what this worker asks for (`world.elastic.join_state`). last: the last round
    of the run. island_rank: this worker's, which takes states of that rank.

    taken, of, left_out: bytes of the newest state that was taken, its round, and whom its donor knew by then to be left
    out. lacks_moments: whether that came without the inner optimizer's state. are_drawn: whether this worker's own
    state is still as drawn.
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

    def wanted(self) -> list[bool]:
        """Whether somebody has asked this worker for `STATE`, and for `ANCHORS`."""
        return [self._transfers.is_requested(what) for what in (STATE, ANCHORS)]

    def landed(self, round: int, left_out: dict[int, int], wanted: Sequence[bool]) -> bool:
        """Right after the landing of `round`: copy what is `wanted`; whether something was. left_out: who was told by
        then to be left out, and of which view.
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
        """What this worker has is nobody's any more: no copy of it is given."""
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
        """Fetch the state of `donor` (-1: the one that the lighthouse keeps) for `adopt`; nothing changes here yet.

        seconds, wait, after: as in `FetchRequest`. Returns the round that it is said to be of, 0 where nothing is said.
        StateUnavailable where none came.
        """
        state_server, what = server_name(donor, self._island_rank), self._joins_with
        if donor < 0:
            state_server, what = LIGHTHOUSE, saved_name(self._island_rank)
        weights = sum(one.numel() * one.element_size() for one in self._optimizer.parameters)
        most = COPIES * weights + BESIDE
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
        """Take on the state that was fetched; the round that it is of. StateUnavailable where it is not one of this
        run.
        """
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
                raise StateUnavailable("it holds numbers that are none")
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
                fragment.residual.zero_()  # what the donor holds back it will still send itself
        return round

    def become(self, other: OuterSync) -> None:
        """Take on the state of `other`, which has just been made."""
        self._optimizer.load_weights(other.weights())
        adopt(self._optimizer, other.shared_state())
        self.taken, self.of, self.lacks_moments, self.are_drawn = 0, 0, False, True


RETAINED = 16
_MEAN = "mean"
_SPARE = 1 << 16  # bytes of a file beside its tensor


class CatchUpLog:
    """The means that a donor keeps for joiners. folder: for their files."""

    def __init__(self, optimizer: OuterSync, transfers: StateTransfer, folder: Path) -> None:
        self._optimizer, self._transfers, self._folder = optimizer, transfers, folder
        self._offered: list[int] = []
        self._next = math.inf  # the first round whose mean may still be had here
        transfers.announce(self._comes)

    def begins(self, round: int) -> None:
        """This worker takes part from `round` on."""
        self._next = round

    def forget(self) -> None:
        """This worker is to begin with another's state: who has followed it asks elsewhere."""
        (fragment,) = self._optimizer.fragments
        fragment.retain_until, self._next = 0, math.inf
        for round in self._offered:
            self._transfers.unpublish(_name(round))
        self._offered = []
        self._transfers.announce(self._comes)

    def _comes(self, what: str) -> bool:
        """A round that went on without this worker, or that it has landed and not kept, never does."""
        name, _, round = what.rpartition("-")
        return name != _MEAN or not round.isdecimal() or int(round) >= self._next

    def copied(self, round: int) -> None:
        """This worker's state after `round` has been given to somebody: the means of the next ones are kept for it."""
        (fragment,) = self._optimizer.fragments
        fragment.retain_until = round + RETAINED

    def landed(self, round: int, left_out: Mapping[Any, int]) -> None:
        """Right after the landing of `round`: its mean, where it was kept. left_out: see `MissedMean`."""
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
    """Land the means of `rounds` as `donor` has. path: for a file that is gone afterwards. Whom the others have left
    out meanwhile, see `MissedMean`.

    StateUnavailable where one does not come within `seconds`, or leads elsewhere.
    """
    out: dict[int, int] = {}
    for round in rounds:
        mean = _taken(optimizer, transfers, donor, round, path, seconds)
        if land_missed(optimizer, round, mean.mean, mean.participants, whole=mean.whole) != mean.digest:
            raise StateUnavailable(f"with the mean of round {round} this worker is elsewhere than worker {donor}")
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
    """The mean of a round that others have landed on that word; None where none of its keepers gives it."""
    for member in decision.members[:MEAN_HOLDERS]:
        if not is_lost(member):
            with contextlib.suppress(StateUnavailable):
                return _taken(optimizer, transfers, str(member), decision.round, path, seconds)
    return None


def _taken(
    optimizer: OuterSync, transfers: StateTransfer, donor: str, round: int, path: Path, seconds: float
) -> MissedMean:
    """The mean of `round`, as `donor` has it. StateUnavailable."""
    (fragment,) = optimizer.fragments
    try:
        most = fragment.anchor.nbytes + _SPARE
        facts = transfers.fetch(FetchRequest(source=donor, what=_name(round), most=most, seconds=seconds), path)
        mean = load_file(str(path))[_MEAN]
        if mean.shape != fragment.anchor.shape or mean.dtype != fragment.anchor.dtype:
            raise StateUnavailable("it is of another model")
        if not mean.isfinite().all():
            raise StateUnavailable("it holds numbers that are none")
        participants, whole, digest = facts["participants"], facts["whole"], facts["digest"]
    except (SafetensorError, KeyError, ValueError) as error:
        raise StateUnavailable(f"the mean of round {round} is invalid: {str(error).splitlines()[0][:120]}") from error
    finally:
        path.unlink(missing_ok=True)
    return MissedMean(mean, participants, whole, digest, facts.get("left_out", {}))


def _name(round: int) -> str:
    return f"{_MEAN}-{round}"
