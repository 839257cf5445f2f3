"""The workers of an island that is one member of a world that changes: who leads it, and who follows.

    leader      has the seat: it talks with the lighthouse, and says what all of them do
    follower    does what it is told, and exchanges its share with the workers at its place in other islands

Who takes part in a round, and who of them is lost, the leader says; whether an exchange was whole is asked of all
places. So an island lands a round as a whole or not at all, and does it alone as a whole or not at all. Of pairs and
groups the other islands may land a round that this one has done alone, as it is with single workers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from isles.comm.elastic.company import Company
from isles.comm.elastic.roster import KEPT, ElasticRoster
from isles.comm.errors import CommError, DeadlinePassed, Diverged, Malformed, PeerLost, PeerSilent, Refused
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
        self.failed: Callable[[int, int], None] = lambda round, attempt: None
        """Called with (round, attempt) of which this worker has no answer: the others are to wait for none either."""
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
        self._group.broadcast(torch.tensor([len(text)], dtype=torch.int64, device="cpu"))
        self._group.broadcast(torch.frombuffer(bytearray(text), dtype=torch.uint8))

    def hear(self) -> dict[str, Any]:
        """A follower's: what the leader says next."""
        assert self._group is not None, "a worker by itself follows nobody"
        length = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._group.broadcast(length)
        if not 0 < int(length) <= _LONGEST:
            raise Malformed(self._group.ranks[0], f"a saying of {int(length)} bytes")
        text = torch.empty(int(length), dtype=torch.uint8, device="cpu")
        self._group.broadcast(text)
        return cast(dict[str, Any], parse_json(text.numpy().tobytes()))

    def settle(self, answer: bool = False) -> bool:
        """The leader's answer, for all; all call it together."""
        if self._group is None:
            return answer
        word = torch.tensor([answer], dtype=torch.uint8, device="cpu")
        self._group.broadcast(word)
        return bool(word)

    def gather(self, *numbers: int) -> list[list[int]]:
        """Everybody's numbers, by place; all call it together."""
        if self._group is None:
            return [list(numbers)]
        return [own.tolist() for own in self._group.all_gather(torch.tensor(numbers, dtype=torch.int64, device="cpu"))]

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


def _answer_of(digest: int | None, error: CommError | None) -> tuple[int, int, int, int]:
    """(digest, whose fault it is that there is none, whether that is late or sent what cannot be, who has found it so)
    as numbers.
    """
    refused = isinstance(error, (Refused, Malformed, Diverged))
    blamed = getattr(error, "peer", _NOBODY) if refused or isinstance(error, DeadlinePassed) else _NOBODY
    blamed = error.rank if isinstance(error, PeerSilent) else blamed
    return (_NONE if digest is None else digest), blamed, int(refused), getattr(error, "by", _NOBODY)


def _together(told: Sequence[Sequence[int]], seconds: float) -> tuple[int | None, CommError | None]:
    """What all places' answers are together: one digest of them, or why there is none."""
    for digest, blamed, refused, by in told:
        if digest == _NONE and blamed == _NOBODY:
            return None, None
        if digest == _NONE:
            late = DeadlinePassed(blamed, "outer", seconds)
            return None, Refused(blamed, "at another place of this island", by) if refused else late
    return sum(_MIX * (2 * place + 1) * own[0] for place, own in enumerate(told)) & _POSITIVE, None


class LeadingRoster(ElasticRoster):
    """The leader's: what the lighthouse says is said to the others."""

    answers_alike = True

    def __init__(self, company: Company, alone: Group, places: IslandGroup) -> None:
        super().__init__(company, alone)
        self._places = places

    def group(self, round: int) -> Group:
        is_known = round in self._answers
        group = super().group(round)
        if not is_known:
            self._places.say("group", **_told_of(group))
        return group

    def lacks(self, seats: Sequence[int]) -> bool:
        return len(seats) > 1 and self._places.settle(super().lacks(seats))

    def accepts(self, round: int, seats: Sequence[int], *, whole: bool) -> bool:
        if self._places.size == 1 or len(seats) <= 1:
            return super().accepts(round, seats, whole=whole)
        if not whole:
            self._places.failed(round, 0)
        told = self._places.gather(*_answer_of(0 if whole else None, None))
        together, failure = _together(told, self.founders.deadlines.outer)
        if failure is not None:
            self.miss(getattr(failure, "peer", _NOBODY), failure)
        elif whole and together is None:
            self._note(round, tuple(seats), PeerLost.__name__)
        return self._places.settle(super().accepts(round, seats, whole=together is not None))

    def opening(self, round: int) -> tuple[Group, int] | None:
        opening = super().opening(round)
        if opening is None:
            self._places.say("closed")
        else:
            group, attempt = opening
            self._places.say("open", attempt=attempt, **_told_of(group))
        return opening

    def commit(self, round: int, attempt: int, digest: int | None, error: CommError | None = None) -> Ruling:
        if self._places.size == 1:
            return super().commit(round, attempt, digest, error)
        if digest is None:
            self._places.failed(round, attempt)
        told = self._places.gather(*_answer_of(digest, error))
        together, failure = _together(told, self.founders.deadlines.outer)
        ruling = super().commit(round, attempt, together, error or failure)
        self._places.say("ruling", ruling=ruling)
        return ruling


class FollowingRoster:
    """A follower's, see `isles.comm.roster.Roster`: it knows what it is told."""

    grows = answers_alike = True

    def __init__(self, alone: Group, places: IslandGroup) -> None:
        self.founders, self._places = alone, places
        self._answers: dict[int, Group] = {}
        self._missed: CommError | None = None  # of the exchange that is asked about next

    def group(self, round: int) -> Group:
        if round not in self._answers:
            group = self._group(self._hear("group"))
            self._answers = {**{r: a for r, a in self._answers.items() if r > round - KEPT}, round: group}
        return self._answers[round]

    def lost(self, seat: int) -> bool:
        return False

    def lacks(self, seats: Sequence[int]) -> bool:
        return len(seats) > 1 and self._places.settle()

    def miss(self, seat: int, error: CommError) -> None:
        """The leader tells the lighthouse."""
        self._missed = self._missed or error

    def accepts(self, round: int, seats: Sequence[int], *, whole: bool) -> bool:
        missed, self._missed = self._missed, None
        if len(seats) <= 1:
            return whole
        if not whole:
            self._places.failed(round, 0)
        self._places.gather(*_answer_of(0 if whole else None, missed))
        return self._places.settle()

    def opening(self, round: int) -> tuple[Group, int] | None:
        said = self._hear("open", "closed")
        return None if said["act"] == "closed" else (self._group(said), int(said["attempt"]))

    def commit(self, round: int, attempt: int, digest: int | None, error: CommError | None = None) -> Ruling:
        if digest is None:
            self._places.failed(round, attempt)
        self._places.gather(*_answer_of(digest, error))
        ruling = self._hear("ruling")["ruling"]
        if ruling not in ("land", "again", "wait"):
            raise Malformed(-1, "a ruling that there is not")
        return cast(Ruling, ruling)

    def begin_anew(self) -> None:
        """See `ElasticRoster.begin_anew`."""
        self._answers, self._missed = {}, None

    def survivors(self, asked: bool) -> Group:
        return self.founders

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""

    def _hear(self, *acts: str) -> dict[str, Any]:
        """What the leader says, which must be one of `acts`. Malformed."""
        said = self._places.hear()
        if said["act"] not in acts:
            raise Malformed(-1, f"{said['act']} in place of {acts[0]}")
        return said

    def _group(self, said: Mapping[str, Any]) -> Group:
        """Of what `_told_of` made."""
        waits: Deadlines = replace(self.founders.deadlines, outer=float(said["seconds"]))
        seats = tuple(int(seat) for seat in said["seats"])
        return replace(self.founders, ranks=seats, view=int(said["view"]), deadlines=waits)


def _told_of(group: Group) -> dict[str, Any]:
    """Who takes part, and how long it is waited for, JSON-able."""
    return {"seats": list(group.ranks), "view": group.view, "seconds": group.deadlines.outer}
