"""The first hour on a GPU: what works there, and how fast. Blocks that each write a table, at most 25 minutes in all.

    here       what is there
    tests      tests that want a GPU
    methods    every method's loss after 20 steps of two workers, against the CPU's
    formats    number formats, compilation, accumulation, a plan of memory
    resume     a run that goes on has the same bits on the same kind of device
    speed      tokens/s of wrapped loops per bare torch, in turns, at 124M and 1B parameters
    rounds     an outer round of 124M and 1.3B: seconds, copies, gaps; beside it what the links' rates foretell
    streams    the same bits on a side stream, and with every kernel waited for
    islands    with two GPUs: native sums, fsdp, and how soon a killed worker is missed
    memory     plans of memory beside torchao and FSDP2 (`benchmarks.memory_gpu`)

    python -m benchmarks.gpu [--out FOLDER] [--blocks here,speed] [--fake]

A block is a process with a time limit; the next one goes on where it fails. FOLDER has its output and its table.
--fake: small models on the tests' fake GPU, which shows that the blocks run and nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

Table = list[list[Any]]
"""A head, and rows."""
ROOT = Path(__file__).parents[1]
LINK = 50e9  # bytes a second, one way: what `isles.network.machines` says of an H100


class Skipped(Exception):
    """Why a block cannot be run here."""


def main() -> int:
    """Run the blocks, a line each. Exit code 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--blocks", default=",".join(BLOCKS))
    parser.add_argument("--fake", action="store_true")
    parser.add_argument("--block", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.block:
        return _in_process(asked.block, asked.out, asked.fake)
    asked.out.mkdir(parents=True, exist_ok=True)
    ended = [_run(name, asked.out, asked.fake) for name in asked.blocks.split(",")]
    return int("failed" in ended)


def _run(name: str, out: Path, fake: bool) -> str:
    """One block, in a process group of its own; how it ended."""
    seconds = BLOCKS[name][0] * (4 if fake else 1)  # the fake GPU is a CPU
    began, log = time.perf_counter(), out / f"{name}.log"
    command = [sys.executable, "-m", "benchmarks.gpu", "--block", name, "--out", str(out), *["--fake"] * fake]
    if not fake and not _gpus():
        how, why = "skipped", "torch sees no GPU here"
    else:
        with log.open("w") as file:
            process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, start_new_session=True)
            try:
                code = process.wait(seconds)
                how = {0: "done", 3: "skipped"}.get(code, "failed")
            except subprocess.TimeoutExpired:
                how = "failed"
                os.killpg(process.pid, signal.SIGKILL)  # the block's own group, begun above
                process.wait()
        said = log.read_text().strip().splitlines()
        late = how == "failed" and time.perf_counter() - began >= seconds
        why = f"not over within {seconds:g} s" if late else said[-1] if said else ""
    print(f"{name:<8} {how:<8} {time.perf_counter() - began:6.1f} s  {why if how != 'done' else log}", flush=True)
    if how == "done":
        print((out / f"{name}.md").read_text(), flush=True)
    return how


def _gpus() -> int:
    from isles.training.config.reading import gpus_here

    return gpus_here()


def _in_process(name: str, out: Path, fake: bool) -> int:
    if fake:
        from tests.device import fake_cuda

        fake_cuda.install(2)
    try:
        head, *rows = BLOCKS[name][1](out / name, fake)
    except Skipped as why:
        print(why)
        return 3
    lines = [head, ["---"] * len(head), *rows]
    text = "".join("| " + " | ".join(map(_cell, line)) + " |\n" for line in lines)
    (out / f"{name}.md").write_text(text)
    print(text)
    return 0


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# ---------------------------------------------------------------------------------------------------------------------
# Blocks


def here(out: Path, fake: bool) -> Table:
    import torch

    rows: Table = [["what", "is"], ["torch", f"{torch.__version__}, CUDA {torch.version.cuda}"]]
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        rows.append([f"cuda:{index}", f"{gpu.name}, {gpu.total_memory / 1e9:.1f} GB"])
    told = subprocess.run([sys.executable, "-m", "isles", "doctor"], capture_output=True, text=True, timeout=90)
    return [*rows, ["date", time.strftime("%Y-%m-%d %H:%M")], ["isles doctor", f"exit code {told.returncode}"]]


def tests(out: Path, fake: bool) -> Table:
    if fake:
        raise Skipped("a real GPU only")
    files = ["memory/test_cuda.py", "models/test_factory.py", "training/test_draws.py", "memory/test_measuring.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "4", *(f"tests/{file}" for file in files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout[-4000:])
    return [["tests", "exit code", "end"], [len(files), done.returncode, done.stdout.strip().splitlines()[-1]]]


def methods(out: Path, fake: bool) -> Table:
    import isles

    rows: Table = [["method", "loss, GPU", "loss, CPU", "apart", ""]]
    for name in isles.METHODS:
        if name != "fsdp":  # wants processes, with a GPU each
            there, here = (_tried(out / f"{name}-{on}", name, f"model.device={on}") for on in ("cuda", "cpu"))
            apart = abs(there - here) if isinstance(there, float) and isinstance(here, float) else 1e9
            rows.append([name, there, here, apart, "" if apart < 0.02 else "LOOK"])
    return rows


def formats(out: Path, fake: bool) -> Table:
    tried = ["model.autocast=bf16", "model.autocast=fp16", "model.dtype=bfloat16", "inner.accumulation=2"]
    tried += ["memory.method=checkpoint", *([] if fake else ["model.compile=true", "memory.method=auto"])]
    rows: Table = [["setting", "loss of diloco, GPU"], ["", _tried(out / "plain", "diloco", "model.device=cuda")]]
    return rows + [[one, _tried(out / one, "diloco", "model.device=cuda", one)] for one in tried]


def resume(out: Path, fake: bool) -> Table:
    import shutil

    rows: Table = [["method", "goes on with the same bits"]]
    for name in ("noloco", "diloco", "ddp"):
        run = out / name
        _tried(run, name, "model.device=cuda", "run.checkpoint_every=10")
        copy = shutil.copytree(run, out / f"{name}-again")
        for result in ("model.safetensors", "summary.json"):
            (copy / result).unlink()
        _isles("resume", str(copy), "--step", "10")
        rows.append([name, (copy / "model.safetensors").read_bytes() == (run / "model.safetensors").read_bytes()])
    return rows


def speed(out: Path, fake: bool) -> Table:
    import torch

    import isles
    from isles.network.machines import known_gpu

    sizes, turns, steps = ([("tiny", 2, 32)], 2, 2) if fake else ([("124M", 8, 1024), ("1B", 4, 1024)], 7, 10)
    rows: Table = [["parameters", "loop", "tokens/s", "per bare", "MFU", "peak, GB"]]
    group = isles.init().outer
    wraps: dict[str, Callable[..., Any]] = {
        "bare": lambda model, inner: inner,
        "diloco, H = 50": partial(isles.DiLoCo, group=group, sync_every=50),
        "noloco, H = 50": partial(isles.NoLoCo, group=group, sync_every=50),
        "ddp": partial(isles.DDP, group=group),
        "none": partial(isles.NoSync, group=group),
    }
    for size, batch, context in sizes:
        held = 2 if size == "1B" else len(wraps)  # at once in the GPU's memory
        loops = {name: _Loop(size, wrap, batch, context) for name, wrap in [*wraps.items()][:held]}
        times: dict[str, list[float]] = {name: [] for name in loops}
        for turn in range(turns + 1):
            for name, loop in loops.items():
                seconds = loop.run(steps)
                times[name] += [seconds] if turn else []  # the first one warms up
        gpu = torch.cuda.get_device_properties(0)
        card, tokens = known_gpu(gpu.name, gpu.total_memory), batch * context * steps
        for name, loop in loops.items():
            seconds, bare = statistics.median(times[name]), times["bare"]
            ratio = statistics.median(b / own for b, own in zip(bare, times[name], strict=True))
            mfu = 6 * loop.parameters * tokens / seconds / card.peak if card else ""
            rows.append([loop.parameters, name, tokens / seconds, ratio, mfu, loop.peak / 1e9])
    return rows


def rounds(out: Path, fake: bool) -> Table:
    import torch

    import isles
    from isles.network.machines import known_gpu

    gpu = torch.cuda.get_device_properties(0)
    link = getattr(known_gpu(gpu.name, gpu.total_memory), "up", LINK)
    head = ["parameters", "round, s", "copies", "gap: GPU idle, s", "foretold, s: each byte once each way"]
    rows: Table = [head]
    for size in ("tiny",) if fake else ("124M", "1.3B"):
        model = _decoder(size)
        inner = torch.optim.SGD(model.parameters(), lr=1e-3)
        optimizer = isles.DiLoCo(model, inner, isles.init().outer, sync_every=1)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        seconds = []
        for _ in range(4):
            torch.cuda.synchronize()
            began = time.perf_counter()
            optimizer.step()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        copies, busy, whole = ("", 0.0, 0.0) if fake else _profiled(optimizer.step)
        count = sum(parameter.numel() for parameter in model.parameters())
        rows.append([count, statistics.median(seconds[1:]), copies, whole - busy, 2 * 4 * count / link])
        del model, inner, optimizer
        torch.cuda.empty_cache()
    return rows


def streams(out: Path, fake: bool) -> Table:
    """CUDA_LAUNCH_BLOCKING counts from a process's start: one more process."""
    import torch

    usual = _bits()
    with torch.cuda.stream(torch.cuda.Stream()):
        beside = _bits()
    torch.cuda.synchronize()
    rows: Table = [["as on the default stream", "same bits"], ["side stream", beside == usual]]
    if not fake:
        code = "from benchmarks.gpu import _bits; print(_bits())"
        environment = {**os.environ, "CUDA_LAUNCH_BLOCKING": "1"}
        told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
        rows.append(["every kernel waited for", told.stdout.strip() == usual])
    return rows


def islands(out: Path, fake: bool) -> Table:
    import torch

    if fake or torch.cuda.device_count() < 2:
        raise Skipped("one GPU: NCCL wants one for each worker")
    rows: Table = [["run of two GPUs", "exit code", "seconds", "end"]]
    plain = ["--steps", "40", "--set", "run.validate_every=0"]
    for name, words in {
        "ddp, native": ["--method", "ddp", "--set", "replicas.reduction=native"],
        "fsdp": ["--method", "fsdp"],
        "an island, native": ["--method", "diloco", "--set", "world.inner=2"],
    }.items():
        rows.append([name, *_command([*words, *plain, "--workers", "2", "--out", str(out / name)])])
    words = ["--method", "ddp", "--set", "replicas.reduction=native", "--steps", "100000", "--workers", "2"]
    rows.append(["one is killed after 30 s", *_command([*words, "--out", str(out / "killed")], kill_after=30.0)])
    return rows


def memory(out: Path, fake: bool) -> Table:
    if fake:
        raise Skipped("a real GPU only")
    command = [sys.executable, "-m", "benchmarks.memory_gpu", "--budgets", "16", "--steps", "5"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout)
    return [["benchmarks.memory_gpu", "exit code"], ["its table is in memory.log", done.returncode]]


# ---------------------------------------------------------------------------------------------------------------------
# What they share


class _Loop:
    """Training of a decoder on drawn tokens under bf16 autocast."""

    def __init__(self, size: str, wrap: Callable[..., Any], rows: int, context: int) -> None:
        import torch

        self.model = _decoder(size)
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.optimizer = wrap(self.model, torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True))
        drawn = torch.Generator("cuda").manual_seed(0)
        self.tokens = torch.randint(0, 256, (rows, context + 1), generator=drawn, device="cuda")
        self.peak = 0

    def run(self, steps: int) -> float:
        """Seconds of so many."""
        import torch

        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        for _ in range(steps):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = self.model(self.tokens).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        torch.cuda.synchronize()
        self.peak = torch.cuda.max_memory_allocated()
        return time.perf_counter() - began


def _decoder(size: str) -> Any:
    from isles.models import Decoder, Shape

    width, layers, context = {
        "tiny": (32, 2, 32),
        "124M": (768, 12, 1024),
        "1B": (2048, 16, 1024),
        "1.3B": (2048, 24, 1024),
    }[size]
    heads, vocab = max(width // 64, 1), 256 if size == "tiny" else 32000
    shape = Shape(
        d_model=width, layers=layers, heads=heads, ffn=8 * width // 3, vocab=vocab, context=context, tie_embeddings=True
    )
    return Decoder(shape, seed=0, device="cuda")


def _bits() -> str:
    """Of the weights after six steps, two rounds among them."""
    import hashlib

    import isles

    loop = _Loop("tiny", partial(isles.DiLoCo, group=isles.init().outer, sync_every=3), 2, 32)
    loop.run(6)
    weights = b"".join(parameter.detach().cpu().numpy().tobytes() for parameter in loop.model.parameters())
    return hashlib.sha256(weights).hexdigest()


def _profiled(step: Callable[[], object]) -> tuple[int, float, float]:
    """Copies between host and GPU, seconds in which the GPU did something, and those of the whole."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as record:
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        whole = time.perf_counter() - began
    on_gpu = [one for one in record.events() if one.device_type == torch.autograd.DeviceType.CUDA]
    between = sum("HtoD" in one.name or "DtoH" in one.name for one in on_gpu)
    busy, reached = 0.0, 0.0
    for start, end in sorted((one.time_range.start, one.time_range.end) for one in on_gpu):
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return between, busy / 1e6, whole


def _isles(*words: str) -> None:
    """A command, in this process: torch is loaded once."""
    from isles.cli import app

    app(list(words), standalone_mode=False)


def _tried(out: Path, method: str, *settings: str) -> float | str:
    """The validation loss of a small run of two virtual workers; what it failed with."""
    plain = ["world.backend=virtual", "data.batch_size=2", "data.validation_sequences=4", "run.validate_every=0"]
    plain += ["model.context=32", "model.d_model=32", "model.layers=2", "model.heads=2", "model.ffn=48"]
    words = [word for setting in (*plain, *settings) for word in ("--set", setting)]
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            _isles("train", "--method", method, "--workers", "2", "--steps", "20", *words, "--out", str(out))
        except Exception as error:  # the table says so, and the next one is tried
            return f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
    return json.loads((out / "summary.json").read_text())["val_loss"]


def _command(words: Sequence[str], kill_after: float | None = None) -> list[Any]:
    """Exit code, seconds and last line of `isles train`; with kill_after, those after one of its workers was killed."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "isles", "train", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if kill_after is not None:
        time.sleep(kill_after)
        began = time.perf_counter()
        os.kill(max(_workers(process.pid)), signal.SIGKILL)
    said, _ = process.communicate(timeout=150)
    return [process.returncode, time.perf_counter() - began, said.strip().splitlines()[-1]]


def _workers(launcher: int) -> Iterator[int]:
    """Processes below a launcher that hold a GPU: children of its fork server."""
    import psutil

    for process in psutil.Process(launcher).children(recursive=True):
        if any("nvidia" in one.path for one in process.memory_maps()):
            yield process.pid


BLOCKS: dict[str, tuple[float, Callable[[Path, bool], Table]]] = {
    "here": (100.0, here),
    "tests": (150.0, tests),
    "methods": (240.0, methods),
    "formats": (120.0, formats),
    "resume": (90.0, resume),
    "speed": (200.0, speed),
    "rounds": (120.0, rounds),
    "streams": (60.0, streams),
    "islands": (240.0, islands),
    "memory": (180.0, memory),
}
"""Seconds that a block may take, together 25 minutes, and what it does."""


if __name__ == "__main__":
    sys.exit(main())
