"""The messages between the lighthouse and the workers of an elastic run, and their JSON form.

Every message is a frozen dataclass of numbers, text and tuples; `encode` and `decode` are the only ways in and out.
What comes from another machine is data: it must have the kind, the keys, the types and the sizes that are stated here,
or `decode` refuses it with one line. Nothing of it becomes code, a path or a type.

A `View` names the members of the rounds from `since` on, until a newer view takes over. Workers make their own
certificates; the lighthouse says where a member is and vouches for its fingerprint. That it vouches for the same one to
everybody is shown by the views, on which members agree, and by people who compare what their workers print (`spoken`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import Field
from pydantic_core import from_json, to_json

from isles.base.parsing import MANY, Bool, Exact, Float, Int, Ints, Str, read
from isles.membership.round_commit import RoundDecision


class SampleRange(NamedTuple):
    """Data that nobody has read for good: `steps` inner steps of the worker at `index` in the view numbered `view`.

    first: the first of them, counted over all inner steps of that place since the view began.
    """

    view: Int
    index: Int
    first: Int
    steps: Int


@dataclass(frozen=True, slots=True)
class View(Exact):
    """The workers of a run for the rounds that it covers.

    Round r belongs to the newest committed view with `since` <= r. A fixed world has one view, number 0.

    members: numbers of the workers, in the order of the view; a number is never used twice in a run.
    steps: inner steps a round of each member; empty: as many as the method is set to, for everybody.
    start: batches (of one worker and inner step) of the data that come before the first one of this view.
    backlog: what the first rounds of this view read before they go on in the order of the data.
    identities: of the workers, in the order of `members`, what others know them by; empty where they have none.
    """

    number: Int
    since: Int
    members: Ints
    steps: Ints = ()
    start: Int = 0
    backlog: Annotated[tuple[SampleRange, ...], MANY] = ()
    identities: Annotated[tuple[Str, ...], MANY] = ()

    def index(self, member: int) -> int | None:
        """Where `member` stands in this view; None where it is not in it."""
        return self.members.index(member) if member in self.members else None


Fingerprint = Annotated[str, Field(strict=True, pattern="^[0-9a-f]{32}$")]
"""Of a certificate, or of those of an island."""


def identity_of(certificates: Sequence[str]) -> str:
    """Of a member whose workers, in their order, have certificates with these fingerprints; "" where it has none."""
    if len(certificates) < 2:
        return "".join(certificates)
    return hashlib.sha256("".join(certificates).encode("ascii")).hexdigest()[:32]


def spoken(identity: str) -> str:
    """So much of it as two people compare: four groups of four digits."""
    return "-".join(identity[at : at + 4] for at in range(0, 16, 4))


MOST = 256
"""SeatPaths that one worker tells of: those with the most bytes."""
PathRow = tuple[int, str, float, int, int]
"""A peer's member; how this worker sends to it now ("" while it does not); the shortest round trip of that connection
in seconds, 0 where unknown; bytes sent to that peer and taken from it so far, of messages.
"""
MemberPaths = Annotated[tuple[tuple[Int, Int, Str, Float, Int, Int], ...], MANY]
"""Each with the member before it whose worker tells of it."""
_Bytes = Annotated[int, Field(strict=True, ge=0, lt=1 << 62)]
_Rows = Annotated[
    list[
        tuple[
            Annotated[int, Field(strict=True, ge=0, lt=1 << 30)],
            Annotated[Str, Field(max_length=40)],
            Annotated[float, Field(ge=0, lt=1e6)],
            _Bytes,
            _Bytes,
        ]
    ],
    Field(max_length=MOST, fail_fast=True),
]


def read_paths(value: object) -> list[PathRow]:
    """Rows as another machine tells them. ValueError where they are none."""
    return read(_Rows, value, "an invalid list of paths")


ANY = -1
"""A peer's wish for a stage, where it has none."""


@dataclass(frozen=True)
class RequestWork(Exact):
    """A peer has nothing to do yet. stage: that it wishes to serve, or `ANY`. run: a number that all of one
    configuration and of the same cut points share.
    """

    stage: Int
    run: Int


@dataclass(frozen=True)
class StartSwarm(Exact):
    """Begin a swarm of `members`, which serve `stages`, with what the lighthouse keeps of after `step`; 0: as drawn.
    epoch: of all swarms of this run, which one.
    """

    epoch: Int
    step: Int
    members: Ints
    stages: Ints


@dataclass(frozen=True)
class JoinSwarm(Exact):
    """A swarm is at work: ask its `members` to be let in."""

    epoch: Int
    members: Ints


@dataclass(frozen=True)
class Wait(Exact):
    """Nothing can begin yet, for the `reason` that is one line for a person."""

    reason: Str


@dataclass(frozen=True)
class Rejoin(Exact):
    """The run does not go on with what this peer is part of: it is to come again as somebody else."""

    reason: Str


@dataclass(frozen=True)
class SwarmBeat(Exact):
    """A peer at work, each second: after `step` the swarm is `members`, which serve `stages`. seconds: that a
    microbatch takes it; queue: microbatches that waited, on average; counted: in the newest step; since: seconds since
    that ended. coordinates: in a run in clusters this peer's, as `PeerStatus` has it.
    """

    epoch: Int
    step: Int
    members: Ints
    stages: Ints
    seconds: Float
    queue: Float
    counted: Int
    since: Float
    coordinates: Ints


@dataclass(frozen=True)
class StatesSaved(Exact):
    """To a peer at work: the lighthouse keeps all stages' states of after `step`; 0: as drawn."""

    step: Int


@dataclass(frozen=True)
class PeerStatus(Exact):
    """One peer as the lighthouse knows it. stage: `ANY` while it waits. heard: seconds since it was. coordinates: in a
    run in clusters its cluster, its stage there, how many that has, and 1 where it is whole; () where it serves none.
    identity: fingerprint of its certificate.
    """

    member: Int
    stage: Int
    step: Int
    seconds: Float
    queue: Float
    counted: Int
    heard: Float
    coordinates: Ints
    identity: Str


@dataclass(frozen=True)
class SwarmStatus(Exact):
    """How a swarm stands. wanted: what nothing can begin without, "" where it has begun. since: seconds since the
    newest step ended, -1 before the first. saved: the newest step of which the lighthouse keeps all stages' states.
    refused, paths: as in `RunStatus`. clustered: whether it is a run in clusters.
    """

    epoch: Int
    step: Int
    last: Int
    since: Float
    saved: Int
    wanted: Str
    peers: Annotated[tuple[PeerStatus, ...], MANY]
    refused: Annotated[tuple[tuple[Int, Int, Str, Int], ...], MANY]
    clustered: Bool
    paths: MemberPaths = ()


MARGIN = 3  # rounds from the newest that anybody has begun to the first of a new view
MAX_BYTES = 64 << 10  # of one message from a worker
Fingerprints = Annotated[tuple[Fingerprint, ...], Field(max_length=1024, fail_fast=True)]


@dataclass(frozen=True)
class Proposal(Exact):
    """A view that is to be: from round `since` on, `members`. Whoever has not begun that round promises not to begin it
    before it knows what became of this, and takes no work of `lost` from now on.

    number: that of the view, if it comes to be; never used twice. base: the newest view before it.
    """

    number: Int
    base: Int
    since: Int
    members: Ints
    lost: Ints = ()


@dataclass(frozen=True)
class Beat(Exact):
    """A worker's sign of life, at least at the begin of every round.

    round: the one that it is in, 0 before the first with the state that it has. ready: the call (`BeatReply.call`) for
    which it has everything that it needs to take part, -1 while it has not. skipped: rounds that it did out of turn;
    seen: newest rounds of others whose work it has, by member; both since the last answer. known: its newest view.
    seconds: of an inner step, 0 where unknown.
    """

    round: Int = 0
    ready: Int = -1
    known: Int = -1
    skipped: Ints = ()
    seen: Annotated[tuple[tuple[Int, Int], ...], MANY] = ()
    seconds: Float = 0.0


@dataclass(frozen=True)
class Ack(Exact):
    """A worker's answer to a proposal: True promises what `Proposal` says, False says that it is in that round."""

    number: Int
    promised: Bool
    beat: Beat


@dataclass(frozen=True)
class BeatReply(Exact):
    """The lighthouse's answer to a beat.

    round: that of the beat. issued: the highest number ever proposed. newest: number of the newest view, -1 before the
    first. views: those that the beat's `known` did not know, the older ones that their debts name included.
    newest_round: that of the member that is furthest; a view that is proposed later begins `MARGIN` rounds behind it or
    later. proposal: under way. call: how often this worker has been asked to begin with another's state.
    """

    round: Int
    issued: Int
    newest: Int
    newest_round: Int
    views: Annotated[tuple[View, ...], MANY]
    proposal: Proposal | None
    call: Int


@dataclass(frozen=True)
class Admitted(Exact):
    """The member of a worker that asked to join."""

    member: Int


@dataclass(frozen=True)
class Load(Exact):
    """Take the state of `donor` (-1: from the lighthouse's disk, or the run's own start), then be ready for `call`.

    seconds: that a round takes the donor, 0 where unknown; its state is copied at the end of one.
    """

    call: Int
    donor: Int
    seconds: Float = 0.0


@dataclass(frozen=True)
class Done(Exact):
    """The answer of an attempt of an all-reduce round is whole at a worker; `digest` is its hash."""

    round: Int
    attempt: Int
    digest: Int


@dataclass(frozen=True)
class Delivered(Exact):
    """A worker has a share of a round for whose mean a quorum is enough, the work of `steps` inner steps, and is at its
    next exchange in so many `seconds`; 0 where that is unknown.
    """

    round: Int
    steps: Int
    seconds: Float


@dataclass(frozen=True)
class PeerReport(Exact):
    """In this attempt the share of `member` was late, or was refused: `reason` says why. by: who found it so and told
    the sayer; -1: the sayer itself.
    """

    round: Int
    attempt: Int
    member: Int
    charge: Literal["late", "refused"]
    reason: Str = ""
    by: Int = -1


@dataclass(frozen=True)
class Silent(Exact):
    """To the lighthouse: nothing comes from `member`, which is waited for. To members: the lighthouse has not heard it
    either, so nobody waits for it now.
    """

    member: Int


@dataclass(frozen=True)
class Failed(Exact):
    """From one worker of an island to the others: it has no answer of that attempt, so nobody there waits for one."""

    round: Int
    attempt: Int


@dataclass(frozen=True)
class Hello(Exact):
    """A worker asks for a member. version: of isles. corpus: SHA-256 of its text, which all must share. session: the
    engine's name of the session that asks. certificates: fingerprints of its own, or of those of all workers of its
    island: what others are to know it by.
    """

    version: Str
    corpus: Str
    session: Str
    certificates: Fingerprints


@dataclass(frozen=True)
class Later(Exact):
    """The answer to `Hello` where too many come: ask again in `seconds`; `reason` is a line for a person."""

    seconds: Float
    reason: Str


@dataclass(frozen=True)
class About(Exact):
    """How a run stands. clock: the lighthouse's, seconds since 1970. members: who train; round: the newest that anybody
    has begun, of `last` (0: it has no end).
    """

    version: Str
    clock: Float
    members: Int
    round: Int
    last: Int


@dataclass(frozen=True)
class Entry(Exact):
    """The answer to `Hello`: a member, and the key that everything said for that member must bear."""

    member: Int
    key: Str


@dataclass(frozen=True)
class AnnounceAddress(Exact):
    """A worker can be reached directly, it thinks; or, at port 0 of "", it is there and not reached. host: "" where the
    lighthouse sees it; session: the name of the session that asks; certificate: its own's fingerprint; island_rank: in
    its island. relays: whether it carries for others.
    """

    host: Str
    port: Int
    session: Str
    certificate: Fingerprint
    island_rank: Int = 0
    relays: Bool = False


@dataclass(frozen=True)
class Reachability(Exact):
    """The answer to `AnnounceAddress`: where the lighthouse tried; refusal: why that failed, "" where it did not. seen:
    the address from which it sees the session that asked.
    """

    host: Str
    port: Int
    refusal: Str
    seen: Str


@dataclass(frozen=True)
class Lookup(Exact):
    """A worker asks for the way to the worker at `island_rank` in the island of `member`."""

    member: Int
    island_rank: Int = 0


@dataclass(frozen=True)
class PeerAddress(Exact):
    """The answer to `Lookup`. host, port: as in `AnnounceAddress`, "" and 0 where it is not reached directly.
    certificates: as in `Hello`; none where it is not there. peer_key: what the worker that asked shows to `member`
    (hex). relay: the member, -1 for none, of who carries for the two where neither reaches the other; ticket: to be
    shown there (hex).
    """

    member: Int
    host: Str
    port: Int
    certificates: Fingerprints
    peer_key: Str
    relay: Int = -1
    ticket: Str = ""


@dataclass(frozen=True)
class Leave(Exact):
    """This worker leaves with the next view."""


@dataclass(frozen=True)
class Reload(Exact):
    """The state that `Load` named did not come: another donor."""


@dataclass(frozen=True)
class Finished(Exact):
    """This worker has done the last round, and offers what it came to."""


@dataclass(frozen=True)
class Examine(Exact):
    """The one model of the run is at the lighthouse: fetch it, and report its validation loss."""


@dataclass(frozen=True)
class Over(Exact):
    """The run has ended, for the `reason` that is one line for a person; "" where all went well."""

    reason: Str = ""


@dataclass(frozen=True)
class MemberStatus(Exact):
    """One worker as the lighthouse knows it. state: a `WorkerState`. round: the newest that it has begun. seconds: of
    an inner step, 0 where unknown. identity: as in `View`. seen: the address from which it comes, "" while it does not.
    """

    member: Int
    state: Str
    round: Int
    seconds: Float
    identity: Str
    seen: Str


@dataclass(frozen=True)
class RunStatus(Exact):
    """How a run of whole replicas stands. view: the newest, -1 before the first. round, last: as in `About`. refused:
    by whom (-1: the lighthouse), of whom (-1: somebody), why, and how often. paths: by whom, and a `PathRow`.
    """

    view: Int
    round: Int
    last: Int
    members: Annotated[tuple[MemberStatus, ...], MANY]
    refused: Annotated[tuple[tuple[Int, Int, Str, Int], ...], MANY]
    paths: MemberPaths = ()


@dataclass(frozen=True)
class Refusal(Exact):
    """What was asked is not done; `reason` is one line for a person."""

    reason: Str


Message = (
    View | Proposal | Beat | Ack | BeatReply | Admitted | Load | Done | Delivered | PeerReport | Silent | Refusal |
    RoundDecision | Failed | Hello | Later | About | Entry | AnnounceAddress | Reachability | Lookup | PeerAddress |
    Leave | Reload | Finished | Examine | Over | RunStatus | RequestWork | StartSwarm | JoinSwarm | Wait | Rejoin |
    SwarmBeat | StatesSaved | SwarmStatus
)  # fmt: skip
KINDS: dict[str, type] = {kind.__name__.lower(): kind for kind in get_args(Message)}


def encode(message: Any) -> bytes:
    """One line of JSON, without the end of the line."""
    values = {field.name: getattr(message, field.name) for field in fields(message)}
    return to_json({"kind": type(message).__name__.lower(), **values})


def decode(data: bytes, kinds: Mapping[str, type] = KINDS, *, limit: int = MAX_BYTES) -> Any:
    """The message that `encode` was given. ValueError, in one line, where it is none of `kinds`."""
    if len(data) > limit:
        raise ValueError(f"a message of {len(data)} bytes; at most {limit} are read")
    try:
        value = from_json(data, allow_inf_nan=False)
    except ValueError:
        raise ValueError("a message that is not JSON") from None
    return from_plain(value, kinds)


def plain(message: Any) -> dict[str, Any]:
    """{"kind": its name in small letters, and its fields}, of values that JSON holds."""
    return from_json(encode(message))


def from_plain(value: Any, kinds: Mapping[str, type] = KINDS) -> Any:
    """The message of `plain`. ValueError where anything is not as its class says."""
    if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
        raise ValueError("a message without a kind")
    kind = kinds.get(value["kind"])
    if kind is None:
        raise ValueError(f"a message of the unknown kind {ascii(value['kind'])[:60]}")
    return read(kind, {key: part for key, part in value.items() if key != "kind"})
