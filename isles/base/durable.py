"""Files that are there whole or not at all, whatever is cut off when: written beside their path, flushed to the disk,
renamed, and the folder's entry flushed too. `home` is the one folder in which Isles keeps things of its user's own.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

_NO_ROOM = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the disk is read-only",
}


def no_room(error: BaseException) -> str:
    """Of an error: that the disk was full, or not to be written to; empty where it was something else."""
    return _NO_ROOM.get(error.errno or 0, "") if isinstance(error, OSError) else ""


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name beside `path` to write a file at; at the end of the block it takes the place of `path`. Where the block
    fails nothing of it stays, for it would take room from what is written next.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        yield partial
        settle(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def plain_mode(path: Path) -> Iterator[None]:
    """Give the file that the block makes at `path` the umask's permissions; safetensors' own are private."""
    path.touch()
    mode = path.stat().st_mode & 0o777
    yield
    path.chmod(mode)


def write_text(path: Path, text: str) -> None:
    """Put `text` at `path`. OSError where that fails: what was there before is untouched then."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def appending(path: Path) -> TextIO:
    """Open the file of lines at `path` to add some. A last line that was not written whole is removed, for the next one
    would become part of it.
    """
    with path.open("ab+") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
    return path.open("a", encoding="utf-8")


def settle(partial: Path, path: Path) -> None:
    """Flush the file `partial` to the disk, then let it take the place of `path`."""
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(partial, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush the names in `folder` to the disk."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def home() -> Path:
    """$ISLES_HOME; else `isles` where the system keeps what programs remember, such as ~/.local/state."""
    if own := os.environ.get("ISLES_HOME"):
        return Path(own).expanduser()
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "isles"
