"""Going on from a checkpoint: which one it is, and what its states must be made into first."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isles.tables import changed, read_toml
from isles.training.config.reading import read_config, run_name
from isles.training.config.sections import Config
from isles.training.kinds import kind_of
from isles.training.records.checkpoint import Checkpoints
from isles.training.records.reshard.clusters import POSITIONS, reshard_clusters
from isles.training.records.reshard.replicas import reshard_replicas
from isles.training.records.reshard.stages import first_blocks, with_boundary, with_stages

_SECTIONS = {"model", "data", "inner", "replicas", "world", "run"}  # of every run's config.toml


@dataclass(frozen=True)
class Resumption:
    """A run ready to go on: its configuration, the step of its checkpoint, and what a user should know."""

    config: Config
    step: int
    notes: list[str]


def prepare(
    run: Path, workers: int | None, stages: int | None = None, step: int | None = None, *, trust: bool = False
) -> Resumption:
    """Make the checkpoint of `run` after `step` (None: the newest) one of `workers` workers in replicas of `stages`
    stages (None: as config.toml says, or with `stages` alone as many replicas as before), and config.toml too. trust:
    import what that names, whoever made the run.

    ValueError: there is no such checkpoint, the run cannot be with so many workers or stages, or it is going on; then
    nothing is changed.
    """
    checkpoints = Checkpoints(run)
    newest, step = step is None, _chosen(checkpoints, run, step)
    manifest, path = checkpoints.manifest(step), run / "config.toml"
    own = read_config(str(path), {}, [], trust=trust)
    if POSITIONS in manifest:
        if stages is not None:
            raise ValueError(f"--stages {stages}: clusters go on as they were; leave it out")
        return Resumption(*reshard_clusters(run, step, own, workers))
    if missing := _SECTIONS - read_toml(str(path)).keys():
        raise ValueError(
            f"{path}: damaged, for it has no [{sorted(missing)[0]}], as every run's own: take it from a copy"
        )
    if stages is None:
        _refuse_other_cut(own, manifest)
        saved = own
        config = own if workers is None else read_config(str(path), {"world.workers": workers}, [], trust=trust)
    else:
        config, cut = with_stages(own, stages, workers), tuple(manifest.get("cut", ()))
        saved = changed(own, {"pipeline.stages": manifest["stages"], "pipeline.cut": cut})  # whatever own says by now
        config = with_boundary(saved, config)
    kind = kind_of(config.pipeline)
    if first_blocks(saved) == first_blocks(config):
        notes = []
        if manifest["run"] != run_name(config):
            notes = [f"note: {path} was changed since this checkpoint was written: what follows is another run's"]
        if checkpoints.seats(step) == list(range(config.world.workers)):
            return Resumption(config, step, notes)
        as_they_are = kind.lost(run, step, config, newest=newest) if config.world.workers == own.world.workers else None
        if as_they_are is not None:
            return Resumption(config, as_they_are[0], notes + as_they_are[1])
    _refuse_reshard(run, checkpoints, step, config)
    return Resumption(*reshard_replicas(run, step, saved, config))


def _refuse_reshard(run: Path, checkpoints: Checkpoints, step: int, config: Config) -> None:
    """ValueError where the states after `step` cannot be made those of other workers or stages."""
    seats = checkpoints.seats(step)
    if kind_of(config.pipeline).has_peers:
        raise ValueError(
            f"{run}: after step {step} workers {', '.join(map(str, seats))} saved; clusters and swarms resume with "
            "all workers of before, clusters from a checkpoint that all wrote (--step names an earlier one)"
        )
    if elsewhere := checkpoints.absent(step):
        raise ValueError(
            f"{run}: after step {step} the states of workers {', '.join(map(str, elsewhere))} lie on other machines: "
            f"copy them here, into {checkpoints.folder}, and resume without --nodes"
        )
    by_plan = bool(config.pipeline.skippipe.plan)
    if by_plan or config.world.inner > 1:
        why = "a plan is for its nodes" if by_plan else "the workers of an island have parts of their own"
        raise ValueError(f"{why}: resume with {len(seats)} workers, as before")


def _refuse_other_cut(config: Config, manifest: dict[str, Any]) -> None:
    """ValueError where config.toml has another cut than the checkpoint, by itself."""
    stages, here = config.pipeline.stages, first_blocks(config)
    if stages != manifest["stages"]:
        raise ValueError(
            f"pipeline.stages = {stages}: the checkpoint is of {manifest['stages']}; set it back, or resume with "
            f"--stages {stages}"
        )
    if (blocks := manifest.get("cut", [])) != here:
        raise ValueError(
            f"pipeline.cut: the checkpoint's stages begin at blocks {blocks}, config.toml's at {here}; set "
            f"pipeline.cut = {blocks}, or resume with --stages {stages} to cut it anew"
        )


def _chosen(checkpoints: Checkpoints, run: Path, step: int | None) -> int:
    """The checkpoint to go on from. ValueError where there is none."""
    steps = checkpoints.steps()
    if not run.exists():
        raise ValueError(f"{run}: there is nothing of that name; give the directory of a run")
    if not steps:
        raise ValueError(f"{run}: no whole checkpoint there; set run.checkpoint_every, or start again")
    chosen = steps[-1] if step is None else step
    if chosen not in steps:
        raise ValueError(f"--step {chosen}: there is no whole checkpoint of it; there are {', '.join(map(str, steps))}")
    return chosen
