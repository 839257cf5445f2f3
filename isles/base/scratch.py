"""Temporary folders, locked while their process lives, so that a later one can remove those of killed ones."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX, _LOCK = "isles-", "lock"


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder for temporary files that only this user can read. Removes the folders of processes that were killed."""
    _remove_abandoned(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as name, Path(name, "locking").open("xb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.rename(lock.name, Path(name, _LOCK))  # so that nobody finds it without its lock
        yield Path(name)


def _remove_abandoned(there: Path) -> None:
    """Remove this user's folders in `there` whose lock no process holds. Follows no link."""
    for folder in there.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # a living process holds its lock, or another one removes it
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                continue
            handle = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)
