"""The runs of `benchmarks.same_bits`: every method of isles, and what may go with it.

All words of commands, settings and files that the record uses stand here, so that a script can rename them.

grid     every method x 1 to 4 workers, and every method x WORLDS, on the virtual clock
gloo     every method x 1 to 4 workers; through `isles train` every method once, and every world that processes can be
alone    stages, swarms, clusters and plans of memory, a feature each: not every pair of features
churned  CHURNED x seeds
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import isles

HALVES = (("first.weight", "first.bias"), ("second.weight",))  # fragments of `network`
JITTER = isles.Links(bandwidth=1e5, latency=0.02, jitter=0.4)
UNEVEN = {"links": JITTER, "speeds": (1.0, 1.4, 0.8, 1.1), "compute_jitter": 0.2}
AWAY = {"pauses": isles.Pauses(every=0.7, seconds=0.5), "deadlines": isles.Deadlines(outer=0.2)}


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A training loop of a user's own on the virtual clock: `method` with `options` around a small network.

    inner: workers of an island, in which DDP acts. batches: backward passes a step. max_norm: clip to it. resume: go on
    in new workers from the states after that step. clock: more for `isles.run_virtual`.
    """

    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    workers: int = 3
    inner: int = 1
    batches: int = 1
    max_norm: float | None = None
    resume: int | None = None
    clock: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Command:
    """`isles COMMAND --out RUN` with `settings`. resume: afterwards the end is taken away, and RESUME with these
    arguments makes it again. replay: afterwards REPLAY must find the same weights.
    """

    settings: Sequence[str]
    command: Sequence[str] = ("train",)
    resume: Sequence[str] | None = None
    replay: bool = False


H = {"sync_every": 3}
TOPK = {"sync_every": 3, "outer_lr": 0.4, "codec": "topk:40", "error_feedback": "global", "feedback_decay": 0.95}
BEHIND = {"sync_every": 3, "fragments": HALVES, "overlap_steps": 2, "codec": "int4", "error_feedback": "local"}
LATE = {"sync_every": 3, "outer_delay": 2, "fragments": HALVES, "codec": "int8"}
LOW_RANK = {"codec": "powersgd:1", "error_feedback": "local", "bucket_megabytes": 3e-4}
SMALL = {"bucket_megabytes": 2e-4}
DENSE_FIRST = {"sync_every": 3, "rank": 1, "start_compress": 1, "window": 0}
OTHER_BITS = {
    "compression_topk": 2,
    "compression_chunk": 4,
    "value_dtype": "sign",
    "transform": "random",
    "base": "muon",
}
CUSTOM = {
    "sync_every": 3,
    "outer_delay": 1,
    "landing": "carry",
    "codec": "powersgd:1+int4",
    "error_feedback": "local",
}

LOOPS: dict[str, Loop] = {
    "none": Loop(method="none", workers=2),
    "ddp": Loop(method="ddp"),
    "ddp, small buckets, clipped": Loop(method="ddp", options=SMALL, max_norm=0.2),
    "ddp, accumulated": Loop(method="ddp", options=SMALL, workers=4, batches=3, max_norm=0.2),
    "ddp, bf16": Loop(method="ddp", options={"codec": "bf16"}, workers=2),
    "ddp, low rank": Loop(method="ddp", options=LOW_RANK),
    "ddp, int4": Loop(method="ddp", options={"codec": "int4", "error_feedback": "global", "feedback_decay": 0.9}),
    "ddp, resumed": Loop(method="ddp", options=LOW_RANK, resume=5),
    "dct-dp": Loop(method="dct-dp", options={"sparsity": 0.9, "exclude_below": 20, "bucket_megabytes": 3e-4}),
    "localsgd, accumulated": Loop(method="localsgd", options=H, batches=2),
    "diloco": Loop(method="diloco", options=H, workers=4),
    "diloco, int8, clipped": Loop(method="diloco", options={**H, "codec": "int8"}, max_norm=0.2),
    "diloco, fp16, uneven": Loop(method="diloco", options={**H, "codec": "fp16"}, workers=4, clock=UNEVEN),
    "diloco, topk": Loop(method="diloco", options=TOPK),
    "diloco, topk, resumed": Loop(method="diloco", options=TOPK, resume=4),
    "streaming-diloco": Loop(method="streaming-diloco", options={**H, "fragments": HALVES}),
    "streaming, int4": Loop(method="streaming-diloco", options=BEHIND, workers=4),
    "streaming, resumed": Loop(method="streaming-diloco", options=BEHIND, resume=4),
    "delayed": Loop(method="delayed", options=H),
    "eager": Loop(method="eager", options=H, workers=4),
    "eager, int8, jitter": Loop(method="eager", options=LATE, clock={"links": JITTER}),
    "eager, resumed": Loop(method="eager", options=LATE, resume=4),
    "noloco": Loop(method="noloco", options=H, workers=4),
    "noloco, no prefetch": Loop(method="noloco", options={**H, "prefetch_phi": False, "seed": 7}),
    "noloco, single vector": Loop(method="noloco", options={**H, "exchange": "single_vector", "gamma": 0.4}),
    "noloco, theta only": Loop(method="noloco", options={**H, "exchange": "theta_only"}, workers=2),
    "noloco, lossy": Loop(method="noloco", options={**H, "codec": "int8", "anchor_codec": "bf16"}),
    "noloco, uneven": Loop(method="noloco", options=H, workers=4, clock=UNEVEN),
    "noloco, solo": Loop(method="noloco", options={**H, "on_peer_failure": "solo"}, workers=4, clock=AWAY),
    "noloco, resumed": Loop(method="noloco", options=H, workers=4, resume=5),
    "streaming-noloco": Loop(method="streaming-noloco", options={**H, "fragments": HALVES}, workers=4),
    "fedavg": Loop(method="fedavg", options=H),
    "slowmo": Loop(method="slowmo", options=H, workers=2),
    "postlocal-sgd": Loop(method="postlocal-sgd", options={**H, "every_step_until": 4}),
    "sparta": Loop(method="sparta", options={**H, "fraction": 0.3}),
    "sparseloco": Loop(method="sparseloco", options=H),
    "dilocox": Loop(method="dilocox", options=DENSE_FIRST),
    "dilocox, adaptive": Loop(method="dilocox", options={"sync_every": 2, "start_compress": 1, "window": 2}),
    "demo": Loop(method="demo", options={"check_every": 3}),
    "demo, signs": Loop(method="demo", options=OTHER_BITS),
    "ist": Loop(method="ist", options=H, workers=4),
    "ist, central": Loop(method="ist", options={**H, "server": "central", "sampler": "stratified"}),
    "ist, resumed": Loop(method="ist", options=H, resume=4),
    "custom": Loop(method="custom", options=CUSTOM),
    "islands, none": Loop(method="none", workers=4, inner=2),
    "islands, localsgd": Loop(method="localsgd", options=H, workers=4, inner=2, max_norm=0.2),
    "islands, diloco": Loop(method="diloco", options=H, workers=4, inner=2, batches=2),
    "islands, noloco": Loop(method="noloco", options=H, workers=4, inner=2),
    "islands, streaming, int4": Loop(method="streaming-diloco", options=BEHIND, workers=4, inner=2),
    "islands, eager, resumed": Loop(method="eager", options=LATE, workers=4, inner=2, resume=4),
}

# ---------------------------------------------------------------------------------------------------------------------
# The grid: every method

EVERY_STEP = {"none", "ddp", "fsdp", "dct-dp", "demo"}  # the methods without sync_every
OPTIONS: dict[str, dict[str, Any]] = {
    "dct-dp": {"sparsity": 0.9, "exclude_below": 20, "bucket_megabytes": 3e-4},
    "postlocal-sgd": {"every_step_until": 4},
    "sparta": {"fraction": 0.3},
    "dilocox": {"rank": 1, "start_compress": 1, "window": 0},
    "demo": {"check_every": 3},
    "custom": {"outer_delay": 1, "landing": "carry", "codec": "powersgd:1+int4", "error_feedback": "local"},
}


def options(method: str) -> dict[str, Any]:
    """With which `method` is run where nothing else is said."""
    return (H if method not in EVERY_STEP else {}) | OPTIONS.get(method, {})


for name in isles.METHODS:
    own = options(name) | ({"fragments": HALVES} if name.startswith("streaming") else {})
    for workers in range(1, 5):
        if name != "fsdp":  # which is among the commands
            LOOPS[f"{name} of {workers}"] = Loop(method=name, options=own, workers=workers)
    if name != "fsdp":
        LOOPS[f"{name} of 3, resumed"] = Loop(method=name, options=own, resume=4)

# ---------------------------------------------------------------------------------------------------------------------
# Commands. {home}: the folder of FILES; {run}: the run's

RESUME = ("resume", "{run}")
REPLAY = ("simulate", "{run}", "--replay", "--out", "{run}/again.safetensors")
MEMORY_PLAN = ("plan", "memory", "--json")
PATHS_PLAN = ("plan", "paths", "home-fibre", "--stages", "2,1,2", "--message", "4kB", "--task", "50ms")
PATHS_PLAN += ("--path-length", "67%", "--microbatches", "2x1", "--out", "{home}/paths.json")


def trace(*events: Mapping[str, float]) -> str:
    """A file for `--churn`."""
    return "".join(json.dumps(event) + "\n" for event in events)


JOINS_AND_LOSSES = (
    {"at": 0.15, "kill": 3}, {"at": 0.25, "join": 1}, {"at": 0.5, "leave": 2}, {"at": 0.6, "join": 2},
    {"at": 0.7, "pause": 1}, {"at": 0.9, "resume": 1},
)  # fmt: skip
FILES = {
    "trace.jsonl": trace(*JOINS_AND_LOSSES),
    "outage.jsonl": trace(*JOINS_AND_LOSSES, {"at": 1.0, "lighthouse": 0.4}, {"at": 1.2, "join": 1}),
}

SHORT = ["data.path={home}/text.txt", "data.batch_size=2", "data.validation_sequences=4", "model.device=cpu"]
SHORT += ["inner.warmup_steps=2", "run.steps=8", "run.log_every=1", "run.validate_every=4"]
SAVED = ["run.checkpoint_every=5"]
SMALL = [*SHORT, "model.d_model=16", "model.layers=2", "model.heads=2", "model.ffn=24", "model.context=16"]
SMALL += ["inner.lr=0.01"]
UNTIED = ["model.tie_embeddings=false"]
VIRTUAL, REAL = ["world.backend=virtual"], ["world.backend=distributed"]


def method(name: str, **more: Any) -> list[str]:
    """The settings of a method."""
    own = options(name) | more
    return [f"replicas.method={name}", *(f"replicas.{key}={value}" for key, value in own.items())]


FOUR, STAGES = ["world.workers=4"], ["pipeline.stages=2", "pipeline.microbatches=2"]
PLAN = ["memory.method=auto", "memory.machine=RTX 3060", "memory.device_budget=190kB"]
WORLDS: dict[str, list[str]] = {
    **{f"workers {count}": [f"world.workers={count}"] for count in range(1, 5)},
    "islands": [*FOUR, "world.inner=2", "inner.accumulation=2", "world.virtual.links=datacentres"],
    "dropped": [*FOUR, "world.inner=2", "world.drop_outer=0.5"],
    "stages": [*FOUR, *STAGES],
    "random": [*FOUR, *STAGES, "pipeline.routing=random"],
    "stages of islands": ["world.workers=8", *STAGES, "world.inner=2"],
    "recompute": ["world.workers=2", "memory.method=checkpoint"],
    "vectors": ["world.workers=2", "memory.vectors=disk", "memory.disk={home}"],
}
SIMULATED: dict[str, list[str]] = {  # what only the virtual clock can be
    "uneven": ["world.workers=3", "inner.accumulation=2", "inner.max_norm=0.3", "world.virtual.links=home-cable",
               "world.virtual.step_factors=[1.0,1.4,0.8]", "world.virtual.step_jitter=0.2"],
    "paused": ["world.workers=3", "world.virtual.links=worldwide", "world.virtual.pause_every=0.5",
               "world.virtual.pause_seconds=0.3"],
    "priced": ["world.workers=3", "run.priced_as=1B, A100, 64k"],
    "plan": ["world.workers=2", *PLAN],
    "plan, stages": [*FOUR, *STAGES, *UNTIED, "pipeline.loss_at=last", *PLAN],
}  # fmt: skip
ONE = "diloco"  # the method that meets every world also where only some do

COMMANDS: dict[str, Command] = {}
for name in isles.METHODS:
    for world, settings in (WORLDS | SIMULATED if name != "fsdp" else {}).items():  # which is of processes
        again = [] if world == "workers 2" or name == ONE else None
        here = [*SMALL, *SAVED, *VIRTUAL, *method(name), *settings]
        COMMANDS[f"{name}, {world}"] = Command(settings=here, resume=again)
    for world, settings in WORLDS.items():
        if world == "workers 2" or name == ONE or (name == "fsdp" and world.startswith("workers")):
            COMMANDS[f"{name}, {world}, real"] = Command(settings=[*SMALL, *SAVED, *REAL, *method(name), *settings])

# ---------------------------------------------------------------------------------------------------------------------
# Alone

DDP, DILOCO, NOLOCO = method("ddp"), method("diloco"), method("noloco")
THREE = [*UNTIED, "model.layers=3", "pipeline.stages=3", "pipeline.microbatches=2", "world.workers=3"]
LOST = [*THREE[1:], "pipeline.recovery.stage_loss=0.2"]
SWARM = [*UNTIED, "data.batch_size=8", "data.batch_mode=global", "pipeline.routing=swarm", "pipeline.microbatches=8"]
TWOS, FOURS = ["pipeline.swarm.peers=[2,2]", *FOUR], ["pipeline.swarm.peers=[4,4]", "world.workers=8"]
SOLO = method("noloco", on_peer_failure="solo", prefetch_phi="false")
NONE = ["replicas.method=none"]
CLUSTERS = [*UNTIED, "model.layers=4", "replicas.method=localsgd", "replicas.sync_every=4", "pipeline.routing=ravnest"]
CLUSTERS += ["pipeline.microbatches=2", "pipeline.clip=stage"]
ALIKE, UNLIKE = (
    ["pipeline.ravnest.clusters=[[2],[2]]", *FOUR],
    ["pipeline.ravnest.clusters=[[1,2],[3],[]]", "world.workers=6"],
)
ALONE: dict[str, list[str]] = {
    "stages, all in flight": [*DDP, *THREE, "pipeline.in_flight=all", "pipeline.order=arrival"],
    "stages, 1f1b, recomputed": [*DDP, *THREE, "pipeline.in_flight=1f1b", "pipeline.recompute=true"],
    "stages, cut": [*NOLOCO, *THREE, "pipeline.cut=[1,2]", "pipeline.clip=stage", "pipeline.loss_at=origin"],
    "stages, apart": [*DILOCO, *FOUR, *STAGES, "pipeline.together=false", "world.virtual.step_jitter=0.3"],
    "stages, coordinates": [*DDP, *THREE, "pipeline.boundary.kind=subspace:8", "pipeline.boundary.update_every=3"],
    "stages, row-wise": [*DDP, *THREE, "pipeline.boundary.kind=subspace:8", "pipeline.boundary.form=row-wise"],
    "stages, projected": [*DDP, *THREE, "pipeline.boundary.kind=subspace:8", "pipeline.boundary.form=projected"],
    "stages, dct": [*DDP, *THREE, "pipeline.boundary.kind=dct:0.75"],
    "stages, bottleneck": [*DDP, *THREE, "pipeline.boundary.kind=bottleneck:8"],
    "stages, maxout": [*DDP, *THREE, "pipeline.boundary.kind=maxout:8", "pipeline.loss_at=last"],
    "stages, int8": [*DDP, *THREE, "pipeline.boundary.codec=int8", "pipeline.boundary.gradient_codec=bf16"],
    **{f"stages, lost, {kind}": [*DDP, *LOST, f"pipeline.recovery.kind={kind}"]
       for kind in ("checkfree", "checkfree+", "average", "copy", "random")},
    "stages, lost, checkpoint": [*DDP, *LOST, "pipeline.recovery.kind=checkpoint", "pipeline.recovery.every=2"],
    "paths": [*DDP, "model.layers=3", "pipeline.stages=3", "pipeline.microbatches=2", "pipeline.routing=skippipe",
              "pipeline.skippipe.plan={home}/paths.json", "world.virtual.links=home-fibre", "world.workers=5"],
    "swarm": [*NONE, *SWARM, *TWOS],
    "swarm, strict": [*NONE, *SWARM, *TWOS, "pipeline.swarm.consistency=strict"],
    "swarm, relaxed, int8": [*NONE, *SWARM, *TWOS, "pipeline.swarm.consistency=relaxed",
                             "pipeline.boundary.codec=int8"],
    "swarm, delayed": [*NONE, *SWARM, *TWOS, "pipeline.swarm.delay_updates=1"],
    "swarm, moves": [*NONE, *SWARM, "pipeline.swarm.peers=[3,1]", *FOUR, "pipeline.swarm.rebalance=throughput",
                     "pipeline.swarm.rebalance_every=0.2", "pipeline.swarm.hysteresis=0.05",
                     "world.virtual.step_jitter=0.2"],
    "swarm, uneven": [*NONE, *SWARM, *TWOS, "world.virtual.step_factors=[1.0,2.0,1.0,0.5]",
                      "world.virtual.links=home-cable"],
    "swarm, diloco": [*DILOCO, *SWARM, *TWOS],
    "swarm, noloco": [*SOLO, *SWARM, *TWOS],
    "clusters": [*CLUSTERS, *ALIKE],
    "clusters, unlike": [*CLUSTERS, *UNLIKE, "pipeline.ravnest.average_optimizer=true",
                         "pipeline.ravnest.stage_lr=1/(1+tau)"],
    "clusters, one more": [*CLUSTERS, *ALIKE[:1], "world.workers=5",
                           "world.virtual.step_factors=[1.0,1.5,1.0,1.0,1.0]"],
    "plan, early": [*DDP, *WORLDS["workers 2"], *PLAN, "memory.update=early", "inner.max_norm=0"],
    "plan, shared": [*DDP, *WORLDS["workers 2"], *PLAN, "memory.shard=true"],
    "plan, islands": [*DILOCO, *FOUR, "world.inner=2", *PLAN],
    "plan, karma": [*DDP, *WORLDS["workers 2"], "memory.method=karma", "memory.machine=RTX 3060"],
    "plan, autohete": [*DDP, *WORLDS["workers 2"], *PLAN, "memory.method=autohete"],
    "bf16, sgd": [*DILOCO, *FOUR, "model.autocast=bf16", "inner.optimizer=sgd"],
    "float64": [*NOLOCO, *FOUR, "model.dtype=float64", "data.batch_mode=global", "data.batch_size=8"],
}  # fmt: skip
ALONE_REAL: dict[str, list[str]] = {
    "shards": [*DILOCO, *FOUR, "world.inner=2", "world.inside=fsdp"],
    "stages, int8": ALONE["stages, int8"],
    "paths": [word for word in ALONE["paths"] if not word.startswith("world.virtual.links")],
    "swarm": [
        *NONE,
        *SWARM,
        "pipeline.swarm.peers=[1,1]",
        "world.workers=2",
    ],  # with more it is the clock that shares out
    "clusters": ALONE["clusters"],
}
COMMANDS |= {name: Command(settings=[*SMALL, *SAVED, *VIRTUAL, *own], resume=[]) for name, own in ALONE.items()}
COMMANDS |= {f"{name}, real": Command(settings=[*SMALL, *REAL, *own]) for name, own in ALONE_REAL.items()}
COMMANDS |= {
    "embedded model, streaming": Command(settings=[*SHORT, *VIRTUAL, *method("streaming-diloco")]),
    "regrouped": Command(settings=[*SMALL, *SAVED, *VIRTUAL, *DILOCO, *WORLDS["workers 3"]], resume=["--workers", "2"]),
    "cut again": Command(settings=[*SMALL, *SAVED, *VIRTUAL, *DILOCO, *WORLDS["workers 2"]], resume=["--stages", "2"]),
}

# ---------------------------------------------------------------------------------------------------------------------
# Churned

LONGER = [*SMALL, "run.steps=24"]
SEEDS = range(3)
CHURNED: dict[str, tuple[str, list[str]]] = {
    "noloco": ("10%/s", [*NOLOCO, *FOUR]),
    "diloco": ("10%/s", [*DILOCO, *FOUR]),
    "diloco, int8": ("10%/s", [*method("diloco", codec="int8"), *FOUR, "world.elastic.join_state=anchors"]),
    "diloco, quorum": ("10%/s", [*method("diloco", on_late="quorum"), *FOUR, "world.virtual.step_jitter=0.5"]),
    "noloco, ramp": ("ramp-up", [*NOLOCO, *FOUR]),
    "diloco, outage": ("{home}/outage.jsonl", [*DILOCO, *FOUR]),
    "noloco, outage": ("{home}/outage.jsonl", [*NOLOCO, *FOUR]),
    "swarm": ("8%/s", [*NONE, *SWARM, *FOURS]),
    "swarm, trace": ("{home}/trace.jsonl", [*NONE, *SWARM, *FOURS]),
    "swarm, strict": ("8%/s", [*NONE, *SWARM, *FOURS, "pipeline.swarm.consistency=strict"]),
    "swarm, relaxed": ("8%/s", [*NONE, *SWARM, *FOURS, "pipeline.swarm.consistency=relaxed"]),
    "swarm, diloco": ("8%/s", [*DILOCO, *SWARM, *FOURS]),
    "swarm, noloco": ("8%/s", [*SOLO, *SWARM, *FOURS]),
    "clusters": ("8%/s", [*CLUSTERS, *UNLIKE]),
}
for name, (rate, own) in CHURNED.items():
    for seed in SEEDS:
        COMMANDS[f"churned {name}, seed {seed}"] = Command(
            command=("simulate", "--churn", rate),
            settings=[*LONGER, *own, f"run.seed={seed}"],
            replay=name in ("noloco", "diloco") and seed == 0,
        )

# ---------------------------------------------------------------------------------------------------------------------
# Plans that are printed

LARGE = ["model.size=1B", "data.batch_size=4", "memory.machine=RTX 3060", "memory.device_budget=10GiB"]
PLANS: dict[str, list[str]] = {
    "memory plan, auto": [*LARGE, "memory.method=auto"],
    "memory plan, early": [*LARGE, "memory.method=auto", "memory.update=early", "inner.max_norm=0"],
    "memory plan, autohete": [*LARGE, "memory.method=autohete"],
    "memory plan, karma": [*LARGE, "memory.method=karma", "model.size=300M"],
    "memory plan, checkpoint": [*LARGE, "memory.method=checkpoint", "model.size=300M"],
    "memory plan, stages": [*LARGE, *UNTIED, *STAGES, "memory.method=auto", "pipeline.loss_at=last"],
}
