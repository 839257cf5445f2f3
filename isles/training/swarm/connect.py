"""Taking part in a swarm over a lighthouse, as one peer, until the run ends or this peer is told to leave.

    seat -> "what am I to do?" -> begin with the others, or ask those at work to be let in -> train -> the end
      ^                                                                                         |
      +--------- again, in another seat: the others have lost this peer, or a stage its last ---+

Seats are never used twice. So a peer that the others have counted out, that stood still for too long, or whose swarm
has lost a whole stage gives its seat back and comes again. Nothing is lost with that: its state is that of the others,
or is kept by the lighthouse.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from isles.base.errors import printable
from isles.comm.credentials import Token
from isles.comm.errors import CommError, Diverged, Malformed, Refused, RendezvousFailed
from isles.membership.keys import LIGHTHOUSE
from isles.membership.messages import Begin, Enter, Finished, Leave, Over, Refusal, Wait
from isles.membership.requests import SwarmLine
from isles.membership.rounds import IslandGroup
from isles.membership.state_transfer import GiftRequest, NotGiven
from isles.membership.swarm_coordinator import MOST_SEATS
from isles.models import choose_device
from isles.training.elastic.connect import Entrance, Here, admitted, connect, rank_to_load
from isles.training.elastic.states import MODEL, state_of
from isles.training.elastic.support import among_peers
from isles.training.interrupts import first_interrupt
from isles.training.kinds import kind_of
from isles.training.stage_runner import planned_cut
from isles.training.swarm.step import identity, number_of
from isles.training.swarm.trainer import ANYWHERE, OwnSeat, SeatedTrainer, SeatedWork

_ASK = 0.2  # seconds from one question to the next while there is nothing to do
_SOON = 1.0  # seconds until a peer comes again
_SLOW = 60.0  # seconds without a piece of a state
_LAST = 3.0  # seconds for the last reports
_MOST = 1 << 40  # bytes of a state
_LONGEST_OUTAGE = 600.0  # seconds without the lighthouse, where there is nothing to do without it
SeatEnding = Literal["finished", "left", "again"]


def take_part(address: str, token: Token, here: Here, wish: int, *, tell: Callable[[str], None]) -> str:
    """Join the run at `address`, wishing to serve stage `wish` or `ANYWHERE`, and train until the run ends or this peer
    has left; how it ended, in a line.

    ValueError, in one line, for what a person can mend; OSError where nobody answers, or the run goes on without this
    peer.
    """
    leaving = threading.Event()
    current: list[SeatedPeer] = []

    def leave() -> None:
        leaving.set()
        for peer in current:
            peer.leave()

    with first_interrupt(leave):
        while True:
            with ExitStack() as stack:
                entrance = admitted(stack, address, token, here, tell=tell, fit=among_peers)
                if not 0 <= wish < entrance.config.pipeline.stages and wish != ANYWHERE:
                    stages = entrance.config.pipeline.stages
                    raise ValueError(f"--stage {wish}: the run has {stages} stages, 0 to {stages - 1}; leave it out")
                peer = kind_of(entrance.config.pipeline).member_peer(stack, entrance, wish, leaving, tell)
                current[:] = [peer]
                device = choose_device(entrance.config.model, int(os.environ.get("LOCAL_RANK", 0)))
                tell(f"in: seat {peer.line.seat} at {address}, on {device}")
                ending = peer.run()
                current.clear()
                step = peer.step
            if ending == "finished":
                return f"the run is over; its model and report are at the lighthouse ({address})"
            if ending == "left" or leaving.is_set():
                return f"left the run after step {step}; the others go on"
            time.sleep(_SOON)


class SeatedPeer:
    """One peer in one seat, until `stack` ends. wish, tell, errors: as in `take_part`. leaving: set once this peer is
    to leave.
    """

    def __init__(
        self, stack: ExitStack, entrance: Entrance, wish: int, leaving: threading.Event, tell: Callable[[str], None]
    ) -> None:
        self.config, self.folder, self.wish = entrance.config, entrance.folder, wish
        self.leaving, self.tell = leaving, tell
        self._corpus = entrance.corpus
        self._run = self.number()
        self._there: set[int] = set()
        self._named: set[int] = set()
        self._trainer: SeatedWork | None = None
        self._session, self._refused = entrance.session, entrance.session.refused
        alone = IslandGroup()
        certificates = entrance.shown(alone)
        entry = rank_to_load(entrance.session, self._corpus.sha256, certificates, tell)
        self.line = SwarmLine(entrance.session, entry, self._meet)
        self._transport, self._gifts = connect(
            stack, entrance, self.line, alone, certificates, size=MOST_SEATS, tell=tell
        )

    def number(self) -> int:
        """A number that all peers of one configuration and the same cut points share."""
        return number_of(identity(self.config, planned_cut(self.config)))

    @property
    def step(self) -> int:
        return 0 if self._trainer is None else self._trainer.steps_done()

    def leave(self) -> None:
        """Leave, as soon as the others can do without this peer."""
        if self._trainer is not None:
            self._trainer.leave()

    def run(self) -> SeatEnding:
        """Train until there is nothing more to do in this seat; "again": come back in another one."""
        part = self._part()
        if not isinstance(part, Begin | Enter):
            return part
        try:
            return self._work(part)
        except Diverged as error:
            raise ValueError(str(error)) from None
        except CommError as error:
            self.line.look()
            if isinstance(self.line.ended, Over):
                return self._over(self.line.ended)
            self.tell(f"{printable(str(error), 300)}: coming again")
            return self._again()

    def _part(self) -> Begin | Enter | SeatEnding:
        """Ask the lighthouse what to do until it says so, or how this seat has ended."""
        told, heard = "", time.monotonic()
        while not self.leaving.is_set():
            part = self.line.part(self.wish, self._run)
            match part:
                case Begin() | Enter():
                    return part
                case Over():
                    return self._over(part)
                case Refusal(reason=reason):
                    raise ValueError(printable(reason, 300))
                case Wait(reason=reason):
                    if reason != told:
                        self.tell(printable(reason, 300))
                    told, heard = reason, time.monotonic()
                case None if time.monotonic() - heard > _LONGEST_OUTAGE:
                    raise RendezvousFailed(f"the lighthouse has not answered for {_LONGEST_OUTAGE:.0f} s")
                case None:
                    pass
                case _:
                    return "again"
            self.leaving.wait(_ASK)
        return self._left()

    def _over(self, over: Over) -> SeatEnding:
        if over.reason:
            raise OSError(f"the run has ended: {printable(over.reason, 300)}")
        return "finished"

    def _work(self, part: Begin | Enter) -> SeatEnding:
        trainer = self._trainer = self.made(part)
        for seat in [*self._there]:
            trainer.post.mail.meet(seat)
        if isinstance(part, Begin) and part.step:
            self._resume(trainer, part.step)
        if self.leaving.is_set():
            trainer.leave()
        self.line.at_work(trainer.beat)
        result = trainer.run(self.folder)
        if result is None:
            trainer.post.mail.settle()
            return self._left() if trainer.has_left else self._again()
        self._conclude(trainer, result)
        return self._over(self.line.ended) if isinstance(self.line.ended, Over) else self._again()

    def _left(self) -> SeatEnding:
        self.line.ask(Leave())
        return "left"

    def _again(self) -> SeatEnding:
        return self._left() if self.leaving.is_set() else "again"

    def made(self, part: Begin | Enter) -> SeatedWork:
        return SeatedTrainer(self.seat(), part, wish=self.wish, await_kept=self.line.await_kept)

    def seat(self) -> OwnSeat:
        return OwnSeat(
            self.config,
            self._transport,
            self._corpus,
            self._gifts,
            self.folder,
            report=self._report,
            stop_here=self._stops,
        )

    def _stops(self, step: int) -> bool:
        """Whether this peer ends after `step` without the others' leave."""
        return self.line.ended is not None or (self._trainer is not None and self._trainer.has_left)

    def _resume(self, trainer: SeatedWork, step: int) -> None:
        """Begin with what the lighthouse keeps."""
        paths: list[Path] = []

        def kept(part: int) -> tuple[Path, dict[str, Any]]:
            path, facts = self._kept(part, step)
            paths.append(path)
            return path, facts

        trainer.go_on_from(step, kept)
        for path in paths:
            path.unlink()

    def _kept(self, stage: int, step: int) -> tuple[Path, dict[str, Any]]:
        """Fetch the state of `stage` after `step` that the lighthouse keeps: (its file, the facts told beside it).
        CommError where it does not come.
        """
        path = self.folder / f"kept-{stage}.safetensors"
        try:
            asked = GiftRequest(giver=LIGHTHOUSE, what=state_of(stage, step), most=_MOST, seconds=_SLOW)
            return path, self._gifts.take(asked, path)
        except NotGiven as why:
            raise CommError(f"the state of stage {stage} after step {step} did not come ({why})") from None

    def _conclude(self, trainer: SeatedWork, result: dict[str, Any]) -> None:
        """Hand in the model, or wait while the first peer does; where that one is lost, put it together again."""
        while True:
            if result["parameters"]:
                self._gifts.offer(MODEL, self.folder / "model.safetensors", {})
            self._tell()
            self.line.report({"result": result})
            heard, first = time.monotonic(), trainer.first
            while self.line.ended is None and (first == self.line.seat or first not in trainer.post.mail.lost):
                if self.line.ask(Finished()) is not None:
                    heard = time.monotonic()
                elif time.monotonic() - heard > self.config.world.eval_deadline:
                    raise RendezvousFailed("the lighthouse has not taken the model")
                self.line.rest(_ASK)
            self.line.look()
            if self.line.ended is not None:
                self.line.reported(_LAST if isinstance(self.line.ended, Over) else 0.0)
                return
            result = trainer.conclude(self.folder)

    def _meet(self, seat: int) -> None:
        """Somebody is there. In a session's thread."""
        self._there.add(seat)
        if self._trainer is not None:
            self._trainer.post.mail.meet(seat)

    def _report(self, event: Any) -> None:
        """What the trainer tells whoever started it."""
        if "notice" in event:
            self.tell(event["notice"])
            self.line.report({"notice": event["notice"]})
        elif "offered" in event or ("step" in event and "loss" in event):
            self.line.report(event)
            self._tell()

    def _tell(self) -> None:
        """What was sent which way, and what was refused."""
        lost = {} if self._trainer is None else dict(self._trainer.post.mail.lost)
        for seat, why in lost.items():
            if isinstance(why, Malformed | Refused) and seat not in self._named:
                self._refused.note(seat, why.detail)
                self._named.add(seat)
        self.line.report({"carried": dict(self._transport.carried)})
        self.line.report({"paths": self._transport.paths()})
        self.line.report({"refused": self._refused.rows()})
