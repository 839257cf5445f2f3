"""One run a directory at a time: a lock that ends with the process that holds it, however that ends.

The kernel's own lock on RUN/run.lock (flock), so nothing has to be cleaned up after a crash. The file holds the process
id for the message. On a network file system without locks the run goes on unlocked.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

NAME = "run.lock"


@contextlib.contextmanager
def locked(run: Path) -> Iterator[None]:
    """Hold the lock of the run directory `run` (which exists). ValueError while another process holds it; OSError
    where no file can be made.
    """
    path = run / NAME
    handle = _take(path)
    try:
        yield
    finally:
        # While it is held: who opened the file meanwhile finds that it is gone, see `_take`.
        path.unlink(missing_ok=True)
        os.close(handle)


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
