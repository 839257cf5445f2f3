"""Which peers are in a swarm: a pure state machine like `coordinator`, for worlds whose peers agree among themselves.

    waiting     a peer with a member id that asks again and again what to do
    begin       once every stage has its peers: these peers, at these stages, from the states saved on disk
    join        while a swarm is running: ask its members, which admit the peer at the end of a step
    serving     the swarm's members report its membership; the lighthouse does not vote

A swarm without peers has ended; the next one consists of the peers that wait by then, and continues from the saved
states. A partitioned swarm runs twice until the lighthouse hears from one half: that half continues, and the peers of
the other rejoin. So the lighthouse's `epoch` and membership are the run's only history.

Calls in, effects out, like `coordinator`: no clock, no sockets; `SwarmCoordinator(rules, entries)` continues from a
journal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from isles.membership.effects import Coordinator, Effect, Known, MemberLimits, MemberTable, Reply
from isles.membership.messages import (
    ANY,
    JoinSwarm,
    Leave,
    MemberStatus,
    Message,
    Over,
    Refusal,
    Rejoin,
    RequestWork,
    RunStatus,
    StartSwarm,
    StatesSaved,
    SwarmBeat,
    Wait,
)

MAX_MEMBERS = 1 << 14
"""The most members of a run, over all time: positions in a swarm's messages. A run of days takes some 1,000."""
AGAIN = 5.0
"""Seconds for which a run that has lost its swarm waits for further peers, once every stage has one."""


@dataclass(frozen=True, kw_only=True)
class SwarmRules(MemberLimits):
    """peers: by stage, that the first swarm waits for; least: per stage, that later swarms need. last: the run's last
    step. clustered: the peers are nodes of clusters, which are all alike for the lighthouse.
    """

    peers: tuple[int, ...]
    least: int = 1
    last: int = 0
    members: int = MAX_MEMBERS
    clustered: bool = False


@dataclass
class _Peer(Known):
    """wish: None if it has not asked for work. run: see `RequestWork`. heard_at, serving: its last beat; beside: the
    members in it. pace: seconds of a step. is_out: the others go on without it. why: it was shut out.
    """

    left: bool = False
    why: str = ""
    wish: int | None = None
    run: int | None = None
    heard_at: float = 0.0
    serving: SwarmBeat | None = None
    pace: float = 0.0
    beside: Collection[int] = ()
    is_out: bool = False

    @property
    def here(self) -> bool:
        return self.connected and not self.left


class SwarmCoordinator(Coordinator):
    """rules: of the run. entries: of its journal so far. until: after a restart, when `tick` takes members that have
    not reconnected for lost.
    """

    kind = _Peer

    def __init__(self, rules: SwarmRules, entries: Iterable[dict[str, Any]] = (), until: float = 0.0) -> None:
        self.rules = rules
        self.peers = MemberTable[_Peer]()
        self.members: dict[int, int] = {}
        """By member of the swarm, its stage, as last reported."""
        self.epoch = self.step = self.saved = 0
        self.wanted = 0
        """The step from which on peers are asked for their states; 0: they are not."""
        self._bare: int | None = None  # the stage that was the first to lose its last peer
        self.ended: str | None = None
        """Set once the run is over: its reason, "" for a regular end."""
        self._run: int | None = None
        self._last_joined = self._ended_at = -1.0
        super().__init__(self.peers, rules, entries, until)

    # Calls

    def hear(self, now: float, member: int, message: Any) -> list[Effect] | None:
        peer = self.peers.get(member)
        if peer is None or peer.left:
            why = f" ({peer.why})" if peer is not None and peer.why else ""
            return [Reply(Rejoin(f"member {member} is no longer in this run{why}"))]
        match message:
            case RequestWork():
                self._wait(now, member, message)
            case SwarmBeat():
                self._serve(now, member, message)
            case Leave():
                self._record("leave", member=member)
            case _:
                return None
        return self._effects(now)

    def keep(self, now: float, step: int) -> list[Effect]:
        """The states of all stages after `step` are on disk."""
        if step > self.saved:
            self._record("saved", step=step)
        return self._effects(now)

    def ask_states(self, now: float, step: int) -> list[Effect]:
        """Ask all peers for their states, after `step` or soon after."""
        self.wanted = step
        return self._effects(now)

    def dissolve(self, now: float, member: int, why: str) -> list[Effect]:
        """End the swarm because of `member`, which is shut out; the others begin again as new members."""
        self._record("ban", member=member, why=why)
        self._record("serve", step=self.saved, members=[], stages=[])
        return self._effects(now)

    def end(self, now: float, reason: str = "") -> list[Effect]:
        """The run is over; peers learn it by the reply to their next message."""
        self.ended = reason
        return self._effects(now)

    # Queries

    def alive(self) -> list[int]:
        """Members that are connected, or may be: after a restart they have some time to reconnect."""
        return [member for member in self.members if self.peers[member].here]

    def about(self) -> tuple[int, int, int]:
        return len(self.alive()), self.step, self.rules.last

    def now(self, now: float, refused: Sequence[tuple[int, int, str, int]]) -> RunStatus:
        rows = []
        for member, peer in sorted(self.peers.items(), key=lambda one: (self.members.get(one[0], 1 << 40), one[0])):
            if peer.here:
                stage, heard = self.members.get(member, ANY), now - peer.heard_at
                role = "waiting" if stage == ANY else "standby" if self.rules.clustered else f"stage {stage}"
                row = MemberStatus(member, peer.identity, role, 0, 0.0, 0, 0.0, round(heard, 1), stage)
                if (beat := peer.serving) is not None:
                    if at := beat.coordinates:
                        role = f"cluster {at[0]}{'' if at[3] else ', broken'}: stage {at[1]} of {at[2]}"
                    row = replace(row, role=role, step=beat.step, seconds=beat.seconds, counted=beat.counted)
                    row = replace(row, queue=beat.queue, coordinates=at, exchanged=beat.step or None)
                    row = replace(row, ago=round(heard + beat.since, 1), rate=1 / peer.pace if peer.pace else None)
                rows.append(row)
        text = f"step {self.step} of {self.rules.last}"
        text += f", {now - self._ended_at:.1f} s ago" if self._ended_at >= 0 else ""
        text += f"; {'clusters' if self.rules.clustered else 'swarms'} begun: {self.epoch}"
        text += "" if self.alive() else f"; {self._wanted()}"
        return RunStatus(text, "step", self.step, tuple(rows), tuple(refused))

    # Consequences

    def _wait(self, now: float, member: int, seek: RequestWork) -> None:
        if not ANY <= seek.stage < len(self.rules.peers):
            count = len(self.rules.peers)
            why = f"--stage {seek.stage}: the run has {count} stages, 0 to {count - 1}"
            self._reply(Refusal(why))
            return
        peer = self.peers[member]
        peer.heard_at, peer.serving, peer.run = now, None, seek.run
        if peer.wish is None:
            peer.wish, self._last_joined = seek.stage, now
        run, is_certain = self._most_common_run()
        if seek.run != run and is_certain:
            peer.wish, why = None, "its configuration or its cut points are not the run's"
            self._reply(Refusal(f"{why}: install the same isles, torch and settings"))
        elif seek.run != run and self.ended is None:
            self._reply(
                Wait("waiting: the peers' configurations or cut points differ; further peers decide which counts")
            )
        else:
            self._step(now)
            self._reply(self._part(member))

    def _most_common_run(self) -> tuple[int | None, bool]:
        """(the `RequestWork.run` of the swarm, before the first one that of most waiting peers; if it is certain)."""
        if self._run is not None:
            return self._run, True
        waiting = [member for member, peer in self.peers.items() if peer.wish is not None and peer.here]
        runs = {self.peers[member].run: None for member in waiting}
        by_run = {run: [member for member in waiting if self.peers[member].run == run] for run in runs}
        run = max(by_run, key=lambda run: self.peers.votes(by_run[run]), default=None)
        return run, run is not None and 2 * self.peers.votes(by_run[run]) > self.peers.votes(waiting)

    def _part(self, member: int) -> Message:
        if self.ended is not None:
            return Over(self.ended)
        alive = self.alive()
        if member in alive:
            members = tuple(sorted(self.members))
            return StartSwarm(self.epoch, self.saved, members, tuple(self.members[one] for one in members))
        heard_at = [one for one in alive if one not in self._awaited]  # members not heard since a restart may be lost
        if heard_at:
            return JoinSwarm(self.epoch, tuple(heard_at))
        return Wait(self._wanted())

    def _serve(self, now: float, member: int, serving: SwarmBeat) -> None:
        """Handle a beat. A peer's report of the others is a vote on whether it works with them: a peer is in the swarm
        once more than half of the others work with it, and out once so many at a later step do not.
        """
        stages = dict(zip(serving.members, serving.stages, strict=False))
        fits = len(stages) == len(serving.members) == len(serving.stages) and member in stages
        fits = fits and len(serving.coordinates) in (0, 4) and 0 <= serving.step <= self.rules.last
        numbers = (*serving.coordinates, serving.seconds, serving.queue, serving.counted, serving.since)
        fits = fits and all(0 <= number <= 1 << 40 for number in numbers)
        if not fits or not all(one in self.peers and 0 <= stages[one] < len(self.rules.peers) for one in stages):
            raise ValueError("an impossible swarm")
        peer, others = self.peers[member], {*self.alive()} - {member}
        is_new = member not in self.members
        if serving.epoch != self.epoch or peer.is_out or (is_new and not others & stages.keys()):
            self._reply(Rejoin("the run goes on without this part of its swarm"))
            return
        if (last := peer.serving) is not None and last.step < serving.step:  # both ended a step when the beat says
            seconds = now - serving.since - (peer.heard_at - last.since)
            peer.pace = max(seconds, 0.0) / (serving.step - last.step)
        peer.heard_at, peer.serving, peer.beside, peer.wish = now, serving, stages.keys(), None
        steps = dict[str | int, int]()  # by vote
        for one in self.alive():
            beat, voter = self.peers[one].serving, self.peers.voter(one)
            steps[voter] = max(steps.get(voter, 0), self.step if beat is None else beat.step)
        ranked = sorted(steps.values())
        if ranked and (reached := ranked[(len(ranked) - 1) // 2]) > self.step:  # more than half of them have reached it
            self.step, self._ended_at = reached, now - serving.since
        members = self.members | ({member: stages[member]} if self._is_of(member) else {})
        members = {one: at for one, at in members.items() if one in stages or self._is_of(one)}
        if members != self.members:
            self._record("serve", step=self.step, members=list(members), stages=list(members.values()))
        wanted = self.wanted if self.wanted > self.saved else 0
        self._reply(StatesSaved(self.saved, wanted) if self.ended is None else Over(self.ended))

    def _is_of(self, member: int) -> bool:
        """Whether it is in the swarm, by the latest beats of the others."""
        own, others, count = self.peers[member].serving, [*self.alive()], self.peers.votes
        others = [one for one in others if one != member]
        beats = {one: beat for one in others if (beat := self.peers[one].serving) is not None}
        if member not in self.members:
            return 2 * count(one for one in beats if member in self.peers[one].beside) > count(others) or not others
        step = -1 if own is None else own.step
        without = [one for one, beat in beats.items() if member not in self.peers[one].beside and beat.step > step]
        is_pair = count({*others, member}) == 2 and min(self.alive()) not in without  # of two votes the first counts
        return 2 * count(without) <= count(others) or is_pair

    def _step(self, now: float) -> None:
        """Begin a new swarm if there is none and enough peers wait."""
        if self.alive() or self._awaited or self.ended is not None:
            return
        assigned = self._assigned()
        counts = Counter(assigned.values())
        whole = all(counts[stage] >= wanted for stage, wanted in enumerate(self.rules.peers))
        some = self.epoch > 0 and all(counts[stage] >= self.rules.least for stage in range(len(self.rules.peers)))
        if whole or (some and now - self._last_joined >= AGAIN):
            members = sorted(assigned)
            stages, run = [assigned[member] for member in members], self._most_common_run()[0]
            begin = {"epoch": self.epoch + 1, "step": self.saved, "members": members, "stages": stages, "run": run}
            why = "the swarm was ended" if self._bare is None else f"stage {self._bare} lost its last peer"
            why = "no complete cluster was left" if self.rules.clustered else why
            self._record("begin", **begin, reached=max(self.step, self.saved), why=why)

    def _assigned(self) -> dict[int, int]:
        """By waiting member, a stage: its wish, or the stage that lacks most peers."""
        run, _ = self._most_common_run()
        waiting = {
            member: peer.wish
            for member, peer in self.peers.items()
            if peer.wish is not None and peer.here and peer.run == run
        }
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

    # Journalled state

    def _note_bare(self) -> None:
        """Note the first stage that has lost its last peer."""
        bare = {*self.members.values()} - {self.members[member] for member in self.alive()}
        self._bare = self._bare if self._bare in bare else min(bare, default=None)

    def _change(self, entry: dict[str, Any]) -> bool:
        match entry:
            case {"event": "lost", "member": member}:
                self.peers[member].connected, self.peers[member].wish = False, None
                self._note_bare()
            case {"event": "back", "member": member}:
                self.peers[member].connected = True
                self._note_bare()
            case {"event": "leave" | "ban", "member": member}:
                self.peers[member].left, self.peers[member].why = True, entry.get("why", "")
                self._note_bare()
            case {"event": "begin", "epoch": epoch, "step": step, "members": members, "stages": stages}:
                self.epoch, self.step, self.members = epoch, step, dict(zip(members, stages, strict=True))
                self._run = entry.get("run", self._run)
                self.wanted, self._bare = 0, None
                for member in members:
                    self.peers[member].wish = None
            case {"event": "serve", "step": step, "members": members, "stages": stages}:
                for member in self.members.keys() - {*members}:
                    self.peers[member].is_out = True
                self.step, self.members = step, dict(zip(members, stages, strict=True))
            case {"event": "saved", "step": step}:
                self.saved = step
            case _:
                return False
        return True
