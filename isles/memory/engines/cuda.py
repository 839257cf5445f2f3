"""The engine of a GPU: a stream per direction, with copies from and to pinned memory while kernels run.

Kernels run later than they are launched. These rules keep copies and kernels apart:

    read     a job waits for the kernels that were launched before it was submitted (one event per job)
    written  memory for fetched tensors comes from the computing stream's pool, and the lane waits for all kernels
             launched so far; the previous user of that memory is one of them
    done     a lane's event fires when its copy is complete, not when it is launched. So a waiter may launch kernels at
             once, and memory freed afterwards has no reader left

Each lane has one stream for good, because the allocator keeps a memory pool per stream. Two threads launch kernels, the
caller's and autograd's; `submit` looks up the stream that they use.

**The authors have not run this, as they had no GPU.** `tests/memory/streams.py` checks the order of its accesses on a
CPU; `tests/memory/test_cuda.py` needs a GPU; a run compares it with plain copies before it trusts it
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
"""Bytes of each of the two pieces of pinned memory for copies that change the format."""

_PINNED = 1 << 28
"""Bytes of a block of pinned parameters. Torch rounds blocks up to a power of two. While parameters move, one new block
exists beside the old memory at a time.
"""


class PinnedRing:
    """Two pieces of pinned memory that alternate: a copy may still use one while `take` returns the other."""

    def __init__(self) -> None:
        self._pieces = [torch.empty(_CHUNK, dtype=torch.uint8, pin_memory=True, device="cpu") for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in range(2)]
        self._index = 0

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return memory for `count` numbers, after the copy that used it last is complete."""
        self._index ^= 1
        self._copied[self._index].synchronize()  # returns at once if the event was never recorded
        return self._pieces[self._index].view(dtype)[:count]

    def used(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Record that a copy with the last piece was launched on `stream`. Returns the event of its end."""
        self._copied[self._index].record(stream)
        return self._copied[self._index]


class CudaMoves(Moves):
    """Copies to and from one GPU, on the current stream of the caller. computing: the stream of the kernels."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.computing = device, torch.cuda.current_stream(device)
        self._here = threading.local()

    @contextmanager
    def room(self) -> Iterator[None]:
        """Allocate from the computing stream's pool; the current stream then waits for the kernels launched so far."""
        current = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self.computing):
            yield
        if current != self.computing:
            current.wait_stream(self.computing)

    def fill(self, into: Sequence[Tensor], source: Sequence[Tensor]) -> None:
        """Copy pinned tensors of the same format directly, all others through the ring."""
        for target, host_tensor in zip(into, source, strict=True):
            if target.dtype == host_tensor.dtype and host_tensor.is_pinned():
                target.copy_(host_tensor, non_blocking=True)
                continue
            flat, numbers = target.view(-1), host_tensor.reshape(-1)
            for at, count in _chunks(len(flat), target.itemsize):
                piece = self._ring().take(count, target.dtype)
                piece.copy_(numbers[at : at + count])
                flat[at : at + count].copy_(piece, non_blocking=True)
                self._ring().used(torch.cuda.current_stream(self.device))
        self._wait()

    def to_host(self, tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
        """Copy into pinned memory, or through the ring if the format changes. The host converts, so the bytes on the
        link are those of the device's format.
        """
        copies = list[Tensor]()
        for tensor, dtype in zip(tensors, dtypes, strict=True):
            if tensor.dtype == dtype:
                copies.append(torch.empty(tensor.shape, dtype=dtype, pin_memory=True, device="cpu"))
                copies[-1].copy_(tensor, non_blocking=True)
            else:
                copies.append(torch.empty(tensor.shape, dtype=dtype, device="cpu"))
                self._changed(tensor.reshape(-1), copies[-1].view(-1))
        self._wait()
        return copies

    def _changed(self, source: Tensor, target: Tensor) -> None:
        """Copy in chunks: while one is in flight, convert the one before to the other format."""
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
            copies = [torch.empty(tensor.shape, dtype=tensor.dtype, device=device) for tensor in tensors]
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        self._wait()
        return copies

    def offload(self, hosted: Container[int], model: nn.Module) -> None:
        """Pin the host's parameters, many in a block. Drops gradients, which would be on the parameter's old device."""
        block = list[nn.Parameter]()
        for parameter in model.parameters():
            parameter.grad = None
            if id(parameter) not in hosted:
                parameter.data = parameter.detach().to(self.device)
                continue
            if sum(member.nbytes for member in block) + parameter.nbytes > _PINNED:
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
    for parameter, pinned in zip(parameters, arena(parameters, pinned=True), strict=True):
        parameter.data = pinned.copy_(parameter.detach())


def _chunks(count: int, itemsize: int) -> Iterator[tuple[int, int]]:
    """(first, count) of pieces that fit the ring."""
    most = _CHUNK // itemsize
    return ((at, min(most, count - at)) for at in range(0, count, most))


def _land(copied: torch.cuda.Event, piece: Tensor, target: Tensor) -> None:
    copied.synchronize()
    target.copy_(piece)


class Cuda(ThreadEngine):
    """One thread and one stream per lane. The host's updates use as many threads as the caller, copies a quarter."""

    def __init__(self, device: torch.device, *, first_come: bool = False) -> None:
        super().__init__(first_come=first_come)
        self.device, self.moves = device, CudaMoves(device)
        self._cores = torch.get_num_threads()
        self._streams: dict[EngineLane, torch.cuda.Stream] = {}

    def threads(self, lane: EngineLane) -> int:
        """Torch threads for the lane's own arithmetic."""
        return self._cores if lane == "host" else max(self._cores // 4, 1)

    def submit(self, lane: EngineLane, urgency: Urgency, seconds: float, work: LaneAction, done: LaneAction) -> None:
        """Queue the work; it begins after the kernels launched so far."""
        if threading.current_thread() not in self._threads.values():
            self.moves.computing = torch.cuda.current_stream(self.device)
        launched = torch.cuda.Event()
        launched.record(self.moves.computing)

        def on_stream() -> None:
            with torch.cuda.device(self.device), torch.cuda.stream(self._stream(lane)):
                torch.cuda.current_stream(self.device).wait_event(launched)
                work()

        super().submit(lane, urgency, seconds, on_stream, done)

    def _stream(self, lane: EngineLane) -> torch.cuda.Stream:
        if lane not in self._streams:
            self._streams[lane] = torch.cuda.Stream(self.device)
        return self._streams[lane]


def usual_engine(device: torch.device) -> Engine:
    """The engine for `device`: a thread per lane; on a GPU also a stream per lane."""
    return Cuda(device) if device.type == "cuda" else ThreadEngine()
