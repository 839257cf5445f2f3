"""Who is of a swarm: a pure state machine beside `coordinator`, for worlds whose peers agree among themselves.

    waiting     a peer that has its member id; it asks again and again what to do
    begin       once every stage has its peers: these, at these stages, from what is saved on the disk
    join        where a swarm is at work: ask its members, who let the peer in at the end of a step
    serving     its members say who they are; the lighthouse does not vote

A swarm that has nobody left is over; the next one consists of the peers that wait by then, and continues from what is
saved. A swarm that was partitioned runs twice until one half is heard of: the half that is heard first continues, and
the peers of the other rejoin. So `epoch` and membership, as the lighthouse has it, are the run's one history.

Calls in, effects out, as `coordinator`: no clock, no sockets; `SwarmCoordinator(rules, entries)` continues from its
journal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from isles.membership.effects import Coordinator, Effect, Reply, of_another_version
from isles.membership.messages import (
    ANY,
    Admitted,
    JoinSwarm,
    Leave,
    Message,
    Over,
    PeerStatus,
    Refusal,
    Rejoin,
    RequestWork,
    StartSwarm,
    StatesSaved,
    SwarmBeat,
    SwarmStatus,
    Wait,
    identity_of,
)

MAX_MEMBERS = 1 << 14
"""Of a run, whoever had them: positions in the letters of a swarm. Some 1,000 are taken in a run of days."""
AGAIN = 5.0
"""Seconds for which a run that has lost its swarm waits for further peers, once every stage has one."""


@dataclass(frozen=True, kw_only=True)
class SwarmRules:
    """peers: of each stage, that the first swarm waits for; least: that later ones begin with. most: at once. last: the
    run's last step. clustered: they are nodes of clusters, of one kind for the lighthouse.
    """

    peers: tuple[int, ...]
    least: int = 1
    most: int = 1024
    last: int = 0
    members: int = MAX_MEMBERS
    clustered: bool = False


@dataclass
class _Peer:
    """What is known of one member. identity: by its certificate. wish: None while it has not asked what to do. heard:
    when, and what it said of its work, `beside` whom. is_out: the others have gone on without it.
    """

    identity: str
    connected: bool = True
    left: bool = False
    wish: int | None = None
    heard_at: float = 0.0
    serving: SwarmBeat | None = None
    beside: Collection[int] = ()
    is_out: bool = False

    @property
    def is_here(self) -> bool:
        """Whether it has a part in the run now."""
        return self.connected and not self.left


class SwarmCoordinator(Coordinator):
    """rules: of the run. entries: its journal so far. until: if there is one, `tick` counts who has not come back by
    then as gone.
    """

    def __init__(self, rules: SwarmRules, entries: Iterable[dict[str, Any]] = (), until: float = 0.0) -> None:
        self.rules = rules
        self.peers: dict[int, _Peer] = {}
        self.members: dict[int, int] = {}
        """The stage of each of the swarm's, as it was told last."""
        self.epoch = self.step = self.saved = 0
        self.ended: str | None = None
        """Set where the run is over: its reason, "" where all went well."""
        self._run: int | None = None
        self._came = self._ended_at = -1.0
        super().__init__(entries, until)

    # Calls

    def join(self, now: float, description: str, certificates: Sequence[str] = ()) -> list[Effect]:
        """A worker asks for a member. certificates: as in `Hello`."""
        if len(self._connected()) >= self.rules.most:
            return [Reply(Refusal(f"the run has its most workers, {self.rules.most} (isles lighthouse --max-members)"))]
        if len(self.peers) >= self.rules.members:
            return [Reply(Refusal(f"the run has given its {self.rules.members} members, and none is used twice"))]
        member = len(self.peers)
        self._record("join", member=member, description=description, certificates=[*certificates])
        self._reply(Admitted(member))
        return self._taken()

    def disconnected(self, now: float, member: int) -> list[Effect]:
        """The connection of a worker broke."""
        if member in self.peers and self.peers[member].connected:
            self._record("lost", member=member)
        return self._taken()

    def reconnected(self, now: float, member: int) -> list[Effect]:
        """The connection of a worker is there (again)."""
        self._awaited.discard(member)
        if member in self.peers and not self.peers[member].connected:
            self._record("back", member=member)
        return self._taken()

    def tick(self, now: float) -> list[Effect]:
        """Time passes."""
        self._count_absent(now)
        self._form(now)
        return self._taken()

    def hear(self, now: float, member: int, message: Any) -> list[Effect] | None:
        """What a worker says; None where no peer of a swarm says that. ValueError for what cannot be."""
        peer = self.peers.get(member)
        if peer is None or peer.left:
            return [Reply(Rejoin(f"member {member} is no longer in this run"))]
        match message:
            case RequestWork():
                self._wait(now, member, message)
            case SwarmBeat():
                self._serve(now, member, message)
            case Leave():
                self._record("leave", member=member)
            case _:
                return None
        return self._taken()

    def keep(self, step: int) -> list[Effect]:
        """The states of all stages after `step` are on the disk."""
        if step > self.saved:
            self._record("saved", step=step)
        return self._taken()

    def end(self, now: float, reason: str = "") -> list[Effect]:
        """The run is over; whoever asks is told."""
        self.ended = reason
        return self._taken()

    # What is asked

    def alive(self) -> list[int]:
        """Members that are there, or may be: after a restart they are given a while."""
        return [member for member in self.members if self.peers[member].is_here]

    def about(self) -> tuple[int, int, int]:
        """(peers at work, newest step, last step)."""
        return len(self.alive()), self.step, self.rules.last

    def now(self, now: float, refused: Sequence[tuple[int, int, str, int]]) -> SwarmStatus:
        """How the swarm stands, for a person. refused: see `SwarmStatus`."""
        rows = []
        for member, peer in self.peers.items():
            if peer.is_here:
                beat = peer.serving
                work = (0, 0.0, 0.0, 0) if beat is None else (beat.step, beat.seconds, beat.queue, beat.counted)
                coordinates = () if beat is None else beat.coordinates
                rows.append(
                    PeerStatus(
                        member,
                        self.members.get(member, ANY),
                        *work,
                        round(now - peer.heard_at, 1),
                        coordinates,
                        peer.identity,
                    )
                )
        since = round(now - self._ended_at, 1) if self._ended_at >= 0 else -1.0
        wanted = "" if self.alive() else self._wanted()
        step, last = self.step, self.rules.last
        more = tuple(rows), tuple(refused), self.rules.clustered
        return SwarmStatus(self.epoch, step, last, since, self.saved, wanted, *more)

    # What follows

    def _wait(self, now: float, member: int, seek: RequestWork) -> None:
        if not ANY <= seek.stage < len(self.rules.peers):
            count = len(self.rules.peers)
            why = f"--stage {seek.stage}: the run has {count} stages, 0 to {count - 1}"
            self._reply(Refusal(why))
            return
        self._run = seek.run if self._run is None else self._run
        if seek.run != self._run:
            why = "its configuration or its cut points are not the run's: install the same isles, torch and settings"
            self._reply(Refusal(why))
            return
        peer = self.peers[member]
        peer.heard_at, peer.serving = now, None
        if peer.wish is None:
            peer.wish, self._came = seek.stage, now
        self._form(now)
        self._reply(self._part(member))

    def _part(self, member: int) -> Message:
        if self.ended is not None:
            return Over(self.ended)
        alive = self.alive()
        if member in alive:
            members = tuple(sorted(self.members))
            return StartSwarm(self.epoch, self.saved, members, tuple(self.members[one] for one in members))
        heard_at = [one for one in alive if one not in self._awaited]  # who was not heard since a restart may be gone
        if heard_at:
            return JoinSwarm(self.epoch, tuple(heard_at))
        return Wait(self._wanted())

    def _serve(self, now: float, member: int, serving: SwarmBeat) -> None:
        """What a peer says of others is that it works with them, or does not: it is of the swarm once more than half of
        the others work with it, and counted out once so many do not, at a later step than its own.
        """
        stages = dict(zip(serving.members, serving.stages, strict=False))
        fits = len(stages) == len(serving.members) == len(serving.stages) and member in stages
        fits = fits and len(serving.coordinates) in (0, 4) and 0 <= serving.step <= self.rules.last
        numbers = (*serving.coordinates, serving.seconds, serving.queue, serving.counted, serving.since)
        fits = fits and all(0 <= number <= 1 << 40 for number in numbers)
        if not fits or not all(one in self.peers and 0 <= stages[one] < len(self.rules.peers) for one in stages):
            raise ValueError("a swarm that cannot be")
        peer, others = self.peers[member], {*self.alive()} - {member}
        is_new = member not in self.members
        if serving.epoch != self.epoch or peer.is_out or (is_new and others and not others & stages.keys()):
            self._reply(Rejoin("the run goes on without this part of its swarm"))
            return
        peer.heard_at, peer.serving, peer.beside, peer.wish = now, serving, stages.keys(), None
        beats = [self.peers[one].serving for one in self.alive()]
        steps = sorted(self.step if beat is None else beat.step for beat in beats)
        if steps and (reached := steps[(len(steps) - 1) // 2]) > self.step:  # half of them, at the least, are there
            self.step, self._ended_at = reached, now - serving.since
        members = self.members | ({member: stages[member]} if self._is_of(member) else {})
        members = {one: at for one, at in members.items() if one in stages or self._is_of(one)}
        if members != self.members:
            self._record("serve", step=self.step, members=list(members), stages=list(members.values()))
        self._reply(StatesSaved(self.saved) if self.ended is None else Over(self.ended))

    def _is_of(self, member: int) -> bool:
        """Whether it is one of the swarm, by what the others there have said last."""
        own, others = self.peers[member].serving, [self.peers[one] for one in self.alive() if one != member]
        votes = [(member in other.beside, other.serving.step) for other in others if other.serving is not None]
        if member not in self.members:
            return 2 * sum(is_beside for is_beside, _ in votes) > len(others) or not others
        step = -1 if own is None else own.step
        return 2 * sum(not is_beside and at > step for is_beside, at in votes) <= len(others)

    def _form(self, now: float) -> None:
        """A new swarm, where there is none."""
        if self.alive() or self._awaited or self.ended is not None:
            return
        found = self._assigned()
        counts = Counter(found.values())
        whole = all(counts[stage] >= wanted for stage, wanted in enumerate(self.rules.peers))
        some = self.epoch > 0 and all(counts[stage] >= self.rules.least for stage in range(len(self.rules.peers)))
        if whole or (some and now - self._came >= AGAIN):
            members = sorted(found)
            self._record(
                "begin", epoch=self.epoch + 1, step=self.saved, members=members, stages=[found[s] for s in members]
            )

    def _assigned(self) -> dict[int, int]:
        """By member, the stage of each that waits: its wish, or the one that lacks most."""
        waiting = {member: peer.wish for member, peer in self.peers.items() if peer.wish is not None and peer.is_here}
        found = {member: wish for member, wish in waiting.items() if wish != ANY}
        counts = Counter(found.values())
        for member in sorted(waiting.keys() - found.keys()):
            found[member] = min(range(len(self.rules.peers)), key=lambda at: (counts[at] / self.rules.peers[at], at))
            counts[found[member]] += 1
        return found

    def _wanted(self) -> str:
        counts, peers = Counter(self._assigned().values()), self.rules.peers
        missing = [(stage, number - counts[stage]) for stage, number in enumerate(peers) if counts[stage] < number]
        if missing and self.rules.clustered:
            (_, number), *_ = missing
            return f"waiting for {number} node{'s' * (number > 1)}"
        beat = ", ".join(f"stage {stage} for {number} peer{'s' * (number > 1)}" for stage, number in missing)
        return f"waiting: {beat}" if beat else "waiting for the others to come back"

    # What must survive

    def _connected(self) -> list[int]:
        return [member for member, peer in self.peers.items() if peer.is_here]

    def _apply(self, entry: dict[str, Any]) -> None:
        match entry:
            case {"event": "join", "member": member, "certificates": certificates}:
                self.peers[member] = _Peer(identity_of(certificates))
            case {"event": "lost", "member": member}:
                self.peers[member].connected, self.peers[member].wish = False, None
            case {"event": "back", "member": member}:
                self.peers[member].connected = True
            case {"event": "leave", "member": member}:
                self.peers[member].left = True
            case {"event": "begin", "epoch": epoch, "step": step, "members": members, "stages": stages}:
                self.epoch, self.step, self.members = epoch, step, dict(zip(members, stages, strict=True))
                for member in members:
                    self.peers[member].wish = None
            case {"event": "serve", "step": step, "members": members, "stages": stages}:
                for member in self.members.keys() - {*members}:
                    self.peers[member].is_out = True
                self.step, self.members = step, dict(zip(members, stages, strict=True))
            case {"event": "saved", "step": step}:
                self.saved = step
            case _:
                of_another_version(entry)
