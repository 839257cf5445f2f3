"""Which layers are exchanged after which step, and when the answer must be there: what `utilisation` simulates.

| schedule | after step s | answer needed |
|---|---|---|
| data parallel | all layers, every step                             | by the next step |
| DiLoCo        | all layers, when s mod H = 0                       | by the next step |
| streaming     | one fragment, when s mod n = 0, n = round(H / P)   | tau steps later than that |

P fragments take turns, so each is exchanged every `period` = n P steps, which is H only where P divides H. Layers are
counted from 0, the one next to the data.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanges:
    """every: steps from one exchange to the next, the first after step 0. fragments: their layers, in the order of
    their turns. bits: of one parameter on the wire. overlap: steps (tau) that go on before the answer is needed.
    """

    every: int
    fragments: tuple[tuple[int, ...], ...]
    bits: float
    overlap: int = 0

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every = {self.every} steps: choose 1 or more")
        if not self.bits > 0:
            raise ValueError(f"bits = {self.bits} a parameter: choose more than 0")
        if self.overlap < 0:
            raise ValueError(f"overlap = {self.overlap} steps: choose 0 or more")

    @property
    def period(self) -> int:
        """Steps in which the whole model is exchanged once."""
        return self.every * len(self.fragments)

    def after(self, step: int) -> tuple[int, ...]:
        """The layers exchanged after `step`, the one that is ready first (the last layer) first."""
        if step % self.every:
            return ()
        return self.fragments[step // self.every % len(self.fragments)]


def data_parallel(layers: int, *, bits: float = 16) -> Exchanges:
    """Gradients of all layers after every step."""
    return Exchanges(every=1, fragments=_whole(layers), bits=bits)


def diloco(layers: int, sync_every: int, *, bits: float = 16, overlap: int = 0) -> Exchanges:
    """All layers every `sync_every` steps."""
    return Exchanges(every=sync_every, fragments=_whole(layers), bits=bits, overlap=overlap)


def streaming(
    layers: int,
    sync_every: int,
    *,
    bits: float = 16,
    overlap: int = 0,
    per_fragment: int = 3,
    every: int | None = None,
) -> Exchanges:
    """Fragments of `per_fragment` layers in turns, the last fragment first: of P fragments each has every P-th layer.

    every: steps from one fragment to the next; None: round(sync_every / fragments), half to even, at least 1.
    """
    if not 1 <= per_fragment <= layers:
        raise ValueError(f"{per_fragment} layers a fragment: choose 1 to {layers}, the number of layers")
    count = -(-layers // per_fragment)
    parts = [range(first, layers, count) for first in range(count)]
    every = max(round(sync_every / count), 1) if every is None else every
    turns = tuple(tuple(reversed(part)) for part in reversed(parts))
    return Exchanges(every=every, fragments=turns, bits=bits, overlap=overlap)


def _whole(layers: int) -> tuple[tuple[int, ...], ...]:
    if layers < 1:
        raise ValueError(f"layers = {layers}: choose 1 or more")
    return (tuple(reversed(range(layers))),)
