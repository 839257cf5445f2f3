"""Checkpoints on disk: one safetensors file and one JSON file a worker, then the manifest, whose presence is the
commit.

    checkpoints/step-400/
        worker-0.safetensors    the tensors of that worker's state, by path
        worker-0.json           everything else, with the places of the tensors and a checksum of their file
        manifest.json           written last: which files belong to it and how long they are

A checkpoint without a manifest, or with a file of another length, does not exist for readers. Every file is written
beside its place, flushed and renamed, so a power cut leaves the checkpoint before it intact. No pickle.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from isles.training.records.finite import first_nan
from isles.training.records.tensors import write_tensors

State = dict[str, Any]

_TENSOR, _PAIRS, _TUPLE = "__tensor__", "__pairs__", "__tuple__"


def split_state(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """A nested state of dicts, lists, tuples, tensors, numbers, strings and None as JSON-able structure and flat
    tensors, the same ones.
    """
    tensors: dict[str, Tensor] = {}

    def walk(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            tensors[path] = value.detach()
            return {_TENSOR: path}
        if isinstance(value, Mapping):
            pairs = [(key, walk(entry, f"{path}.{key}")) for key, entry in value.items()]
            if all(isinstance(key, str) for key, _ in pairs):
                return dict(pairs)
            return {_PAIRS: pairs}  # JSON would turn an optimizer's integer keys into strings
        if isinstance(value, tuple):
            return {_TUPLE: [walk(entry, f"{path}.{index}") for index, entry in enumerate(value)]}
        if isinstance(value, list):
            return [walk(entry, f"{path}.{index}") for index, entry in enumerate(value)]
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise TypeError(
            f"state{path} is a {type(value).__name__}: a checkpoint holds tensors, numbers, strings and None"
        )

    return walk(state, ""), tensors


def join_state(structure: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `split_state`."""
    if isinstance(structure, list):
        return [join_state(entry, tensors) for entry in structure]
    if not isinstance(structure, dict):
        return structure
    if _TENSOR in structure:
        return tensors[structure[_TENSOR]]
    if _PAIRS in structure:
        return {key: join_state(entry, tensors) for key, entry in structure[_PAIRS]}
    if _TUPLE in structure:
        return tuple(join_state(entry, tensors) for entry in structure[_TUPLE])
    return {key: join_state(entry, tensors) for key, entry in structure.items()}


class Checkpoints:
    """The checkpoints of one run directory."""

    def __init__(self, run: Path) -> None:
        self.folder = run / "checkpoints"

    def write_shard(self, step: int, worker: int, state: State) -> None:
        """Write one worker's state for `step`. Workers do this side by side; `commit` comes after the last."""
        folder = self._at(step)
        folder.mkdir(parents=True, exist_ok=True)
        structure, tensors = split_state(state)
        path = self._shard(step, worker)
        partial = path.with_suffix(".partial")
        write_tensors(partial, tensors)
        checksum = _checksum(partial)
        _settle(partial, path)
        _write_text(path.with_suffix(".json"), json.dumps({"crc32": checksum, "state": structure}))

    def commit(
        self, step: int, seats: Sequence[int], facts: Mapping[str, Any], keep: int, own: Iterable[int] | None = None
    ) -> None:
        """Make the checkpoint of `step` exist; drop all but the newest `keep` (0: all), and later ones: they are of a
        run that has gone back since. seats: the workers whose state it is, all that were left of the run. facts: for
        the manifest.

        own: the workers of this machine; None: all. The others' shards lie on other machines.
        """
        folder = self._at(step)
        here = seats if own is None else [worker for worker in own if worker in seats]
        names = [f"worker-{worker}{suffix}" for worker in here for suffix in (".safetensors", ".json")]
        files = {name: (folder / name).stat().st_size for name in names}
        looked = {"finite": True}  # by each worker, before it wrote
        manifest = {"step": step, "workers": len(seats), "seats": list(seats), **looked, **facts, "files": files}
        _write_text(folder / "manifest.json", json.dumps(manifest, indent=2))
        _sync_folder(self.folder)
        there = self.steps()
        earlier, later = [old for old in there if old <= step], [new for new in there if new > step]
        for old in [*later, *(earlier[:-keep] if keep else [])]:
            (self._at(old) / "manifest.json").unlink()  # first: half a deletion is then no checkpoint
            shutil.rmtree(self._at(old))

    def steps(self) -> list[int]:
        """Steps with a whole checkpoint, ascending."""
        found = []
        for manifest in self.folder.glob("step-*/manifest.json"):
            number = manifest.parent.name.removeprefix("step-")
            if number.isdigit() and self._whole(manifest):
                found.append(int(number))
        return sorted(found)

    def manifest(self, step: int) -> dict[str, Any]:
        """What was committed for `step`."""
        return json.loads((self._at(step) / "manifest.json").read_text(encoding="utf-8"))

    def seats(self, step: int) -> list[int]:
        """The workers whose state the checkpoint of `step` is, ascending. Older manifests name none: all."""
        manifest = self.manifest(step)
        return manifest.get("seats", list(range(manifest["workers"])))

    def absent(self, step: int) -> list[int]:
        """Those of `seats` whose shards do not lie here, but on other machines."""
        return [worker for worker in self.seats(step) if not self._shard(step, worker).exists()]

    def broken(self, step: int) -> str | None:
        """What is wrong with the weights of `step`; None where they are all numbers. Those of earlier versions, which
        did not look before they wrote, are read; shards on other machines are not.
        """
        if self.manifest(step).get("finite"):
            return None
        for worker in sorted({*self.seats(step)} - {*self.absent(step)}):
            if (path := first_nan(self.read_shard(step, worker))) is not None:
                return f"worker {worker}'s {path} is no number any more"
        return None

    def read_shard(self, step: int, worker: int) -> State:
        """One worker's state, exactly as written; tensors on the CPU. ValueError where a file is damaged."""
        path = self._shard(step, worker)
        text = path.with_suffix(".json")
        try:
            held = json.loads(text.read_text(encoding="utf-8"))
            checksum, structure = held["crc32"], held["state"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(self._damaged(text)) from error
        if _checksum(path) != checksum:
            raise ValueError(self._damaged(path))
        return join_state(structure, load_file(str(path)))

    def _damaged(self, file: Path) -> str:
        return f"{file}: damaged; remove {file.parent} to go on from the checkpoint before it, if there is one"

    def replace(self, step: int, shards: Iterable[State], facts: Mapping[str, Any]) -> None:
        """Put other shards, made one at a time, in the place of those of `step`. What was there stays whole until all
        are written; only between two renames is there neither.
        """
        fresh = Checkpoints(self.folder / "replacing")
        shutil.rmtree(fresh.folder.parent, ignore_errors=True)  # of an attempt that was cut off
        workers = 0
        for shard in shards:
            fresh.write_shard(step, workers, shard)
            workers += 1
        fresh.commit(step, range(workers), facts, keep=0)
        before = self.folder / "replaced"
        shutil.rmtree(before, ignore_errors=True)
        os.replace(self._at(step), before)
        os.replace(fresh._at(step), self._at(step))
        _sync_folder(self.folder)
        shutil.rmtree(before)
        shutil.rmtree(fresh.folder.parent)

    def _at(self, step: int) -> Path:
        return self.folder / f"step-{step}"

    def _shard(self, step: int, worker: int) -> Path:
        return self._at(step) / f"worker-{worker}.safetensors"

    def _whole(self, manifest: Path) -> bool:
        try:
            files = json.loads(manifest.read_text(encoding="utf-8"))["files"]
            return all((manifest.parent / name).stat().st_size == size for name, size in files.items())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return False


@contextlib.contextmanager
def no_half_file(path: Path) -> Iterator[None]:
    """While safetensors writes `path`: if that fails, no part of it stays, and the cause is an OSError as elsewhere."""
    try:
        yield
    except SafetensorError as error:
        path.unlink(missing_ok=True)  # it would take room from what is written next
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def _write_text(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    _settle(partial, path)


def _checksum(path: Path) -> int:
    """CRC-32 of a file: it finds what a disk or a copy spoils, at the speed of memory."""
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 24):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


def _settle(partial: Path, path: Path) -> None:
    """Flush `partial` to the disk, then let it take the place of `path`."""
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(partial, path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
