"""Torch's state around Isles' arithmetic: modes, and copies between host and GPU.

Modes (autocast, inference mode, gradients, default device) in which Isles' own arithmetic runs, whatever
modes a caller is in. The default dtype is that of all threads and stays: every new tensor names its own.

`generator_of`: a random generator of its own, which leaves torch's as it is.

Copies between GPUs and the host go through pinned memory, on a stream of their own for each GPU.

    down    after all kernels that were called before; the host waits once, for all copies together
    up      after all kernels that were called before, and before all that are called later; the host waits for nothing

"Before" and "later" are meant of the stream that is current where it is called. The host may write to pinned memory
again once the copies up from it are over (`HostCopies.settle`). Torch pins blocks of a power of two bytes, so each list
of tensors has one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch._C import _len_torch_function_stack as _function_modes

_NOTHING = nullcontext()


def own_modes(*, gradients: bool = False) -> AbstractContextManager[Any]:
    """No autocast, no inference mode, no gradients if not asked for, and new tensors on the CPU. Each step enters them:
    what is so already costs next to nothing.
    """
    modes: list[AbstractContextManager[Any]] = []
    if torch.is_inference_mode_enabled():
        modes.append(torch.inference_mode(False))
    if modes or torch.is_grad_enabled() != gradients:
        modes.append(torch.enable_grad() if gradients else torch.no_grad())
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
}
_CALLS |= {"together", "state_dict", "live_state", "shared_state", "load_state_dict", "weights", "load_weights"}
_MANAGERS = {"no_sync", "evaluation_weights"}  # what is called within `step` has a closure, which is the user's


_ALIGNED = 64
_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


def is_away(tensors: Sequence[Tensor]) -> bool:
    """Whether one of them is where the host cannot read it."""
    return any(tensor.device.type not in ("cpu", "meta") for tensor in tensors)


def arena(tensors: Sequence[Tensor], *, pinned: bool | None = None) -> list[Tensor]:
    """Uninitialised host tensors of their shapes and formats, in one block. pinned None: where there are GPUs."""
    *starts, end = _offsets(tensors)
    pinned = torch.cuda.is_available() if pinned is None else pinned
    block = torch.empty(end, dtype=torch.uint8, pin_memory=pinned, device="cpu")
    parts = zip(starts, tensors, strict=True)
    return [block[at : at + own.numel() * own.itemsize].view(own.dtype).view(own.shape) for at, own in parts]


def pinned_bytes(tensors: Sequence[Tensor]) -> int:
    """Of the host's memory that a pinned `arena` of them takes."""
    end = _offsets(tensors)[-1]
    return 1 << (end - 1).bit_length() if end else 0


def _offsets(tensors: Sequence[Tensor]) -> list[int]:
    return list(accumulate((-(-own.numel() * own.itemsize // _ALIGNED) * _ALIGNED for own in tensors), initial=0))


class HostCopies:
    """`hosts`: tensors of the host that stand for others, which are on GPUs. Among those may be some of the host."""

    def __init__(self, hosts: Sequence[Tensor]) -> None:
        self.hosts = list(hosts)
        self._read: list[torch.Event] = []  # when the copies up are over

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Whether they are of the shapes and formats of `hosts`."""
        mine, theirs = ([(one.shape, one.dtype) for one in each] for each in (self.hosts, tensors))
        return mine == theirs

    def down(self, tensors: Sequence[Tensor | None]) -> None:
        """Copy what is there of `tensors` into `hosts`."""
        for copied in _crossed(tensors, lambda index, own: self.hosts[index].copy_(own, non_blocking=True)):
            copied.synchronize()

    def up(self, tensors: Sequence[Tensor | None], local_share: float = 0.0) -> None:
        """tensors = local_share tensors + (1 - local_share) hosts."""

        def copy(index: int, own: Tensor) -> None:
            host = self.hosts[index]
            if local_share:
                own.lerp_(host.to(own.device, non_blocking=True), 1 - local_share)
            else:
                own.copy_(host, non_blocking=True)

        self._read += _crossed(
            tensors, copy, aside=not local_share
        )  # memory for what is mixed is the computing stream's

    def settle(self) -> None:
        """Wait until `hosts` may be written to: as a rule no time at all."""
        for copied in self._read:
            if not copied.query():
                copied.synchronize()
        self._read = []


def _crossed(
    tensors: Sequence[Tensor | None], copy: Callable[[int, Tensor], object], *, aside: bool = True
) -> list[torch.Event]:
    """Call `copy(index, tensor)` for each of them. On GPUs that is between what was called before and what is called
    later, on the current stream or aside; the event of its end, for each GPU.
    """
    there = [(index, own.detach()) for index, own in enumerate(tensors) if own is not None]
    ends: list[torch.Event] = []
    for device in dict.fromkeys(own.device for _, own in there):
        here = [(index, own) for index, own in there if own.device == device]
        if device.type != "cuda":
            for index, own in here:
                copy(index, own)
            continue
        computing = torch.cuda.current_stream(device)
        side = _side(device) if aside else computing
        side.wait_stream(computing)
        with torch.cuda.stream(side):
            for index, own in here:
                copy(index, own)
            ends.append(side.record_event())
        computing.wait_event(ends[-1])
    return ends


def _side(device: torch.device) -> torch.cuda.Stream:
    if device not in _STREAMS:
        _STREAMS[device] = torch.cuda.Stream(device)
    return _STREAMS[device]


def generator_of(text: str) -> torch.Generator:
    """A generator on the CPU whose draws follow from `text` alone, on every machine."""
    digest = hashlib.sha256(text.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Themselves, or copies where one of them is on a GPU, for which the host waits once."""
    if not is_away(tensors):
        return list(tensors)
    staging = HostCopies(arena(tensors))
    staging.down(tensors)
    return staging.hosts


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Themselves where they are there, else copies: of what is on the host, without a wait for a GPU."""
    near = [tensor for tensor in tensors if tensor.is_cpu and device.type == "cuda"]
    made = [torch.empty(tensor.shape, dtype=tensor.dtype, device=device) for tensor in near]
    if near:
        staging = HostCopies(arena(near))
        for host, own in zip(staging.hosts, near, strict=True):
            host.copy_(own)
        staging.up(made)
    copies = {id(tensor): own for tensor, own in zip(near, made, strict=True)}
    return [copies[id(tensor)] if id(tensor) in copies else tensor.to(device) for tensor in tensors]
