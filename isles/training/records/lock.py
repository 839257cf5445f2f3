"""One run a directory at a time: a lock that ends with the process that holds it, however that ends.

The kernel's own lock on RUN/run.lock (flock), so nothing has to be cleaned up after a crash. The file holds the process
id for the message. On a network file system without locks the run goes on unlocked. Who removes the file by hand takes
the lock away: the run that held it notices before it writes, and takes it back, or ends where another run has it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

NAME = "run.lock"


class RunLock:
    """The lock of the run directory `run` (which exists), held until `release`, or as a context manager. ValueError
    while another process holds it; OSError where no file can be made.
    """

    def __init__(self, run: Path) -> None:
        self._path = run / NAME
        self._handle = _take(self._path)

    def keep(self, tell: Callable[[str], None]) -> None:
        """Take the lock again if somebody has removed its file. OSError where another run holds it by now."""
        if not self._is_ours():
            try:
                handle = _take(self._path)
            except ValueError as error:
                raise OSError(
                    f"{self._path} was removed while this run went on, and now {error.args[0]}; this run has ended"
                ) from error
            os.close(self._handle)
            self._handle = handle
            tell(f"{self._path} was removed while this run goes on; it is there again: leave it to the run")

    def release(self) -> None:
        """Give the lock and its file back."""
        # While it is held: who opened the file meanwhile finds that it is gone, see `_take`.
        if self._is_ours():
            self._path.unlink(missing_ok=True)
        os.close(self._handle)

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _is_ours(self) -> bool:
        own = os.fstat(self._handle)
        if not os.path.samestat(own, os.stat(os.devnull)):
            with contextlib.suppress(FileNotFoundError):
                return os.path.samestat(own, self._path.stat())
            return False
        return True  # no locks here


def _take(path: Path) -> int:
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(handle, 32, 0).decode("ascii", "replace").strip()
            os.close(handle)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                return os.open(os.devnull, os.O_RDONLY)  # no locks on this file system
            raise ValueError(
                f"{path.parent}: in use by another run (process {holder or 'unknown'}); wait for its end or stop it"
            ) from error
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(handle).st_ino == path.stat().st_ino:
                with contextlib.suppress(OSError):  # a full disk: the lock itself needs no room
                    os.ftruncate(handle, 0)
                    os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
                return handle
        os.close(handle)  # the one before took its file away between our opening and locking it
