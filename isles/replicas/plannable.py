"""What a method says of a run before it runs: who sends what to whom when, how much, and what is held in memory.

Exact, unless an outline is `about` right: tests hold it against what runs then send.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from isles.base.wrapping import Wrapping
from isles.comm.codecs.lowrank import Form, LowRank
from isles.comm.collectives.mean import phases
from isles.comm.group import Group
from isles.comm.tags import rounds_apart
from isles.network.exchange_plan import COMPARED, MemoryItem, PlannedExchange, Rhythm
from isles.replicas import start
from isles.replicas.exchange_schedule import Outline, bytes_of, opening_exchanges, outline
from isles.replicas.flat import FlatParameters
from isles.replicas.replica import PeerQuestion, Replica


class Foretold(Wrapping):
    """The part of `ReplicaSync`, whose attributes these are, that a plan asks."""

    group: Group
    model: nn.Module
    replica: Replica
    config: Any
    shares: Sequence[Tensor]
    max_norm: float | None

    @property
    def is_sketch(self) -> bool:
        """True for a model on the meta device: it can be planned with (`schedule`, `memory`), not trained."""
        return self.parameters[0].is_meta

    def schedule(self, steps: int) -> list[PlannedExchange]:
        """Who sends what to whom when in a run of `steps` inner steps. Sends nothing."""
        return []

    def rhythm(self, steps: int) -> Rhythm:
        """How the exchanges of a run of `steps` inner steps repeat themselves; never, unless a method says so."""
        return Rhythm(0, max(steps, 1))

    def retime(self, sync_every: int) -> None:
        """Plan with rounds of so many inner steps from now on; of a sketch. TypeError where the method has none."""
        self.config = replace(self.config, sync_every=sync_every)  # type: ignore[type-var]

    def outline(self, steps: int) -> Outline:
        """`schedule(steps)` in short, with the bytes sent before the first step: what the counters will show. In an
        island bytes are those of this worker and of those at its place in other islands, inside and across.
        """
        own = self.own_outline(steps)
        inside, about = self.replica.sent(steps, self.questions)
        inside += self.spread_bytes(steps)
        sent = tuple(nbytes + inside for nbytes in own.sent)
        return replace(own, sent=sent, inside=inside, about=own.about or about)

    @property
    def questions(self) -> list[PeerQuestion]:
        """What a step asks its replica's other workers."""
        return ["norm"] if self.max_norm is not None else []

    def own_outline(self, steps: int) -> Outline:
        """Of what the group exchanges."""
        return outline(self.schedule(steps), steps, self.opening(), per_step=False)

    def spread_bytes(self, steps: int) -> int:
        """Bytes that this worker sends inside its replica in `steps` steps for what lands on it."""
        return 0

    def opening(self) -> tuple[int, ...]:
        """Bytes that each position sends while the optimizer is made."""
        inside = self.replica.opening()
        return tuple(inside + own for own in bytes_of(self.opening_exchanges(), self.group.size))

    def opening_exchanges(self) -> list[PlannedExchange]:
        """What the group exchanges meanwhile."""
        return opening_exchanges(start.bytes_by_format(self._shared()), self.group.size)

    def memory(self) -> list[MemoryItem]:
        """What this method holds in the host's memory, beside weights, gradients and the inner optimizer's state."""
        flat = FlatParameters(self.shares)
        return [MemoryItem(COMPARED, 2 * flat.numel * flat.dtype.itemsize, "end"), *self.replica.memory()]

    def advise(self, steps: int) -> list[str]:
        """Warnings about these settings for a run of `steps`; ValueError if the run cannot mean what they say."""
        return []

    def _shared(self) -> Sequence[Tensor]:
        """What must be equal on all workers of the group at the start."""
        trained = set(map(id, self.parameters))
        frozen = [parameter for parameter in self.model.parameters() if id(parameter) not in trained]
        return [*self.shares, *map(self.replica.own, frozen), *self.model.buffers()]


def idle_low_rank(form: Form, parameters: Sequence[Tensor]) -> list[str]:
    """A warning where low rank compresses nothing of a model."""
    if not isinstance(form, LowRank) or form.compresses(parameters):
        return []
    return [
        f"rank {form.rank} makes no matrix of the model smaller by {form.min_compression_rate:g} times, so all of it "
        "travels dense: lower the rank"
    ]


def rounds_to_leave_behind(rounds: int, fragments: int, elements: int) -> None:
    """ValueError where a lost round could be taken for a later one of as many fragments: their addresses come round
    again. elements: of the largest fragment.
    """
    most = rounds_apart(fragments, phases(elements)) - 1  # what the next round needs may be sent ahead
    if rounds > most:
        raise ValueError(
            f'on_peer_failure = "solo" may leave rounds behind, and addresses of {fragments} fragment(s) come again '
            f'after {most} rounds, of which this run has {rounds}: raise sync_every, or choose "raise"'
        )
