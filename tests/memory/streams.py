"""A GPU's streams on a CPU. Numbers are computed at once; whether a GPU might have gone about them in another order
is judged by vector clocks, from what it promises:

    a kernel, or a copy that is not waited for, runs on its stream after all that was called there before, and after the
    moment at which the host called it
    an event is over when what its stream had been told by then is; who waits for it is after that
    memory that is given back goes to the next who asks on the stream on which it was made, at once

Two accesses to one piece of memory, one of them a write, without an order between them are a race; so is memory that is
given back while another stream may still be at it. The host's threads are one here: what keeps those apart is tried for
real, without streams.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from isles.base.wrapping import is_host_work
from isles.memory.engines.base import EngineLane, Urgency
from isles.memory.engines.cuda import Cuda, CudaMoves

HOST, KERNELS = "host", "kernels"
Clock = Counter[str]

_LIKE = ("empty_like", "zeros_like", "ones_like", "full_like", "new_zeros", "new_empty", "new_ones", "new_full")
_NO_ACCESS = ("set_", "detach", "alias", "_unsafe_view")


@dataclass
class _Piece:
    """One storage. home: the stream on which it was made. written, read: at which tick of whom."""

    device: bool
    home: str
    written: tuple[str, int]
    pinned: bool = False
    read: dict[str, int] = field(default_factory=dict)


class Watch:
    """Who knows what of whom, and what every piece of memory has seen. races: what went wrong, in words."""

    mixing: tuple[str, ...] = ("copy_",)
    """Operations that may go between the host and the device."""

    def __init__(self) -> None:
        self.races: list[str] = []
        self.kernels = self.copies = 0
        self._clocks: dict[str, Clock] = {}
        self._pieces: dict[int, _Piece] = {}
        self._here = threading.local()
        self.lock = threading.RLock()  # a finalizer may run within any of these

    # Streams and events

    def clock(self, actor: str) -> Clock:
        return self._clocks.setdefault(actor, Counter())

    @property
    def current(self) -> str:
        return getattr(self._here, "stream", KERNELS)

    @contextmanager
    def within(self, stream: Stream) -> Iterator[None]:
        before, self._here.stream = self.current, stream.name
        yield
        self._here.stream = before

    @contextmanager
    def room(self) -> Iterator[None]:
        """What is made within is the device's."""
        self._here.room = True
        yield
        self._here.room = False

    def join(self, actor: str, clock: Clock) -> None:
        """What `clock` knows is before all that `actor` does from here on."""
        with self.lock:
            self._clocks[actor] = self.clock(actor) | clock

    def tick(self, actor: str) -> tuple[str, int]:
        """It does something; on a stream, after the host has called it."""
        if actor != HOST:
            self.join(actor, self.clock(HOST))
        self.clock(actor)[actor] += 1
        return actor, self.clock(actor)[actor]

    # Memory

    def piece(self, tensor: Tensor) -> _Piece:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._pieces:  # from before the watch began
            self._add(tensor, self.new(tensor, HOST, (HOST, 0)))
        return self._pieces[storage._cdata]

    def new(self, tensor: Tensor, actor: str, written: tuple[str, int]) -> _Piece:
        """What is known of a tensor that `actor` has made."""
        return _Piece(device=actor != HOST, home=actor, written=written)

    def on_device(self, *tensors: Tensor) -> None:
        with self.lock:
            for tensor in tensors:
                self.piece(tensor).device, self.piece(tensor).home = True, KERNELS

    def pin(self, tensor: Tensor) -> Tensor:
        with self.lock:
            piece = self.piece(tensor)
            piece.device, piece.pinned, piece.home, piece.written = False, True, HOST, self.tick(HOST)
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        return self.piece(tensor).pinned

    def resized(self, key: int, nbytes: int) -> None:
        with self.lock:
            if (piece := self._pieces.get(key)) is None:
                return
            if not nbytes:
                self._given_back(piece)
                return
            piece.home, piece.read = self.current, {}
            piece.written = self.tick(self.current)

    def _add(self, tensor: Tensor, piece: _Piece) -> None:
        storage = tensor.untyped_storage()
        self._pieces[storage._cdata] = piece
        weakref.finalize(storage, self._gone, storage._cdata, piece).atexit = False

    def _gone(self, key: int, piece: _Piece) -> None:
        with self.lock:
            if self._pieces.get(key) is piece:
                del self._pieces[key]
            self._given_back(piece)

    def _given_back(self, piece: _Piece) -> None:
        if piece.device:
            known = self.clock(piece.home) | self.clock(HOST)
            for actor, at in [piece.written, *piece.read.items()]:
                if actor != piece.home and known[actor] < at:
                    self.races.append(f"memory of {piece.home} is given back while {actor} may be at it")

    # Operations

    def did(self, func: Any, args: Any, kwargs: Any, made: Any) -> None:
        """An operation was called on this thread."""
        name = func._schema.name.removeprefix("aten::")
        into = [one for one in tree_iter((args, kwargs)) if isinstance(one, Tensor)]
        if name == "_local_scalar_dense" and self.piece(into[0]).device:
            self.join(HOST, self.clock(self.current))
        if name in _NO_ACCESS or func.is_view:
            return
        changed = [one for one in tree_iter(_written(func, args, kwargs)) if isinstance(one, Tensor)]
        seen = {one.untyped_storage()._cdata for one in into}
        fresh = [one for one in tree_iter(made) if isinstance(one, Tensor) and _key(one) not in seen]
        if not changed and not fresh and name != "_local_scalar_dense":
            return
        reads = [] if name in _LIKE else [one for one in into if all(one is not other for other in changed)]
        sides = {self.piece(one).device for one in [*reads, *changed] if one.dim()}
        sides = sides or {self.piece(one).device for one in [*reads, *changed]}
        sides |= {self.makes_on_device(one) for one in fresh if not sides or name == "_to_copy"}
        if len(sides) > 1 and name not in self.mixing:
            self.races.append(f"{name} mixes the host's memory and the device's")
        waited = len(sides) > 1 and not self._flies([*reads, *changed], args, kwargs)
        self._access(name, self.current if True in sides else HOST, reads, changed, fresh)
        if waited:
            self.join(HOST, self.clock(self.current))

    def makes_on_device(self, fresh: Tensor) -> bool:
        """Where what is made of nothing lies."""
        return getattr(self._here, "room", False) or not is_host_work()

    def _flies(self, both: Sequence[Tensor], args: Any, kwargs: Any) -> bool:
        """Whether a copy between the sides is not waited for: asked for so, and of pinned memory."""
        asked = kwargs.get("non_blocking", args[2] if len(args) > 2 and isinstance(args[2], bool) else False)
        return bool(asked) and all(one.device or one.pinned for one in map(self.piece, both))

    def _access(
        self, name: str, actor: str, reads: Sequence[Tensor], changed: Sequence[Tensor], fresh: Sequence[Tensor]
    ) -> None:
        at = self.tick(actor)
        self.kernels += actor == KERNELS
        self.copies += actor not in (HOST, KERNELS)
        known = self.clock(actor)
        for tensor in [*reads, *changed]:
            piece, writes = self.piece(tensor), any(tensor is other for other in changed)
            before = [piece.written, *(piece.read.items() if writes else ())]
            for other, tick in before:
                if known[other] < tick:
                    what = "writes" if writes else "reads"
                    self.races.append(f"{name} on {actor} {what} what {other} may be at")
        for tensor in reads:
            self.piece(tensor).read[actor] = at[1]
        for tensor in changed:
            self.piece(tensor).written, self.piece(tensor).read = at, {}
        for tensor in fresh:
            self._add(tensor, self.new(tensor, actor, at))


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """What the schema says is changed."""
    pairs = zip(func._schema.arguments, args, strict=False)
    named = {one.name: one for one in func._schema.arguments}
    every = [*pairs, *((named[name], value) for name, value in kwargs.items())]
    return [value for one, value in every if one.alias_info is not None and one.alias_info.is_write]


class Watched(TorchDispatchMode):
    """Around what a thread does."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        with self.watch.lock:
            self.watch.did(func, args, kwargs or {}, made)
        return made


@dataclass(frozen=True)
class Stream:
    """As `torch.cuda.Stream`."""

    watch: Watch
    name: str

    def wait_event(self, event: Event) -> None:
        self.watch.join(self.name, event.clock)

    def wait_stream(self, stream: Stream) -> None:
        self.watch.join(self.name, self.watch.clock(stream.name))

    def record_event(self) -> Event:
        event = Event(self.watch)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.watch.join(HOST, self.watch.clock(self.name))


class Event:
    """As `torch.cuda.Event`."""

    def __init__(self, watch: Watch) -> None:
        self.watch, self.clock = watch, Clock()

    def record(self, stream: Stream | None = None) -> None:
        name = self.watch.current if stream is None else stream.name
        self.clock = self.watch.clock(name) | self.watch.clock(HOST)

    def query(self) -> bool:
        """Whether the host knows that it is over."""
        return self.clock <= self.watch.clock(HOST)

    def synchronize(self) -> None:
        self.watch.join(HOST, self.clock)


class WatchedMoves(CudaMoves):
    """Says what becomes the device's."""

    def __init__(self, watch: Watch, device: torch.device) -> None:
        super().__init__(device)
        self.watch = watch

    @contextmanager
    def room(self) -> Iterator[None]:
        with super().room(), self.watch.room():
            yield

    def offload(self, hosted: Container[int], model: nn.Module) -> None:
        super().offload(hosted, model)
        self.watch.on_device(*(one for one in model.parameters() if id(one) not in hosted), *model.buffers())


class WatchedCuda(Cuda):
    """The lanes' threads are watched, too."""

    def __init__(self, watch: Watch, **how: Any) -> None:
        device = torch.device("cpu")
        super().__init__(device, **how)
        self.watch, self.moves = watch, WatchedMoves(watch, device)

    def submit(self, lane: EngineLane, urgency: Urgency, seconds: float, work: Any, done: Any) -> None:
        def watched() -> None:
            with Watched(self.watch):
                work()

        super().submit(lane, urgency, seconds, watched, done)


@contextmanager
def watching() -> Iterator[Watch]:
    """`torch.cuda` as the watch has it, and this thread watched."""
    watch = Watch()
    empty, resize, pinned = torch.empty, torch.UntypedStorage.resize_, torch.Tensor.clone

    def made(*size: Any, pin_memory: bool = False, **how: Any) -> Tensor:
        tensor = empty(*size, **how)
        return watch.pin(tensor) if pin_memory else tensor

    def apart(tensors: Sequence[Tensor], *, pinned: bool | None = None) -> list[Tensor]:
        """Not in one block: pieces of memory are told apart by their storage."""
        return [made(one.shape, dtype=one.dtype, pin_memory=True, device="cpu") for one in tensors]

    def resized(storage: torch.UntypedStorage, nbytes: int) -> Any:
        watch.resized(storage._cdata, nbytes)
        return resize(storage, nbytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_stream", lambda device=None: Stream(watch, watch.current))
        patch.setattr(torch.cuda, "stream", watch.within)
        patch.setattr(torch.cuda, "device", lambda device: nullcontext())
        patch.setattr(torch.cuda, "Stream", lambda device=None: Stream(watch, threading.current_thread().name))
        patch.setattr(torch.cuda, "Event", lambda: Event(watch))
        patch.setattr(torch, "empty", made)
        patch.setattr("isles.memory.engines.cuda.arena", apart)
        patch.setattr(torch.UntypedStorage, "resize_", resized)
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor: watch.pin(pinned(tensor)))
        patch.setattr(torch.Tensor, "is_pinned", lambda tensor: watch.is_pinned(tensor))
        with Watched(watch):
            yield watch
