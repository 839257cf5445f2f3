"""What an inner optimizer keeps that is a copy of the weights: its next step would write it over what a round has
landed. Found in its state by value, before the weights are landed on:

    master      equals its parameter, rounded to the parameter's format, wherever there is one (and is not all zero):
                it becomes what has landed
    near copy   within half of the weights' norm of them, as Lookahead's slow weights, or schedule-free's z: it moves by
                as much as the weights

An optimizer that keeps its copy elsewhere is given `after_landing(parameters)`, a method that is called instead of all
this. Where it has none it is found out by its next step, and refused. torch's own optimizers keep none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from isles.replicas.flat import views
from isles.replicas.island.sharded import own_rows
from isles.wrapping import Deferred, each_of, innermost

_NEAR = 0.25  # of the weights' square: how far a copy of them may be
_FEWEST = 3  # inner steps of a round after which one step cannot lead as far back as a landing has led
_LOOKED_AT = 512  # entries of each parameter by which that is seen


def copies_of(inner: Optimizer, parameters: Sequence[nn.Parameter]) -> list[WeightCopies]:
    """Of each optimizer below `inner` that may keep some. A plan of memory keeps what torch's own do."""
    each = [one for one in each_of(innermost(inner)) if not isinstance(one, Deferred)]
    return [WeightCopies(one, parameters) for one in each if not type(one).__module__.startswith("torch.optim.")]


class WeightCopies:
    """In the state of `inner`, of those of `parameters` that it steps."""

    def __init__(self, inner: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        self._inner, self._all = inner, list(parameters)
        self._parameters: dict[int, nn.Parameter] = {}  # its own, by number
        self._renews = getattr(inner, "after_landing", None)
        self._keys: set[str] = set()
        self._before: dict[int, Tensor] | None = None  # the weights, where there are copies
        self._start: list[Tensor] | None = None  # some of them, where there may be some out of reach
        self._landed: tuple[list[Tensor], list[Tensor]] | None = None  # the same after a landing, and how they moved
        self._steps, self._last = 0, dict[int, int]()  # inner steps; at the last landing, by number of the parameter
        self._round = 0  # inner steps of the round that has just landed
        self._undone = 0  # landings in succession that the next inner step took back
        self._probes = 2

    def stepped(self) -> None:
        """After an inner step. ValueError where it has taken back a landing, for the second time in succession."""
        self._steps += 1
        if self._landed is None:
            return
        (landed, moved), self._landed = self._landed, None
        back = _product([then - now for now, then in zip(self._some(), landed, strict=True)], moved)
        # Where each worker pulls its own way, an honest step leads back by as much as one step of the round had led.
        self._undone = self._undone + 1 if back > (1 + 1 / self._round) / 2 * _product(moved, moved) else 0
        self._probes = max(self._probes - 1, int(self._undone > 0))
        if self._undone == 2:
            raise ValueError(
                f"{type(self._inner).__name__} takes back what rounds have landed, for it keeps a copy of the weights "
                "that is not in its state: give it a method after_landing(parameters) that renews the copy, or choose "
                "an optimizer without one"
            )

    def before_landing(self) -> None:
        """The weights are as the inner step has left them."""
        self._parameters = self._held()
        if self._renews is not None:
            return
        states = (self._inner.state.get(parameter, {}) for parameter in self._parameters.values())
        known = {"z"} if "train_mode" in self._inner.param_groups[0] else set()  # schedule-free's, how far it may be
        self._keys = {key for key in {key for state in states for key in state} if key in known or self._is_copy(key)}
        self._start, self._landed = self._some() if self._probes and not self._keys else None, None
        own = {place: own_rows(parameter.detach()) for place, parameter in self._parameters.items()}
        self._before = {place: weights.clone() for place, weights in own.items()} if self._keys else None

    def landed(self, places: Sequence[int], exact: Mapping[int, Tensor]) -> None:
        """The parameters of numbers `places` have been written to. exact: what they were rounded from, by number, where
        that is known.
        """
        places = [place for place in places if place in self._parameters]
        if not places:
            return
        if self._renews is not None:
            self._renews([self._parameters[place] for place in places])
        elif self._before is not None:
            for place in places:
                self._renew(place, exact.get(place))
            self._before = None
        elif self._start is not None:
            now = self._some()
            moved = [after - then for after, then in zip(now, self._start, strict=True)]
            self._round = self._steps - self._last.get(places[0], 0)
            if self._round >= _FEWEST and _product(moved, moved) > 0:
                self._landed = (now, moved)
        self._last |= dict.fromkeys(places, self._steps)

    def averages(self) -> dict[str, Tensor]:
        """Of a schedule-free optimizer what its average is made from, live, by number of the parameter."""
        held = self._held().items() if "train_mode" in self._inner.param_groups[0] else ()
        states = ((place, own, self._inner.state.get(own, {})) for place, own in held)
        return {f"z {place}": own_rows(state.get("z", own.detach().clone())) for place, own, state in states}

    def _held(self) -> dict[int, nn.Parameter]:
        held = {id(parameter) for group in self._inner.param_groups for parameter in group["params"]}
        return {place: own for place, own in enumerate(self._all) if id(own) in held}

    def _renew(self, place: int, exact: Tensor | None) -> None:
        assert self._before is not None
        parameter, before = own_rows(self._parameters[place].detach()), self._before[place]
        state = self._inner.state.get(self._parameters[place], {})
        for key in self._keys & state.keys():
            kept = own_rows(state[key])
            if torch.equal(kept.to(before), before):
                full = parameter.to(kept.dtype)
                if exact is not None:
                    full = torch.where(exact.to(parameter) == parameter, exact.to(full), full)
                kept.copy_(full)
            else:
                kept.add_((parameter.to(kept.dtype) - before.to(kept.dtype)).to(kept.device))

    def _is_copy(self, key: str) -> bool:
        """Near all parameters that have it, and no zeros throughout."""
        apart, size, found = 0.0, 0.0, False
        for parameter in self._parameters.values():
            own: Any = self._inner.state.get(parameter, {}).get(key)
            if own is None:
                continue
            if not (isinstance(own, Tensor) and own.shape == parameter.shape and own.is_floating_point()):
                return False
            weights = own_rows(parameter.detach()).double()
            apart += float((own_rows(own.detach()).to(weights) - weights).square().sum())
            size += float(weights.square().sum())
            found = True
        return found and size > 0 and apart <= _NEAR * size

    def _some(self) -> list[Tensor]:
        """Of each parameter the first entries, copied."""
        own = (own_rows(parameter.detach()) for parameter in self._parameters.values())
        some = ([view.reshape(-1) for view in views(one, 0, min(one.numel(), _LOOKED_AT))] for one in own)
        return [torch.cat(parts).to(torch.float64) for parts in some]


def _product(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    return sum(float((mine * theirs).sum()) for mine, theirs in zip(one, other, strict=True))
