"""Checkpoints on disk: one safetensors file and one JSON file a worker, then the manifest, whose presence is the
commit.

    checkpoints/step-400/
        worker-0.safetensors    the tensors of that worker's state, by path
        worker-0.json           everything else: run, worker, step, the places of the tensors, their file's checksum
        manifest.json           written last: which files belong to it, how long they are, checksums of the JSON files

JSON files begin with a checksum of the rest of themselves. A checkpoint without a manifest, or with a file of another
length, does not exist for readers; what is damaged, or of another run, worker or step, is refused when it is read.
Every file is written beside its place, flushed and renamed, so a power cut leaves the checkpoint before it intact. No
pickle.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from isles.durable import replacing, sync_folder, write_text
from isles.parsing import parse_json
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

    def write_shard(self, step: int, worker: int, state: State, run: str = "") -> None:
        """Write one worker's state for `step`. Workers do this side by side; `commit` comes after the last. run: what
        tells this run from others, that of the manifest's facts.
        """
        folder = self._at(step)
        folder.mkdir(parents=True, exist_ok=True)
        structure, tensors = split_state(state)
        path = self._shard(step, worker)
        with replacing(path) as partial:
            write_tensors(partial, tensors)
            checksum = _checksum(partial)
        facts = {"run": run, "worker": worker, "step": step, "crc32": checksum}
        _write_checked(path.with_suffix(".json"), json.dumps({**facts, "state": structure}))

    def commit(
        self, step: int, seats: Sequence[int], facts: Mapping[str, Any], keep: int, own: Iterable[int] | None = None
    ) -> None:
        """Make the checkpoint of `step` exist; drop all but the newest `keep` (0: all). seats: the workers whose state
        it is, all that were left of the run. facts: for the manifest.

        own: the workers of this machine; None: all. The others' shards lie on other machines.
        """
        folder = self._at(step)
        here = seats if own is None else [worker for worker in own if worker in seats]
        names = [f"worker-{worker}{suffix}" for worker in here for suffix in (".safetensors", ".json")]
        files = {name: (folder / name).stat().st_size for name in names}
        looked = {"finite": True}  # by each worker, before it wrote
        sums = {name: _checksum(folder / name) for name in names if name.endswith(".json")}
        manifest = {"step": step, "workers": len(seats), "seats": list(seats), **looked, **facts}
        _write_checked(folder / "manifest.json", json.dumps({**manifest, "files": files, "sums": sums}, indent=2))
        sync_folder(self.folder)
        self._drop(self.steps()[:-keep] if keep else [])

    def go_back(self, step: int) -> None:
        """Drop the checkpoints after `step`, from which the run goes on: before its workers write such again."""
        self._drop(later for later in self.steps() if later > step)

    def _drop(self, steps: Iterable[int]) -> None:
        for step in steps:
            (self._at(step) / "manifest.json").unlink()  # first: half a deletion is then no checkpoint
            shutil.rmtree(self._at(step))

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
        return _read_checked(self._at(step) / "manifest.json")

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
        path, manifest = self._shard(step, worker), self._manifest_or_none(step)
        text = path.with_suffix(".json")
        if not (path.exists() and text.exists()):
            raise ValueError(f"{text}: worker {worker}'s state is not there; copy it from the machine that wrote it")
        try:
            held = _read_checked(text)
            checksum, structure = held["crc32"], held["state"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(self._damaged(text)) from error
        _refuse_other(text, held, {"worker": worker, "step": step, "run": (manifest or {}).get("run", "")})
        sums = (manifest or {}).get("sums", {})
        if _checksum(path) != checksum:
            raise ValueError(self._damaged(path))
        if text.name in sums and _checksum(text) != sums[text.name]:
            raise ValueError(self._damaged(text))
        try:
            return join_state(structure, load_file(str(path)))
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ValueError(self._damaged(text)) from error

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
            fresh.write_shard(step, workers, shard, facts.get("run", ""))
            workers += 1
        fresh.commit(step, range(workers), facts, keep=0)
        before = self.folder / "replaced"
        shutil.rmtree(before, ignore_errors=True)
        os.replace(self._at(step), before)
        os.replace(fresh._at(step), self._at(step))
        sync_folder(self.folder)
        shutil.rmtree(before)
        shutil.rmtree(fresh.folder.parent)

    def _at(self, step: int) -> Path:
        return self.folder / f"step-{step}"

    def _shard(self, step: int, worker: int) -> Path:
        return self._at(step) / f"worker-{worker}.safetensors"

    def _manifest_or_none(self, step: int) -> dict[str, Any] | None:
        return self.manifest(step) if (self._at(step) / "manifest.json").exists() else None

    def _whole(self, manifest: Path) -> bool:
        try:
            told = _read_checked(manifest)
            files = told["files"]
            named = f"step-{told['step']}" == manifest.parent.name and 0 < told["workers"] == len(
                told.get("seats", range(told["workers"]))
            )
            return named and all((manifest.parent / name).stat().st_size == size for name, size in files.items())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return False


def _checksum(path: Path) -> int:
    """CRC-32 of a file: it finds what a disk or a copy spoils, at the speed of memory."""
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 24):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


_CHECK = re.compile(rb'\{"check": "([0-9a-f]{8})",\n')


def _write_checked(path: Path, text: str) -> None:
    """Write a JSON object of at least one entry, with a checksum of the rest of the file as its first."""
    rest = text.removeprefix("{").encode()
    write_text(path, f'{{"check": "{zlib.crc32(rest):08x}",\n{rest.decode()}')


def _read_checked(path: Path) -> dict[str, Any]:
    """What `_write_checked` wrote, or an earlier version without a checksum. ValueError where it is damaged."""
    data = path.read_bytes()
    check = _CHECK.match(data)
    if check is not None and int(check[1], 16) != zlib.crc32(data[check.end() :]):
        raise ValueError(f"{path}: damaged")
    held = parse_json(data.decode("utf-8"))
    if not isinstance(held, dict):
        raise ValueError(f"{path}: damaged")
    return held


def _refuse_other(file: Path, held: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """ValueError for a shard of another worker, step or run. Earlier versions wrote none of these."""
    for key, value in here.items():
        if key in held and held[key] != value and value != "":
            raise ValueError(f"{file}: is of another {key} ({held[key]} instead of {value}); put the right file there")


def seat_of(checkpoints: Checkpoints, step: int, rank: int) -> int:
    """The worker whose state of `step` worker `rank` of a swarm goes on from: its own; where it was lost before, that
    of a peer of the stage that it served. ValueError where nobody of that stage has saved.
    """
    seats = checkpoints.seats(step)
    if rank in seats:
        return rank
    stages = _stages(checkpoints, step)
    alike = [seat for seat in seats if stages[seat] == stages[rank]]
    if not alike:
        raise ValueError(
            f"after step {step} nobody of stage {stages[rank]} has saved: name an earlier step with --step"
        )
    return alike[0]


def newest_whole(checkpoints: Checkpoints) -> int | None:
    """The newest step after which somebody of every stage has saved; None: there is none."""
    for step in sorted(checkpoints.steps(), reverse=True):
        stages = _stages(checkpoints, step)
        if {stages[seat] for seat in checkpoints.seats(step)} == set(stages):
            return step
    return None


def _stages(checkpoints: Checkpoints, step: int) -> list[int]:
    """By worker, the stage that it served."""
    return checkpoints.read_shard(step, checkpoints.seats(step)[0])["step"]["stages"]
