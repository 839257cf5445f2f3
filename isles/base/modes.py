"""Torch's modes (autocast, inference mode, gradients, default device) in which Isles' own arithmetic runs, whatever
modes a caller is in. The default dtype is that of all threads and stays: every new tensor names its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch._C import _len_torch_function_stack as _function_modes

_NOTHING = nullcontext()


def own_modes() -> AbstractContextManager[Any]:
    """No autocast, no inference mode, no gradients, and new tensors on the CPU. Each step enters them: what is so
    already costs next to nothing.
    """
    modes: list[AbstractContextManager[Any]] = []
    if torch.is_inference_mode_enabled():
        modes.append(torch.inference_mode(False))
    if modes or torch.is_grad_enabled():
        modes.append(torch.no_grad())
    modes += [torch.autocast(kind, enabled=False) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    if _function_modes():  # torch.set_default_device, or `with torch.device(...)`
        modes.append(torch.device("cpu"))
    return _all_of(modes) if len(modes) > 1 else modes[0] if modes else _NOTHING


@contextmanager
def _all_of(modes: Sequence[AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as entered:
        for mode in modes:
            entered.enter_context(mode)
        yield


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """So many in this thread, and in those that begin within; then as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
