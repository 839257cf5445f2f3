"""A world of toy workers round the real `RoundsCoordinator` and `MemberState`: messages with delays, deaths, pauses,
cuts, outages.

There are no weights. What stands for them is the set of batches whose work they hold, as the bits of an integer: an
exchange is a union, a death loses what nobody else has. So it can be counted what was read, by whom, and whether it is
in a world that goes on.
"""

from __future__ import annotations

import heapq
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count

from isles.data.order import rows
from isles.membership.coordinator import RoundsCoordinator
from isles.membership.data_ledger import batches
from isles.membership.effects import Append, Notify, Reply, Rules
from isles.membership.member import MemberState
from isles.membership.messages import (
    Ack,
    Admitted,
    BeatReply,
    Delivered,
    Done,
    Load,
    PeerReport,
    Proposal,
    Refusal,
    View,
)
from isles.membership.round_commit import NOTHING, RoundDecision, RoundState

LEASE, PATIENCE, GRACE, RETRY = 3.0, 5.0, 4.0, 1.0
FIRST = 3.0  # seconds to wait in the first attempt of a round of one mean; as in `RoundLeader` less than in later ones


@dataclass
class Share:
    """What one worker sends in an exchange."""

    member: int
    view: int
    round: int
    attempt: int
    work: int


@dataclass
class Node:
    """One worker process."""

    name: int
    pace: float
    address: str = ""
    state: MemberState | None = None
    work: int = 0
    mean: int = 0  # where all land one mean, the part of `work` that has landed: the state that it gives
    alive: bool = True
    frozen: bool = False
    cut: bool = False
    broken: bool = False  # its connection, and it has not come back yet
    training: bool = False
    leaving: bool = False
    landed: list[tuple[int, int, tuple[int, ...]]] = field(default_factory=list)  # what makes its digest
    means: dict[int, tuple[RoundDecision, int]] = field(default_factory=dict)
    shares: dict[tuple[int, int], dict[int, Share]] = field(default_factory=dict)
    exchange: Exchange | None = None
    asking: bool = False
    loading: int = -1
    donor: int = -1  # whose state it loads
    held_back: list[Callable[[], None]] = field(default_factory=list)

    @property
    def member(self) -> int:
        assert self.state is not None
        return self.state.member


@dataclass
class Exchange:
    """The one under way at a worker. members: whom it waits for."""

    round: int
    view: int
    members: tuple[int, ...]
    part: RoundState | None = None
    work: int = 0


class World:
    """agrees: all-reduce instead of pairs. quorum: see `Rules`; workers train on while a round lands. After `run` the
    counts can be read.
    """

    def __init__(self, *, founders: int, agrees: bool, seed: int, sync_every: int = 2, quorum: float = 0.0) -> None:
        self.rules = Rules(founders=founders, sync_every=sync_every, agrees=agrees, quorum=quorum)
        self.random = random.Random(seed)
        self.now = 0.0
        self.nodes: list[Node] = []
        self.reads: list[tuple[int, int]] = []  # (position, member) of each batch; its index is its bit
        self.counts: Counter[str] = Counter()
        self.journal: list[dict] = []
        self.lighthouse: RoundsCoordinator | None = RoundsCoordinator(self.rules)
        self.deaf = -1.0  # messages sent to the lighthouse before this moment never arrive
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._number = count()
        self._members: dict[int, Node] = {}
        self.final = 1 << 30
        for _ in range(founders):
            self.join()

    # Time and messages

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._number), what))

    def run(self, until: float) -> None:
        while self._queue and self._queue[0][0] <= until:
            self.now, _, what = heapq.heappop(self._queue)
            what()
        self.now = max(self.now, until)

    def delay(self) -> float:
        return self.random.uniform(0.01, 0.12)

    def to_node(self, node: Node, what: Callable[[], None]) -> None:
        """Deliver, if it lives and is reachable then; a frozen one gets it when it is back."""

        def arrive() -> None:
            if node.frozen and node.alive:
                node.held_back.append(what)
            elif node.alive and not node.cut:
                what()

        self.after(self.delay(), arrive)

    def ask(
        self, node: Node, call: Callable[[RoundsCoordinator], list], answer: Callable[[object | None], None]
    ) -> None:
        """One query; `answer` gets the reply, or None when none comes."""
        sent, replied = self.now, [False]

        def reply(message: object | None) -> None:
            if not replied[0]:
                replied[0] = True
                answer(message)

        def arrive() -> None:
            if self.lighthouse is None or self.deaf >= sent or node.cut:
                return
            for message in self.carry_out(call(self.lighthouse)):
                self.to_node(node, lambda message=message: reply(message))

        if not node.cut:
            self.after(self.delay(), arrive)
        self.after(RETRY, lambda: node.alive and self.unless_frozen(node, lambda: reply(None)))

    def unless_frozen(self, node: Node, what: Callable[[], None]) -> None:
        node.held_back.append(what) if node.frozen else what()

    def carry_out(self, orders: list) -> list:
        """Journal, send; the replies are given back."""
        replies = []
        for order in orders:
            if isinstance(order, Append):
                self.journal.append(json.loads(json.dumps(order.entry)))
                self.counts[order.entry["event"]] += 1
            elif isinstance(order, Reply):
                replies.append(order.message)
            elif isinstance(order, Notify) and order.member in self._members:
                node = self._members[order.member]
                self.to_node(node, lambda node=node, message=order.message: self.heard(node, message))
        return replies

    def command(self, call: Callable[[RoundsCoordinator], list]) -> None:
        """What the lighthouse notices by itself."""
        if self.lighthouse is not None:
            self.carry_out(call(self.lighthouse))

    # Events

    def join(self) -> None:
        node = Node(len(self.nodes), self.random.uniform(0.9, 1.1))
        self.nodes.append(node)
        self._hello(node)

    def _hello(self, node: Node) -> None:
        def answer(message: object | None) -> None:
            if node.state is not None:
                return
            if not isinstance(message, Admitted):
                self._hello(node)
                return
            node.state = MemberState(message.member)
            self._members[message.member] = node
            for other in self.nodes:
                if other.state is not None and not other.alive:
                    node.state.connection(other.member, broken=True)
            self.beat(node)

        self.ask(node, lambda m: m.join(self.now, "toy", (), node.address), answer)

    def kill(self, node: Node) -> None:
        node.alive = False
        self.counts["deaths"] += 1
        if node.state is not None:
            self.after(self.random.uniform(0.02, 0.3), lambda: self.break_connection(node))

    def pause(self, node: Node, seconds: float) -> None:
        node.frozen = True
        self._away(node, seconds, self._wake)

    def cut(self, node: Node, seconds: float) -> None:
        """It goes on by itself; nothing comes in or goes out."""
        node.cut = True

        def mend(node: Node) -> None:
            node.cut = False

        self._away(node, seconds, mend)

    def _away(self, node: Node, seconds: float, end: Callable[[Node], None]) -> None:
        if seconds > LEASE:
            self.counts["absences"] += 1
            self.after(LEASE, lambda: node.alive and node.state is not None and self.break_connection(node))

        def over() -> None:
            end(node)
            if node.broken:  # by this absence, or by one before after which it was not back yet
                self.after(self.random.uniform(0.1, 0.3), lambda: node.alive and self.make_connection(node))

        self.after(seconds, over)

    def _wake(self, node: Node) -> None:
        node.frozen = False
        waiting, node.held_back = node.held_back, []
        for what in waiting:
            if node.alive:
                what()

    def leave(self, node: Node) -> None:
        node.leaving = True

        def answer(message: object | None) -> None:
            if node.alive and node.leaving and message is None:
                self.leave(node)

        if node.state is not None:
            self.ask(node, lambda m: [*m.leave(self.now, node.member), Reply(Refusal("heard"))], answer)

    def crash(self, seconds: float) -> None:
        """The lighthouse dies, and is started again on its journal."""
        self.lighthouse, self.deaf = None, self.now
        self.counts["outages"] += 1

        def restart() -> None:
            self.deaf = self.now
            self.lighthouse = RoundsCoordinator(self.rules, self.journal, until=self.now + GRACE)
            for node in self.nodes:
                if node.alive and node.state is not None:
                    self.after(self.random.uniform(0.5, 2.0), lambda node=node: self._return(node))
            self.after(GRACE + 0.01, lambda: self.command(lambda m: m.tick(self.now)))

        self.after(seconds, restart)

    def _return(self, node: Node) -> None:
        if node.alive and (node.frozen or node.cut):  # it tries as long as it takes
            self.after(1.0, lambda: self._return(node))
        elif node.alive and not node.broken:
            self.command(lambda m: m.reconnected(self.now, node.member))

    def break_connection(self, node: Node) -> None:
        node.broken = True
        self.command(lambda m: m.disconnected(self.now, node.member))
        for other in self.nodes:
            if other is not node and other.alive and other.state is not None:
                self.to_node(other, lambda other=other: self._broken(other, node.member))
            if node.alive and other is not node and other.state is not None:  # it sees the others go
                self.unless_frozen(node, lambda member=other.member: self._broken(node, member))

    def make_connection(self, node: Node) -> None:
        if node.frozen or node.cut:
            return
        node.broken = False
        self.command(lambda m: m.reconnected(self.now, node.member))
        for other in self.nodes:
            if other.state is not None and other.alive and other is not node:
                assert node.state is not None
                node.state.connection(other.member, broken=other.frozen or other.cut)
                if not other.cut and not other.frozen:
                    other.state.connection(node.member, broken=False)

    def _broken(self, node: Node, member: int) -> None:
        assert node.state is not None
        node.state.connection(member, broken=True)
        if node.loading >= 0 and node.donor == member:  # what it had of a state it does not use
            node.loading = -1
            self.ask(node, lambda m: m.reload(self.now, node.member) or [], lambda message: None)
        self.look(node)

    # A worker

    def beat(self, node: Node) -> None:
        """Ask, one at a time; again each second, and sooner while it waits for its first round."""
        if node.asking or not node.alive:
            return
        member = node.state
        assert member is not None
        node.asking = True
        beat = member.beat()

        def answer(message: object | None) -> None:
            node.asking = False
            if not node.alive:
                return
            if isinstance(message, BeatReply):
                ack = member.answered(beat, message)
                if ack is not None:
                    self.acknowledge(node, ack)
                self.look(node)
            elif isinstance(message, Refusal):
                node.alive = False
                self.break_connection(node)
                return
            # a round begun meanwhile is told at once, not a beat later
            soon = member.beat().round != beat.round
            self.after(0.0 if soon else 1.0 if node.training else 0.2, lambda: self.beat(node))

        self.ask(node, lambda m: m.beat(self.now, member.member, beat), answer)

    def acknowledge(self, node: Node, ack: Ack) -> None:
        self.ask(node, lambda m: m.ack(self.now, node.member, ack), lambda message: None)

    def heard(self, node: Node, message: object) -> None:
        member = node.state
        assert member is not None
        match message:
            case Proposal():
                ack = member.proposed(message)
                if ack is not None:
                    self.acknowledge(node, ack)
            case View():
                member.receive_view(message)
            case Load():
                self.load(node, message)
            case RoundDecision():
                self.decision(node, message)
        self.look(node)

    def load(self, node: Node, load: Load) -> None:
        member = node.state
        assert member is not None
        if node.loading == load.call or load.call == member.ready:
            return
        node.loading, node.donor, node.training, node.exchange = load.call, load.donor, False, None
        if load.donor < 0:
            node.loading = -1
            node.work, node.mean, node.landed = 0, 0, []
            member.loaded(load, 0)
            return
        donor = self._members[load.donor]

        def given(work: int, landed: list, round: int, left_out: dict[int, int]) -> None:
            if not node.alive or (node.loading, node.donor) != (load.call, load.donor):
                return
            node.loading = -1
            node.work, node.mean, node.landed = work, work, landed
            member.loaded(load, round, left_out)
            self.beat(node)

        def give() -> None:
            dm = donor.state
            assert dm is not None
            if donor.cut or not donor.training:
                return
            # the state after its last landing: what it has read since then comes with its own next exchange
            work, round = (donor.mean, len(donor.landed)) if self.rules.agrees else (donor.work, dm.round)
            snapshot = work, list(donor.landed), round, dict(dm.left_out)
            self.after(self.random.uniform(0.1, 1.0), lambda: self.to_node(node, lambda: given(*snapshot)))

        def give_up() -> None:
            if node.alive and node.loading == load.call and member.ready != load.call:
                node.loading = -1
                self.ask(node, lambda m: m.reload(self.now, node.member) or [], lambda message: None)

        self.to_node(donor, give)
        self.after(RETRY + 2.5, lambda: self.unless_frozen(node, give_up))

    def look(self, node: Node) -> None:
        """Whether something that the worker waits for is there."""
        member = node.state
        if member is None or not node.alive or node.frozen:
            return
        if not node.training and node.loading < 0 and member.ready == member.call and node.exchange is None:
            first = member.first()
            if first is not None and self._caught_up(node, first):
                node.training = True
                self.begin(node, first)
        elif node.exchange is not None:
            self.exchanging(node)

    def _caught_up(self, node: Node, first: int) -> bool:
        """Shadow rounds: the means that came after the donor's state, from whoever has them."""
        if not self.rules.agrees:
            return True
        while len(node.landed) < first - 1:
            round = len(node.landed) + 1
            found = next((n.means[round] for n in self.nodes if n.alive and round in n.means), None)
            if found is None:
                if any(len(n.landed) >= round for n in self.living()):  # and nobody has it any more
                    self.ask(node, lambda m: m.reload(self.now, node.member) or [], lambda message: None)
                return False
            self._land(node, *found)
        return True

    def begin(self, node: Node, round: int) -> None:
        member = node.state
        assert member is not None
        if member.call != member.ready or not node.training:
            node.training = False
            return
        until = member.until()
        if round > self.final or (node.leaving and until is not None and round >= until):
            if node.leaving and node.exchange is not None:  # it waits until its work has landed
                self._soon(node, lambda: self.begin(node, round))
                return
            node.training = False
            if node.leaving:
                node.alive = False
                self.counts["left"] += 1
                self.break_connection(node)
            return
        view = member.start_round(round)
        if view is None:
            self.counts["out of turn"] += 1
        else:
            island_rank = view.index(member.member)
            assert island_rank is not None
            for batch in batches(member.views, view, round, island_rank):
                (position,) = rows(*batch, batch_size=1)
                self.reads.append((int(position), member.member))
                node.work |= 1 << len(self.reads) - 1
        self.beat(node)
        call = member.call
        seconds = node.pace * self.random.uniform(0.9, 1.1)
        self.after(seconds, lambda: self.unless_frozen(node, lambda: node.alive and self.meet(node, round, call)))

    def meet(self, node: Node, round: int, call: int) -> None:
        """The end of a round: who takes part is asked now."""
        member = node.state
        assert member is not None
        if member.call != member.ready or member.call != call or not node.training:
            node.training, node.exchange = False, None
            return
        if self.rules.quorum:
            if node.exchange is None:
                self._deliver(node, round)
            else:  # the round before has not landed
                self._soon(node, lambda: self.meet(node, round, call))
            return
        round_members = member.group(round)
        if self.rules.agrees and not round_members.decided:  # nothing could land; the inner loop goes on meanwhile
            self._soon(node, lambda: self.meet(node, round, call))
            return
        members = (
            round_members.members if self.rules.agrees else self._pair(round, round_members.members, member.member)
        )
        if len(members) == 1 and not self.rules.agrees:
            self.counts["alone"] += 1
            self.begin(node, round + 1)
            return
        part = RoundState(member.member, round, 0, members) if self.rules.agrees else None
        node.exchange = Exchange(round, round_members.view, members, part, node.work)
        self._send(node)
        self._late(node, node.exchange, 0)
        self.exchanging(node)

    def _soon(self, node: Node, what: Callable[[], None]) -> None:
        self.after(0.2, lambda: self.unless_frozen(node, lambda: node.alive and what()))

    def _deliver(self, node: Node, round: int) -> None:
        """The share of a round for which a quorum is enough; then it trains on. If the others have landed without it,
        it takes their mean, and this share is one of the next round.
        """
        member, part = node.state, RoundState(node.member, round, 0, (node.member,))
        assert member is not None
        call = member.call
        exchange = node.exchange = Exchange(round, -1, (), part, node.work)
        delivered, heard = Delivered(round, self.rules.sync_every, node.pace), [Reply(Refusal("heard"))]

        def deliver(run: RoundsCoordinator) -> list:
            effects = run.deliver(self.now, node.member, delivered)
            return effects + heard * (not any(isinstance(effect, Reply) for effect in effects))

        def first(message: object | None) -> None:
            if not (node.alive and node.training) or (member.call, member.ready) != (call, call):
                return
            answer(message)
            if node.exchange is exchange or node.member in node.landed[-1][2] or round == self.final:
                self.begin(node, round + 1)
            else:
                member.skip(round + 1)
                self._deliver(node, round + 1)

        def answer(message: object | None) -> None:
            if isinstance(message, RoundDecision):
                self.decision(node, message)
            self._soon(node, again)

        def again() -> None:
            if node.exchange is exchange and exchange.part is not None and not exchange.part.attempt:
                self.ask(node, deliver, answer)

        self.ask(node, deliver, first)

    def _pair(self, round: int, members: tuple[int, ...], member: int) -> tuple[int, ...]:
        order = list(members)
        random.Random(round).shuffle(order)
        island_rank = order.index(member)
        return tuple(order[island_rank // 2 * 2 : island_rank // 2 * 2 + 2])

    def _send(self, node: Node) -> None:
        exchange = node.exchange
        assert exchange is not None
        attempt, members = (
            (0, exchange.members) if exchange.part is None else (exchange.part.attempt, exchange.part.members)
        )
        share = Share(node.member, exchange.view, exchange.round, attempt, exchange.work)
        for member in members:
            other = self._members.get(member)
            if other is None:
                continue
            self.counts["sent"] += 1
            if not node.cut:
                self.to_node(other, lambda other=other: self._arrive(other, share))

    def _arrive(self, node: Node, share: Share) -> None:
        node.shares.setdefault((share.round, share.attempt), {})[share.member] = share
        oldest = node.state.round - 8 if node.state is not None else 0
        node.shares = {key: shares for key, shares in node.shares.items() if key[0] >= oldest}
        self.look(node)

    def _late(self, node: Node, exchange: Exchange, attempt: int) -> None:
        def late() -> None:
            if not node.alive or node.exchange is not exchange:
                return
            part = exchange.part
            if part is None:
                self.counts["deadline"] += 1
                node.exchange = None
                self.begin(node, exchange.round + 1)
            elif part.attempt == attempt and part.phase == "exchanging":
                here = node.shares.get((exchange.round, attempt), {})
                for member in part.members:
                    if member not in here:
                        peer_report = PeerReport(exchange.round, attempt, member, "late")
                        self.ask(
                            node, lambda m, a=peer_report: m.report_peer(self.now, node.member, a), lambda message: None
                        )
                self._say_failed(node, Done(exchange.round, attempt, NOTHING))
                self._late(node, exchange, attempt)

        seconds = FIRST if exchange.part is not None and not attempt else PATIENCE
        self.after(seconds, lambda: self.unless_frozen(node, late))

    def _say_failed(self, node: Node, done: Done) -> None:
        """An attempt failed here: the others are to try again, or to go on without this worker."""

        def answer(message: object | None) -> None:
            if isinstance(message, RoundDecision):
                self.decision(node, message)

        self.ask(node, lambda m: m.done(self.now, node.member, done), answer)

    def exchanging(self, node: Node) -> None:
        """Go on with the exchange if what it waits for is there."""
        exchange, member = node.exchange, node.state
        assert exchange is not None and member is not None
        if exchange.part is None:
            self._exchanging_pair(node, exchange, member)
            return
        if member.call != member.ready:
            node.exchange, node.training = None, False
            return
        part = exchange.part
        here = node.shares.get((exchange.round, part.attempt), {})
        if self.rules.quorum and not part.attempt:  # it is not known who takes part
            return
        if part.phase == "exchanging" and set(part.members) <= set(here):
            exchange.part = part.answered(part.attempt)
            self._say_done(node, exchange)

    def _exchanging_pair(self, node: Node, exchange: Exchange, member: MemberState) -> None:
        (other,) = [one for one in exchange.members if one != member.member]
        share = node.shares.get((exchange.round, 0), {}).get(other)
        over = True
        if share is not None and share.view == exchange.view and member.accept(exchange.round, exchange.members):
            node.work |= share.work
            self.counts["whole"] += 1
        elif share is not None or member.lost(other):
            self.counts["partner elsewhere" if share is not None else "partner lost"] += 1
        else:
            over = False
        if over:
            node.exchange = None
            self.begin(node, exchange.round + 1)

    def _say_done(self, node: Node, exchange: Exchange) -> None:
        part = exchange.part
        if part is None or part.phase != "done" or node.exchange is not exchange or not node.alive:
            return
        done = Done(exchange.round, part.attempt, hash((*map(tuple, node.landed), exchange.round)) & 0xFFFFFFFF)

        def answer(message: object | None) -> None:
            if isinstance(message, RoundDecision):
                self.decision(node, message)
            if node.exchange is exchange and node.alive:
                self.after(0.3, lambda: self.unless_frozen(node, lambda: self._say_done(node, exchange)))

        self.ask(node, lambda m: m.done(self.now, node.member, done), answer)

    def decision(self, node: Node, decision: RoundDecision) -> None:
        exchange = node.exchange
        if exchange is None or exchange.part is None or exchange.round != decision.round:
            return
        before, exchange.part = exchange.part, exchange.part.apply(decision)
        if exchange.part.phase == "landed":
            shares = node.shares[decision.round, decision.attempt]
            union = 0
            for member in decision.members:
                union |= shares[member].work
            node.exchange = None
            self._land(node, decision, union)
            self.counts["landed"] += 1
            if not self.rules.quorum:
                self.begin(node, decision.round + 1)
        elif self.rules.quorum and decision.outcome == "land" and node.member not in decision.members:
            self._miss(node, decision)
        elif exchange.part.phase == "left out" and node.leaving:  # nobody calls it for another state
            node.exchange = None
            self.begin(node, decision.round + 1)
        elif exchange.part != before and exchange.part.phase == "exchanging":
            self.counts["again"] += 1
            self._send(node)
            self._late(node, exchange, exchange.part.attempt)
            self.exchanging(node)

    def _miss(self, node: Node, decision: RoundDecision) -> None:
        """It was late: it takes the mean from another one, or another state if nobody has that any more."""
        self.counts["late"] += 1
        node.exchange = None
        found = next((n.means[decision.round] for n in self.living() if decision.round in n.means), None)
        if found is not None:
            self._land(node, *found)
        else:
            self.ask(node, lambda m: m.reload(self.now, node.member) or [], lambda message: None)

    def _land(self, node: Node, decision: RoundDecision, union: int) -> None:
        assert node.state is not None
        node.state.landed(decision)
        node.work, node.mean = node.work | union, node.mean | union
        node.landed = [*node.landed, (decision.round, decision.attempt, decision.members)]
        node.means = {
            **{r: m for r, m in node.means.items() if r > decision.round - 16},
            decision.round: (decision, union),
        }

    def end_after(self, rounds: int) -> None:
        """The run's last round is so many after the newest one."""
        self.final = max(node.state.round for node in self.living() if node.state is not None) + rounds
        self.rules = replace(self.rules, last=self.final)
        if self.lighthouse is not None:
            self.lighthouse.rules = self.rules

    # What came of it

    def living(self) -> list[Node]:
        return [node for node in self.nodes if node.alive]

    def held(self) -> list[tuple[int, int]]:
        """(position, reader) of every batch that is in the weights of somebody living."""
        union = 0
        for node in self.living():
            union |= node.work
        return [read for bit, read in enumerate(self.reads) if union >> bit & 1]
