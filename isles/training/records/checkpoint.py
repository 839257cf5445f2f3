"""Checkpoints on disk: one file a worker (`shard`), then the manifest, whose presence is the commit. Loads no torch.

    checkpoints/step-400/
        worker-0.safetensors    that worker's state; of which run, worker and step it is stands in its header
        manifest.json           written last: which files belong to it, and how long they are

Every file holds a checksum of the rest of itself. A checkpoint without a manifest, or with a file of another length,
does not exist for readers; what is damaged, or of another run, worker or step, is refused when it is read. Every file
is written beside its place, flushed and renamed, so a power cut leaves the checkpoint before it intact. What a
lighthouse keeps lies in the same way in RUN/states: of each round, or step, a shard of each place, or stage.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isles.base.durable import replacing, settle, sync_folder
from isles.training.records.checksums import is_whole, read_checked, write_checked

if TYPE_CHECKING:
    from isles.training.records.shard import State


class Checkpoints:
    """The checkpoints of one run directory, or the states that a lighthouse keeps there."""

    def __init__(self, run: Path, name: str = "checkpoints") -> None:
        self.folder = run / name

    def write_shard(self, step: int, worker: int, state: State, run: str = "") -> None:
        """Write one worker's state for `step`. Workers do this side by side; `commit` comes after the last. run: what
        tells this run from others, that of the manifest's facts.
        """
        from isles.training.records.shard import write_state

        path = self.shard(step, worker)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial:
            write_state(partial, state, {"run": run, "worker": str(worker), "step": str(step)})

    def take_in(self, ranks: Sequence[int], fetch: Callable[[int, Path], int]) -> int | None:
        """Have `fetch` put the shard of each of `ranks` at a path, and say of which step it is; commit them where that
        is one step, which is returned. Errors of `fetch`: then nothing of them stays.
        """
        coming = {rank: self.folder / "coming" / f"worker-{rank}.safetensors" for rank in ranks}
        shutil.rmtree(self.folder / "coming", ignore_errors=True)  # of an attempt that was cut off
        (self.folder / "coming").mkdir(parents=True)
        try:
            steps = {fetch(rank, path) for rank, path in coming.items()}
            if len(steps) > 1:
                return None
            (step,) = steps
            self._at(step).mkdir(exist_ok=True)
            for rank, path in coming.items():
                settle(path, self.shard(step, rank))
            self.commit(step, ranks, {}, keep=0)
            return step
        finally:
            shutil.rmtree(self.folder / "coming", ignore_errors=True)

    def commit(
        self, step: int, ranks: Sequence[int], facts: Mapping[str, Any], keep: int, own: Iterable[int] | None = None
    ) -> None:
        """Make the checkpoint of `step` exist; drop all but the newest `keep` (0: all). ranks: the workers whose state
        it is, all that were left of the run. facts: for the manifest.

        own: the workers of this machine; None: all. The others' shards lie on other machines.
        """
        here = ranks if own is None else [worker for worker in own if worker in ranks]
        files = {path.name: path.stat().st_size for path in (self.shard(step, worker) for worker in here)}
        manifest = {"step": step, "workers": len(ranks), "ranks": list(ranks), **facts, "files": files}
        write_checked(self._at(step) / "manifest.json", manifest, indent=2)
        sync_folder(self.folder)
        self.thin(keep)

    def thin(self, keep: int) -> None:
        """Drop all but the newest `keep`; 0: none."""
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
        return read_checked(self._at(step) / "manifest.json")

    def ranks(self, step: int) -> list[int]:
        """The workers whose state the checkpoint of `step` is, ascending."""
        return self.manifest(step)["ranks"]

    def absent(self, step: int) -> list[int]:
        """Those of `ranks` whose shards do not lie here, but on other machines."""
        return [worker for worker in self.ranks(step) if not self.shard(step, worker).exists()]

    def read_shard(self, step: int, worker: int) -> State:
        """One worker's state, exactly as written; tensors on the CPU. ValueError where a file is damaged."""
        from isles.training.records.shard import read_state

        path = self.shard(step, worker)
        if not path.exists():
            raise ValueError(f"{path}: worker {worker}'s state is not there; copy it from the machine that wrote it")
        try:
            state, notes = read_state(path)
        except ValueError as error:
            raise ValueError(f"{error}; remove {path.parent} to go on from the checkpoint before it, if any") from None
        manifest = self.manifest(step) if (path.parent / "manifest.json").exists() else {}
        for key, value in {"worker": worker, "step": step, "run": manifest.get("run", "")}.items():
            if notes.get(key) != str(value) and value != "":
                raise ValueError(
                    f"{path}: is of another {key} ({notes.get(key)} instead of {value}); put the right file there"
                )
        return state

    def newest_sound(self, notify: Callable[[str], None]) -> int | None:
        """The newest step of which no shard is damaged; None where there are none at all. notify: called with a line
        for each that is newer. ValueError where all are: who begins anew in their stead loses what the run has learned.
        """
        steps, damaged = self.steps(), list[Path]()
        while steps and (bad := [path for path in self.shards(steps[-1]) if not is_whole(path)]):
            damaged, steps = [*damaged, bad[0]], steps[:-1]
        if damaged and not steps:
            raise ValueError(f"{self.folder}: no state there is intact: restore one, or start a new run")
        for path in damaged:
            notify(f"{path}: is damaged, so the run goes on from round {steps[-1]}")
        return steps[-1] if steps else None

    def shards(self, step: int) -> list[Path]:
        return [self.shard(step, worker) for worker in self.ranks(step)]

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

    def shard(self, step: int, worker: int) -> Path:
        """Where the state of a worker lies, or will."""
        return self._at(step) / f"worker-{worker}.safetensors"

    def _whole(self, manifest: Path) -> bool:
        try:
            manifest_table = read_checked(manifest)
            files = manifest_table["files"]
            named = f"step-{manifest_table['step']}" == manifest.parent.name and 0 < manifest_table["workers"] == len(
                manifest_table["ranks"]
            )
            return named and all((manifest.parent / name).stat().st_size == size for name, size in files.items())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return False


def rank_to_load(checkpoints: Checkpoints, step: int, rank: int) -> int:
    """The worker whose state of `step` worker `rank` of a swarm goes on from: its own; where it was lost before, that
    of a peer of the stage that it served. ValueError where nobody of that stage has saved.
    """
    ranks = checkpoints.ranks(step)
    if rank in ranks:
        return rank
    stages = _stages(checkpoints, step)
    alike = [other for other in ranks if stages[other] == stages[rank]]
    if not alike:
        raise ValueError(
            f"after step {step} no worker of stage {stages[rank]} has saved: name an earlier step with --step"
        )
    return alike[0]


def newest_whole(checkpoints: Checkpoints) -> int | None:
    """The newest step after which somebody of every stage has saved; None: there is none."""
    for step in sorted(checkpoints.steps(), reverse=True):
        stages = _stages(checkpoints, step)
        if {stages[rank] for rank in checkpoints.ranks(step)} == set(stages):
            return step
    return None


def _stages(checkpoints: Checkpoints, step: int) -> list[int]:
    """By worker, the stage that it served."""
    return checkpoints.read_shard(step, checkpoints.ranks(step)[0])["step"]["stages"]
