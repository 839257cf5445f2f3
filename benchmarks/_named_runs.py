"""The configurations of `benchmarks.same_bits`: every method of isles, and what may go with it."""

from __future__ import annotations

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
    """`isles train` with `settings`. resume: afterwards the end is taken away, and `isles resume` with these arguments
    makes it again.
    """

    settings: Sequence[str]
    resume: Sequence[str] | None = None


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

VIRTUAL = ["world.backend=virtual", "run.steps=8", "run.checkpoint_every=5"]
ISLANDS = ["world.inner=2", "inner.accumulation=2"]
COMMANDS: dict[str, Command] = {
    "train noloco": Command(settings=[*VIRTUAL, "replicas.sync_every=3"]),
    "train diloco, int8": Command(
        settings=[*VIRTUAL, "replicas.method=diloco", "replicas.sync_every=3", "replicas.codec=int8", "world.workers=3"]
    ),
    "train ddp, accumulated": Command(
        settings=[*VIRTUAL, "replicas.method=ddp", "inner.accumulation=2", "inner.max_norm=0.3", "world.workers=2"]
    ),
    "train streaming": Command(
        settings=[*VIRTUAL, "replicas.method=streaming-diloco", "replicas.sync_every=4", "world.step_jitter=0.2"]
    ),
    "train islands": Command(settings=[*VIRTUAL, *ISLANDS, "replicas.method=diloco", "replicas.sync_every=3"]),
    "train eager, resumed": Command(
        settings=[*VIRTUAL, "replicas.method=eager", "replicas.sync_every=3", "world.workers=2"], resume=[]
    ),
    "train diloco, regrouped": Command(
        settings=[*VIRTUAL, "replicas.method=diloco", "replicas.sync_every=3", "world.workers=3"],
        resume=["--workers", "2"],
    ),
    "train ist, resumed": Command(
        settings=[*VIRTUAL, "replicas.method=ist", "replicas.sync_every=3", "world.workers=2"], resume=[]
    ),
    "train noloco, real": Command(settings=["run.steps=4", "replicas.sync_every=3", "world.workers=2"]),  # processes
    "train fsdp, real": Command(settings=["replicas.method=fsdp", "run.steps=4", "world.workers=2"]),
}
