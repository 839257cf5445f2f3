"""256 virtual workers of the 0.12M model in one process: CPU seconds of a step against a plain loop, and memory; and
what `isles simulate` takes for a whole run of them.

    python -m benchmarks.virtual [--workers 256] [--json]                        the table
    python -m benchmarks.virtual --simulate METHOD,... [--workers 256] [--json]  that of `isles simulate`
    python -m benchmarks.virtual part WORKERS SLOTS STEPS EVERY TOKENS [plain]   one run, as a line of JSON

Each part runs in a process of its own, on one thread. A step: two sequences of `TOKENS` bytes, forward, backward,
AdamW, and with Isles NoLoCo's round every `EVERY` steps. Seconds of a step come from two runs of different lengths, so
that the start cancels. Exit code 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from statistics import median
from typing import Any

import torch
from torch import nn

import isles
from benchmarks._measure import Row, report
from benchmarks.overhead import resident
from isles.comm.mesh import Mesh
from isles.models import ModelConfig, build

SHAPE = ModelConfig(size="0.12M", device="cpu")
EVERY = 10  # twice as often as in the demo
TURNS = 3


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, number: int, tokens: int) -> None:
    generator = torch.Generator().manual_seed(1000 * rank + number)
    model(torch.randint(256, (2, tokens + 1), generator=generator)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def worker(world: Mesh, steps: int, every: int, tokens: int) -> tuple[str, float]:
    """Digest of the weights in the end, virtual seconds."""
    model = build(SHAPE, seed=0)
    inner = torch.optim.AdamW(model.parameters(), fused=True)
    optimizer = isles.NoLoCo(model, inner, world.outer, sync_every=every)
    for number in range(steps):
        step(model, optimizer, world.rank, number, tokens)
    optimizer.finish()
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    return digest, world.transport.now()


def plain(workers: int, steps: int, tokens: int) -> None:
    """The same training of as many models in a loop, without Isles."""
    models = [build(SHAPE, seed=0) for _ in range(workers)]
    inner = [torch.optim.AdamW(model.parameters(), fused=True) for model in models]
    for number in range(steps):
        for rank in range(workers):
            step(models[rank], inner[rank], rank, number, tokens)


def part(workers: int, slots: int, steps: int, every: int, tokens: int, bare: bool) -> dict[str, Any]:
    """One run in this process."""
    torch.set_num_threads(1)
    threads, begun = threading.active_count(), time.process_time()
    if bare:
        plain(workers, steps, tokens)
        return {"cpu_seconds": time.process_time() - begun}
    results = isles.run_virtual(worker, workers, links="home-fibre", slots=slots, args=(steps, every, tokens))
    return {
        "hash": hashlib.sha256("".join(digest for digest, _ in results).encode()).hexdigest(),
        "clock": max(clock for _, clock in results),
        "parameters": sum(parameter.numel() for parameter in build(SHAPE, seed=0).parameters()),
        "peak_gib": resident("VmHWM") / 2**30,  # getrusage would count the parent's pages before the exec
        "threads_left": threading.active_count() - threads,
        "cpu_seconds": time.process_time() - begun,
    }


def apart(*arguments: object) -> dict[str, Any]:
    """`part` in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.virtual", "part", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def table(workers: int, tokens: int = 128) -> list[Row]:
    """CPU seconds of a step, and peak memory."""
    short, long = EVERY // 2, EVERY + EVERY // 2  # one round lies between them
    ratios, peak = [], 0.0
    for _ in range(TURNS):
        seconds = []
        for words in ((), ("plain",)):
            few, many = (apart(workers, 1, steps, EVERY, tokens, *words) for steps in (short, long))
            seconds.append((many["cpu_seconds"] - few["cpu_seconds"]) / (long - short) / workers)
            peak = max(peak, many.get("peak_gib", 0.0))
        ratios.append(seconds[0] / seconds[1])
        note = f"{1e3 * seconds[0]:.2f} ms against {1e3 * seconds[1]:.2f} ms a step of 2 x {tokens} tokens, H = {EVERY}"
    return [
        Row(f"{workers} workers, step / plain loop", median(ratios), "CPU ratio", ("<=", 1.15), note),
        Row(f"{workers} workers, peak memory", peak, "GiB", ("<=", 3.0), ""),
    ]


def simulated(workers: int, methods: str) -> list[Row]:
    """`isles simulate`: 60 steps of batches of 4 x 32 tokens on home-fibre, start, report and a validation of every
    worker's weights (16 sequences) included.
    """
    rows, seconds = [], 0.0
    for method in methods.split(","):
        with tempfile.TemporaryDirectory() as folder:
            words = ["simulate", "--methods", method, "--workers", str(workers), "--steps", "60"]
            words += ["--links", "home-fibre", "--out", f"{folder}/run", "--json"]
            settings = ("model.size=0.12M", "model.context=32", "data.batch_size=4", "data.validation_sequences=16")
            words += [word for setting in settings for word in ("--set", setting)]
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([sys.executable, "-m", "isles", *words], check=True, capture_output=True, timeout=3600)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        rows.append(Row(f"simulate {method}", cpu, "CPU s", None, f"{workers} workers, 60 steps of 4 x 32 tokens"))
        seconds += cpu
    rows.append(Row("simulate, all of them", seconds, "CPU s", ("<=", 360.0), "home-fibre"))
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20  # KiB
    return [*rows, Row("simulate, peak memory", peak, "GiB", ("<=", 6.0))]


def main() -> int:
    """Run what was asked for."""
    if sys.argv[1:2] == ["part"]:
        numbers = [int(word) for word in sys.argv[2:7]]
        print(json.dumps(part(*numbers, bare=sys.argv[7:] == ["plain"])))
        return 0
    parser = argparse.ArgumentParser(description="Many virtual workers in one process.")
    parser.add_argument("--workers", type=int, default=256)
    parser.add_argument("--simulate", metavar="METHOD,...", help="measure `isles simulate` with these instead")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    rows = simulated(options.workers, options.simulate) if options.simulate else table(options.workers)
    return report(rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
