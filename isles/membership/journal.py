"""The lighthouse's memory on disk: a line of JSON for everything that must survive it.

    journal = Journal(folder)
    coordinator = RoundsCoordinator(rules, journal.entries)
    for effect in coordinator.beat(...):
        Append -> journal.append(entry); anything else -> journal.commit(), then send it

A line that was not written whole, at the end of the file, is what a crash leaves; nothing that depends on it has left
the machine, so it is cut off. A damaged line anywhere else is an error: what came after it would be misread.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from isles.base.parsing import parse_json

NAME = "members.jsonl"


class Journal:
    """The file `members.jsonl` in `folder`. entries: what it held when it was opened.

    ValueError where it cannot be read, or a line in the middle is damaged.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / NAME
        self.entries, whole = _read(self.path)
        self._file = open(self.path, "ab")  # noqa: SIM115  closed by `close`
        if self._file.tell() != whole:
            self._file.truncate(whole)
        self._committed = True
        _sync_folder(folder)

    def append(self, entry: dict[str, Any]) -> None:
        """Add an entry; it is safe after `commit`."""
        self._file.write(json.dumps(entry, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n")
        self._committed = False

    def commit(self) -> None:
        """Return when everything appended is on the disk. Does nothing where there is nothing new."""
        if not self._committed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._committed = True

    def close(self) -> None:
        """Commit and give the file back. Safe to call twice."""
        if not self._file.closed:
            self.commit()
            self._file.close()


def _read(path: Path) -> tuple[list[dict[str, Any]], int]:
    """(the entries, bytes up to the end of the last whole line)."""
    try:
        data = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); restore the file, or start a new run") from None
    whole = data.rfind(b"\n") + 1
    entries = []
    for number, line in enumerate(data[:whole].splitlines(), start=1):
        try:
            entry = parse_json(line)
        except ValueError:
            entry = None
        if not isinstance(entry, dict):
            raise ValueError(f"{path}: line {number} is damaged; restore the file, or start a new run")
        entries.append(entry)
    return entries, whole


def _sync_folder(folder: Path) -> None:
    """A new file's name is safe when its folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
