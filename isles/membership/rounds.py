"""What every worker of a member does next. The member's leader decides once, and all its workers follow.

A member is a worker by itself, or an island of several. Workers that follow do not care where decisions come from:
    leader     a worker that is connected with the lighthouse (`isles.training.elastic.leader`)
    follower   the leader, over the island's network (`IslandGroup`)
    replay     the record of a run (`isles.training.elastic.replay`)

A follower exchanges its share with the workers of the same rank in other islands. The leader decides who takes part in
a round, and which of them are lost (`RoundLeader`). All ranks of an island vote on whether an exchange completed, so an
island lands a round at all its workers or at none. In pairs and groups, the other islands may land a round in which
this one used no partner, just as single workers may.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, ClassVar, Literal

import torch
from pydantic import ConfigDict, TypeAdapter

from isles.base.parsing import read_json
from isles.comm.errors import CommError, DeadlinePassed, Diverged, Malformed, PeerLost, PeerSilent, Refused
from isles.comm.group import Group
from isles.comm.mesh import Mesh
from isles.comm.roster import RoundOutcome
from isles.comm.transport import Transport
from isles.membership.client import MembershipClient
from isles.membership.data_ledger import Batch
from isles.membership.late_shares import Deliveries
from isles.membership.round_commit import RoundState
from isles.membership.run_log import ALONE, WHOLE

DecisionKind = Literal[
    # between rounds
    "member",  # take this identity: member, key
    "idle",  # nothing to do yet
    "load",  # fetch the state of `donor` after `round` or a later one
    "draw",  # start from the initial weights
    "catch up",  # land the means of rounds `round` to `until - 1` as `donor` did
    "enter",  # start with `round`, after so many `steps`; `began_at` as below
    "forget",  # this member's state is obsolete: do not serve it
    "conclude",  # write the model
    "end",
    # a round
    "train",  # the inner steps after so many `steps`, on `slices`
    "exchange",  # attempt `attempt` among `members` of `view`, for `seconds`
    "land",  # the answer is committed
    "retry",  # exchange once more
    "postpone",  # no decision can be had now, or the member takes no part
    "keep",  # `round` has landed: save what other members have asked for
    "over",  # close rounds up to `round`
    "validate",
    "report",  # the workers' counters
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """kind: what to do. Each of the other fields is set for some kinds only.

    round: of the run. attempt: of an exchange, from 0. members: in the order of the view. view: its number. seconds:
    how long to wait for a state, or for the members of an exchange. wait: how long to wait for a state after `round`;
    None: take what there is now. donor: the member that serves the state; -1: the lighthouse. steps: inner steps done
    before. began_at: inner steps after which the member started without optimizer moments; None: it started with them.
    slices: the batches to read, one per inner step; empty: a round on unassigned data, of which `spare` batches were
    read before. left_out: by member, the newest view when it was left out.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid", allow_inf_nan=False)

    kind: DecisionKind
    round: int = -1
    until: int = -1
    attempt: int = 0
    members: tuple[int, ...] = ()
    view: int = -1
    seconds: float = 0.0
    wait: float | None = None
    donor: int = -1
    steps: int = 0
    began_at: int | None = None
    slices: tuple[Batch, ...] = ()
    spare: int = 0
    left_out: Mapping[int, int] = field(default_factory=dict)
    member: int = -1
    key: str = ""


_DECISION = TypeAdapter(Decision)


def to_bytes(decision: Decision) -> bytes:
    """The JSON that `from_bytes` reads; fields with default values are left out."""
    return _DECISION.dump_json(decision, exclude_defaults=True)


def from_bytes(text: bytes) -> Decision:
    """The decision of `to_bytes`. ValueError, one line, for invalid bytes."""
    return read_json(Decision, text)


_LONGEST = 1 << 20  # bytes of a decision, or of a text
_NONE = _NOBODY = -1
_MIX = 0x9E3779B97F4A7C1  # odd, like its factors below: one changed digest always changes the sum
_POSITIVE = (1 << 61) - 1  # so that no digest is one of the negative numbers above


class IslandGroup:
    """Collectives inside a member's island. mesh: its workers; None: a single worker. waits: the most seconds that one
    worker may be behind the others.
    """

    def __init__(self, mesh: Mesh | None = None, waits: float = 0.0) -> None:
        self.mesh, self._group = mesh, None
        self.failed: Callable[[int, int], None] = lambda round, attempt: None
        """Called with (round, attempt) if this worker has no answer: cancels the other workers' waits for one."""
        if mesh is not None:
            group = mesh.world
            patient = replace(group.deadlines, control=group.deadlines.control + 2 * waits)
            self._group = replace(group, channel="control", deadlines=patient)

    def transports(self, outer: Transport) -> list[Transport]:
        """Those on which a worker waits for others; `outer` is between members."""
        return [outer] if self.mesh is None else [outer, self.mesh.transport]

    @property
    def size(self) -> int:
        """Number of workers."""
        return 1 if self._group is None else self._group.size

    @property
    def island_rank(self) -> int:
        """This worker's rank in the island; the leader's is 0."""
        return 0 if self._group is None else self._group.rank

    def next_decision(self, decide: Callable[[], Decision]) -> Decision:
        """The leader's decision, at all workers; collective. decide: called at the leader only. Raises Malformed."""
        if self._group is None:
            return decide()
        text = to_bytes(decide()) if self.island_rank == 0 else b""
        length = torch.tensor([len(text)], dtype=torch.int64, device="cpu")
        self._group.broadcast(length)
        if not 0 < int(length) <= _LONGEST:
            raise Malformed(self._group.ranks[0], f"a decision of {int(length)} bytes")
        gathered = torch.frombuffer(bytearray(text or bytes(int(length))), dtype=torch.uint8)
        self._group.broadcast(gathered)
        try:
            return from_bytes(gathered.numpy().tobytes())
        except ValueError as error:
            raise Malformed(self._group.ranks[0], f"an invalid decision: {error}") from None

    def settle(self, answer: Callable[[], bool]) -> bool:
        """The leader's answer, at all workers; collective. answer: called at the leader only."""
        if self._group is None:
            return answer()
        agreed = torch.tensor([self.island_rank == 0 and answer()], dtype=torch.uint8, device="cpu")
        self._group.broadcast(agreed)
        return bool(agreed)

    def gather(self, *numbers: int) -> list[list[int]]:
        """All workers' numbers, by rank; collective."""
        if self._group is None:
            return [list(numbers)]
        return [own.tolist() for own in self._group.all_gather(torch.tensor(numbers, dtype=torch.int64, device="cpu"))]

    def gather_text(self, text: bytes) -> list[bytes]:
        """All workers' texts, of any length, by rank; collective."""
        if self._group is None:
            return [text]
        lengths = [length for (length,) in self.gather(len(text))]
        if max(lengths) > _LONGEST:
            raise Malformed(self._group.ranks[lengths.index(max(lengths))], f"a text of {max(lengths)} bytes")
        mine = torch.frombuffer(bytearray(text.ljust(max(lengths))), dtype=torch.uint8)
        gathered = self._group.all_gather(mine)
        return [one.numpy().tobytes()[:length] for one, length in zip(gathered, lengths, strict=True)]

    def combine(
        self, round: int, attempt: int, digest: int | None, error: CommError | None, seconds: float
    ) -> tuple[int | None, CommError | None]:
        """Combine the workers' answers to an attempt into one digest, or into an error if one of them has none;
        collective. digest, error: this worker's. seconds: how long it waited for the others.
        """
        if self._group is None:
            return digest, error
        if digest is None:
            self.failed(round, attempt)  # before the gather, which waits for all: they may wait for a lost member
        return _together(self.gather(*_answer_of(digest, error)), seconds)


def _answer_of(digest: int | None, error: CommError | None) -> tuple[int, int, int, int]:
    """An answer as four numbers: digest, the member that caused a failure, whether its share was refused (else late),
    the member that reported it.
    """
    refused = isinstance(error, (Refused, Malformed, Diverged))
    blamed = getattr(error, "peer", _NOBODY) if refused or isinstance(error, DeadlinePassed) else _NOBODY
    blamed = error.rank if isinstance(error, PeerSilent) else blamed
    return (_NONE if digest is None else digest), blamed, int(refused), getattr(error, "by", _NOBODY)


def _together(gathered: Sequence[Sequence[int]], seconds: float) -> tuple[int | None, CommError | None]:
    """The combined digest of gathered answers, or an error if one is missing."""
    for digest, blamed, refused, by in gathered:
        if digest == _NONE and blamed == _NOBODY:
            return None, None
        if digest == _NONE:
            late = DeadlinePassed(blamed, "outer", seconds)
            return None, Refused(blamed, "at another worker of this island", by) if refused else late
    return sum(_MIX * (2 * island_rank + 1) * own[0] for island_rank, own in enumerate(gathered)) & _POSITIVE, None


RETAINED = 8
"""Rounds whose answers are cached."""
_SAMPLES, _ENOUGH = 20, 5  # recent exchanges to time; the fewest for an estimate
_LEAST, _FIRST = 3.0, 10.0  # seconds to wait for a partner: at least, and before there is an estimate
_SPREADS = 5.0  # median deviations beyond the median: a slow but usual exchange is waited for


class RoundLeader:
    """Decides for a member, by what its client knows from the lighthouse. alone: the group of this member only.

    It waits for a partner a little longer than exchanges usually take (median and spread of the last `_SAMPLES`), and
    at most `world.outer_deadline`. A partner that does not know the new view yet does its round without a partner, and
    sends nothing.
    """

    def __init__(self, client: MembershipClient, alone: Group) -> None:
        self.client, self.alone, self.member = client, alone, alone.ranks[0]
        self.deliveries = Deliveries(client, alone)
        self._begun: dict[int, float] = {}  # by round, when its exchange began
        self._durations: deque[float] = deque(maxlen=_SAMPLES)
        self._state: RoundState | None = None  # the newest round that lands by a decision of the lighthouse
        self._view = -1  # its view
        self._opened = 0.0
        self._outcomes: dict[int, tuple[tuple[int, ...], str]] = {}

    def exchange(self, round: int) -> Decision:
        """The decision to exchange `round`, with its members."""
        round_members = self.client.round_members(round)
        self.note_begun(round)
        return Decision(
            kind="exchange",
            round=round,
            members=round_members.members,
            view=max(round_members.view, 0),
            seconds=self._patience(),
        )

    def lost(self, member: int) -> bool:
        return self.client.lost(member) or self.client.is_silent(member)

    def report_failure(self, member: int, error: CommError) -> None:
        """Note a failed exchange. The network reports lost members and late ones will recover, so only a malformed or
        refused share is reported to the lighthouse.
        """
        newest = max(self._begun, default=0)
        if isinstance(error, (Malformed, Refused)):
            self.report_peer(newest, error)
        self.note(newest, tuple(sorted({self.member, member} - {-1})), type(error).__name__)

    def may_apply(
        self, round: int, members: Sequence[int], digest: int | None = 0, failure: CommError | None = None
    ) -> bool:
        """Whether the answer of an exchange among `members` may be used. digest: None if a worker of this member has no
        complete answer, because of `failure`.
        """
        if failure is not None:
            self.report_failure(getattr(failure, "peer", -1), failure)
        if digest is None:
            self.note(round, tuple(members), PeerLost.__name__)  # `note` retains an earlier cause
            return False
        if len(members) > 1 and round in self._begun:
            self._durations.append(self._now() - self._begun[round])
        accepted = self.is_answer_used(round, members)
        if len(members) > 1:
            self.note(round, tuple(members), WHOLE if accepted else PeerLost.__name__)
        return accepted

    def is_answer_used(self, round: int, members: Sequence[int]) -> bool:
        return self.client.accepts(round, members)

    def report_peer(self, round: int, error: CommError) -> None:
        """Report an invalid share to the lighthouse, if it is reachable."""
        if self.client.has_answers:
            self.client.report_peer(round, 0, error)

    def outcome(self, round: int) -> tuple[tuple[int, ...], str]:
        """(members of this member's exchange of `round`, `WHOLE` or `ALONE` or the name of the error that ended it)."""
        return self._outcomes.get(round, ((self.member,), ALONE))

    def note_begun(self, round: int) -> None:
        """Note when the exchange of `round` begins."""
        self._begun = {**{r: at for r, at in self._begun.items() if r > round - RETAINED}, round: self._now()}

    def note(self, round: int, members: tuple[int, ...], outcome: str) -> None:
        """Note how an exchange ended; of several messages of a round the first failure counts."""
        if self._outcomes.get(round, (members, WHOLE))[1] == WHOLE:
            recent = {r: o for r, o in self._outcomes.items() if r > round - RETAINED}
            self._outcomes = {**recent, round: (members, outcome)}

    def start_round(self, round: int) -> Decision:
        """Begin an attempt of a round that all members land together, or none; postpone it if its members are not
        known now.
        """
        postponed = Decision(kind="postpone", round=round)
        if self._state is None or self._state.round != round:
            round_members = self.client.decided(round)
            if round_members is None:
                return postponed
            self._state, self._view = RoundState(self.member, round, 0, round_members.members), round_members.view
        if (
            self._has_lost_member(self._state)
            and (decision := self.client.finish_round(round, self._state.attempt, None)) is not None
        ):
            self._state = self._state.apply(decision)  # do not wait for a lost member
        part, self._opened = self._state, self._now()
        if part.phase != "exchanging":
            return postponed
        waits = self.alone.deadlines.outer if part.attempt else self._patience()  # other members may still train
        return Decision(
            kind="exchange", round=round, attempt=part.attempt, members=part.members, view=self._view, seconds=waits
        )

    def finish_round(self, round: int, attempt: int, digest: int | None, error: CommError | None) -> Decision:
        """The decision on an attempt: land, retry, or postpone the round."""
        part = self._state
        assert part is not None and part.round == round, "it was opened"
        if digest is not None:
            part = part.answered(attempt)
            if attempt == 0:
                self._durations.append(self._now() - self._opened)
        elif error is not None:
            self.client.report_peer(round, attempt, error)
        decision = self.client.finish_round(round, attempt, digest)
        if decision is not None:
            part = part.apply(decision)
        self._state = part
        if decision is not None and part.phase == "landed":
            self.client.landed(decision)
            self.note(round, decision.members, WHOLE)
            return Decision(kind="land", round=round)
        return Decision(
            kind="retry" if decision is not None and part.phase == "exchanging" else "postpone", round=round
        )

    def _has_lost_member(self, part: RoundState) -> bool:
        return part.phase == "exchanging" and any(
            self.client.lost(member) for member in part.members if member != self.member
        )

    def begin_anew(self) -> None:
        """Forget earlier rounds: this member has loaded another state."""
        self._begun, self._outcomes, self._state = {}, {}, None

    def _now(self) -> float:
        return self.alone.transport.now()

    def _patience(self) -> float:
        """Seconds to wait for a partner."""
        longest = self.alone.deadlines.outer
        if len(self._durations) < _ENOUGH:
            return min(_FIRST, longest)
        usual = median(self._durations)
        spread = median(abs(one - usual) for one in self._durations)
        return min(max(_LEAST, usual + _SPREADS * spread), longest)


class ElasticRoster:
    """The `isles.comm.roster.Roster` of a single worker, or of each worker of an island. The workers of an island call
    it in the same order; their leader decides.

    alone: the group of this member only. A worker's first group is itself, because its weights are initialized like
    everybody's or loaded from a member. island: the workers of its island. leader: None at a follower.
    """

    grows = answers_alike = True

    def __init__(self, alone: Group, island: IslandGroup, leader: RoundLeader | None) -> None:
        self.founders, self._island, self._leader = alone, island, leader
        self.deliveries = None if leader is None else leader.deliveries
        self._answers: dict[int, Group] = {}
        self._missed: CommError | None = None  # at a follower: the failure of the present exchange

    def group(self, round: int) -> Group:
        if round not in self._answers:
            group = self._group_of(self._island.next_decision(lambda: self._lead.exchange(round)))
            self._answers = {**{r: a for r, a in self._answers.items() if r > round - RETAINED}, round: group}
        return self._answers[round]

    def lost(self, member: int) -> bool:
        return self._leader is not None and self._leader.lost(member)

    def has_lost(self, members: Sequence[int]) -> bool:
        return len(members) > 1 and self._island.settle(lambda: any(self.lost(member) for member in members))

    def report_failure(self, member: int, error: CommError) -> None:
        if self._leader is not None:
            self._leader.report_failure(member, error)
        else:
            self._missed = self._missed or error

    def may_apply(self, round: int, members: Sequence[int], *, whole: bool) -> bool:
        missed, self._missed = self._missed, None
        if len(members) <= 1 or self._island.size == 1:
            return whole and (self._leader is None or self._leader.may_apply(round, members))
        digest, failure = self._island.combine(round, 0, 0 if whole else None, missed, self.founders.deadlines.outer)
        return self._island.settle(lambda: self._lead.may_apply(round, members, digest, failure))

    def start_round(self, round: int) -> tuple[Group, int] | None:
        decision = self._island.next_decision(lambda: self._lead.start_round(round))
        return (self._group_of(decision), decision.attempt) if decision.kind == "exchange" else None

    def finish_round(
        self, round: int, attempt: int, digest: int | None, error: CommError | None = None
    ) -> RoundOutcome:
        together, failure = self._island.combine(round, attempt, digest, error, self.founders.deadlines.outer)
        decision = self._island.next_decision(
            lambda: self._lead.finish_round(round, attempt, together, error or failure)
        )
        if decision.kind not in ("land", "retry", "postpone"):
            raise Malformed(-1, f"the leader of this island answers an attempt with {decision.kind!r}")
        return decision.kind

    def begin_anew(self) -> None:
        """Forget earlier rounds: this worker has loaded another state."""
        self._answers, self._missed = {}, None
        if self._leader is not None:
            self._leader.begin_anew()

    def survivors(self, asked: bool) -> Group:
        """This member's own group: the lighthouse combines the run's model."""
        return self.founders

    def state_dict(self) -> dict[str, Any]:
        """Empty: the lighthouse holds the state of membership."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""

    @property
    def _lead(self) -> RoundLeader:
        assert self._leader is not None, "a follower is never asked"
        return self._leader

    def _group_of(self, decision: Decision) -> Group:
        """The group of an exchange, with its deadline. Raises Malformed."""
        if decision.kind != "exchange" or not decision.members:
            raise Malformed(-1, f"the leader of this island decides on {decision.kind!r} instead of an exchange")
        waits = replace(self.founders.deadlines, outer=decision.seconds)
        return replace(self.founders, ranks=decision.members, view=decision.view, deadlines=waits)
