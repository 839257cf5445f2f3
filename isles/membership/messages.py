"""The messages between the lighthouse and the workers of an elastic run, and their JSON form.

Every message is a frozen dataclass of numbers, text and tuples; `encode` and `decode` are the only ways in and out.
Data from another machine must have the kind, keys, types and sizes that are declared here; otherwise `decode` refuses
it with one line. None of it becomes code, a path or a type.

MESSAGES is the version of all of this. A minor version may add fields with defaults, and kinds that machines of the
former minor version need not understand: they ignore unknown fields. A lighthouse takes members of its own and of the
former minor version (`takes`), so a run changes version by `isles resume` with the next one, then member by member.

A `View` names the members of the rounds from `since` on, until a newer view replaces it. Workers make their own
certificates; the lighthouse reports a member's address and vouches for its fingerprint. Views, on which members agree,
prove that it vouches for the same fingerprint to all of them; people can also compare the printed ones (`spoken`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import Field
from pydantic_core import from_json, to_json

from isles.base.parsing import MANY, Bool, Exact, Float, Int, Ints, Str, read
from isles.membership.round_commit import Delivered, Done, RoundDecision

MESSAGES = (0, 2)
"""(major, minor) version of the messages. The minor one is raised with what the former one may ignore."""


def takes(lighthouse: Sequence[int], member: Sequence[int]) -> bool:
    """Whether a lighthouse of one version of the messages takes a member of another one."""
    is_same = len(lighthouse) == len(member) == 2 and lighthouse[0] == member[0]
    return is_same and 0 <= lighthouse[1] - member[1] <= 1


def version_text(version: str, messages: Sequence[int]) -> str:
    """A version of isles, and that of its messages."""
    return f"isles {version} (messages {'.'.join(map(str, messages[:2]))})"


class SampleRange(NamedTuple):
    """Data to be read again: `steps` inner steps of the worker at `index` in the view numbered `view`.

    first: the first of these steps, counted over all inner steps of that index since the view began.
    """

    view: Int
    index: Int
    first: Int
    steps: Int


@dataclass(frozen=True, slots=True)
class View(Exact):
    """The workers of a run for the rounds that it covers.

    Round r belongs to the newest committed view with `since` <= r. A fixed world has one view, number 0.

    members: member ids, in the order of the view; an id is never used twice in a run.
    steps: inner steps per round of each member; empty: the method's number for every member.
    start: batches (of one worker and inner step) of the data before the first one of this view.
    backlog: data to read in the first rounds of this view, before going on in the order of the data.
    identities: fingerprints of the members, in their order; empty without certificates.
    """

    number: Int
    since: Int
    members: Ints
    steps: Ints = ()
    start: Int = 0
    backlog: Annotated[tuple[SampleRange, ...], MANY] = ()
    identities: Annotated[tuple[Str, ...], MANY] = ()

    def index(self, member: int) -> int | None:
        """The index of `member` in this view; None if it is not in it."""
        return self.members.index(member) if member in self.members else None


Fingerprint = Annotated[str, Field(strict=True, pattern="^[0-9a-f]{32}$")]
"""A hash of a certificate, or of those of an island."""


def identity_of(certificates: Sequence[str]) -> str:
    """The fingerprint of a member whose workers, by rank, have certificates with these fingerprints; "" for none."""
    if len(certificates) < 2:
        return "".join(certificates)
    return hashlib.sha256("".join(certificates).encode("ascii")).hexdigest()[:32]


def spoken(identity: str) -> str:
    """The part of a fingerprint that people compare: four groups of four digits."""
    return "-".join(identity[at : at + 4] for at in range(0, 16, 4))


MOST = 256
"""The most peers in a worker's report of paths: those with the most bytes."""
PathRow = tuple[int, str, float, int, int]
"""(peer, way, round trip, sent, received): the peer's member id; "direct" or "relayed ..." as it is sent to now, "" if
it is not; the shortest round trip of that connection in seconds, 0 if unknown; bytes of messages sent to it and
received from it so far.
"""
MemberPaths = Annotated[tuple[tuple[Int, Int, Str, Float, Int, Int], ...], MANY]
"""Path rows, each behind the member id of the worker that reports it."""
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
    """Path rows received from another machine. ValueError for invalid ones."""
    return read(_Rows, value, "an invalid list of paths")


ANY = -1
"""The wish of a peer that would serve any stage."""


@dataclass(frozen=True)
class RequestWork(Exact):
    """A peer has no stage yet. stage: the one that it wishes to serve, or `ANY`. run: a hash of the configuration and
    of the cut points, equal at all peers of a run.
    """

    stage: Int
    run: Int


@dataclass(frozen=True)
class StartSwarm(Exact):
    """Begin a swarm of `members` that serve `stages`, from the states that the lighthouse saved after `step`; 0: from
    initial weights. epoch: the number of this swarm in the run.
    """

    epoch: Int
    step: Int
    members: Ints
    stages: Ints


@dataclass(frozen=True)
class JoinSwarm(Exact):
    """A swarm is running: ask its `members` for admission."""

    epoch: Int
    members: Ints


@dataclass(frozen=True)
class Wait(Exact):
    """Nothing can begin yet; `reason` is one line for the user."""

    reason: Str


@dataclass(frozen=True)
class Rejoin(Exact):
    """The run continues without this peer's swarm: the peer must join again as a new member."""

    reason: Str


@dataclass(frozen=True)
class SwarmBeat(Exact):
    """The heartbeat of a running peer, each second: after `step` the swarm is `members`, which serve `stages`. seconds:
    of one of its microbatches. queue: mean number of waiting microbatches. counted: microbatches counted in the newest
    step. since: seconds since that step ended. coordinates: in a run in clusters this peer's, see `MemberStatus`.
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
    """To a running peer: the lighthouse has saved all stages' states after `step`; 0: no step yet. wanted: after the
    first step from that one on, all peers offer their states once; 0: it asks for none.
    """

    step: Int
    wanted: Int = 0


MACHINE = 40
"""The most characters of a machine's name."""
MARGIN = 3  # rounds from the newest begun round to the first round of a new view
MAX_BYTES = 64 << 10  # of one message from a worker
Fingerprints = Annotated[tuple[Fingerprint, ...], Field(max_length=1024, fail_fast=True)]


@dataclass(frozen=True)
class Proposal(Exact):
    """A proposed view of `members` from round `since` on. A member that has not begun that round promises not to begin
    it before the proposal is decided, and to accept no work of `lost` from now on.

    number: of the view if it is committed; never used twice. base: the newest view before it.
    """

    number: Int
    base: Int
    since: Int
    members: Ints
    lost: Ints = ()


@dataclass(frozen=True)
class Beat(Exact):
    """A worker's heartbeat, at least at the start of every round.

    round: the present one, 0 before the first with the present state. ready: the call (`BeatReply.call`) for which it
    has loaded all that it needs to take part, -1: none. skipped: rounds done on unassigned data; seen: by member, the
    newest round of others whose work it has; both since the last reply. known: its newest view. seconds: of an inner
    step, 0 if unknown.
    """

    round: Int = 0
    ready: Int = -1
    known: Int = -1
    skipped: Ints = ()
    seen: Annotated[tuple[tuple[Int, Int], ...], MANY] = ()
    seconds: Float = 0.0


@dataclass(frozen=True)
class Ack(Exact):
    """A worker's answer to a proposal: True: the promise of `Proposal`; False: it has begun that round already."""

    number: Int
    promised: Bool
    beat: Beat


@dataclass(frozen=True)
class BeatReply(Exact):
    """The lighthouse's reply to a beat.

    round: of the beat. issued: the highest number proposed so far. newest: number of the newest view, -1 before the
    first. views: those newer than the beat's `known`, and older ones that their backlogs name. newest_round: of the
    member that is furthest; a later proposal begins at least `MARGIN` rounds after it. proposal: the open one. call:
    how often this worker has been asked to load another state.
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
    """The member id of a worker that asked to join."""

    member: Int


@dataclass(frozen=True)
class Load(Exact):
    """Load the state of `donor` (-1: from the lighthouse's disk, or the initial weights), then be ready for `call`.

    seconds: of a round of the donor, 0 if unknown; it copies its state at the end of a round. why: this worker was left
    out, a line for the user; "" at its first state.
    """

    call: Int
    donor: Int
    seconds: Float = 0.0
    why: Str = ""


@dataclass(frozen=True)
class PeerReport(Exact):
    """The share of `member` in this attempt was late, or was refused for `reason`. by: the member that detected it and
    reported it to the sender of this message; -1: the sender itself.
    """

    round: Int
    attempt: Int
    member: Int
    charge: Literal["late", "refused"]
    reason: Str = ""
    by: Int = -1


@dataclass(frozen=True)
class Silent(Exact):
    """To the lighthouse: the sender waits for `member`, and nothing arrives. To members: the lighthouse has no beat of
    it either, so nobody should wait for it now.
    """

    member: Int


@dataclass(frozen=True)
class Failed(Exact):
    """From one worker of an island to the others: it has no answer of that attempt, so they cancel their waits."""

    round: Int
    attempt: Int


@dataclass(frozen=True)
class Hello(Exact):
    """A worker asks to join. version: of isles. corpus: SHA-256 of its text, which must be the same at all workers.
    session: the name of the session that asks. certificates: fingerprints of its own certificate, or of those of all
    workers of its island. messages: see `MESSAGES`. machine: its name for people, "" for none.
    """

    version: Str
    corpus: Str
    session: Str
    certificates: Fingerprints
    messages: Ints = (0, 2)
    machine: Annotated[str, Field(strict=True, max_length=MACHINE, pattern=r"^[\x20-\x7e]*$")] = ""


@dataclass(frozen=True)
class Later(Exact):
    """The reply to `Hello` if too many workers ask: ask again in `seconds`; `reason` is a line for the user."""

    seconds: Float
    reason: Str


@dataclass(frozen=True)
class About(Exact):
    """The progress of a run. clock: of the lighthouse, seconds since 1970. members: number of training members. round:
    the newest begun one, of `last` (0: no end). messages: see `MESSAGES`.
    """

    version: Str
    clock: Float
    members: Int
    round: Int
    last: Int
    messages: Ints = (0, 2)


@dataclass(frozen=True)
class Entry(Exact):
    """The reply to `Hello`: a member id, and the key that authenticates all messages of and to that member."""

    member: Int
    key: Str


@dataclass(frozen=True)
class AnnounceAddress(Exact):
    """A worker can be reached directly, as it believes; port 0 and host "": it cannot.

    host: "": the address from which the lighthouse sees it. session: the name of the session that asks. certificate:
    its fingerprint. island_rank: in its island. relays: whether it relays for others.
    """

    host: Str
    port: Int
    session: Str
    certificate: Fingerprint
    island_rank: Int = 0
    relays: Bool = False


@dataclass(frozen=True)
class Reachability(Exact):
    """The reply to `AnnounceAddress`: the address that the lighthouse dialled; refusal: why that failed, "" if it did
    not. seen: the address of the session that asked.
    """

    host: Str
    port: Int
    refusal: Str
    seen: Str


@dataclass(frozen=True)
class Lookup(Exact):
    """A worker asks for the address of the worker at `island_rank` in the island of `member`."""

    member: Int
    island_rank: Int = 0


@dataclass(frozen=True)
class PeerAddress(Exact):
    """The reply to `Lookup`. host, port: as in `AnnounceAddress`; "" and 0 if it cannot be reached directly.
    certificates: as in `Hello`; empty if it is not connected. peer_key: the asker's key for messages to `member` (hex).
    relay: the member that relays if neither can dial the other, -1: none; ticket: for the relay (hex).
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
    """This worker asks to leave with the next view."""


@dataclass(frozen=True)
class Reload(Exact):
    """The state that `Load` named did not arrive: name another donor."""


@dataclass(frozen=True)
class Finished(Exact):
    """This worker has done the last round, and offers its model."""


@dataclass(frozen=True)
class Examine(Exact):
    """The lighthouse has the run's final model: fetch it, and report its validation loss."""


@dataclass(frozen=True)
class News(Exact):
    """What became of another member, or of all: `line` is for the user."""

    line: Str


@dataclass(frozen=True)
class Over(Exact):
    """The run has ended; `reason` is one line for the user, "" for a regular end."""

    reason: Str = ""


@dataclass(frozen=True)
class MemberStatus(Exact):
    """One member as the lighthouse knows it. role: a `WorkerState`, or its stage. step: the newest, of whole replicas
    the newest round. seconds: of an inner step, or of a peer's microbatch; 0 if unknown. identity: as in `View`.

    Of peers only: queue, counted: see `SwarmBeat`. heard: seconds since its last beat. stage: `ANY` while it waits.
    coordinates: in a run in clusters (cluster, stage, stages of the cluster, 1 if all of them are served); () if it
    serves none. rate: steps per second.

    exchanged, ago: the newest round or step in which it exchanged with others, and seconds since then. machine,
    address: its name for people, and the address that it joined from, `since` seconds ago.
    """

    member: Int
    identity: Str
    role: Str
    step: Int
    seconds: Float
    counted: Int | None = None
    queue: Float | None = None
    heard: Float | None = None
    stage: Int = ANY
    coordinates: Ints = ()
    rate: Float | None = None
    exchanged: Int | None = None
    ago: Float | None = None
    machine: Str = ""
    address: Str = ""
    since: Float | None = None


@dataclass(frozen=True)
class RunStatus(Exact):
    """The state of a run. text: for people. unit: what `step` and those of the members count, "round" or "step".
    refused: (by whom, -1: the lighthouse; of whom, -1: unknown; reason; count). paths: see `MemberPaths`. saved: the
    newest step of which all states are saved.
    """

    text: Str
    unit: Str
    step: Int
    members: Annotated[tuple[MemberStatus, ...], MANY]
    refused: Annotated[tuple[tuple[Int, Int, Str, Int], ...], MANY] = ()
    paths: MemberPaths = ()
    saved: Int | None = None


@dataclass(frozen=True)
class Refusal(Exact):
    """A request is refused; `reason` is one line for the user."""

    reason: Str


Message = (
    View | Proposal | Beat | Ack | BeatReply | Admitted | Load | Done | Delivered | PeerReport | Silent | Refusal |
    RoundDecision | Failed | Hello | Later | About | Entry | AnnounceAddress | Reachability | Lookup | PeerAddress |
    Leave | Reload | Finished | Examine | Over | RunStatus | RequestWork | StartSwarm | JoinSwarm | Wait | Rejoin |
    SwarmBeat | StatesSaved | News
)  # fmt: skip
KINDS: dict[str, type] = {kind.__name__.lower(): kind for kind in get_args(Message)}


def encode(message: Any) -> bytes:
    """The message as one line of JSON, without a line end."""
    values = {field.name: getattr(message, field.name) for field in fields(message)}
    return to_json({"kind": type(message).__name__.lower(), **values})


def decode(data: bytes, kinds: Mapping[str, type] = KINDS, *, limit: int = MAX_BYTES) -> Any:
    """The message that `encode` was given. ValueError, one line, for anything else, or a kind not in `kinds`."""
    if len(data) > limit:
        raise ValueError(f"a message of {len(data)} bytes; at most {limit} are read")
    try:
        value = from_json(data, allow_inf_nan=False)
    except ValueError:
        raise ValueError("a message that is not JSON") from None
    return from_plain(value, kinds)


def plain(message: Any) -> dict[str, Any]:
    """The message as a dict of JSON values: "kind", its name in lower case, and its fields."""
    return from_json(encode(message))


def from_plain(value: Any, kinds: Mapping[str, type] = KINDS) -> Any:
    """The message of `plain`. ValueError if a field is missing, unknown or invalid."""
    if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
        raise ValueError("a message without a kind")
    kind = kinds.get(value["kind"])
    if kind is None:
        raise ValueError(f"a message of the unknown kind {ascii(value['kind'])[:60]}")
    return read(kind, {key: part for key, part in value.items() if key != "kind"})
