"""Checkpoints on disk: one file per worker (`shard`), then the manifest, whose presence is the commit. Loads no torch.

    checkpoints/step-400/
        worker-0.safetensors    that worker's state; its header names the run, worker and step
        manifest.json           written last: the names and lengths of the files, and facts about the run

Every file holds a checksum of the rest of itself. Readers ignore a checkpoint without a manifest, or with a file of
another length; they refuse a file that is damaged, or of another run, worker or step. Every file is written under
another name, flushed and renamed, so a power cut leaves the previous checkpoint intact. RUN/states of a lighthouse has
the same layout: for each round or step, a shard per island rank or stage.
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
        """Write one worker's state for `step`. Workers do this concurrently; `commit` follows after the last. run: the
        run's name, as in the manifest.
        """
        from isles.training.records.shard import write_state

        path = self.shard(step, worker)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial:
            write_state(partial, state, {"run": run, "worker": str(worker), "step": str(step)})

    def take_in(self, ranks: Sequence[int], fetch: Callable[[int, Path], int]) -> int | None:
        """Fetch the shards of `ranks`: `fetch` writes one to a path and returns its step. Commits them if all are of
        one step, and returns that. If `fetch` raises, no file stays.
        """
        incoming = {rank: self.folder / "coming" / f"worker-{rank}.safetensors" for rank in ranks}
        shutil.rmtree(self.folder / "coming", ignore_errors=True)  # of an attempt that was cut off
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self.folder / "coming").mkdir()
        try:
            steps = {fetch(rank, path) for rank, path in incoming.items()}
            if len(steps) > 1:
                return None
            (step,) = steps
            self._at(step).mkdir(exist_ok=True)
            for rank, path in incoming.items():
                settle(path, self.shard(step, rank))
            self.commit(step, ranks, {}, keep=0)
            return step
        finally:
            shutil.rmtree(self.folder / "coming", ignore_errors=True)

    def commit(
        self, step: int, ranks: Sequence[int], facts: Mapping[str, Any], keep: int, own: Iterable[int] | None = None
    ) -> None:
        """Commit the checkpoint of `step`; delete all but the newest `keep` (0: keep all). ranks: the workers that
        wrote it, all that remained in the run. facts: for the manifest.

        own: the workers of this machine; None: all. The others' shards are on other machines.
        """
        here = ranks if own is None else [worker for worker in own if worker in ranks]
        files = {path.name: path.stat().st_size for path in (self.shard(step, worker) for worker in here)}
        manifest = {"step": step, "workers": len(ranks), "ranks": list(ranks), **facts, "files": files}
        write_checked(self._at(step) / "manifest.json", manifest, indent=2)
        sync_folder(self.folder)
        self.thin(keep)

    def thin(self, keep: int) -> None:
        """Delete all but the newest `keep`; 0: none."""
        self._drop(self.steps()[:-keep] if keep else [])

    def go_back(self, step: int) -> None:
        """Delete the checkpoints after `step`, when a run resumes from it, before its workers write these again."""
        self._drop(later for later in self.steps() if later > step)

    def _drop(self, steps: Iterable[int]) -> None:
        for step in steps:
            (self._at(step) / "manifest.json").unlink()  # first, so that an interrupted deletion leaves no checkpoint
            shutil.rmtree(self._at(step))

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, ascending."""
        found = []
        for manifest in self.folder.glob("step-*/manifest.json"):
            number = manifest.parent.name.removeprefix("step-")
            if number.isdigit() and self._whole(manifest):
                found.append(int(number))
        return sorted(found)

    def manifest(self, step: int) -> dict[str, Any]:
        return read_checked(self._at(step) / "manifest.json")

    def ranks(self, step: int) -> list[int]:
        """The workers that wrote the checkpoint of `step`, ascending."""
        return self.manifest(step)["ranks"]

    def absent(self, step: int) -> list[int]:
        """Those of `ranks` whose shards are on other machines."""
        return [worker for worker in self.ranks(step) if not self.shard(step, worker).exists()]

    def read_shard(self, step: int, worker: int) -> State:
        """One worker's state, exactly as written; tensors on the CPU. ValueError if a file is damaged."""
        from isles.training.records.shard import read_state

        path = self.shard(step, worker)
        if not path.exists():
            raise ValueError(f"{path}: worker {worker}'s state is missing; copy it from the machine that wrote it")
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
        """The newest step without a damaged shard; None if there are no steps. notify: called with a line of text for
        each newer one. ValueError if all are damaged: to start anew instead would discard the training so far.
        """
        steps, damaged = self.steps(), list[Path]()
        while steps and (bad := [path for path in self.shards(steps[-1]) if not is_whole(path)]):
            damaged, steps = [*damaged, bad[0]], steps[:-1]
        if damaged and not steps:
            raise ValueError(f"{self.folder}: all states are damaged: restore one, or start a new run")
        for path in damaged:
            notify(f"{path}: is damaged, so the run goes on from round {steps[-1]}")
        return steps[-1] if steps else None

    def shards(self, step: int) -> list[Path]:
        return [self.shard(step, worker) for worker in self.ranks(step)]

    def replace(self, step: int, shards: Iterable[State], facts: Mapping[str, Any]) -> None:
        """Replace the shards of `step` by others, which are computed one at a time. The old ones stay intact until all
        new ones are written; only between the two renames is there neither.
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
        """Path of a worker's state."""
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
    """The worker whose state of `step` worker `rank` of a swarm loads: its own, or, if it was lost before, that of a
    peer of its stage. ValueError if no peer of that stage has saved.
    """
    ranks = checkpoints.ranks(step)
    if rank in ranks:
        return rank
    stages = _stages(checkpoints, step)
    alike = [other for other in ranks if stages[other] == stages[rank]]
    if not alike:
        raise ValueError(
            f"after step {step} no peer of stage {stages[rank]} has saved: name an earlier step with --step"
        )
    return alike[0]


def newest_whole(checkpoints: Checkpoints) -> int | None:
    """The newest step after which a peer of every stage has saved; None: there is none."""
    for step in sorted(checkpoints.steps(), reverse=True):
        stages = _stages(checkpoints, step)
        if {stages[rank] for rank in checkpoints.ranks(step)} == set(stages):
            return step
    return None


def _stages(checkpoints: Checkpoints, step: int) -> list[int]:
    """By worker, the stage that it served."""
    return checkpoints.read_shard(step, checkpoints.ranks(step)[0])["step"]["stages"]
