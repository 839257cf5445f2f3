"""An optimizer around another one (`Wrapping`) shares its parameter groups and state, so that schedulers and trainers
see both. `SeveralOptimizers` is several as one. `Deferred`, `Phased` and `Sharing` say what is asked of an optimizer
that works later than its call, or on the host; `host_work` marks memory that a thread allocates there.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from types import CodeType, FrameType
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.optim import Optimizer


class _Here(threading.local):
    host = False


_HERE = _Here()


@contextmanager
def host_work() -> Iterator[None]:
    """What this thread makes within is the host's: meters of the device's memory do not count it."""
    before, _HERE.host = _HERE.host, True
    try:
        yield
    finally:
        _HERE.host = before


def is_host_work() -> bool:
    """Whether this thread is within `host_work`."""
    return _HERE.host


def evaluated(closure: Callable[[], Any] | None) -> Any:
    """The loss of `Optimizer.step(closure)`, its gradients in place; None where there is no closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def is_within_function() -> bool:
    """Whether a backward pass goes on inside the backward function of an autograd.Function: there it is a part of
    another one, as torch.utils.checkpoint with use_reentrant=True makes it.
    """
    return call_of(torch.autograd.function.BackwardCFunction.apply.__code__) is not None


def call_of(code: CodeType) -> FrameType | None:
    """The innermost call of it that goes on in this thread."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame


@runtime_checkable
class Deferred(Protocol):
    """An optimizer whose work may come later than its call: gradients after `backward`, updates after `step`. Whoever
    needs either says so first.
    """

    def gradients(self) -> None:
        """Put the gradients of all backward passes so far into `.grad`."""

    def catch_up(self) -> None:
        """Bring weights and state to where the `step`s so far should have left them."""


@runtime_checkable
class Phased(Deferred, Protocol):
    """A deferred optimizer that may update a parameter before `step`, as soon as its gradient is final."""

    early: bool
    """Whether it does."""

    def hold(self) -> None:
        """From here on, gradients are final when `ready` says so, not when they are made."""

    def ready(self, parameters: Sequence[nn.Parameter]) -> None:
        """What is in `.grad` of these is what `step` would update them by. `.grad` may be freed after this call."""


class Spreading(Protocol):
    """Shares of a few tensors on their way to everyone."""

    def done(self) -> bool:
        """Whether `land` would not wait."""

    def land(self) -> None:
        """Wait for the others' and write them to the tensors."""


SpreadShares = Callable[[int, int, Sequence[Sequence[torch.Tensor]]], Spreading]
"""(number, round, rows) -> what is under way: rows[k][p] is what position p answers for of tensor k; this worker's are
sent to all others, theirs come. number: of this list of tensors, 0, 1, ...; round: how often it has gone before.
"""


@runtime_checkable
class Sharing(Protocol):
    """An optimizer that may update a share of what it updates on the host, where others update the rest."""

    def portions(self, size: int) -> list[list[int]]:
        """Bytes of the weights that each of `size` workers updates, by list of tensors; empty: it shares nothing."""

    def share(self, position: int, size: int, spread: SpreadShares) -> None:
        """Update the share of `position`; `spread` brings the others'."""


class Wrapping(Optimizer):
    """`param_groups`, `state`, `state_dict`, `zero_grad` and `add_param_group` are those of `inner`, whose trainable
    parameters must all be among `parameters`. Deferred where `inner` is.
    """

    def __init__(self, inner: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        self.inner = inner  # first: param_groups and state below are the inner optimizer's
        super().__init__(inner.param_groups, inner.defaults)
        self.parameters = list(parameters)
        self._refuse_strangers(inner.param_groups)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The inner optimizer's, shared."""
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if hasattr(self, "parameters"):  # else it is Optimizer.__init__, which begins with none
            self.inner.param_groups = groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The inner optimizer's, shared."""
        return self.inner.state

    @state.setter
    def state(self, state: Any) -> None:
        if state:
            self.inner.state = state

    def __getattr__(self, name: str) -> Any:
        """`train` and `eval` of an inner optimizer that has them: schedule-free ones."""
        if name in ("train", "eval"):
            return getattr(self.inner, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the inner optimizer's. ValueError for parameters that are not exchanged: those that were no trainable ones
        of the model when it was wrapped.
        """
        if not hasattr(self, "parameters"):  # called by Optimizer.__init__, with the inner optimizer's own groups
            return
        self.inner.add_param_group(param_group)
        try:
            self._refuse_strangers(self.param_groups[-1:])
        except ValueError:
            self.param_groups.pop()
            raise

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the inner optimizer's: torch's own would give this object a state that the inner one never sees."""
        self.inner.load_state_dict(state_dict)

    def gradients(self) -> None:
        """As the inner optimizer's; in place already where that is not deferred."""
        if isinstance(self.inner, Deferred):
            self.inner.gradients()

    def catch_up(self) -> None:
        """As the inner optimizer's; nothing to do where that is not deferred."""
        if isinstance(self.inner, Deferred):
            self.inner.catch_up()

    def _refuse_strangers(self, groups: Sequence[dict[str, Any]]) -> None:
        own = set(map(id, self.parameters))
        strange = sum(p.requires_grad and id(p) not in own for group in groups for p in group["params"])
        if strange:
            raise ValueError(
                f"{strange} parameters of the inner optimizer are not trainable parameters of the model and would "
                "never be exchanged: wrap the module that holds them all, after setting requires_grad"
            )


class SeveralOptimizers(Optimizer):
    """Optimizers of one model as one: `param_groups` and `state` are those of all, live and in their order, so
    schedulers work on each and on all. The form of `state_dict` is torch's. ValueError for a parameter in two.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        if any(isinstance(one, Deferred) for one in optimizers):
            raise ValueError("of several inner optimizers none may be a method or a memory plan: give torch's, or one")
        self.__setstate__({"optimizers": list(optimizers), "defaults": {}})  # torch's own would begin with no groups
        ids = [id(parameter) for group in self.param_groups for parameter in group["params"]]
        if len(set(ids)) < len(ids):
            raise ValueError("a parameter is in two of the inner optimizers and would be stepped twice: divide them")

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizers": self.optimizers, "defaults": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.optimizers: list[Optimizer] = state["optimizers"]
        self._states = _States(self.optimizers)
        super().__setstate__(state)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for one in self.optimizers for group in one.param_groups]

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self._states

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = evaluated(closure)
        for one in self.optimizers:
            one.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        for one in self.optimizers:
            one.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise ValueError("which of the inner optimizers is it for? Call add_param_group of that one")

    def state_dict(self) -> dict[str, Any]:
        """Parameters are numbered through; what is not of parameters, or not torch's, is in "others"."""
        whole: dict[str, Any] = {"state": {}, "param_groups": [], "others": []}
        first = 0
        for one in self.optimizers:
            own = one.state_dict()
            state, groups = own.pop("state"), own.pop("param_groups")
            whole["state"] |= {first + key: value for key, value in state.items() if isinstance(key, int)}
            whole["param_groups"] += [{**group, "params": [first + key for key in group["params"]]} for group in groups]
            whole["others"].append({**own, "state": {key: state[key] for key in state if not isinstance(key, int)}})
            first += sum(len(group["params"]) for group in groups)
        return whole

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Each its own part; "others" may be left out."""
        groups, state = iter(state_dict["param_groups"]), state_dict["state"]
        others = state_dict.get("others", [{"state": {}}] * len(self.optimizers))
        for one, other in zip(self.optimizers, others, strict=True):
            own = list(islice(groups, len(one.param_groups)))
            own_state = {key: state[key] for group in own for key in group["params"] if key in state}
            one.load_state_dict({**other, "state": own_state | other["state"], "param_groups": own})


class _States(MutableMapping[torch.Tensor, Any]):
    """The states of several optimizers as one, by parameter."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers

    def __getitem__(self, key: torch.Tensor) -> Any:
        return self._of(key)[key]

    def __setitem__(self, key: torch.Tensor, value: Any) -> None:
        self._of(key)[key] = value

    def __delitem__(self, key: torch.Tensor) -> None:
        del self._of(key)[key]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return chain.from_iterable(one.state for one in self._optimizers)

    def __contains__(self, key: object) -> bool:
        return any(key in one.state for one in self._optimizers)

    def __len__(self) -> int:
        return sum(len(one.state) for one in self._optimizers)

    def _of(self, key: torch.Tensor) -> Any:
        """The state that has it, or else is that of the optimizer that steps it."""
        states = [one.state for one in self._optimizers if key in one.state]
        own = (one.state for one in self._optimizers for group in one.param_groups for p in group["params"] if p is key)
        return states[0] if states else next(own, {})


def each_of(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers that are stepped as this one."""
    return optimizer.optimizers if isinstance(optimizer, SeveralOptimizers) else [optimizer]


def fresh_state(optimizer: Optimizer) -> None:
    """Reset what an optimizer has of earlier gradients, as before its first step."""
    if isinstance(optimizer, SeveralOptimizers):
        for one in optimizer.optimizers:
            fresh_state(one)
    elif isinstance(optimizer, torch.optim.Adagrad):  # alone among torch's, it makes its state when it is made
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter]["step"].zero_()
                optimizer.state[parameter]["sum"].fill_(group["initial_accumulator_value"])
    else:
        optimizer.state.clear()


def innermost(optimizer: Optimizer) -> Optimizer:
    """The one that takes the steps, below whatever is wrapped around it."""
    while isinstance(optimizer, Wrapping):
        optimizer = optimizer.inner
    return optimizer
