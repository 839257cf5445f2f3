"""The disk tier: what a unit has in a file, and the pieces of memory through which it goes there and back.

    N    | states |
    F    | weights | gradients | states |      where the RAM is the device

The file has no name, so nobody else can cut or lose it, and it is gone when the process ends, however that ends. Each
section begins on a page. The executor reads and writes whole sections through page-aligned slots of its own mapping
(memory that is given back to the C library stays with the process), past the page cache where the file system can; the
gradients' through it, because clipping reads them soon. Everyone else sees the sections as tensors mapped from the same
file: the kernel keeps both views alike as long as they do not overlap in time, which `catch_up` sees to.
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
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from isles.memory.meter import MemoryMeter

ALIGNED = 64
"""Bytes: where a tensor begins within its section."""
_MMAP_THRESHOLD = -3  # of mallopt
_SMALL = 65536  # bytes: what is larger the C library is to give back at once


class TensorPlace(NamedTuple):
    """Where a tensor lies in its section."""

    dtype: torch.dtype
    shape: torch.Size
    begin: int
    nbytes: int


def pages(nbytes: int) -> int:
    """The bytes of as many whole pages as hold `nbytes`."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


class DiskFile:
    """A file without a name in `folder`. OSError where it cannot be made."""

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
        """Make room at the end; where it begins. OSError where the disk is full."""
        begin = self.size
        if nbytes:
            with self._failing(f"no room for {nbytes} bytes more"):
                os.posix_fallocate(self._cached, begin, nbytes)
            self.size += nbytes
        return begin

    def read(self, begin: int, into: Tensor, *, cached: bool = False) -> None:
        """Fill the bytes `into`, whole pages. OSError where there are fewer, or the disk fails."""
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
        """Return once all that was written is on the disk."""
        with self._failing("writing failed"):
            os.fdatasync(self._cached)

    def forget(self) -> None:
        """Give back what the page cache holds of the file, where the system can be asked to."""
        self.sync()
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._cached, 0, 0, os.POSIX_FADV_DONTNEED)

    def mapped(self, begin: int, nbytes: int) -> Tensor:
        """The bytes as a tensor over the file."""
        return torch.frombuffer(mmap.mmap(self._cached, nbytes, offset=begin), dtype=torch.uint8)

    def close(self) -> None:
        """What is mapped stays."""
        self._finalizer()

    @contextlib.contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        """The system's error becomes one that says what failed, and what to do."""
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
    """Tensors of one unit in the file, shaped like those of `like`. nbytes: of them; room: with what lies between."""

    def __init__(self, file: DiskFile, like: Sequence[Tensor], *, cached: bool = False) -> None:
        self.file, self._cached = file, cached
        self.places, end = list[TensorPlace](), 0
        for tensor in like:
            begin = -(-end // ALIGNED) * ALIGNED
            self.places.append(TensorPlace(tensor.dtype, tensor.shape, begin, tensor.nbytes))
            end = begin + tensor.nbytes
        self.nbytes, self.room = sum(place.nbytes for place in self.places), pages(end)
        self._begin = file.extend(self.room)
        self._mapped: list[Tensor] | None = None

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Whether they are of these formats and shapes."""
        return [(one.dtype, one.shape) for one in tensors] == [(place.dtype, place.shape) for place in self.places]

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The tensors in the bytes of `buffer`."""
        return [
            buffer[place.begin : place.begin + place.nbytes].view(place.dtype).view(place.shape)
            for place in self.places
        ]

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
        """What `views` show goes to the file."""
        self.file.write(self._begin, buffer[: self.room], cached=self._cached)


class StagingSlot:
    """Page-aligned memory that is taken once and grows where a larger unit comes. meter: counts it."""

    def __init__(self, meter: MemoryMeter | None = None) -> None:
        self._bytes, self._meter = torch.empty(0, dtype=torch.uint8, device="cpu"), meter

    def take(self, nbytes: int) -> Tensor:
        """So many bytes; what was in them before may be lost."""
        if len(self._bytes) < nbytes:
            self._bytes = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
            if self._meter is not None:
                self._meter.track(self._bytes)
        return self._bytes[:nbytes]


def disk_vectors(folder: str) -> Callable[[int, torch.dtype], Tensor]:
    """A maker of vectors (numel,) that lie in a file of `folder`: for what is touched once in a while. It holds them in
    the page cache as long as there is room.
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
    """What a user should know of a folder for `nbytes` of a plan. ValueError, one line, where it cannot be used."""
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
