"""Save states while training goes on: copy them in the host's memory, and let a thread check and write the copy.

    with saver:             until the end of training, or until it stops: then the last state is written
        saver.save(state, write)    waits until the state before is written; copies; returns
        saver.check()               after each step: raises what went wrong in the thread

The buffer of the copy stays allocated, because most of a first copy's time is page faults. A state that is too large
for a copy is written at once, a tensor at a time.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from typing import Self

import torch

from isles.training.records.shard import State, copied_size, copy_to_host, join_state, split_state

_LONGEST = 3600.0  # seconds to write a state


class StateSaver:
    """Saves one worker's states. memory: returns the bytes that a copy may take; asked when a buffer is needed."""

    def __init__(self, memory: Callable[[], float]) -> None:
        self._memory = memory
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def save(self, state: State, write: Callable[[State], None]) -> None:
        """Check and write `state` with `write`; it may change once this returns. Raises the error of the save before,
        and of this one where there is no memory for a copy.
        """
        self._finish()
        self.check()
        structure, tensors = split_state(state)
        size = copied_size(tensors)
        if len(self._buffer) < size:
            self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")  # frees the smaller one first
            if size > self._memory():
                write(state)
                return
            pins = any(tensor.is_cuda for tensor in tensors.values())
            self._buffer = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pins)
        copy = join_state(structure, copy_to_host(tensors, self._buffer))
        # A daemon: where the process ends at once, the checkpoint before counts.
        self._thread = threading.Thread(target=self._save, args=(write, copy), name="isles-save", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise the error of a state that could not be saved."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait until the last state is written, also if training failed. Raises the error of a state otherwise."""
        self._finish()
        if kind is None:
            self.check()

    def _finish(self) -> None:
        if self._thread is not None:
            self._thread.join(_LONGEST)
            if self._thread.is_alive():
                raise OSError(errno.ETIMEDOUT, f"a state was not written within {_LONGEST:g} s: is its disk there?")
            self._thread = None

    def _save(self, write: Callable[[State], None], state: State) -> None:
        try:
            write(state)
        except Exception as error:  # for the training thread
            self._error = error
