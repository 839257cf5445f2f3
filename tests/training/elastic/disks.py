"""A small file system of its own, which can be full and have room again. Linux and root."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path


@cache
def unavailable() -> str:
    """Why there are none here; empty where there are."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("mount") is None:
        return "a small disk needs root on Linux, and mount"
    with tempfile.TemporaryDirectory() as place:
        try:
            Disk(Path(place), 1 << 16).end()
        except subprocess.CalledProcessError as error:
            return f"a small disk: mount says {error.stderr.decode().strip()}"
    return ""


class Disk:
    """In the folder `place`, with `size` bytes, until `end`."""

    def __init__(self, place: Path, size: int) -> None:
        self.place, self._ballast = place, place / "ballast"
        place.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], check=True, capture_output=True
        )

    def fill(self) -> None:
        """Leave no room on it."""
        with self._ballast.open("wb", buffering=0) as file:
            try:
                while file.write(bytes(1 << 16)):
                    pass
            except OSError:  # the disk is full
                return

    def free(self) -> None:
        """Give the room back."""
        self._ballast.unlink()

    def end(self) -> None:
        """Its files are gone, once nobody has one open any more."""
        subprocess.run(["umount", "-l", str(self.place)], check=True, capture_output=True)
