"""EngineEvents of a GPU: a stream for each direction, whose copies go from and to pinned memory while kernels run.

What keeps copies and kernels apart, though kernels run later than they are called:

    read     a lane begins when the kernels that had been called before it was submitted are over (an event a job)
    written  memory for what comes up is taken from the computing stream's own, and the lane waits for all kernels that
             had been called by then: whoever had that memory before is among them
    done     a lane's event fires when its copy is over, not when it is called; so a waiter may call kernels at once,
             and what is freed after it has no reader left

Streams are made once a lane: every fresh one would have the allocator keep memory of its own for it. Kernels are called
from two threads, the caller's and autograd's; which stream they use is looked up where a job is submitted.

**Not run by its authors, for want of a GPU.** `tests/memory/streams.py` checks the order of its accesses without one;
`tests/memory/test_cuda.py` waits for one; a run holds it against plain copies before it trusts it
(`isles.training.memory.in_use`).
"""

from __future__ import annotations

import threading
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from isles.base.modes import arena
from isles.memory.engines.base import Engine, Moves, ThreadEngine
from isles.memory.events import EngineLane, LaneAction, Urgency

_CHUNK = 1 << 24
"""Bytes of each of the two pieces of pinned memory through which numbers go whose format changes on the way."""

_PINNED = 1 << 28
"""Bytes of a block of pinned parameters: torch rounds blocks up to a power of two, and beside the old ones there is one
new block at a time.
"""


class PinnedRing:
    """Two pieces of pinned memory that take turns; one may still be copied from or to while the other is handed out."""

    def __init__(self) -> None:
        self._pieces = [torch.empty(_CHUNK, dtype=torch.uint8, pin_memory=True, device="cpu") for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in range(2)]
        self._index = 0

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        """Room for `count` numbers, once the copy that used it is over."""
        self._index ^= 1
        self._copied[self._index].synchronize()  # of an event that was never recorded: at once
        return self._pieces[self._index].view(dtype)[:count]

    def used(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """A copy with the piece last taken has been called on `stream`. The event of its end."""
        self._copied[self._index].record(stream)
        return self._copied[self._index]


class CudaMoves(Moves):
    """To and from one GPU, on the stream that is current where it is called. computing: the stream of the kernels."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.computing = device, torch.cuda.current_stream(device)
        self._here = threading.local()

    @contextmanager
    def room(self) -> Iterator[None]:
        """From the computing stream's memory; the current stream waits for the kernels called so far."""
        current = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self.computing):
            yield
        if current != self.computing:
            current.wait_stream(self.computing)

    def fill(self, into: Sequence[Tensor], source: Sequence[Tensor]) -> None:
        """Numbers of the same format straight from pinned memory, others by way of the ring."""
        for target, own in zip(into, source, strict=True):
            if target.dtype == own.dtype and own.is_pinned():
                target.copy_(own, non_blocking=True)
                continue
            flat, numbers = target.view(-1), own.reshape(-1)
            for at, count in _chunks(len(flat), target.itemsize):
                piece = self._ring().take(count, target.dtype)
                piece.copy_(numbers[at : at + count])
                flat[at : at + count].copy_(piece, non_blocking=True)
                self._ring().used(torch.cuda.current_stream(self.device))
        self._wait()

    def to_host(self, tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
        """Into pinned memory, or by way of the ring where the format changes: on the host, as the bytes that travel are
        those of the device's format.
        """
        made = list[Tensor]()
        for tensor, dtype in zip(tensors, dtypes, strict=True):
            if tensor.dtype == dtype:
                made.append(torch.empty(tensor.shape, dtype=dtype, pin_memory=True, device="cpu"))
                made[-1].copy_(tensor, non_blocking=True)
            else:
                made.append(torch.empty(tensor.shape, dtype=dtype, device="cpu"))
                self._changed(tensor.reshape(-1), made[-1].view(-1))
        self._wait()
        return made

    def _changed(self, source: Tensor, target: Tensor) -> None:
        """While a chunk is on its way, the one before is written in the other format."""
        before: tuple[torch.cuda.Event, Tensor, Tensor] | None = None
        for at, count in _chunks(len(source), source.itemsize):
            piece = self._ring().take(count, source.dtype)
            piece.copy_(source[at : at + count], non_blocking=True)
            copied = self._ring().used(torch.cuda.current_stream(self.device))
            under_way = copied, piece, target[at : at + count]
            if before is not None:
                _land(*before)
            before = under_way
        if before is not None:
            _land(*before)

    def to_device(self, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        with self.room():
            made = [torch.empty(tensor.shape, dtype=tensor.dtype, device=device) for tensor in tensors]
        for new, tensor in zip(made, tensors, strict=True):
            new.copy_(tensor, non_blocking=True)
        self._wait()
        return made

    def offload(self, hosted: Container[int], model: nn.Module) -> None:
        """The host's in pinned memory, many in a block. Gradients go, for they would be where their parameter was."""
        block = list[nn.Parameter]()
        for parameter in model.parameters():
            parameter.grad = None
            if id(parameter) not in hosted:
                parameter.data = parameter.detach().to(self.device)
                continue
            if sum(one.nbytes for one in block) + parameter.nbytes > _PINNED:
                _pin(block)
                block = []
            block.append(parameter)
        _pin(block)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(self.device)

    def _ring(self) -> PinnedRing:
        if not hasattr(self._here, "ring"):
            self._here.ring = PinnedRing()
        return self._here.ring

    def _wait(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()


def _pin(parameters: Sequence[nn.Parameter]) -> None:
    for parameter, own in zip(parameters, arena(parameters, pinned=True), strict=True):
        parameter.data = own.copy_(parameter.detach())


def _chunks(count: int, itemsize: int) -> Iterator[tuple[int, int]]:
    """(first, how many) of pieces that fit the ring."""
    most = _CHUNK // itemsize
    return ((at, min(most, count - at)) for at in range(0, count, most))


def _land(copied: torch.cuda.Event, piece: Tensor, target: Tensor) -> None:
    copied.synchronize()
    target.copy_(piece)


class Cuda(ThreadEngine):
    """A thread and a stream a lane. The host's updates take as many threads as the caller has, copies a quarter."""

    def __init__(self, device: torch.device, *, first_come: bool = False) -> None:
        super().__init__(first_come=first_come)
        self.device, self.moves = device, CudaMoves(device)
        self._cores = torch.get_num_threads()
        self._streams: dict[EngineLane, torch.cuda.Stream] = {}

    def threads(self, lane: EngineLane) -> int:
        """Of torch, for the lane's own arithmetic."""
        return self._cores if lane == "host" else max(self._cores // 4, 1)

    def submit(self, lane: EngineLane, urgency: Urgency, seconds: float, work: LaneAction, done: LaneAction) -> None:
        """Queue it, after the kernels that have been called."""
        if threading.current_thread() not in self._threads.values():
            self.moves.computing = torch.cuda.current_stream(self.device)
        called = torch.cuda.Event()
        called.record(self.moves.computing)

        def on_stream() -> None:
            with torch.cuda.device(self.device), torch.cuda.stream(self._stream(lane)):
                torch.cuda.current_stream(self.device).wait_event(called)
                work()

        super().submit(lane, urgency, seconds, on_stream, done)

    def _stream(self, lane: EngineLane) -> torch.cuda.Stream:
        if lane not in self._streams:
            self._streams[lane] = torch.cuda.Stream(self.device)
        return self._streams[lane]


def usual_engine(device: torch.device) -> Engine:
    """Threads; on a GPU with streams of their own."""
    return Cuda(device) if device.type == "cuda" else ThreadEngine()
