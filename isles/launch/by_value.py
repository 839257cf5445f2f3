"""What goes through the pipes between a launcher and its workers, tensors by value.

Torch's own way shares the memory of a tensor: one file descriptor a tensor (`ulimit -n`), room in /dev/shm, and a
sender that must live until the reader has looked. Both ends are processes of one launcher: nothing here is a peer's.
"""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing import reductions


class _Pickler(ForkingPickler):
    """Multiprocessing's, without what torch adds to it."""

    def __init__(self, file: BytesIO) -> None:
        super().__init__(file)
        self.dispatch_table = {
            kind: reduce
            for kind, reduce in self.dispatch_table.items()
            if getattr(reduce, "__module__", "") != reductions.__name__
        }
        self._storages: dict[int, Any] = {}

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, torch.storage.TypedStorage):  # made anew for each tensor that looks at the same memory
            first = self._storages.setdefault(thing._untyped_storage._cdata, thing)
            return NotImplemented if first is thing else (_same, (first, thing.dtype))
        return NotImplemented


class ByValue:
    """A value that a new process is given; `open` makes it there, so that who cannot read it can say so."""

    def __init__(self, value: Any, made: bytes | None = None) -> None:
        self._value, self._made = value, made

    def open(self) -> Any:
        return self._value if self._made is None else ForkingPickler.loads(self._made)

    def __reduce__(self) -> tuple[Callable[..., ByValue], tuple[Any, ...]]:
        return ByValue, (None, dumps(self._value) if self._made is None else self._made)


class ByValueConnection:
    """A worker's end of the pipe to its launcher."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.recv = pipe.recv

    def send(self, message: tuple[str, Any], /) -> None:
        self._pipe.send_bytes(dumps(message))


def dumps(value: Any) -> bytes:
    """For a pipe's `recv`."""
    file = BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def _same(storage: Any, dtype: torch.dtype) -> Any:
    return torch.storage.TypedStorage(wrap_storage=storage._untyped_storage, dtype=dtype, _internal=True)
