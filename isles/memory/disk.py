"""The disk tier: what a unit has in a file, and the pieces of memory through which it goes there and back.

    N    | states |
    F    | weights | gradients | states |      where the RAM is the device

The file has no name: nobody else can cut or lose it, and it disappears when the process ends, however it ends. Each
section begins on a page. The executor reads and writes whole sections through page-aligned slots of its own mapping
(memory freed to the C library stays with the process), past the page cache where the file system can; the
gradients' through it, because clipping reads them soon. Everyone else sees the sections as tensors mapped from the same
file: the kernel keeps both views alike as long as they do not overlap in time, which `catch_up` sees to.

`StoredUnit` is what the disk holds of one unit while its optimizer does not need it, and updates the unit from there.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import shutil
import sys
import tempfile
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from isles.memory.costs import Placement
from isles.memory.meter import MemoryMeter
from isles.memory.parameters import PartialOptimizer, Settings
from isles.memory.units import ModelUnit

ALIGNED = 64
"""Bytes: where a tensor begins within its section."""
_MMAP_THRESHOLD = -3  # of mallopt
_SMALL = 65536  # bytes: what is larger the C library is to give back at once


class TensorLayout(NamedTuple):
    """Offset and format of a tensor in its section."""

    dtype: torch.dtype
    shape: torch.Size
    begin: int
    nbytes: int


def pages(nbytes: int) -> int:
    """`nbytes` rounded up to whole pages."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


class DiskFile:
    """An unnamed file in `folder`. OSError if it cannot be created."""

    def __init__(self, folder: str) -> None:
        self.folder, self.size = folder, 0
        handle, path = tempfile.mkstemp(prefix="isles-", dir=folder)
        handles = [handle]
        try:
            if hasattr(os, "O_DIRECT"):
                try:
                    handles.append(os.open(path, os.O_RDWR | os.O_DIRECT))
                except OSError as error:
                    if error.errno != errno.EINVAL:  # this file system has none
                        raise
        finally:
            os.unlink(path)
        self._cached, self._direct = handle, handles[-1]
        self._finalizer = weakref.finalize(self, _close, handles)

    @property
    def direct(self) -> bool:
        """Whether sections go past the page cache."""
        return self._direct != self._cached

    def extend(self, nbytes: int) -> int:
        """Allocate `nbytes` at the end; returns their offset. OSError if the disk is full."""
        begin = self.size
        if nbytes:
            with self._failing(f"no room for {nbytes} bytes more"):
                os.posix_fallocate(self._cached, begin, nbytes)
            self.size += nbytes
        return begin

    def read(self, begin: int, into: Tensor, *, cached: bool = False) -> None:
        """Fill the bytes `into`, whole pages. OSError if the file is shorter, or the disk fails."""
        view, handle = into.numpy().data, self._cached if cached else self._direct
        done = 0
        while done < len(view):
            with self._failing("reading failed"):
                count = os.preadv(handle, [view[done:]], begin + done)
            if not count:
                raise self._failure(f"the file ends {len(view) - done} bytes before what was written to it")
            done += count

    def write(self, begin: int, out: Tensor, *, cached: bool = False) -> None:
        """Write the bytes `out`, whole pages."""
        view, handle = out.numpy().data, self._cached if cached else self._direct
        done = 0
        while done < len(view):
            with self._failing("writing failed"):
                done += os.pwritev(handle, [view[done:]], begin + done)

    def sync(self) -> None:
        """Wait until all written bytes are on the disk."""
        with self._failing("writing failed"):
            os.fdatasync(self._cached)

    def forget(self) -> None:
        """Drop the file from the page cache, if the system supports it."""
        self.sync()
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._cached, 0, 0, os.POSIX_FADV_DONTNEED)

    def mapped(self, begin: int, nbytes: int) -> Tensor:
        """The bytes as a tensor over the file."""
        return torch.frombuffer(mmap.mmap(self._cached, nbytes, offset=begin), dtype=torch.uint8)

    def close(self) -> None:
        """Close the file; mapped tensors stay valid."""
        self._finalizer()

    @contextlib.contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        """Turn the system's error into one that names what failed, and what to do."""
        try:
            yield
        except OSError as error:
            raise self._failure(f"{what} ({error.strerror})") from error

    def _failure(self, what: str) -> OSError:
        return OSError(f"memory.disk = {self.folder!r}: {what}; choose another folder, or a plan without disk")


def _close(handles: Sequence[int]) -> None:
    for handle in handles:
        os.close(handle)


class Section:
    """Tensors of one unit in the file, shaped like those of `like`. nbytes: of the tensors; room: with the gaps."""

    def __init__(self, file: DiskFile, like: Sequence[Tensor], *, cached: bool = False) -> None:
        self.file, self._cached = file, cached
        self.layouts, end = list[TensorLayout](), 0
        for tensor in like:
            begin = -(-end // ALIGNED) * ALIGNED
            self.layouts.append(TensorLayout(tensor.dtype, tensor.shape, begin, tensor.nbytes))
            end = begin + tensor.nbytes
        self.nbytes, self.room = sum(one.nbytes for one in self.layouts), pages(end)
        self._begin = file.extend(self.room)
        self._mapped: list[Tensor] | None = None

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Whether `tensors` have these formats and shapes."""
        return [(one.dtype, one.shape) for one in tensors] == [(one.dtype, one.shape) for one in self.layouts]

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The tensors in the bytes of `buffer`."""
        return [buffer[one.begin : one.begin + one.nbytes].view(one.dtype).view(one.shape) for one in self.layouts]

    @property
    def mapped(self) -> list[Tensor]:
        """The tensors over the file, always the same objects."""
        if self._mapped is None:
            self._mapped = self.views(self.file.mapped(self._begin, self.room)) if self.room else []
        return self._mapped

    def read(self, buffer: Tensor) -> list[Tensor]:
        """The tensors, in the bytes of `buffer`."""
        self.file.read(self._begin, buffer[: self.room], cached=self._cached)
        return self.views(buffer)

    def write(self, buffer: Tensor) -> None:
        """Write the buffer, and so the tensors of its `views`, to the file."""
        self.file.write(self._begin, buffer[: self.room], cached=self._cached)


class StagingSlot:
    """Page-aligned memory that is allocated once and grows for larger units. meter: counts it."""

    def __init__(self, meter: MemoryMeter | None = None) -> None:
        self._bytes, self._meter = torch.empty(0, dtype=torch.uint8, device="cpu"), meter

    def take(self, nbytes: int) -> Tensor:
        """`nbytes` bytes of it; their former content may be lost."""
        if len(self._bytes) < nbytes:
            self._bytes = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
            if self._meter is not None:
                self._meter.track(self._bytes)
        return self._bytes[:nbytes]


def disk_vectors(folder: str) -> Callable[[int, torch.dtype], Tensor]:
    """Returns a maker of vectors (numel,) in a file of `folder`, for rarely used ones. They stay in the page cache as
    long as there is memory.
    """
    made: list[DiskFile] = []

    def make(numel: int, dtype: torch.dtype) -> Tensor:
        if not numel:
            return torch.empty(0, dtype=dtype, device="cpu")
        if not made:
            made.append(DiskFile(folder))
        file, room = made[0], pages(numel * dtype.itemsize)
        return file.mapped(file.extend(room), room)[: numel * dtype.itemsize].view(dtype)

    return make


def check_folder(folder: str, nbytes: int) -> list[str]:
    """Notices for the user on a folder for `nbytes` of a plan. ValueError, one line, if it cannot be used."""
    if not os.path.isdir(folder):
        raise ValueError(f"memory.disk = {folder!r}: there is no such folder; make it, or name another one")
    try:
        DiskFile(folder).close()
    except OSError as error:
        raise ValueError(
            f"memory.disk = {folder!r}: nothing can be written there ({error.strerror}); name a folder of your own"
        ) from None
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise ValueError(
            f"memory.disk = {folder!r}: {free} bytes are free there, the plan needs {nbytes}; name another folder"
        )
    if nbytes and _is_memory(folder):
        return [f"memory.disk = {folder!r} is a RAM disk: what is put there takes the memory that it should save"]
    return []


def _is_memory(folder: str) -> bool:
    try:
        with open("/proc/self/mounts", encoding="utf-8") as file:
            mounts = [line.split()[1:3] for line in file]
    except OSError:
        return False
    real = os.path.realpath(folder)
    above = [(len(where), kind) for where, kind in mounts if os.path.commonpath([real, where]) == where]
    return max(above, default=(0, ""))[1] in ("tmpfs", "ramfs")


def give_back_freed_memory() -> None:
    """From now on large pieces of memory that are freed leave the process at once; glibc keeps them otherwise, once it
    has seen some. Elsewhere nothing.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(_MMAP_THRESHOLD, _SMALL)
            libc.malloc_trim(0)


class Staging:
    """The buffers through which all units' bytes go to the disk and back.

    fetched: for weights that come for a pass; sent: for gradients that go; each is used by one unit at a time. Updates
    have `SLOTS` more. meter: is told of the buffers, where the RAM is the device.
    """

    def __init__(self, meter: MemoryMeter | None = None) -> None:
        self.meter = meter
        self.fetched, self.sent = StagingSlot(meter), StagingSlot(meter)
        self.fetching = threading.Lock()
        self.updates: list[StagingSlot] = []  # that are free

    def take(self) -> StagingSlot:
        """A slot for an update, which must have been granted before."""
        return self.updates.pop() if self.updates else StagingSlot(self.meter)

    def give(self, slot: StagingSlot) -> None:
        self.updates.append(slot)


class StoredUnit:
    """One unit's part of the file.

    parameters: the unit's on the host, updated by `part` of `optimizer`. states: bytes that its states will have.
    whole: weights and gradients are in the file too, and `parameters` become views of it.

    read, written: bytes so far.
    """

    def __init__(
        self,
        file: DiskFile,
        staging: Staging,
        parameters: Sequence[nn.Parameter],
        optimizer: Optimizer,
        *,
        states: int,
        whole: bool,
    ) -> None:
        self._expected = pages(states + 4 * ALIGNED * len(parameters))
        self.file, self.staging, self.optimizer = file, staging, optimizer
        self.parameters, self.whole = list(parameters), whole
        self.part = PartialOptimizer(optimizer, self.parameters)
        self.weights: Section | None = None
        self.gradients: Section | None = None
        self.states: Section | None = None
        self.read = self.written = 0
        if whole:
            own = [parameter.detach() for parameter in self.parameters]
            self.weights, self.gradients = Section(file, own), Section(file, own, cached=True)
            buffer = staging.fetched.take(self.weights.room)
            torch._foreach_copy_(self.weights.views(buffer), own)
            self.weights.write(buffer)
            for parameter, mapped in zip(self.parameters, self.weights.mapped, strict=True):
                parameter.data = mapped
        self.keep_states()

    # Weights and gradients

    def fetch(self, into: Sequence[Tensor]) -> None:
        assert self.weights is not None
        with self.staging.fetching:
            torch._foreach_copy_(list(into), self.weights.read(self.staging.fetched.take(self.weights.room)))
        self.read += self.weights.nbytes

    def put_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Write the gradients of the parameters; None for a parameter without one."""
        assert self.gradients is not None
        buffer = self.staging.sent.take(self.gradients.room)
        for view, made in zip(self.gradients.views(buffer), gradients, strict=True):
            if made is not None:
                view.copy_(made)
        self.gradients.write(buffer)
        self.written += self.gradients.nbytes

    def show_gradients(self) -> None:
        """The parameters' gradients are in the file now: free their memory."""
        assert self.gradients is not None
        for parameter, mapped in zip(self.parameters, self.gradients.mapped, strict=True):
            if parameter.grad is not None:
                parameter.grad.data = mapped  # the same object for whoever has looked at it

    # States

    def keep_states(self) -> None:
        """Write states that are in memory, such as those of a checkpoint, to the file."""
        states = self._tensors(self.optimizer.state)
        if states and not self._is_there(states):
            section = self.section(states)
            buffer = StagingSlot().take(section.room)
            torch._foreach_copy_(section.views(buffer), states)
            section.write(buffer)
            self._show(self.optimizer.state)

    def section(self, states: Sequence[Tensor]) -> Section:
        """The section of the file for `states`: the current one, if they fit into it."""
        if self.states is None or not self.states.fits(states):
            self.states = Section(self.file, states)
        return self.states

    @property
    def room(self) -> int:
        """Bytes of memory that an update of this unit needs."""
        sections = (self.weights, self.gradients, self.states)
        return sum(one.room for one in sections if one is not None) + (0 if self.states else self._expected)

    def _is_there(self, states: Sequence[Tensor]) -> bool:
        mapped = [] if self.states is None else self.states.mapped
        return len(mapped) == len(states) and all(map(_same_memory, mapped, states))

    def _keys(self, state: Any) -> list[tuple[nn.Parameter, str]]:
        return [
            (parameter, key)
            for parameter in self.parameters
            for key, value in state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        ]

    def _tensors(self, state: Any) -> list[Tensor]:
        return [state[parameter][key] for parameter, key in self._keys(state)]

    def _show(self, state: Any) -> None:
        """Replace the optimizer's state by that of `state`, with the tensors of the file."""
        assert self.states is not None
        shown = zip(self._keys(state), self.states.mapped, strict=True)
        tensors = {(parameter, key): mapped for (parameter, key), mapped in shown}
        for parameter in self.parameters:
            if parameter in state:
                self.optimizer.state[parameter] = {
                    key: tensors.get((parameter, key), value) for key, value in state[parameter].items()
                }

    def update(self) -> StoredUpdate:
        return StoredUpdate(self)


class StoredUpdate:
    """One update: `load` on the read lane, `step` on the host's, `save` on the write lane."""

    def __init__(self, stored: StoredUnit) -> None:
        self.stored, self.slot = stored, stored.staging.take()
        self.state: dict[Any, Any] = defaultdict(dict)
        self._weights: list[Tensor] = []
        self._gradients: list[Tensor] = []
        self._buffers: dict[str, Tensor] = {}
        self._rest: Tensor | None = None  # of the slot

    def load(self) -> None:
        """Read the states, and the weights and gradients if they are in the file."""
        stored = self.stored
        sections = {"weights": stored.weights, "gradients": stored.gradients, "states": stored.states}
        buffer, begin = self.slot.take(stored.room), 0
        for name, section in sections.items():
            if section is not None:
                self._buffers[name] = buffer[begin : begin + section.room]
                section.read(self._buffers[name])
                stored.read += section.nbytes
                begin += section.room
        self._rest = buffer[begin:]
        if stored.weights is not None and stored.gradients is not None:
            self._weights = stored.weights.views(self._buffers["weights"])
            self._gradients = stored.gradients.views(self._buffers["gradients"])
        if stored.states is not None:
            current = stored.optimizer.state
            views = dict(zip(stored._keys(current), stored.states.views(self._buffers["states"]), strict=True))
            for parameter in stored.parameters:
                for key, value in current.get(parameter, {}).items():
                    self.state[parameter][key] = views.get((parameter, key), value)

    def step(self, settings: Settings, gradients: Sequence[Tensor | None]) -> None:
        """Update by `gradients`; None for a parameter without one."""
        stored = self.stored
        if not stored.whole:
            stored.part.update(settings, gradients, self.state)
            return
        assert stored.gradients is not None
        instead = dict[nn.Parameter, nn.Parameter]()
        for index, (parameter, gradient) in enumerate(zip(stored.parameters, gradients, strict=True)):
            instead[parameter] = nn.Parameter(self._weights[index], parameter.requires_grad)
            if gradient is not None:
                if not _same_memory(gradient, stored.gradients.mapped[index]):  # somebody put another one there
                    self._gradients[index].copy_(gradient)
                instead[parameter].grad = self._gradients[index]
        stored.part.step(settings, self.state, instead)

    def save(self) -> None:
        """Write the states, and the weights if they are in the file."""
        stored = self.stored
        if stored.weights is not None:
            stored.weights.write(self._buffers["weights"])
            stored.written += stored.weights.nbytes
        tensors = stored._tensors(self.state)
        if tensors:
            before, section = stored.states, stored.section(tensors)
            buffer = self._buffers["states"] if section is before else self._rest
            if buffer is None or len(buffer) < section.room:
                buffer = StagingSlot().take(section.room)
            for view, tensor in zip(section.views(buffer), tensors, strict=True):
                if not _same_memory(view, tensor):
                    view.copy_(tensor)
            section.write(buffer)
            stored.written += section.nbytes
            stored._show(self.state)
        self._buffers.clear()
        self.state, self._weights, self._gradients, self._rest = {}, [], [], None
        stored.staging.give(self.slot)


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape


def stored_units(
    units: Sequence[ModelUnit],
    placements: Sequence[Placement],
    optimizer: Optimizer,
    states: Sequence[int],
    folder: str,
    meter: MemoryMeter | None = None,
) -> dict[int, StoredUnit]:
    """The plan's tensors on disk, in a file of `folder`, by unit; model and optimizer see no difference. states: bytes
    of each unit's states. ValueError if there is no folder.
    """
    chosen = {index: one.tier for index, one in enumerate(placements) if one.tier in ("disk", "file")}
    if not chosen:
        return {}
    if not folder:
        raise ValueError("memory.disk: the plan puts units on disk; name a folder on one")
    whole = "file" in chosen.values()
    if whole:
        give_back_freed_memory()
    file, staging = DiskFile(folder), Staging(meter if whole else None)
    stored = {
        index: StoredUnit(file, staging, units[index].parameters, optimizer, states=states[index], whole=tier == "file")
        for index, tier in chosen.items()
    }
    if whole:
        give_back_freed_memory()
    return stored
