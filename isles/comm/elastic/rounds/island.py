"""The workers of an island that is one member of a world that changes: who leads it, and who follows.

    leader      has the seat: it talks with the lighthouse, and says what all of them do
    follower    does what it is told, and exchanges its share with the workers at its place in other islands

Who takes part in a round, and who of them is lost, the leader says; whether an exchange was whole is asked of all
places. So an island lands a round as a whole or not at all, and does it alone as a whole or not at all. Of pairs and
groups the other islands may land a round that this one has done alone, as it is with single workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from isles.comm.elastic.rounds.decision import Decision, from_bytes, to_bytes
from isles.comm.errors import CommError, DeadlinePassed, Diverged, Malformed, PeerSilent, Refused
from isles.comm.mesh import Mesh

_LONGEST = 1 << 20  # bytes of a decision, or of a text
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

    def next_decision(self, made: Callable[[], Decision]) -> Decision:
        """What all do next; all call it together. made: the leader's, which alone is asked. Malformed."""
        if self._group is None:
            return made()
        text = to_bytes(made()) if self.place == 0 else b""
        length = torch.tensor([len(text)], dtype=torch.int64, device="cpu")
        self._group.broadcast(length)
        if not 0 < int(length) <= _LONGEST:
            raise Malformed(self._group.ranks[0], f"a decision of {int(length)} bytes")
        told = torch.frombuffer(bytearray(text or bytes(int(length))), dtype=torch.uint8)
        self._group.broadcast(told)
        try:
            return from_bytes(told.numpy().tobytes())
        except ValueError as error:
            raise Malformed(self._group.ranks[0], f"a decision that is none: {error}") from None

    def settle(self, answer: Callable[[], bool]) -> bool:
        """The leader's answer, for all; all call it together, and the leader alone is asked."""
        if self._group is None:
            return answer()
        word = torch.tensor([self.place == 0 and answer()], dtype=torch.uint8, device="cpu")
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
            raise Malformed(self._group.ranks[lengths.index(max(lengths))], f"a text of {max(lengths)} bytes")
        mine = torch.frombuffer(bytearray(text.ljust(max(lengths))), dtype=torch.uint8)
        told = self._group.all_gather(mine)
        return [one.numpy().tobytes()[:length] for one, length in zip(told, lengths, strict=True)]

    def combine(
        self, round: int, attempt: int, digest: int | None, error: CommError | None, seconds: float
    ) -> tuple[int | None, CommError | None]:
        """What all places' answers to an attempt are together: one digest of them, or why there is none; all call it
        together. digest, error: this place's. seconds: for which the others were waited for.
        """
        if self._group is None:
            return digest, error
        if digest is None:
            self.failed(round, attempt)
        return _together(self.gather(*_answer_of(digest, error)), seconds)


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
