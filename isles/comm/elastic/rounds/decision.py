"""What every worker of a member does next: decided once, by the member's leader, and obeyed by all.

A member is a worker by itself, or an island of several. Where its decisions come from is of no account to who obeys:
    leader     a worker that talks with the lighthouse (`isles.training.elastic.joining`)
    follower   the leader, over the island's network (`island.IslandGroup`)
    replay     the record of a run (`isles.training.elastic.churn.repeating`)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from pydantic import ConfigDict, TypeAdapter

from isles.comm.elastic.cells import Batch
from isles.fields import read_json

DecisionKind = Literal[
    # between rounds
    "seat",  # be of this member: seat, key
    "idle",  # nothing yet
    "load",  # take the state of `donor`, of after `round` or a later one
    "draw",  # begin with the weights as drawn
    "catch up",  # land the means of rounds `round` to `until - 1` as `donor` has
    "enter",  # begin with `round`, after so many `steps`; `began_at` as there
    "forget",  # this member's state is nobody's any more
    "conclude",  # write the model
    "end",
    # a round
    "train",  # the inner steps after so many `steps`, on `slices`
    "exchange",  # attempt `attempt` among `members` of `view`, for `seconds`
    "land",  # the answer is everybody's
    "retry",  # exchange once more
    "postpone",  # nobody can say now, or the member has no part in it
    "keep",  # `round` has landed: copy what others have asked for
    "over",  # rounds up to `round` are over here
    "validate",
    "report",  # what the workers have counted
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """kind: what is done; each of the others is of some kinds alone.

    round: of the run. attempt: of an exchange, from 0. members: seats, in the order of the view. view: its number.
    seconds: for which a state, or a member of an exchange, is waited for. wait: for which a state of after `round` is;
    None: whatever there is now. donor: the seat whose state is taken; -1: the lighthouse. steps: inner steps done
    before. began_at: inner steps after which the member began without moments; None: with them. slices: what to read,
    a batch an inner step; none: a round's out of turn, of which `spare` batches were read before. left_out: by seat,
    the newest view at the time that it was left out.
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
    seat: int = -1
    key: str = ""


_DECISION = TypeAdapter(Decision)


def to_bytes(decision: Decision) -> bytes:
    """As `from_bytes` reads it: what is as by default is left out."""
    return _DECISION.dump_json(decision, exclude_defaults=True)


def from_bytes(text: bytes) -> Decision:
    """The decision. ValueError, in one line, for what is none."""
    return read_json(Decision, text)
