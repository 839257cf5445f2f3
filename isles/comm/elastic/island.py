"""The workers of an island that is one member of a world that changes: who leads it, and who follows.

    leader      has the seat: it talks with the lighthouse, and says what all of them do
    follower    does what it is told, and exchanges its share with the workers at its place in other islands

Whether an exchange was whole is asked of all places, so that an island lands a round as a whole or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from isles.comm.elastic.line import LighthouseLine
from isles.comm.elastic.roster import ElasticRoster
from isles.comm.errors import CommError, DeadlinePassed, Diverged, Malformed, Refused
from isles.comm.group import Group
from isles.comm.mesh import Mesh
from isles.comm.roster import Ruling
from isles.comm.transport import Deadlines
from isles.parsing import parse_json

_LONGEST = 1 << 20  # bytes of a saying
_NONE = _NOBODY = -1
_MIX = 0x9E3779B97F4A7C1
_POSITIVE = (1 << 61) - 1


class IslandGroup:
    """mesh: this island's workers, in their order; None: a worker by itself. waits: seconds that others may take."""

    def __init__(self, mesh: Mesh | None = None, waits: float = 0.0) -> None:
        self.mesh, self._group = mesh, None
        if mesh is not None:
            group = mesh.world
            patient = replace(group.deadlines, control=group.deadlines.control + 2 * waits)
            self._group = replace(group, channel="control", deadlines=patient)

    @property
    def size(self) -> int:
        """Number of workers."""
        return 1 if self._group is None else self._group.size

    @property
    def place(self) -> int:
        """This worker's; the leader's is 0."""
        return 0 if self._group is None else self._group.rank

    def say(self, act: str, **facts: Any) -> None:
        """The leader's: what all do now. facts: JSON-able."""
        if self._group is None:
            return
        text = json.dumps({"act": act, **facts}).encode("ascii")
        self._group.broadcast(torch.tensor([len(text)]))
        self._group.broadcast(torch.frombuffer(bytearray(text), dtype=torch.uint8))

    def hear(self) -> dict[str, Any]:
        """A follower's: what the leader says next."""
        assert self._group is not None, "a worker by itself follows nobody"
        length = torch.zeros(1, dtype=torch.int64)
        self._group.broadcast(length)
        if not 0 < int(length) <= _LONGEST:
            raise Malformed(self._group.ranks[0], f"a saying of {int(length)} bytes")
        text = torch.empty(int(length), dtype=torch.uint8)
        self._group.broadcast(text)
        return cast(dict[str, Any], parse_json(text.numpy().tobytes()))

    def gather(self, *numbers: int) -> list[list[int]]:
        """Everybody's numbers, by place; all call it together."""
        if self._group is None:
            return [list(numbers)]
        return [own.tolist() for own in self._group.all_gather(torch.tensor(numbers))]

    def gather_text(self, text: bytes) -> list[bytes]:
        """Everybody's text, of any length, by place; all call it together."""
        if self._group is None:
            return [text]
        lengths = [length for (length,) in self.gather(len(text))]
        if max(lengths) > _LONGEST:
            raise Malformed(self._group.ranks[lengths.index(max(lengths))], f"a saying of {max(lengths)} bytes")
        mine = torch.frombuffer(bytearray(text.ljust(max(lengths))), dtype=torch.uint8)
        told = self._group.all_gather(mine)
        return [one.numpy().tobytes()[:length] for one, length in zip(told, lengths, strict=True)]


def _answer_of(digest: int | None, error: CommError | None) -> tuple[int, int, int]:
    """(digest, whose fault it is that there is none, whether that is late or sent what cannot be) as numbers."""
    refused = isinstance(error, (Refused, Malformed, Diverged))
    blamed = getattr(error, "peer", _NOBODY) if refused or isinstance(error, DeadlinePassed) else _NOBODY
    return (_NONE if digest is None else digest), blamed, int(refused)


def _together(told: Sequence[Sequence[int]], seconds: float) -> tuple[int | None, CommError | None]:
    """What all places' answers are together: one digest of them, or why there is none."""
    for digest, blamed, refused in told:
        if digest == _NONE and blamed == _NOBODY:
            return None, None
        if digest == _NONE:
            late = DeadlinePassed(blamed, "outer", seconds)
            return None, Refused(blamed, "at another place of this island") if refused else late
    return sum(_MIX * (2 * place + 1) * own[0] for place, own in enumerate(told)) & _POSITIVE, None


class LeadingRoster(ElasticRoster):
    """The leader's: what the lighthouse says is said to the others."""

    def __init__(self, company: LighthouseLine, alone: Group, places: IslandGroup) -> None:
        super().__init__(company, alone)
        self._places = places

    def opening(self, round: int) -> tuple[Group, int] | None:
        opening = super().opening(round)
        if opening is None:
            self._places.say("closed")
        else:
            group, attempt = opening
            self._places.say(
                "open", seats=list(group.ranks), view=group.view, attempt=attempt, seconds=group.deadlines.outer
            )
        return opening

    def commit(self, round: int, attempt: int, digest: int | None, error: CommError | None = None) -> Ruling:
        if self._places.size == 1:
            return super().commit(round, attempt, digest, error)
        told = self._places.gather(*_answer_of(digest, error))
        together, failure = _together(told, self.founders.deadlines.outer)
        ruling = super().commit(round, attempt, together, error or failure)
        self._places.say("ruling", ruling=ruling)
        return ruling


class FollowingRoster:
    """A follower's, see `isles.comm.roster.Roster`: it knows what it is told."""

    grows = True

    def __init__(self, alone: Group, places: IslandGroup) -> None:
        self.founders, self._places = alone, places

    def group(self, round: int) -> Group:
        return self.founders

    def lost(self, seat: int) -> bool:
        return False

    def miss(self, seat: int, error: CommError) -> None:
        """The leader tells the lighthouse."""

    def accepts(self, round: int, seats: Sequence[int]) -> bool:
        return True

    def opening(self, round: int) -> tuple[Group, int] | None:
        said = self._places.hear()
        if said["act"] == "closed":
            return None
        if said["act"] != "open":
            raise Malformed(-1, f"{said['act']} in place of who takes part")
        waits: Deadlines = replace(self.founders.deadlines, outer=float(said["seconds"]))
        seats = tuple(int(seat) for seat in said["seats"])
        return replace(self.founders, ranks=seats, view=int(said["view"]), deadlines=waits), int(said["attempt"])

    def commit(self, round: int, attempt: int, digest: int | None, error: CommError | None = None) -> Ruling:
        self._places.gather(*_answer_of(digest, error))
        said = self._places.hear()
        if said["act"] != "ruling" or said["ruling"] not in ("land", "again", "wait"):
            raise Malformed(-1, f"{said['act']} in place of a ruling")
        return cast(Ruling, said["ruling"])

    def survivors(self, asked: bool) -> Group:
        return self.founders

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""
