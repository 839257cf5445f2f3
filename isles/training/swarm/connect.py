"""One peer of a swarm in a lighthouse's run, until the run ends or this peer is asked to leave.

    member -> request work -> start with the others, or ask a running swarm to join -> train -> the end
      ^                                                                                  |
      +---- again, as another member: the others have lost this peer, or a stage all its peers

Member ids are never used twice. So a peer that the others have removed, that was paused for too long, or whose swarm
has lost a whole stage joins again as another member. No state is lost by that: the others or the lighthouse have it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch
from typing_extensions import override

from isles.base.errors import printable
from isles.comm.credentials import Token
from isles.comm.errors import CommError, Diverged, Malformed, Refused, RendezvousFailed
from isles.membership.keys import LIGHTHOUSE
from isles.membership.messages import Finished, JoinSwarm, Leave, Over, Refusal, Rejoin, StartSwarm, Wait
from isles.membership.requests import SwarmClient
from isles.membership.rounds import IslandGroup
from isles.membership.state_transfer import BESIDE, COPIES, MODEL, FetchRequest, StateUnavailable, state_of
from isles.membership.swarm_coordinator import MAX_MEMBERS
from isles.models import choose_device
from isles.training.elastic.connect import LocalSettings, RunConnection, admit, connect, member_of
from isles.training.elastic.needs import refuse_beyond
from isles.training.elastic.stall import StallWatch, cut_off
from isles.training.elastic.support import among_peers, rules
from isles.training.interrupts import first_interrupt
from isles.training.kinds import kind_of
from isles.training.lighthouse.mean import digest
from isles.training.stage_runner import planned_cut
from isles.training.swarm.step import identity, identity_hash
from isles.training.swarm.trainer import ANYWHERE, ElasticSwarmTrainer, OwnMember, PeerWork

_ASK = 0.2  # seconds between two requests while there is nothing to do
_SOON = 1.0  # seconds until a peer joins again
_SLOW = 60.0  # seconds without a part of a state, after which its transfer fails
_LAST = 3.0  # seconds for the last reports
_MOST = 1 << 40  # bytes of a model whose size is not known
_LONGEST_OUTAGE = 600.0  # seconds that a peer without work waits for a lighthouse that does not answer
MemberEndReason = Literal["finished", "left", "again"]


def take_part(address: str, token: Token, here: LocalSettings, wish: int, *, notify: Callable[[str], None]) -> str:
    """Join the run at `address`, to serve stage `wish` (or `ANYWHERE`), and train until the run ends or this peer has
    left. Returns how it ended, as one line of text.

    ValueError, in one line, for what a user can fix; OSError if the lighthouse does not answer, or the run goes on
    without this peer.
    """
    leaving = threading.Event()
    current: list[SwarmParticipant] = []

    def leave() -> None:
        leaving.set()
        for peer in current:
            peer.leave()

    joined = False
    with first_interrupt(leave):
        while True:
            with ExitStack() as stack:
                connection = admit(stack, address, token, here, notify=notify, fit=among_peers, again=joined)
                refuse_beyond(connection.config, connection.folder)
                joined = True
                if not 0 <= wish < connection.config.pipeline.stages and wish != ANYWHERE:
                    stages = connection.config.pipeline.stages
                    raise ValueError(f"--stage {wish}: the run has {stages} stages, 0 to {stages - 1}; leave it out")
                peer = kind_of(connection.config.pipeline).participant(stack, connection, wish, leaving, notify)
                current[:] = [peer]
                device = choose_device(connection.config.model, int(os.environ.get("LOCAL_RANK", 0)))
                notify(f"in: member {peer.client.member} at {address}, on {device}")
                end_reason = peer.run()
                current.clear()
                step = peer.step
            if end_reason == "finished":
                return f"the run is over; its model and report are at the lighthouse ({address})"
            if end_reason == "left" or leaving.is_set():
                return f"left the run after step {step}; the others go on"
            time.sleep(_SOON)


class SwarmParticipant(OwnMember):
    """One peer as one member, until `stack` ends. wish, notify: as in `take_part`. leaving: set when this peer
    is asked to leave.
    """

    def __init__(
        self,
        stack: ExitStack,
        connection: RunConnection,
        wish: int,
        leaving: threading.Event,
        notify: Callable[[str], None],
    ) -> None:
        super().__init__()
        self.config, self.folder, self.corpus = connection.config, connection.folder, connection.corpus
        self.wish, self.leaving, self.notify = wish, leaving, notify
        self._run = self.number()
        self._there: set[int] = set()
        self._named: set[int] = set()
        self._trainer: PeerWork | None = None
        self._session, self._refused = connection.session, connection.session.refused
        alone = IslandGroup()
        certificates = connection.shown(alone)
        entry = member_of(connection.session, self.corpus.sha256, certificates, connection.here.machine, notify)
        self.client = SwarmClient(connection.session, entry, self._meet)
        self.states_wanted = lambda: self.client.wanted
        self.transport, self.transfers = connect(
            stack, connection, self.client, alone, certificates, size=MAX_MEMBERS, notify=notify
        )
        self.transfers.stops = leaving.is_set
        least = self.config.world.elastic.stall
        self.watched = StallWatch(stack, self.client, [self.transport], least, notify, self._hangs).step
        self._most = COPIES * (rules(self.config).weights or _MOST) + BESIDE

    def number(self) -> int:
        """A number that all peers of one configuration and the same cut points share."""
        return identity_hash(identity(self.config, planned_cut(self.config)))

    @property
    def step(self) -> int:
        return 0 if self._trainer is None else self._trainer.steps_done()

    def leave(self) -> None:
        """Ask to leave as soon as the others can go on without this peer."""
        if self._trainer is not None:
            self._trainer.leave()

    def run(self) -> MemberEndReason:
        """Train until this member ends; "again": join again as another member."""
        part = self._part()
        if not isinstance(part, StartSwarm | JoinSwarm):
            return part
        try:
            return self._work(part)
        except Diverged as error:
            raise ValueError(str(error)) from None
        except CommError as error:
            self.client.look()
            if isinstance(self.client.ended, Over):
                return self._over(self.client.ended)
            self.notify(f"{printable(str(error), 300)}: joining again")
            return self._again()

    def _part(self) -> StartSwarm | JoinSwarm | MemberEndReason:
        """Request work from the lighthouse until it assigns some; or how this member has ended."""
        last_reason, answered_at = "", time.monotonic()
        while not self.leaving.is_set():
            part = self.client.part(self.wish, self._run)
            match part:
                case StartSwarm() | JoinSwarm():
                    return part
                case Over():
                    return self._over(part)
                case Refusal(reason=reason):
                    raise ValueError(printable(reason, 300))
                case Wait(reason=reason):
                    if reason != last_reason:
                        self.notify(printable(reason, 300))
                    last_reason, answered_at = reason, time.monotonic()
                case None if time.monotonic() - answered_at > _LONGEST_OUTAGE:
                    raise RendezvousFailed(f"the lighthouse has not answered for {_LONGEST_OUTAGE:.0f} s")
                case None:
                    pass
                case _:
                    return self._again()
            self.leaving.wait(_ASK)
        return self._left()

    def _over(self, over: Over) -> MemberEndReason:
        if over.reason:
            raise OSError(f"the run has ended: {printable(over.reason, 300)}")
        return "finished"

    def _work(self, part: StartSwarm | JoinSwarm) -> MemberEndReason:
        trainer = self._trainer = self.made(part)
        # Of a copy: `_meet` adds members in another thread. It sees the trainer by now, so none is missed.
        for member in [*self._there]:
            trainer.inbox.queue.meet(member)
        if isinstance(part, StartSwarm) and part.step:
            self._resume(trainer, part.step)
        if self.leaving.is_set():
            trainer.leave()
        # Only with its state: a beat says that this peer serves its stage.
        self.client.at_work(trainer.beat)
        result = trainer.run(self.folder)
        if result is None:
            trainer.inbox.queue.settle()
            return self._left() if trainer.has_left else self._again()
        self._conclude(trainer, result)
        return self._over(self.client.ended) if isinstance(self.client.ended, Over) else self._again()

    def _hangs(self, stalls: bool) -> None:
        """The training thread hangs, or goes on: then it comes back as another member."""
        self.client.ended = self.client.ended or Rejoin("the others have gone on without this peer")
        if stalls:
            cut_off(self.client, self.transport, self._session)

    def _left(self) -> MemberEndReason:
        self.client.ask(Leave())
        return "left"

    def _again(self) -> MemberEndReason:
        if isinstance(self.client.ended, Rejoin):
            self.notify(f"{printable(self.client.ended.reason, 300)}: joining again as another member")
        return self._left() if self.leaving.is_set() else "again"

    def made(self, part: StartSwarm | JoinSwarm) -> PeerWork:
        return ElasticSwarmTrainer(self, part, wish=self.wish, await_saved=self.client.await_saved)

    @override
    def stop_here(self, step: int) -> bool:
        return self.client.ended is not None or (self._trainer is not None and self._trainer.has_left)

    def _resume(self, trainer: PeerWork, step: int) -> None:
        paths: list[Path] = []

        def saved(part: int) -> tuple[Path, dict[str, Any]]:
            path, facts = self._fetch_saved(part, step)
            paths.append(path)
            return path, facts

        trainer.go_on_from(step, saved)
        for path in paths:
            path.unlink()

    def _fetch_saved(self, stage: int, step: int) -> tuple[Path, dict[str, Any]]:
        """Fetch the lighthouse's state of `stage` after `step`; returns its file and its facts. CommError if the
        transfer fails.
        """
        path = self.folder / f"kept-{stage}.safetensors"
        try:
            asked = FetchRequest(source=LIGHTHOUSE, what=state_of(stage, step), most=self._most, seconds=_SLOW)
            return path, self.transfers.fetch(asked, path)
        except StateUnavailable as why:
            raise CommError(f"the state of stage {stage} after step {step} was not received ({why})") from None

    def _conclude(self, trainer: PeerWork, result: dict[str, Any]) -> None:
        """Publish the model, or wait while the first peer does; if that one is lost, gather it again."""
        while True:
            if result["parameters"]:
                self.transfers.publish(MODEL, self.folder / "model.safetensors", {})
            self._report_counters()
            held = {} if (trained := trainer.trained()) is None else trained.state_dict()
            marks = {name: digest(one.cpu().contiguous().view(torch.uint8).numpy()) for name, one in held.items()}
            self.client.report({"held": marks})
            self.client.report({"result": result})
            answered_at, first = time.monotonic(), trainer.first
            while self.client.ended is None and (first == self.client.member or first not in trainer.inbox.queue.lost):
                if self.client.ask(Finished()) is not None:
                    answered_at = time.monotonic()
                elif time.monotonic() - answered_at > self.config.world.eval_deadline:
                    raise RendezvousFailed("the lighthouse has not taken the model")
                self.client.rest(_ASK)
            self.client.look()
            if self.client.ended is not None:
                self.client.reported(_LAST if isinstance(self.client.ended, Over) else 0.0)
                return
            result = trainer.conclude(self.folder)

    def _meet(self, member: int) -> None:
        """Receive from `member` from now on. Called in a session's thread."""
        self._there.add(member)
        if self._trainer is not None:
            self._trainer.inbox.queue.meet(member)

    @override
    def report(self, event: Any) -> None:
        if "notice" in event:
            self.notify(event["notice"])
            self.client.report({"notice": event["notice"]})
        elif "offered" in event or ("step" in event and "loss" in event):
            self.client.report(event)
            self._report_counters()

    def _report_counters(self) -> None:
        """Report the bytes sent by each path, and the refused messages."""
        lost = {} if self._trainer is None else dict(self._trainer.inbox.queue.lost)
        for member, why in lost.items():
            if isinstance(why, Malformed | Refused) and member not in self._named:
                self._refused.note(member, why.detail)
                self._named.add(member)
        self.client.report({"carried": dict(self.transport.carried)})
        self.client.report({"paths": self.transport.paths()})
        self.client.report({"refused": self._refused.rows()})
