"""What the lighthouse and the workers of an elastic run say to each other, and its form as JSON.

Every message is a frozen dataclass of numbers, text and tuples; `encode` and `decode` are the only ways in and out.
What comes from another machine is data: it must have the kind, the keys, the types and the sizes that are stated here,
or `decode` refuses it with one line. Nothing of it becomes code, a path or a type.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from isles.comm.elastic.ballot import Word
from isles.comm.elastic.swarm.words import Apart, Begin, Enter, Seek, StatesKept, SwarmBeat, SwarmNow, Wait
from isles.comm.view import Lot, View
from isles.parsing import parse_json

MARGIN = 3  # rounds from the newest that anybody has begun to the first of a new view
MAX_BYTES = 64 << 10  # of one message from a worker
MAX_TEXT = 4096
_LARGEST = 1 << 62


@dataclass(frozen=True)
class Proposal:
    """A view that is to be: from round `since` on, `seats`. Whoever has not begun that round promises not to begin it
    before it knows what became of this, and takes no work of `lost` from now on.

    number: that of the view, if it comes to be; never used twice. base: the newest view before it.
    """

    number: int
    base: int
    since: int
    seats: tuple[int, ...]
    lost: tuple[int, ...] = ()


@dataclass(frozen=True)
class Beat:
    """A worker's sign of life, at least at the begin of every round.

    round: the one that it is in, 0 before the first with the state that it has. ready: the call (`BeatReply.call`) for
    which it has everything that it needs to take part, -1 while it has not. skipped: rounds that it did out of turn;
    seen: newest rounds of others whose work it has, by seat; both since the last answer. known: its newest view.
    seconds: of an inner step, 0 where unknown.
    """

    round: int = 0
    ready: int = -1
    known: int = -1
    skipped: tuple[int, ...] = ()
    seen: tuple[tuple[int, int], ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class Ack:
    """A worker's answer to a proposal: True promises what `Proposal` says, False says that it is in that round."""

    number: int
    promised: bool
    beat: Beat


@dataclass(frozen=True)
class BeatReply:
    """The lighthouse's answer to a beat.

    round: that of the beat. issued: the highest number ever proposed. newest: number of the newest view, -1 before the
    first. views: those that the beat's `known` did not know, the older ones that their debts name included.
    newest_round: that of the member that is furthest; a view that is proposed later begins `MARGIN` rounds behind it or
    later. proposal: under way. call: how often this worker has been asked to begin with another's state.
    """

    round: int
    issued: int
    newest: int
    newest_round: int
    views: tuple[View, ...]
    proposal: Proposal | None
    call: int


@dataclass(frozen=True)
class Admitted:
    """The seat of a worker that asked to join."""

    seat: int


@dataclass(frozen=True)
class Load:
    """Take the state of `donor` (-1: from the lighthouse's disk, or the run's own start), then be ready for `call`.

    seconds: that a round takes the donor, 0 where unknown; its state is copied at the end of one.
    """

    call: int
    donor: int
    seconds: float = 0.0


@dataclass(frozen=True)
class Done:
    """The answer of an attempt of an all-reduce round is whole at a worker; `digest` is its hash."""

    round: int
    attempt: int
    digest: int


@dataclass(frozen=True)
class Delivered:
    """A worker has a share of a round for whose mean a quorum is enough, the work of `steps` inner steps, and is at its
    next exchange in so many `seconds`; 0 where that is unknown.
    """

    round: int
    steps: int
    seconds: float


@dataclass(frozen=True)
class Accusation:
    """In this attempt the share of `seat` was late, or was refused: `reason` says why. by: who found it so and told the
    sayer; -1: the sayer itself.
    """

    round: int
    attempt: int
    seat: int
    charge: Literal["late", "refused"]
    reason: str = ""
    by: int = -1


@dataclass(frozen=True)
class Silent:
    """To the lighthouse: nothing comes from `seat`, which is waited for. To members: the lighthouse has not heard it
    either, so nobody waits for it now.
    """

    seat: int


@dataclass(frozen=True)
class Failed:
    """From one worker of an island to the others: it has no answer of that attempt, so nobody there waits for one."""

    round: int
    attempt: int


@dataclass(frozen=True)
class Hello:
    """A worker asks for a seat. version: of isles. corpus: SHA-256 of its text, which all must share. session: the
    engine's name of the session that asks.
    """

    version: str
    corpus: str
    session: str


@dataclass(frozen=True)
class Later:
    """The answer to `Hello` where too many come: ask again in `seconds`; `reason` is a line for a person."""

    seconds: float
    reason: str


@dataclass(frozen=True)
class About:
    """How a run stands. clock: the lighthouse's, seconds since 1970. members: who train; round: the newest that anybody
    has begun, of `last` (0: it has no end).
    """

    version: str
    clock: float
    members: int
    round: int
    last: int


@dataclass(frozen=True)
class Entry:
    """The answer to `Hello`: a seat, and the key that everything said for that seat must bear."""

    seat: int
    key: str


@dataclass(frozen=True)
class Listening:
    """A worker can be reached directly, it thinks. host: "" where the lighthouse sees it; session: the engine's name of
    the session that asks; certificate: its own (DER, base64); place: in its island.
    """

    host: str
    port: int
    session: str
    certificate: str
    place: int = 0


@dataclass(frozen=True)
class Reached:
    """The answer to `Listening`: where the lighthouse tried; refusal: why that failed, "" where it did not."""

    host: str
    port: int
    refusal: str


@dataclass(frozen=True)
class Find:
    """A worker asks for the way to the worker at `place` in the island of `seat`."""

    seat: int
    place: int = 0


@dataclass(frozen=True)
class Found:
    """The answer to `Find`. host, port, certificate: as in `Listening`, "" and 0 where it is not reached directly.
    introduction: what the worker that asked shows to `seat` (hex).
    """

    seat: int
    host: str
    port: int
    certificate: str
    introduction: str


@dataclass(frozen=True)
class Leave:
    """This worker leaves with the next view."""


@dataclass(frozen=True)
class Reload:
    """The state that `Load` named did not come: another donor."""


@dataclass(frozen=True)
class Finished:
    """This worker has done the last round, and offers what it came to."""


@dataclass(frozen=True)
class Examine:
    """The one model of the run is at the lighthouse: fetch it, and report its validation loss."""


@dataclass(frozen=True)
class Over:
    """The run has ended, for the `reason` that is one line for a person; "" where all went well."""

    reason: str = ""


@dataclass(frozen=True)
class Refusal:
    """What was asked is not done; `reason` is one line for a person."""

    reason: str


Message = (
    View | Proposal | Beat | Ack | BeatReply | Admitted | Load | Done | Delivered | Accusation | Silent | Refusal | Word
    | Failed | Hello | Later | About | Entry | Listening | Reached | Find | Found | Leave | Reload | Finished | Examine
    | Over | Seek | Begin | Enter | Wait | Apart | SwarmBeat | StatesKept | SwarmNow
)  # fmt: skip
KINDS: dict[str, type] = {kind.__name__.lower(): kind for kind in get_args(Message)}


def encode(message: Any) -> bytes:
    """One line of JSON, ASCII, without the end of the line."""
    return json.dumps(plain(message), separators=(",", ":"), allow_nan=False).encode("ascii")


def decode(data: bytes, kinds: Mapping[str, type] = KINDS, *, limit: int = MAX_BYTES) -> Any:
    """The message that `encode` was given. ValueError, in one line, where it is none of `kinds`."""
    if len(data) > limit:
        raise ValueError(f"a message of {len(data)} bytes; at most {limit} are read")
    try:
        read = parse_json(data)
    except ValueError:
        raise ValueError("a message that is not JSON") from None
    return from_plain(read, kinds)


def plain(message: Any) -> dict[str, Any]:
    """{"kind": its name in small letters, and its fields}, of values that JSON holds."""
    return {"kind": type(message).__name__.lower(), **_fields(message)}


def from_plain(value: Any, kinds: Mapping[str, type] = KINDS) -> Any:
    """The message of `plain`. ValueError where anything is not as its class says."""
    if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
        raise ValueError("a message without a kind")
    kind = kinds.get(value["kind"])
    if kind is None:
        raise ValueError(f"a message of the unknown kind {_short(value['kind'])}")
    return typed({key: part for key, part in value.items() if key != "kind"}, kind)


def _fields(message: Any) -> dict[str, Any]:
    return {field.name: _plain_value(getattr(message, field.name)) for field in fields(message)}


def _plain_value(value: Any) -> Any:
    if hasattr(value, "__dataclass_fields__"):
        return _fields(value)
    return [_plain_value(part) for part in value] if isinstance(value, tuple) else value


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def typed(value: Any, kind: type) -> Any:
    """A `kind` of the table `value`. ValueError where its keys and their types are not those of that dataclass."""
    hints = _hints(kind)
    if not isinstance(value, dict) or value.keys() != hints.keys():
        raise ValueError(f"{kind.__name__}: its keys are {', '.join(hints)}")
    return kind(**{key: _typed(value[key], hint, f"{kind.__name__}.{key}") for key, hint in hints.items()})


def _typed(value: Any, hint: Any, name: str) -> Any:
    """`value` as a `hint`, or a ValueError that begins with `name`."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Lot:
        return Lot(*_typed(value, tuple[int, int, int, int], name))
    if origin in (Union, UnionType):
        (inner,) = (argument for argument in arguments if argument is not type(None))
        return None if value is None else _typed(value, inner, name)
    if origin is tuple and isinstance(value, list | tuple):
        if arguments[-1] is Ellipsis:
            return tuple(_typed(part, arguments[0], name) for part in value)
        if len(value) == len(arguments):
            return tuple(_typed(part, argument, name) for part, argument in zip(value, arguments, strict=True))
    if origin is Literal and isinstance(value, str) and value in arguments:
        return value
    if hint is bool and isinstance(value, bool):
        return value
    if hint is int and isinstance(value, int) and not isinstance(value, bool) and abs(value) < _LARGEST:
        return value
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool) and _finite(value):
        return float(value)
    if hint is str and isinstance(value, str) and len(value) <= MAX_TEXT and value.isprintable():
        return value
    if hasattr(hint, "__dataclass_fields__"):
        return typed(value, hint)
    raise ValueError(f"{name} = {_short(value)} is not what belongs there")


def _finite(value: float) -> bool:
    return abs(value) < 1e300 and math.isfinite(value)


def _short(value: Any) -> str:
    """A value of a stranger for a line on the terminal."""
    return ascii(value)[:60]
