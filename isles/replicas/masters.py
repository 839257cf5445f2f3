"""Inner optimizers that keep copies of the weights: float32 masters of coarser ones, Lookahead's slow weights, the z of
schedule-free. Their next step would undo what a landing has written, so the copies follow it.

A copy is found by what it holds, not by its name: state of a parameter's shape that lies near the parameters, which no
moment does. An entry that equals the weight, rounded to its format, becomes the landed weight; any other one moves as
the weight did. An optimizer whose copies lie elsewhere may offer `after_landing(parameters)`; where it does not, and
undoes landings, that is noticed at the next step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_NEAR = 0.25  # of the sum of squares of the weights: the distance of a copy from them
_ENTRIES = 32  # fewer may lie near the weights by chance, and are copies only if they are equal
_FAR = 4  # inner steps between landings from which on one step cannot look like a landing undone
_LOOKS = 3  # landings in a row that must be undone
_BACK = 0.6  # of the landing's way: who goes so far back in one step
_SAMPLE = 65536  # entries of each parameter that are looked at


class WeightCopies:
    """Of `parameters`, in the state of `optimizer`."""

    def __init__(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        self._optimizer, self._parameters = optimizer, list(parameters)
        self._keys: frozenset[str] | None = None  # all that the state had when it was looked through
        self._copies: list[tuple[nn.Parameter, Tensor]] = []
        self._is_landing = False
        self._landed = 0  # inner step of the last landing
        self._undone = 0  # landings in a row
        self._moved: tuple[list[Tensor], list[Tensor]] | None = None  # samples: weights as landed, how they moved
        self._looks = 0

    @contextmanager
    def landing(self, step: int) -> Iterator[None]:
        """Around all that writes to the weights after inner step `step`."""
        if self._is_landing:
            yield
            return
        self._is_landing = True
        try:
            offers = getattr(self._optimizer, "after_landing", None)
            copies = [] if offers else self._found()
            before = [parameter.detach().clone() for parameter, _ in copies]
            looks = not (copies or offers) and self._looks < _LOOKS and step - self._landed >= _FAR
            sampled = self._sample() if looks else []
            yield
            for (parameter, copy), old in zip(copies, before, strict=True):
                _follow(copy, old, parameter.detach())
            if offers:
                offers(self._parameters)
            if looks:
                self._looks += 1
                landed = self._sample()
                self._moved = landed, [new - old for new, old in zip(landed, sampled, strict=True)]
            self._landed = step
        finally:
            self._is_landing = False

    def look(self) -> None:
        """After the inner step behind a landing. ValueError where it has undone this landing and those before."""
        if self._moved is None:
            return
        (landed, moved), self._moved = self._moved, None
        size = sum(float(way.square().sum()) for way in moved)
        steps = [new - old for new, old in zip(self._sample(), landed, strict=True)]
        back = -sum(float((step * way).sum()) for step, way in zip(steps, moved, strict=True))
        is_undone = size > 0 and _BACK * size < back < size / _BACK
        self._undone = self._undone + 1 if is_undone else 0
        if self._undone == _LOOKS:
            raise ValueError(
                f"{type(self._optimizer).__name__} keeps a copy of the weights that is not in its state, and writes it "
                "over what the others sent: give it a method after_landing(parameters) that reads the weights again, "
                "or choose an optimizer without such a copy"
            )

    def _sample(self) -> list[Tensor]:
        return [p.detach().reshape(-1)[:_SAMPLE].to("cpu", torch.float32, copy=True) for p in self._parameters]

    def _found(self) -> list[tuple[nn.Parameter, Tensor]]:
        """The copies, each with its parameter; looked for again where the state has other keys than before."""
        state = self._optimizer.state
        keys = frozenset(key for parameter in self._parameters for key in state.get(parameter, ()))
        if keys != self._keys:
            self._keys = keys
            self._names = [key for key in keys if self._is_copy(key)]
        return [
            (parameter, state[parameter][key])
            for key in self._names
            for parameter in self._parameters
            if _fits(parameter, state.get(parameter, {}).get(key))
        ]

    def _is_copy(self, key: str) -> bool:
        state = self._optimizer.state
        held = [(p.detach(), state.get(p, {}).get(key)) for p in self._parameters]
        pairs = [(weight, copy) for weight, copy in held if _fits(weight, copy)]
        size = sum(float(weight.double().square().sum()) for weight, _ in pairs)
        if not size:
            return False  # zeros equal zeros
        if key == "z" and type(self._optimizer).__module__.startswith("schedulefree"):
            return True
        if sum(weight.numel() for weight, _ in pairs) < _ENTRIES:
            return all(torch.equal(copy.to(weight.dtype), weight) for weight, copy in pairs)
        return sum(float((copy.double() - weight.double()).square().sum()) for weight, copy in pairs) <= _NEAR * size


def _fits(weight: Tensor, copy: object) -> bool:
    return isinstance(copy, Tensor) and copy.is_floating_point() and copy.shape == weight.shape


def _follow(copy: Tensor, old: Tensor, new: Tensor) -> None:
    """Move `copy` as its weight moved from `old` to `new`."""
    is_equal = copy.to(old.dtype) == old
    copy.copy_(torch.where(is_equal, new.to(copy.dtype), copy + (new.to(copy.dtype) - old.to(copy.dtype))))
