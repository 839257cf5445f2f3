"""Torch's modes (autocast, inference mode, gradients, default device) in which Isles' own arithmetic runs, whatever
modes a caller is in. The default dtype is that of all threads and stays: every new tensor names its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch._C import _len_torch_function_stack as _function_modes


class _Here(threading.local):
    within = False


_HERE = _Here()


def own_modes() -> AbstractContextManager[None]:
    """No autocast, no inference mode, no gradients, and new tensors on the CPU."""
    return _WITHIN if _HERE.within else _own_modes()


_WITHIN = nullcontext()


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """So many in this thread, and in those that begin within; then as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _own_modes() -> Iterator[None]:
    with ExitStack() as modes:
        if torch.is_inference_mode_enabled():
            modes.enter_context(torch.inference_mode(False))
        modes.enter_context(torch.no_grad())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                modes.enter_context(torch.autocast(kind, enabled=False))
        if _function_modes():  # torch.set_default_device, or `with torch.device(...)`
            modes.enter_context(torch.device("cpu"))
        _HERE.within = True
        modes.callback(setattr, _HERE, "within", False)
        yield


def _entered(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def enter(*args: Any, **options: Any) -> Any:
        with own_modes():
            return call(*args, **options)

    return enter


def _entered_around(make: Callable[..., Any]) -> Callable[..., Any]:
    """Of what makes a context manager: its beginning and its end, while what is within is the caller's."""

    @wraps(make)
    @contextmanager
    def enter(*args: Any, **options: Any) -> Iterator[Any]:
        with ExitStack() as end:
            with own_modes():
                manager = make(*args, **options)
                value = manager.__enter__()
            end.push(_entered(manager.__exit__))
            yield value

    return enter


class OwnModes:
    """A base whose subclasses' public calls run in `own_modes`, each where it is defined."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for names, around in ((_CALLS, _entered), (_MANAGERS, _entered_around)):
            for name in names & vars(cls).keys():
                setattr(cls, name, around(vars(cls)[name]))


_CALLS = {
    "__init__",
    "take_step",
    "finish",
    "land_all",
    "settle",
    "catch_up",
    "gradients",
    "consolidate",
    "replica_std",
    "together",
}
_CALLS |= {"state_dict", "live_state", "shared_state", "load_state_dict", "weights", "load_weights"}
_MANAGERS = {"no_sync", "evaluation_weights"}  # what is called within `step` has a closure, which is the user's
