"""The states that joiners begin with, as files that their donors give.

    full       weights, anchors, momenta, the inner optimizer's state: the joiner trains on as its donor does
    anchors    anchors and outer momenta alone, a third or less of that: its inner optimizer begins anew, and its rate
               rises to that of the others over its first `WARM_UP` rounds

A donor copies its state once, right after a landing; the copy becomes a file, and goes, while the donor trains on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from isles.comm.elastic.gifts.giving import Gifts
from isles.comm.elastic.gifts.taking import GiftRequest, NotGiven
from isles.comm.elastic.keys import LIGHTHOUSE
from isles.fields import integer
from isles.replicas.loop.joining import adopt, given
from isles.replicas.loop.outer import OuterSync
from isles.training.config.world import JoinState
from isles.training.elastic.given import ANCHORS, BESIDE, COPIES, STATE, giver_of, kept_as
from isles.training.records.finite import first_nan
from isles.training.records.shard import StateCopy, read_state

FRESH = 2
"""Rounds for which a copied state is given to new takers."""
WARM_UP = 2
"""Rounds in which the inner rate of a joiner rises that has no moments."""


class States:
    """The states that this worker gives and takes.

    folder: for files on their way. kind: what this worker asks for (`world.elastic.join_state`). last: the last round
    of the run. place: this worker's in its island, which takes states of that place.

    taken, of, left_out: bytes of the newest state that was taken, its round, and whom its donor knew by then to be left
    out. lacks_moments: whether that came without the inner optimizer's state. are_drawn: whether this worker's own
    state is still as drawn.
    """

    def __init__(
        self, optimizer: OuterSync, gifts: Gifts, folder: Path, kind: JoinState, last: Callable[[], int], place: int = 0
    ) -> None:
        self._place, self._fetched, self.left_out = place, folder / "taken.safetensors", dict[int, int]()
        self._optimizer, self._gifts, self._folder = optimizer, gifts, folder
        self._joins_with, self._last = STATE if kind == "full" else ANCHORS, last
        self._copied = {STATE: -FRESH, ANCHORS: -FRESH}  # the round of the newest copy
        self.taken, self.of, self.lacks_moments, self.are_drawn = 0, 0, False, True

    def wanted(self) -> list[bool]:
        """Whether somebody has asked this worker for `STATE`, and for `ANCHORS`."""
        return [self._gifts.is_wanted(what) for what in (STATE, ANCHORS)]

    def landed(self, round: int, left_out: dict[int, int], wanted: Sequence[bool]) -> bool:
        """Right after the landing of `round`: copy what is `wanted`; whether something was. left_out: who was told by
        then to be left out, and of which view.
        """
        done = False
        for what, is_wanted in zip((STATE, ANCHORS), wanted, strict=True):
            if round - self._copied[what] >= FRESH:
                self._gifts.shut(what)
            if is_wanted:
                self._copied[what], done = round, True
                self._offer(what, round, left_out)
        return done

    def forget(self) -> None:
        """What this worker has is nobody's any more: no copy of it is given."""
        for what in (STATE, ANCHORS):
            self._gifts.withdraw(what)
            self._copied[what] = -FRESH

    def _offer(self, what: str, round: int, left_out: dict[int, int]) -> None:
        optimizer = self._optimizer
        state, weights = given(optimizer), optimizer.weights()
        if what == ANCHORS:
            del state["inner"]
            weights = {name: weights[name] for name in self._beside_anchors()}
        copy = StateCopy({"optimizer": state, "model": weights, "round": round})
        facts = {"round": round, "left_out": dict(left_out)}
        self._gifts.offer(what, self._folder / f"{what}-{round}.safetensors", facts, copy.write)

    def _beside_anchors(self) -> set[str]:
        trained = {id(parameter) for parameter in self._optimizer.parameters}
        return set(self._optimizer.weights()) - {
            name
            for name, parameter in self._optimizer.model.named_parameters(remove_duplicate=False)
            if id(parameter) in trained
        }

    def fetch(self, donor: int, seconds: float, *, after: int = -1, wait: float | None = None) -> int:
        """Fetch the state of `donor` (-1: the one that the lighthouse keeps) for `adopt`; nothing changes here yet.

        seconds, wait, after: as in `GiftRequest`. Returns the round that it is said to be of, 0 where nothing is said.
        NotGiven where none came.
        """
        giver, what = giver_of(donor, self._place), self._joins_with
        if donor < 0:
            giver, what = LIGHTHOUSE, kept_as(self._place)
        weights = sum(one.numel() * one.element_size() for one in self._optimizer.parameters)
        most = COPIES * weights + BESIDE
        asked = GiftRequest(
            giver=giver, what=what, most=most, seconds=seconds, wait=wait, after=after, newest=self._last()
        )
        try:
            facts = self._gifts.take(asked, self._fetched)
        except NotGiven:
            self._fetched.unlink(missing_ok=True)
            raise
        self.left_out = facts.get("left_out", {})
        return facts.get("round", 0)

    def adopt(self) -> int:
        """Take on the state that was fetched; the round that it is of. NotGiven where it is not one of this run."""
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
                raise NotGiven("it holds numbers that are none")
            round = integer(state, "round", 0, self._last())
            own = {} if "inner" in state["optimizer"] else {"inner": optimizer.inner_state()}
            optimizer.load_weights({**optimizer.weights(), **state["model"]})
            adopt(optimizer, {**own, **state["optimizer"]})
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise NotGiven(f"it is not one of this run: {str(error).splitlines()[0][:120]}") from error
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
