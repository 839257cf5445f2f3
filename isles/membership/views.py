"""Which members take part in which rounds, and by what fingerprints members know each other.

A view names the members of the rounds from `since` on, until a newer view takes over. Workers make their own
certificates; the lighthouse says where a member is and vouches for its fingerprint. That it vouches for the same one to
everybody is shown by the views, on which members agree, and by people who compare what their workers print (`spoken`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from pydantic import Field

from isles.base.parsing import MANY, Exact, Int, Ints, Str


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
