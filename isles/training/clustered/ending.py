"""How a worker of a run in clusters comes to the end: what it puts into the summary, and the one model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from isles.comm.codecs import codec
from isles.comm.collectives.mean import sent_bytes
from isles.comm.mesh import Mesh
from isles.models import sketch
from isles.pipeline.assemble import assembled
from isles.training.clustered.meter import NodeMeter
from isles.training.clustered.serving import Serving
from isles.training.config.reading import run_name
from isles.training.config.sections import Config
from isles.training.records.checkpoint import Checkpoints
from isles.training.records.tensors import save_model
from isles.training.staged import on_host


def conclude(
    config: Config,
    workers: int,
    serving: Serving | None,
    meter: NodeMeter,
    out: Path | None,
    *,
    steps: int,
    judges: bool,
    tells: bool,
) -> dict[str, Any]:
    """Judge the averaged weights. workers: that are left. serving: None where the worker has no place in a cluster that
    is whole. tells: its cluster tells of the one model, and writes OUT/model.safetensors. Returns its share of the
    summary but for tokens.
    """
    meter.conclude(steps, [] if serving is None else serving.node.played[-4 * len(serving.cut.pieces) :])
    totals, loss, text = meter.totals(), None, None
    if serving is not None:
        text = serving.text
        loss = serving.judge.loss(serving.validation()) if judges else None
        if tells:
            _save(config, serving, out)
    whole = sketch(config.model)
    parameters = sum(parameter.numel() for parameter in whole.parameters())
    dtype = next(whole.parameters()).dtype
    ddp = [sent_bytes(parameters, dtype, codec("none"), workers, position) for position in range(workers)]
    is_root = text is not None
    return totals | {
        "parameters": parameters if is_root and tells else 0,  # the summary goes by who has the one model
        "val_loss": loss if is_root and tells else None,
        "val_loss_replica": loss if is_root else None,
        "replica_std": 0.0,  # all have just taken the same mean
        "ddp_bytes": config.run.steps * sum(ddp) / len(ddp),
        "corpus_sha256": "" if text is None else text.corpus.sha256,
        "memory": None,
    }


def write_shard(config: Config, world: Mesh, out: Path, step: int, state: dict[str, Any]) -> None:
    """A worker's part of the checkpoint in the run directory `out`."""
    Checkpoints(out).write_shard(step, world.rank, state, run_name(config))
    world.report({"checkpoint": step, "worker": world.rank})


def _save(config: Config, serving: Serving, out: Path | None) -> None:
    whole = on_host(config.model, config.run.seed) if serving.text is not None else sketch(config.model)
    filled = assembled(serving.model, serving.world.stage, whole, serving.cut.pieces)
    if filled is not None and out is not None:
        save_model(filled, out / "model.safetensors")
