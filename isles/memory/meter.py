"""A meter of storages: live and peak bytes of what a thread's operations make, on real and on fake tensors alike."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from isles.base.wrapping import is_host_work


class MemoryMeter(TorchDispatchMode):
    """Counts each storage once, from the operation that makes it until it is gone. `with meter:` on the thread that
    computes; what other threads make is told by `track`, what they empty by `forget`. What is made in `host_work` is of
    another memory.

    live, peak: bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, int] = {}
        self._lock = threading.RLock()  # a finalizer may run within any of these

    def track(self, *tensors: Tensor) -> None:
        """Count these tensors' storages, if they are not yet."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key, nbytes = storage._cdata, storage.nbytes()
            with self._lock:
                if key in self._known:
                    continue
                self._known[key] = nbytes
                self.live += nbytes
                self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._drop, key)

    def forget(self, *tensors: Tensor) -> None:
        """Count these no longer: they were emptied, or have gone elsewhere."""
        for tensor in tensors:
            self._drop(tensor.untyped_storage()._cdata)

    def _drop(self, key: int) -> None:
        with self._lock:
            self.live -= self._known.pop(key, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if not is_host_work():
            self.track(*(tensor for tensor in tree_iter(made) if isinstance(tensor, Tensor)))
        return made


def storages(tensors: Iterator[Tensor] | Any) -> dict[int, int]:
    """Bytes by storage, each once."""
    return {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}


def nbytes(tensors: Iterator[Tensor] | Any) -> int:
    """Bytes of the tensors' storages, each once."""
    return sum(storages(tensors).values())
