"""Walks Isles on the fake GPU, in a process of its own, for torch must not have been imported before it is installed:

    python -m tests.device.walk [--long] OUT

writes a row a case to OUT, as JSON by the case's name: what was found, or {"error": the end of the traceback}.
"""

from __future__ import annotations

import gc
import json
import math
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.device import fake_cuda

DEVICES = 3  # two workers have one each, and cuda:0, which is the current one everywhere, nobody should touch
fake_cuda.install(DEVICES)

import torch  # noqa: E402

import isles  # noqa: E402
from isles.comm.codecs import form  # noqa: E402
from isles.comm.codecs.kinds import FORMS  # noqa: E402
from isles.memory.engines.cuda import CudaMoves  # noqa: E402
from isles.pipeline.boundaries.base import FullStream  # noqa: E402
from isles.pipeline.wire import StageForm  # noqa: E402
from isles.replicas.island.island import Copies  # noqa: E402
from isles.training.clusters.node import ClusterWorker  # noqa: E402
from isles.training.config.reading import read_config  # noqa: E402
from isles.training.kinds import layout_of  # noqa: E402
from isles.training.loop import TrainingLoop  # noqa: E402
from isles.training.swarm.trainer import SwarmTrainer  # noqa: E402
from isles.training.trainer import Trainer  # noqa: E402
from isles.training.worker import trainer_of  # noqa: E402
from tests.device import ordered, workers, worlds  # noqa: E402
from tests.device.table import BFLOAT16, IN_ONE_PROCESS, QUICK  # noqa: E402

Case = Callable[[Path], Any]


# ---------------------------------------------------------------------------------------------------------------------
# What the fake GPU refuses, and counts


def _refusals(_: Path) -> dict[str, str]:
    """What CUDA refuses, and how it was refused here; "" where it was not."""
    here, there = torch.ones(4, 4), torch.ones(4, 4, device="cuda:1")
    embedding = torch.nn.functional.embedding
    tried: dict[str, Callable[[], object]] = {
        "sum": lambda: there + here,
        "two devices": lambda: there + there.to("cuda:2"),
        "numpy": there.numpy,
        "cat": lambda: torch.cat([there, here]),
        "equal": lambda: torch.equal(there, here),
        "foreach": lambda: torch._foreach_lerp_([there], [here], 0.5),
        "foreach, the host first": lambda: torch._foreach_sub([here], [there]),
        "generator": lambda: there.normal_(generator=torch.Generator()),
        "embedding": lambda: embedding(torch.zeros(2, dtype=torch.int64), there),
        "index": lambda: here[there[0].long()],
        "no such device": lambda: torch.empty(1, device=f"cuda:{DEVICES}"),
        "pinned there": lambda: torch.empty(1, device="cuda:1", pin_memory=True),
    }
    found = {}
    for name, attempt in tried.items():
        try:
            attempt()
            found[name] = ""
        except (RuntimeError, TypeError) as error:
            found[name] = str(error)
    return found


def _counted(_: Path) -> dict[str, Any]:
    """(copies up, bytes, copies down, bytes, waits) of single lines."""
    there, pinned = torch.ones(4, 4, device="cuda:1"), torch.ones(4, 4).pin_memory()
    half, mask = torch.ones(4, 4).bfloat16(), there > 0
    lines: dict[str, Callable[[], object]] = {
        "kernel": lambda: there * 2,
        "up": lambda: there.copy_(torch.ones(4, 4)),
        "up, pinned": lambda: there.copy_(pinned),
        "up, at once": lambda: there.copy_(pinned, non_blocking=True),
        "up, at once, pageable": lambda: there.copy_(torch.ones(4, 4), non_blocking=True),
        "up, converted": lambda: there.copy_(half),
        "up, converted there": lambda: there.copy_(half.pin_memory(), non_blocking=True),
        "down": there.cpu,
        "down, a list": lambda: torch._foreach_copy_([pinned, half], [there, there]),
        "number": there.sum().item,
        "mask": lambda: there[mask],
        "places of the host": lambda: there[torch.tensor([0, 2])],
        "synchronize": lambda: torch.cuda.synchronize("cuda:1"),
    }
    found = {}
    for name, line in lines.items():
        before = fake_cuda.counts(1)
        line()
        told = fake_cuda.since(before, 1)
        found[name] = [told[key] for key in ("to_device", "to_device_bytes", "to_host", "to_host_bytes", "waits")]
    return found


def _own_state(_: Path) -> dict[str, bool]:
    """Generators, new memory, autograd, autocast, a scaler."""
    torch.manual_seed(3)
    host, first = torch.get_rng_state(), torch.rand(2, device="cuda:1")
    is_left = torch.equal(host, torch.get_rng_state())
    kept = torch.cuda.get_rng_state("cuda:1")
    second = torch.rand(2, device="cuda:1")
    torch.cuda.set_rng_state(kept, "cuda:1")
    again = torch.rand(2, device="cuda:1")
    layer = torch.nn.Linear(4, 4).to("cuda:1")
    inner, scaler = torch.optim.AdamW(layer.parameters(), fused=True), torch.amp.GradScaler("cuda")
    with torch.autocast("cuda", dtype=torch.float16):
        out = layer(torch.ones(2, 4, device="cuda:1"))
    scaler.scale(out.float().sum()).backward()
    scaler.step(inner)
    scaler.update()
    return {
        "a device draws for itself": torch.equal(first.cpu(), torch.rand(2, device="cuda:2").cpu()),
        "the host's generator is left": is_left,
        "a state is restored": torch.equal(second, again) and not torch.equal(first, second),
        "dropout draws there": torch.nn.functional.dropout(again).device == again.device,
        "new memory is NaN": bool(torch.empty(100, device="cuda:1").isnan().all()),
        "autocast": out.dtype == torch.float16,
        "gradients are there": str(layer.weight.grad.device) == "cuda:1",
    }


# ---------------------------------------------------------------------------------------------------------------------
# Methods and codecs


@cache
def _plain(name: str) -> tuple[list[dict[str, Any]], bool]:
    """A method's run on the GPU, and whether the current device was left alone."""
    return _ran(name, {})


def _ran(name: str, options: dict[str, Any]) -> tuple[list[dict[str, Any]], bool]:
    idle = fake_cuda.counts(0)
    return workers.run(name, "cuda", options=options), not any(fake_cuda.since(idle, 0).values())


def _compared(name: str, options: dict[str, Any], goes_on: bool, _: Path) -> dict[str, Any]:
    """A method on the GPU, going on from its checkpoint there, and on the CPU."""
    on_gpu, untouched = _ran(name, options) if options else _plain(name)
    found: dict[str, Any] = {"untouched": untouched}
    if goes_on:
        again = workers.run(name, "cuda", [one["file"] for one in on_gpu], options)
        found["same_bits"] = all(torch.equal(a["weights"], b["weights"]) for a, b in zip(on_gpu, again, strict=True))
    on_cpu = workers.run(name, "cpu", options=options)
    return found | _differences(on_gpu, on_cpu)


def _differences(on_gpu: list[dict[str, Any]], on_cpu: list[dict[str, Any]]) -> dict[str, Any]:
    pairs = list(zip(on_gpu, on_cpu, strict=True))
    return _own(on_gpu) | {
        "losses": [max(abs(a["losses"][step] - b["losses"][step]) for a, b in pairs) for step in on_cpu[0]["losses"]],
        "judged": max(abs(a[key] - b[key]) for a, b in pairs for key in ("judged", "consolidated")),
        "bytes": [[a["bytes"], b["bytes"]] for a, b in pairs],
    }


def _counts(name: str, _: Path) -> dict[str, Any]:
    """Of a method on the GPU alone."""
    return _own(_plain(name)[0])


def _sharded(_: Path) -> dict[str, Any]:
    """As `_compared`, of a method whose workers are processes."""
    import torch._dynamo
    import torch.distributed.fsdp  # noqa: F401  # else both would load them

    found = worlds.found(partial(worlds.compared, "fsdp"))
    told = {key: all(one[key] for one in found) for key in ("untouched", "same_bits")}
    return told | _differences([one["cuda"] for one in found], [one["cpu"] for one in found])


def _world(name: str, _: Path) -> dict[str, Any]:
    """Of two processes, each with a GPU of its own."""
    worlds.load(name)
    return _own(worlds.found(partial(worlds.trained, name)))


def _own(on_gpu: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "strays": [stray for one in on_gpu for stray in one["strays"]],
        "counts": [one["counts"] for one in on_gpu],
        "there": [[*one["losses"].values(), one["judged"], one["consolidated"]] for one in on_gpu],
    }


def _shape(_: Path) -> dict[str, Any]:
    """Of the model that is trained: what copies are counted against."""
    model = workers.Decoder(workers.SHAPE)
    sizes = [parameter.numel() for parameter in model.parameters()]
    return {"bytes": 4 * sum(sizes), "sizes": sizes}


def _islands(_: Path) -> dict[str, Any]:
    """Of a worker of an island: what it counts while it looks whether its copy is finite, and while it spreads its
    shares.
    """

    def counted(world: isles.Mesh) -> list[dict[str, int]]:
        optimizer, found = workers.made(world, "ddp", torch.device("cuda", world.rank + 1)), []
        replica, every = Copies(optimizer), range(len(optimizer.parameters))
        for part in (replica.is_sound, lambda: replica.spread(every)):
            before = fake_cuda.counts(world.rank + 1)
            part()
            found.append(fake_cuda.since(before, world.rank + 1))
        return found

    return dict(zip(("is_sound", "spread"), isles.run_virtual(counted, 2)[1], strict=True))


def _between_stages(_: Path) -> dict[str, Any]:
    """Copies down, up and waits of a message forward and one backward, packed and unpacked; whether they arrived."""
    form = StageForm(sequences=2, length=16, vocab=200, dtype=torch.float32, boundary=FullStream(8))
    there = torch.device("cuda:1")
    stream, ids = torch.randn(form.payload_shape, device=there), torch.randint(0, 200, form.ids_shape, device=there)
    counts: list[list[int]] = []

    def counted(call: Callable[..., Any], *args: Any) -> Any:
        before = fake_cuda.counts(1)
        made, now = call(*args), fake_cuda.since(before, 1)
        counts.append([now[key] for key in ("to_host", "to_device", "waits")])
        return made

    payload, _side, tokens = counted(form.unpack, counted(form.pack, stream, None, ids), there)
    gradient, loss = counted(form.unpack_back, counted(form.pack_back, stream, stream.sum()), there)
    pairs = ((payload, stream), (tokens, ids), (gradient, stream), (loss, stream.sum()))
    return {"counts": counts, "arrived": [torch.equal(one, other) for one, other in pairs]}


def _pinned(_: Path) -> dict[str, list[int]]:
    """Bytes of the host that two workers have pinned between rounds, by method, and what they say themselves."""

    def worked(world: isles.Mesh, name: str) -> tuple[int, int]:
        device = torch.device("cuda", world.rank + 1)
        optimizer = workers.made(world, name, device)
        while optimizer.steps < 4:
            optimizer.model(workers.batch(world.rank, optimizer.steps, device)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        world.world.barrier()
        now = fake_cuda.pinned_bytes()
        world.world.barrier()
        return now, sum(held.nbytes for held in optimizer.memory() if held.when == "pinned")

    found = {}
    for name in ("diloco", "streaming-diloco", "ddp", "ist", "demo"):
        gc.collect()  # what earlier methods have pinned
        before = fake_cuda.pinned_bytes()
        told = isles.run_virtual(worked, 2, args=(name,))
        found[name] = [told[0][0] - before, sum(foretold for _, foretold in told)]
    return found


def _node_seconds(_: Path) -> dict[str, Any]:
    """Kernels of two stretches of a node of a cluster, with a line in the middle of either; its seconds."""
    config, own = read_config(None, {"replicas.method": "none", "world.workers": 1}, []), torch.ones(4, device="cuda:1")
    lines: list[dict[str, Any]] = []
    node: Any = object.__new__(ClusterWorker)
    TrainingLoop.__init__(node, config, replace(isles.init(), report=lines.append), "", own.device, None)
    node._gauges, node.played, node.steps_done, node.server = dict, list, lambda: step, None
    kernels = [fake_cuda.counts(1)["kernels"]]
    for step in (1, 2):
        with node.step_clock.step(node.timeline):
            node.losses, node.tokens = [own.sum()], 8 * step
            TrainingLoop.report(node, {})
            own.add_(1)
        kernels.append(fake_cuda.counts(1)["kernels"])
        time.sleep(0.002)  # of no stretch
    totals = node.totals()
    told = [line for line in lines if "loss" in line]
    return {"kernels": kernels[-1] - kernels[0], "seconds": totals["compute_seconds"], "lines": told}


def _ordered(judge: Callable[[str], dict[str, Any]], name: str, _: Path) -> dict[str, Any]:
    return judge(name)


def _lanes(_: Path) -> dict[str, Any]:
    """Of a memory plan's lanes on cuda:1 while cuda:0 is the current one; of batches on their way."""
    moves, layers = CudaMoves(torch.device("cuda:1")), [torch.nn.Linear(65, 65, device="cuda:1") for _ in range(30)]
    model = torch.nn.Sequential(*layers)
    moves.fill([torch.empty(4, 4, device="cuda:1", dtype=torch.bfloat16)], [torch.ones(4, 4)])
    pinned, values = fake_cuda.pinned_bytes(), [one.detach().cpu() for one in model.parameters()]
    moves.offload({id(one) for one in model.parameters()}, model)
    trainer: Any = object.__new__(Trainer)
    trainer.text, trainer.device, trainer.tokens = SimpleNamespace(batch=lambda: torch.ones(2, 9)), moves.device, 0
    trainer.config, before = SimpleNamespace(inner=SimpleNamespace(accumulation=2)), fake_cuda.counts(1)
    batches = [str(one.device) for one in trainer._batches()]
    return {
        "events": [event._device for event in moves._ring()._copied if event._device is not None],
        "pinned": (fake_cuda.pinned_bytes() - pinned) / sum(one.nbytes for one in values),
        "placed": all(torch.equal(one, before) for one, before in zip(model.parameters(), values, strict=True)),
        "batches": batches,
        "waits": fake_cuda.since(before, 1)["waits"],
    }


def _machines(_: Path) -> dict[str, Any]:
    """What is said of cuda:1, which is half as large as cuda:0 is."""
    from isles.training.clusters import member as peering
    from isles.training.clusters import stage_server as describing
    from isles.training.memory.plans import _free_bytes, machine_of

    describing._FOR = 0.0
    one, both = (read_config(None, {}, [f"model.device={device}", "world.workers=2"]) for device in ("cuda:1", "cuda"))
    peer = object.__new__(peering.ClusterParticipant)
    peer.config, peer.notify, peer._session = one, lambda line: None, None
    peering.measure_lighthouse_link = lambda session: None
    kernels = fake_cuda.counts(1)["kernels"]
    node = peer._measured()
    return {
        "node": node.memory,
        "node's kernels": fake_cuda.counts(1)["kernels"] - kernels,
        "plan": machine_of(both).name,
        "plan of one": machine_of(one).name,
        "free": _free_bytes(both),
    }


def _of_codec(name: str) -> dict[str, Any]:
    """Options of DiLoCo with it."""
    is_biased = form(name).biased if hasattr(form(name), "biased") else True
    return {"settings": {"sync_every": 3, "codec": name, **({"error_feedback": "local"} if is_biased else {})}}


def _measured(_: Path) -> dict[str, Any]:
    """A run of one worker on cuda:1, on the host's clock: what its steps called there, and what it tells of that."""
    on = [*TINY[:-2], "model.device=cuda:1", "world.threads=1"]
    lines: list[dict[str, Any]] = []
    world = replace(isles.init(), report=lines.append)
    trainer = trainer_of(read_config(None, {"replicas.method": "none", "world.workers": 1, "run.steps": 6}, on), world)
    steps: list[dict[str, int]] = []
    stretches: list[float] = []
    step, trainer.timeline.step = trainer.step, lambda start, end: stretches.append(end - start)

    def counted() -> None:
        before = fake_cuda.counts(1)
        step()
        steps.append(fake_cuda.since(before, 1))

    trainer.step = counted
    result = trainer.run(None)
    saved = trainer.state_dict()
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    return {
        "kernels": [one["kernels"] for one in steps],
        "waits": [one["waits"] for one in steps],
        "stretches": stretches,
        "lines": [line for line in lines if "loss" in line],
        "seconds": result["compute_seconds"],
        "saved": saved["training_seconds"],
        "parameters": parameters,
    }


def _swarm_seconds(_: Path) -> list[float]:
    """Milliseconds of the peers of a swarm: of their steps, and of what they wait for between them."""
    return [one["milliseconds"] for one in worlds.found(_peer)]


def _peer() -> dict[str, float]:
    on = [*TINY[:-2], "model.device=cuda", *_STAGES, "pipeline.routing=swarm"]
    config = read_config(None, {"replicas.method": "none", "world.workers": 2, "run.steps": 4}, on)
    trainer = SwarmTrainer(config, isles.init().arranged(layout_of(config)))
    trainer.run(None)
    trainer.step_clock.read()
    return {"milliseconds": 1000 * trainer.step_clock.seconds}


def _elastic_seconds(folder: Path) -> dict[str, list[float]]:
    """Milliseconds of a step that the worker of an elastic run on cuda:1 tells the lighthouse, and of its rounds."""
    from isles.membership.client import MembershipClient
    from isles.training.config.reading import gather
    from isles.training.elastic.support import elastic
    from tests.training.elastic.runs import Run

    on = [*TINY[:-2], "model.device=cuda:1", "run.steps=6", "world.workers=1", "replicas.sync_every=3"]
    config, told, pace = elastic(gather(None, {"replicas.method": "diloco"}, on)), list[float](), MembershipClient.pace

    def heard(line: MembershipClient, seconds: float) -> None:
        told.append(1000 * seconds)
        pace(line, seconds)

    with mock.patch.object(MembershipClient, "pace", heard):
        world = Run(config, folder / "run")
        world.own = {}
        world.join()
        world.end()
    return {"told": told, "rounds": [1000 * row["seconds"] for row in _rounds(world.out)]}


def _rounds(out: Path) -> list[dict[str, Any]]:
    """Of all workers of an elastic run."""
    return [row for row in map(json.loads, (out / "exchanges.jsonl").read_text().splitlines()) if "outcome" in row]


TINY = [
    *("model.d_model=16", "model.layers=2", "model.heads=2", "model.ffn=24", "model.context=16", "data.batch_size=2"),
    *("data.validation_sequences=4", "inner.warmup_steps=2", "run.validate_every=0", "run.log_every=2"),
    *("world.backend=virtual", "model.device=cuda"),
]


def _isles(*words: str) -> None:
    import isles.report
    from isles.cli import app

    isles.report.write_report = Path  # nobody looks at it
    app(list(words), standalone_mode=False)


def _train(out: Path, method: str, *settings: str, workers: int = 2, device: str = "cuda") -> float:
    """The run's validation loss."""
    words = [word for pair in (*TINY, *settings, f"model.device={device}") for word in ("--set", pair)]
    _isles("train", "--method", method, "--workers", str(workers), "--steps", "6", *words, "--out", str(out))
    return _judged(out)


def _judged(out: Path) -> float:
    return json.loads((out / "summary.json").read_text())["val_loss"]


def _by_a_plan(folder: Path) -> dict[str, Any]:
    """SkipPipe: whose microbatches leave stages out."""
    from tests.training.test_partial import small, words, write_plan

    folder.mkdir(exist_ok=True)
    made = write_plan(folder, small())
    return _trained("ddp", *words(folder, made), "model.tie_embeddings=false", workers=made.problem.nodes)(folder)


def _experts(folder: Path) -> dict[str, float]:
    """Experts of a router, and the loss of their mixture, in nats a byte."""
    from isles.experts.jobs import JobProgress
    from tests.experts import small

    config, found = small.write_domains(folder / "texts"), {}
    for on in ("cuda", "cpu"):
        out, asked = folder / on, (f"model.device={on}", "world.backend=virtual")
        mean = small.made("smalltalk", config, out, *asked).evaluate(JobProgress())["mean"]
        found[on] = math.log(mean["trained"]["all"]["mixture"])
    return found


def _coming_and_going(folder: Path) -> dict[str, float]:
    """Workers that come while others train take a state over: weights, moments, anchors, outer momenta."""
    found = {}
    trace = folder / "trace.jsonl"
    trace.write_text('{"at": 0.25, "join": 1}\n')
    for on in ("cuda", "cpu"):
        words = [
            word
            for one in (*TINY[:-2], _H2, f"model.device={on}", "world.virtual.links=lan")
            for word in ("--set", one)
        ]
        plain = ("--methods", "diloco", "--workers", "2", "--steps", "20", "--churn", str(trace))
        _isles("simulate", *plain, *words, "--out", str(folder / on))
        (summary,) = (folder / on).rglob("summary.json")
        told = json.loads(summary.read_text())
        steps = sum(row["steps"] for row in _rounds(summary.parent) if row["member"] == 2)
        found |= {on: told["val_loss"], f"gifts {on}": told["state_transfers"], f"joiner {on}": steps}
    return found


def _trained(method: str, *settings: str, workers: int = 2, on_cpu: bool = True) -> Case:
    """A run on GPUs, and the same on the CPU."""

    def case(folder: Path) -> dict[str, Any]:
        found = {"cuda": _train(folder / "cuda", method, *settings, workers=workers)}
        if on_cpu:
            found["cpu"] = _train(folder / "cpu", method, *settings, workers=workers, device="cpu")
        return found

    return case


def _from_run_to_export(folder: Path) -> dict[str, Any]:
    """A run that stops and goes on, here and on the other kind of device; eval, generate, export."""
    run, settings = folder / "run", ("replicas.sync_every=2", "run.checkpoint_every=3")
    _train(run, "noloco", *settings)
    found: dict[str, Any] = {"resumed": {}, "losses": {"": _judged(run)}}
    for device in ("cuda", "cpu"):
        copy = folder / device
        shutil.copytree(run, copy)
        for result in ("model.safetensors", "summary.json"):
            (copy / result).unlink()
        _isles("resume", str(copy), "--step", "3", "--device", device)
        found["losses"][device] = _judged(copy)
        found["resumed"][device] = (copy / "model.safetensors").read_bytes() == (run / "model.safetensors").read_bytes()
    kernels = [fake_cuda.counts(2)["kernels"]]
    for words in (["eval"], ["generate", "--prompt", "a", "--tokens", "4"], ["export", "--format", "safetensors"]):
        _isles(words[0], str(run), *words[1:], "--device", "cuda:2")
        kernels.append(fake_cuda.counts(2)["kernels"])
    return found | {"kernels": [after - before for before, after in pairwise(kernels)]}


# ---------------------------------------------------------------------------------------------------------------------

_H2 = "replicas.sync_every=2"
_STAGES = ("pipeline.stages=2", "pipeline.microbatches=2", "model.tie_embeddings=false")
_CLUSTERS = (*_STAGES[1:], "model.layers=4", "pipeline.routing=ravnest", "pipeline.ravnest.clusters=[[2],[1]]")
_CLUSTERS += ("pipeline.clip=stage",)
CASES: dict[str, Case] = {  # worlds first, see there
    **{f"world {name}": partial(_world, name) for name in ("diloco", "ddp")},
    "method fsdp": _sharded,
    "swarm's milliseconds": _swarm_seconds,
    "native": lambda _: worlds.found(worlds.killed, heard=1)[0],
    "elastic milliseconds": _elastic_seconds,
    "refusals": _refusals,
    "counted": _counted,
    "own state": _own_state,
    "shape": _shape,
    "islands": _islands,
    "pinned": _pinned,
    "between stages": _between_stages,
    "node's seconds": _node_seconds,
    "machines": _machines,
    "measured": _measured,
    "lanes": _lanes,
    "order native": lambda _: ordered.native(),
    **{f"counts {name}": partial(_counts, name) for name in IN_ONE_PROCESS},
    **{f"method {name}": partial(_compared, name, {}, True) for name in IN_ONE_PROCESS},
    **{f"order {name}": partial(_ordered, ordered.races, name) for name in ordered.METHODS},
    **{f"mutant {name}": partial(_ordered, ordered.mutant, name) for name in ordered.MUTANTS},
    **{f"bfloat16 {name}": partial(_compared, name, {"dtype": torch.bfloat16}, False) for name in BFLOAT16},
    **{f"codec {name}": partial(_compared, "diloco", _of_codec(name), False) for name in FORMS},
    "run": _from_run_to_export,
    "train fp16": _trained("diloco", _H2, "model.autocast=fp16", on_cpu=False),
    "train fp16 demo": _trained("demo", "model.autocast=fp16", on_cpu=False),
    "train stages": _trained("noloco", _H2, *_STAGES, workers=4),
    "train islands": _trained("diloco", _H2, "world.inner=2", workers=4),
    "train bf16": _trained("ddp", "model.autocast=bf16"),
    "train swarm": _trained("none", *_STAGES, "pipeline.routing=swarm", workers=4),
    "train checkpoint": _trained("diloco", _H2, "memory.method=checkpoint"),
    "train clusters": _trained("localsgd", _H2, *_CLUSTERS, workers=4),
    "train plan": _by_a_plan,
    "train experts": _experts,
    "train elastic": _coming_and_going,
    "train memory": _trained("diloco", _H2, "memory.method=auto", "memory.machine=H100", on_cpu=False),
    **{f"train {name}": _trained(name) for name in ("demo", "dct-dp")},
    **{f"train {name}": _trained(name, _H2) for name in ("ist", "sparseloco")},
}


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows: dict[str, Any] = {}
    for name in (name for name in CASES if (name in QUICK) != ("--long" in sys.argv)):
        with tempfile.TemporaryDirectory() as folder:
            try:
                rows[name] = CASES[name](Path(folder))
            except Exception:
                rows[name] = {"error": traceback.format_exc()[-3000:]}
    Path(sys.argv[-1]).write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
