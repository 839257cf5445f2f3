"""Plans of memory on a GPU, beside what else there is: bytes, seconds, bits. Not run yet: no GPU was to be had.

A decoder of 1.3B parameters, four sequences of 1024, bfloat16 autocast, clipping, within 12, 16 and 24 GB of the GPU.
Every line is a process of its own, with that share of the memory (`torch.cuda.set_per_process_memory_fraction`):

    plan          the fastest plan for this machine, measured first; "first come" serves as things arise; "no overlap"
                  does everything where it is asked for, and must have the same bits
    whole         all on the device by a plan, and `bare` without one: what the plan costs
    torchao       its CPUOffloadOptimizer with every block checkpointed
    fsdp2         torch's fully_shard with CPUOffloadPolicy and every block checkpointed, a world of one
    largest       the deepest model that a plan trains, found by planning and then run for two steps

    python -m benchmarks.memory_gpu [--budgets 12,16,24] [--steps 20] [--trace FOLDER]
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from isles.memory.engines.base import Inline
from isles.memory.engines.cuda import Cuda, CudaMoves
from isles.memory.measurement import measure_machine
from isles.memory.optimizer import Managed
from isles.memory.plan import InfeasibleBudget, MemoryPlan
from isles.memory.profile import profile
from isles.memory.search import Search
from isles.models.blocks import blocks_of
from isles.models.decoder import Decoder
from isles.models.sizes import Shape
from isles.network.machines import Machine, machine, to_toml

SHAPE = Shape(d_model=2048, layers=24, heads=16, ffn=5504, vocab=32000, context=1024, tie_embeddings=True)
BATCH, GB, DEADLINE = 4, 1e9, 1800
PEERS = ("torchao", "fsdp2")
PLANS = ("plan", "first come", "no overlap")


def main() -> None:
    """Print the table; or, of one process, one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budgets", default="12,16,24", help="GB of the GPU")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--trace", type=Path, help="a folder for torch's trace of three steps of each plan")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--machine", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.memory_gpu: no GPU here, so nothing was measured")
        return
    if asked.case:
        print(json.dumps(case(asked.case, float(asked.budgets), asked.steps, machine(asked.machine), asked.trace)))
        return
    with tempfile.TemporaryDirectory() as folder:
        here = measure_machine(folder).machine
        path = Path(folder) / "here.toml"
        path.write_text(to_toml(here), encoding="utf-8")
        table(asked, str(path))


def table(asked: argparse.Namespace, path: str) -> None:
    """Every case in turn."""
    print(f"{time.strftime('%Y-%m-%d')}, {torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    total = torch.cuda.get_device_properties(0).total_memory / GB
    bare, whole = (of_process(asked, path, name, total) for name in ("bare", "whole"))
    print(f"all on the device / bare, tokens a second: {bare['seconds'] / whole['seconds']:.3f} (bound 0.98)")
    head = ("budget GB", "what", "step s", "planned s", "allocated GB", "planned GB", "reserved GB", "bits", "notes")
    print(" | ".join(head), flush=True)
    for budget in map(float, asked.budgets.split(",")):
        found = {name: of_process(asked, path, name, budget) for name in (*PLANS, *PEERS, "largest")}
        for name, one in found.items():
            print(f"{budget:g} | {name} | {_cells(one)}", flush=True)
        print(f"{budget:g} | bounds | {'; '.join(bounds(found))}", flush=True)


def _cells(one: dict[str, Any]) -> str:
    def number(key: str, scale: float = 1.0) -> str:
        return f"{one[key] / scale:.3f}" if one.get(key) is not None else ""

    cells = [number("seconds"), number("planned_seconds"), number("allocated", GB), number("planned", GB)]
    return " | ".join([*cells, number("reserved", GB), str(one.get("bits", "")), str(one.get("note", ""))])


def bounds(found: dict[str, dict[str, Any]]) -> list[str]:
    """What must hold of one budget, and whether it does."""
    ours = found["plan"]
    if "seconds" not in ours:
        return ["the plan did not run"]
    lines = [
        _bound("allocated within the plan", ours["allocated"] / ours["planned"], 1.0),
        _bound("reserved within 10 % more", ours["reserved"] / ours["planned"], 1.1),
        _bound("step over the plan's", ours["seconds"] / ours["planned_seconds"], 1.2),
        f"bits as without overlap: {'yes' if ours['bits'] == found['no overlap'].get('bits') else 'NO'}",
    ]
    if "seconds" in found["first come"]:
        lines.append(f"first come / priority: {found['first come']['seconds'] / ours['seconds']:.3f}")
    for name in PEERS:
        if "seconds" in found[name]:
            lines.append(_bound(f"ours / {name}", ours["seconds"] / found[name]["seconds"], 1 / 1.2))
    return lines


def _bound(what: str, value: float, most: float) -> str:
    return f"{what}: {value:.3f}{'' if value <= most else f' MISSED (at most {most:.3f})'}"


def of_process(asked: argparse.Namespace, path: str, name: str, budget: float) -> dict[str, Any]:
    """One case, in a process of its own; what it said where it failed."""
    words = ["--case", name, "--budgets", str(budget), "--steps", str(asked.steps), "--machine", path]
    words += ["--trace", str(asked.trace)] if asked.trace and name in PLANS else []
    program = [sys.executable, "-m", "benchmarks.memory_gpu", *words]
    try:
        done = subprocess.run(program, capture_output=True, text=True, timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        return {"note": f"did not end within {DEADLINE} s"}
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines() or ["nothing was said"]
    return json.loads(lines[-1]) if done.returncode == 0 else {"note": lines[-1][:200]}


# ---------------------------------------------------------------------------------------------------------------------
# One process


def case(name: str, budget: float, steps: int, here: Machine, trace: Path | None) -> dict[str, Any]:
    """Seconds of a step and bytes of one way to train."""
    gpu = torch.device("cuda", 0)
    total = torch.cuda.get_device_properties(gpu).total_memory
    torch.cuda.set_per_process_memory_fraction(min(budget * GB / total, 1.0), gpu)
    torch.manual_seed(0)
    if name in ("bare", *PEERS):
        return ran(*made_of(name, gpu), steps, gpu)
    if name == "largest":
        return largest(budget, here, gpu)
    found = planned(SHAPE, budget, here)
    if trace is not None:
        trace.mkdir(parents=True, exist_ok=True)
        traced(found, here, gpu, name, trace / f"{name.replace(' ', '-')}-{budget:g}.json")
    return under_plan(SHAPE, found, name, steps, here, gpu)


def profiled(shape: Shape) -> Any:
    """The decoder at the benchmark's batch."""
    tokens = torch.empty(BATCH, shape.context + 1, dtype=torch.int64, device="meta")
    return profile(Decoder(shape, device="meta"), tokens, autocast="bf16")


def planned(shape: Shape, budget: float, here: Machine) -> MemoryPlan:
    """The fastest plan. InfeasibleBudget where none fits."""
    return Search(profiled(shape), here, budget=budget * GB).run()


def under_plan(
    shape: Shape, plan: MemoryPlan, name: str, steps: int, here: Machine, gpu: torch.device
) -> dict[str, Any]:
    """A run by it."""
    engine = Inline(CudaMoves(gpu)) if name == "no overlap" else Cuda(gpu, first_come=name == "first come")
    model = Decoder(shape)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    made = profiled(shape)
    with Managed(plan, model, inner, profile=made, machine=here, device=gpu, engine=engine) as optimizer:
        told = ran(model, optimizer, steps, gpu)
    return told | {"planned": plan.peak, "planned_seconds": plan.step, "note": plan.short}


def made_of(name: str, gpu: torch.device) -> tuple[nn.Module, Any]:
    """Model and optimizer of a run without a plan."""
    model = Decoder(SHAPE).to(gpu)
    if name == "bare":
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    _, blocks = blocks_of(model)
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    chosen = set(blocks)
    apply_activation_checkpointing(model, check_fn=lambda module: module in chosen)
    if name == "torchao":
        from torchao.optim import CPUOffloadOptimizer  # pyrefly: ignore[missing-import]

        return model, CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4, fused=True)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl", init_method="tcp://127.0.0.1:29477", rank=0, world_size=1
    )
    mesh = init_device_mesh("cuda", (1,))
    policy = {"mesh": mesh, "offload_policy": CPUOffloadPolicy(), "mp_policy": MixedPrecisionPolicy(torch.bfloat16)}
    for block in blocks:
        fully_shard(block, **policy)
    fully_shard(model, **policy)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def steps_of(model: nn.Module, optimizer: Any, gpu: torch.device) -> Callable[[int], float]:
    """step(number) -> its loss, with clipping where gradients can be clipped before they are used."""
    gradients = getattr(optimizer, "gradients", None)
    clips = type(optimizer).__name__ != "CPUOffloadOptimizer"  # its gradients have left when backward is over

    def step(number: int) -> float:
        generator = torch.Generator().manual_seed(number)
        batch = torch.randint(0, SHAPE.vocab, (BATCH, SHAPE.context + 1), generator=generator).to(gpu)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(batch).loss
        loss.backward()
        if gradients is not None:
            gradients()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def ran(model: nn.Module, optimizer: Any, steps: int, gpu: torch.device) -> dict[str, Any]:
    """Median seconds of the steps after the third, peaks, and a hash of losses and weights."""
    torch.cuda.reset_peak_memory_stats(gpu)
    step, marks, losses = steps_of(model, optimizer, gpu), [], []
    for number in range(steps):
        losses.append(step(number))
        torch.cuda.synchronize(gpu)
        marks.append(time.perf_counter())
    if hasattr(optimizer, "catch_up"):
        optimizer.catch_up()
    digest = hashlib.sha256(repr(losses).encode())
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter  # type: ignore[operator]
        digest.update(local.detach().float().cpu().numpy().tobytes())
    return {
        "seconds": statistics.median(b - a for a, b in itertools.pairwise(marks[2:])),
        "allocated": torch.cuda.max_memory_allocated(gpu),
        "reserved": torch.cuda.max_memory_reserved(gpu),
        "bits": digest.hexdigest()[:12],
    }


def traced(plan: MemoryPlan, here: Machine, gpu: torch.device, name: str, path: Path) -> None:
    """Torch's trace of three steps: copies beside kernels."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        under_plan(SHAPE, plan, name, 4, here, gpu)
    seen.export_chrome_trace(str(path))


def largest(budget: float, here: Machine, gpu: torch.device) -> dict[str, Any]:
    """The deepest decoder of this width, by bisection over plans; then two steps more than warming up."""
    low, high, plan = 0, 512, None
    while high - low > 1:
        middle = (low + high) // 2
        try:
            low, plan = middle, planned(replace(SHAPE, layers=middle), budget, here)
        except InfeasibleBudget:
            high = middle
    if plan is None:
        return {"note": "not even one block fits"}
    shape = replace(SHAPE, layers=low)
    told = under_plan(shape, plan, "plan", 5, here, gpu)
    params = sum(parameter.numel() for parameter in Decoder(shape, device="meta").parameters())
    return told | {"note": f"{low} layers, {params / 1e9:.2f}B parameters: {plan.short}"}


if __name__ == "__main__":
    main()
