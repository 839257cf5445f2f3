"""Nodes of clusters as a run makes them: their rates, their memory, and their time beside stages that wait."""

from __future__ import annotations

from pathlib import Path

import pytest

import isles
from isles.comm.mesh import Mesh
from isles.memory.meter import MemoryMeter
from isles.plan.peers import plan_clusters
from isles.running.run import launch
from isles.training.clusters.stage_server import StageServer, cluster_cuts
from isles.training.config.inner import lr_factor
from isles.training.config.reading import read_config
from isles.training.config.sections import Config
from isles.training.kinds import layout_of

CLUSTER = [
    "model.layers=4",
    "model.d_model=32",
    "model.heads=2",
    "model.ffn=64",
    "model.context=32",
    "model.tie_embeddings=false",
    "data.batch_size=4",
    "replicas.method=none",
    "pipeline.clip=stage",
    "world.backend=virtual",
    "inner.warmup_steps=2",
]

SMALL = 2000  # bytes


def config(*more: str) -> Config:
    return read_config(None, {}, [*CLUSTER, *more])


def server(config: Config) -> StageServer:
    """What this worker of the one cluster holds."""
    made: list[StageServer] = []
    world = isles.mesh().arranged(layout_of(config))
    made.append(StageServer(config, world, cluster_cuts(config)[0], lambda stale: made[0].step(stale), None))
    return made[0]


def rates(_: Mesh, config: Config) -> list[float]:
    """Of each update."""
    own = server(config)
    found: list[float] = []
    own.optimizer.register_step_pre_hook(lambda optimizer, *_: found.append(optimizer.param_groups[0]["lr"]))
    own.node.run(own.batches(8))
    return found


def test_stage_lr_divides_by_how_old_a_gradient_is() -> None:
    made = config(
        "pipeline.routing=ravnest",
        "pipeline.ravnest.clusters=[[1, 2, 3]]",
        "pipeline.microbatches=1",
        'pipeline.ravnest.stage_lr="1/(1+tau)"',
        "world.workers=4",
    )
    for stage, own in enumerate(isles.run_virtual(rates, 4, args=(made,))):
        plain = [lr_factor(step + 1, made.run.steps, made.inner) * made.inner.lr for step in range(8)]
        assert own == [rate / (1 + min(step, 3 - stage)) for step, rate in enumerate(plain)]


def peak(_: Mesh, config: Config) -> int:
    """Bytes of all storages that a node's operations make."""
    own, meter = server(config), MemoryMeter()
    given = list(own.batches(6))
    meter.track(*own.model.parameters())
    with meter:
        own.node.run(given)
    return meter.peak


@pytest.mark.parametrize("recompute", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_node_holds_what_its_dry_run_says(recompute: bool) -> None:
    """Counted by every storage. Beside it lie messages, one that is awaited and one under way each way, and what an
    operation of a backward pass makes and drops: three tensors of the widest; and single numbers.
    """
    made = config(
        "pipeline.routing=ravnest",
        "pipeline.ravnest.clusters=[[1, 2, 3]]",
        "pipeline.microbatches=2",
        f"pipeline.recompute={str(recompute).lower()}",
        "world.workers=4",
    )
    shape, rows = made.model.shape(), 2
    stream = rows * shape.context * shape.d_model * 4
    for worker, counted in zip(plan_clusters(made).workers, isles.run_virtual(peak, 4, args=(made,)), strict=True):
        messages = 4 * (stream + rows * (shape.context + 1) * 2)
        passing = 3 * rows * shape.context * max(shape.ffn, shape.vocab if worker.stage == 3 else 0) * 4
        assert worker.memory.peak <= counted <= worker.memory.peak + messages + passing + SMALL, worker


@pytest.mark.parametrize("recompute", [False, pytest.param(True, marks=pytest.mark.long)])
def test_on_unequal_nodes_a_sample_takes_less_than_where_stages_wait(recompute: bool, tmp_path: Path) -> None:
    """On the virtual clock, the same cut, links and draws of jitter; the second node is half as fast."""
    shared = [
        "pipeline.microbatches=2",
        f"pipeline.recompute={str(recompute).lower()}",
        "data.validation_fraction=0",
        "world.workers=2",
        "world.virtual.step_factors=[1.0, 2.0]",
        "world.virtual.step_jitter=0.3",
        "run.steps=12",
    ]
    ways = {
        "waiting": ("pipeline.stages=2", "pipeline.cut=[3]", "pipeline.together=false"),
        "ravnest": ("pipeline.routing=ravnest", "pipeline.ravnest.clusters=[[3]]"),
    }
    seconds = {}
    for name, way in ways.items():
        made = config(*shared, *way)
        seconds[name] = launch(made, tmp_path / name, lambda line: None, lambda descriptor: None, None)[
            "virtual_seconds"
        ]
    assert seconds["ravnest"] < 0.9 * seconds["waiting"], seconds
