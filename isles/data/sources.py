"""Where text lies: the files behind `data.path`, in an order that is the same on every machine."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

SourceKind = Literal["text", "jsonl", "parquet", "dataset"]

_KINDS: dict[str, SourceKind] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}

# Tests are not the library, and the two generated packages would spoil a small corpus: `encodings` is 1.4 MB of nearly
# equal character tables (a copy in validation of what training saw), `pydoc_data` one file of 0.8 MB of prose.
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"})
# Written when Python is built or installed, so they differ between machines with the same Python.
_BUILT_FILES = ("_sysconfigdata", "_sysconfig_vars", "sitecustomize", "usercustomize")


@dataclass(frozen=True)
class Source:
    """One file of a corpus (or one saved dataset folder). `name` is its path relative to `data.path`, with slashes."""

    path: Path
    name: str
    kind: SourceKind
    alone: bool  # named by the user itself, not found in a folder: then nothing about it is passed over

    def document_name(self, row: int | None = None) -> str:
        """What the split hashes. A file that stands alone adds nothing: its path may differ between machines."""
        name = "" if self.alone else self.name
        return name if row is None else f"{name}#{row}"


def list_sources(path: str) -> list[Source]:
    """The sources behind `data.path`, sorted by name. Hidden files and folders are left out.

    ValueError where the path does not exist or the folder holds no file.
    """
    if not path:
        return _standard_library()
    root = Path(path).expanduser()
    if not root.exists():
        raise ValueError(
            f"data.path = {path!r} does not exist; give a file or a folder, or leave it empty for the standard library"
        )
    if root.is_file():
        return [Source(root, root.name, _kind(root), alone=True)]
    if _is_saved_dataset(root):
        return [Source(root, root.name, "dataset", alone=True)]
    sources = [
        Source(file, file.relative_to(root).as_posix(), _kind(file), alone=False)
        for file in _walk(root, enter=lambda folder: not folder.startswith(".") and folder != "__pycache__")
        if not file.name.startswith(".")
    ]
    if not sources:
        raise ValueError(f"data.path = {path!r} is a folder without a readable file; put text, JSONL or Parquet there")
    return sorted(sources, key=lambda source: source.name)


def fingerprint(sources: list[Source]) -> tuple[tuple[str, str, int, int], ...]:
    """(path, name, bytes, mtime in ns) of every file: changes when a file is written, added, removed or renamed."""
    marks = []
    for source in sources:
        files = _walk(source.path, enter=lambda _: True) if source.kind == "dataset" else [source.path]
        for file in sorted(files):
            stat = file.stat()
            marks.append((str(file.resolve()), source.name, stat.st_size, stat.st_mtime_ns))
    return tuple(marks)


def _standard_library() -> list[Source]:
    root = Path(sysconfig.get_path("stdlib"))
    sources = [
        Source(file, file.relative_to(root).as_posix(), "text", alone=False)
        for file in _walk(root, enter=lambda folder: folder not in _NOT_LIBRARY and not folder.startswith("config-"))
        if file.suffix == ".py" and not file.name.startswith(_BUILT_FILES)
    ]
    if not sources:
        raise ValueError(f"data.path is empty and {root} holds no standard library source; give a file or folder")
    return sorted(sources, key=lambda source: source.name)


def _walk(root: Path, enter: Callable[[str], bool]) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if enter(name)]
        for name in files:
            if (file := Path(folder, name)).is_file():  # not a dangling link or a socket
                yield file


def _kind(file: Path) -> SourceKind:
    return _KINDS.get(file.suffix.lower(), "text")


def _is_saved_dataset(folder: Path) -> bool:
    one_split = (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()
    return one_split or (folder / "dataset_dict.json").is_file()
