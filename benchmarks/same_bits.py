"""Whether a change of the code changed what a run computes: named configurations, and hashes of what came out.

    python -m benchmarks.same_bits --write FILE    before the change
    python -m benchmarks.same_bits --check FILE    after it: which configurations differ, and in what
    python -m benchmarks.same_bits                 the training loops alone, twice: the runs must not differ

A row holds the hashes of all workers' weights, of their losses and of the tensors in their optimizers' state, the bytes
that each worker sent and its clock at the end. A table is good for one machine and one version of torch: others round
differently. Nothing below the public names of `isles` and its command is used here, so files may move. Exit code 1 if
anything differs.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import random
import runpy
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import isles
from benchmarks._measure import machine
from benchmarks._named_runs import COMMANDS, LOOPS, Command, Loop

STEPS = 8
SHORT = ["data.batch_size=2", "data.validation_sequences=4", "inner.warmup_steps=2", "run.log_every=1"]

Row = dict[str, Any]


# ---------------------------------------------------------------------------------------------------------------------
# Hashes


def digest(parts: Iterable[bytes]) -> str:
    """One hash over `parts` and where each ends."""
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "little") + part)
    return total.hexdigest()


def content(tensor: Tensor) -> bytes:
    """Shape, type and every bit."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return f"{tensor.dtype} {tuple(tensor.shape)}".encode() + flat.view(torch.uint8).numpy().tobytes()


def numbers(values: Iterable[float]) -> bytes:
    """Every bit of them."""
    return " ".join(value.hex() for value in values).encode()


def tensors_in(state: Any) -> list[Tensor]:
    """The tensors of a nested state."""
    if isinstance(state, Tensor):
        return [state]
    entries = state.values() if isinstance(state, Mapping) else state if isinstance(state, (list, tuple)) else ()
    return [tensor for entry in entries for tensor in tensors_in(entry)]


def unnamed(tensors: Iterable[Tensor]) -> str:
    """A hash that does not ask by what names a state holds its tensors, or in what order."""
    return digest(sorted(hashlib.sha256(content(tensor)).digest() for tensor in tensors))


# ---------------------------------------------------------------------------------------------------------------------
# Loops


def network(seed: int) -> nn.Sequential:
    """Two layers of odd sizes, 143 entries."""
    layers = OrderedDict(first=nn.Linear(5, 11), act=nn.Tanh(), second=nn.Linear(11, 7, bias=False))
    model = nn.Sequential(layers)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) / 3)
    return model


def loss_of(model: nn.Module, worker: int, batch: int) -> Tensor:
    """Mean squared error on 4 rows that `worker` and `batch` alone decide."""
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(1000 * worker + batch))
    return F.mse_loss(model(x), torch.sin(2 * x @ torch.ones(5, 7)))


def wrapped(loop: Loop, model: nn.Module, world: Any) -> Any:
    """The method of `loop` around a fresh inner optimizer."""
    kind = torch.optim.SGD if loop.method == "demo" else torch.optim.AdamW
    inner: Any = kind(model.parameters(), lr=0.02, weight_decay=0.01)
    if loop.inner == 1:
        return isles.method(loop.method)(model, inner, world.outer, max_norm=loop.max_norm, **loop.options)
    inside = isles.DDP(model, inner, world.inner, max_norm=loop.max_norm)
    return isles.method(loop.method)(model, inside, world.outer, **loop.options)


def train_step(loop: Loop, optimizer: Any, worker: int) -> float:
    """One step of `loop.batches` backward passes; the sum of their losses."""
    total, first = 0.0, optimizer.steps * loop.batches
    for batch in range(loop.batches):
        last = batch == loop.batches - 1
        with contextlib.nullcontext() if last else optimizer.no_sync():
            loss = loss_of(optimizer.model, worker, first + batch) / loop.batches
            loss.backward()
        total += float(loss.detach())
    optimizer.step()
    optimizer.zero_grad()
    return total


def saved(optimizer: Any) -> bytes:
    """A worker's checkpoint."""
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "model": optimizer.model.state_dict()}, file)
    return file.getvalue()


def train(world: Any, loop: Loop, steps: int, files: Sequence[bytes] = ()) -> Row:
    """A worker's steps up to `steps`, from its file where there are any, and what it has then."""
    world = isles.mesh(inner=loop.inner, deadlines=world.world.deadlines)
    optimizer = wrapped(loop, network(world.rank), world)
    if files:
        state = torch.load(io.BytesIO(files[world.rank]), weights_only=True)
        optimizer.model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    losses = []
    while optimizer.steps < steps:
        losses.append(train_step(loop, optimizer, world.rank))
    if steps < STEPS:
        return {"losses": losses, "file": saved(optimizer)}
    weights = [content(each) for each in optimizer.model.parameters()]
    optimizer.finish()
    sent, seconds = world.world.traffic.total("bytes_sent"), world.transport.now()
    state = unnamed(tensors_in(optimizer.state_dict()))
    with optimizer.evaluation_weights() as judged:
        weights += [content(each) for each in judged.parameters()]
    losses.append(optimizer.replica_std())
    weights += [content(each) for each in optimizer.consolidate().parameters()]
    return {"weights": weights, "losses": losses, "state": state, "sent": sent, "seconds": seconds}


def run_loop(loop: Loop) -> Row:
    """The row of a loop."""
    clock = {"links": isles.Links(bandwidth=1e5, latency=0.02), "inner": loop.inner, **loop.clock}
    start = partial(isles.run_virtual, train, loop.workers, **clock)
    before = start(args=(loop, loop.resume)) if loop.resume else []
    ends = start(args=(loop, STEPS, [each["file"] for each in before]))
    return {
        "weights": digest(part for end in ends for part in end["weights"]),
        "losses": digest(numbers(one["losses"]) for one in [*before, *ends]),
        "state": digest(end["state"].encode() for end in ends),
        "bytes": [end["sent"] for end in ends],
        "seconds": [repr(end["seconds"]) for end in ends],
    }


# ---------------------------------------------------------------------------------------------------------------------
# Commands


def command(*arguments: str) -> None:
    """`isles ARGUMENTS` in this process, without what it prints. RuntimeError if it fails."""
    said = io.StringIO()
    with patch.object(sys, "argv", ["isles", *arguments]), contextlib.ExitStack() as quiet:
        quiet.enter_context(contextlib.redirect_stdout(said))
        quiet.enter_context(contextlib.redirect_stderr(said))
        try:
            runpy.run_module("isles", run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise RuntimeError(f"isles {' '.join(arguments)}: exit code {end.code}: {said.getvalue()}") from end


def write_text(path: Path) -> None:
    """Words to train on, the same everywhere."""
    draw = random.Random(0)
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "again.\n"]
    path.write_text(" ".join(draw.choice(words) for _ in range(20_000)), encoding="utf-8")


def run_command(asked: Command) -> Row:
    """The row of a run directory."""
    with tempfile.TemporaryDirectory() as folder:
        text, out = Path(folder) / "text.txt", Path(folder) / "run"
        write_text(text)
        settings = [f"data.path={text}", "model.device=cpu", *SHORT, *asked.settings]
        command("train", "--out", str(out), *(part for each in settings for part in ("--set", each)))
        if asked.resume is not None:
            (out / "summary.json").unlink()
            (out / "model.safetensors").unlink()
            command("resume", str(out), *asked.resume)
        return row_of(out)


def row_of(out: Path) -> Row:
    """What a run directory says. Its clock only where that is a virtual one."""
    summary = json.loads((out / "summary.json").read_text())
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    by_worker = [
        sorted((line for line in lines if line.get("worker") == worker), key=lambda line: line["step"])
        for worker in range(summary["workers"])
    ]
    losses = [[line["loss"] for line in own if "loss" in line] for own in by_worker]
    end = [summary["val_loss"], summary["val_loss_replicas"], summary["replica_std"]]
    model, shards = load_file(out / "model.safetensors"), sorted(out.glob("checkpoints/*/*.safetensors"))
    return {
        "weights": digest(content(model[name]) for name in sorted(model)),
        "losses": digest(map(numbers, [*losses, end])),
        "state": digest(unnamed(load_file(shard).values()).encode() for shard in shards),
        "bytes": [own[-1]["bytes_sent"] for own in by_worker],
        "seconds": [repr(own[-1]["clock_seconds"]) for own in by_worker] if summary["backend"] == "virtual" else [],
    }


# ---------------------------------------------------------------------------------------------------------------------
# The table


def loop_rows() -> dict[str, Row]:
    """The rows of all loops."""
    return {name: run_loop(loop) for name, loop in LOOPS.items()}


def all_rows() -> dict[str, Row]:
    """The whole table."""
    return loop_rows() | {name: run_command(asked) for name, asked in COMMANDS.items()}


def differences(before: Mapping[str, Row], after: Mapping[str, Row]) -> list[str]:
    """One line for each configuration that is not as before."""
    found = []
    for name in [*before, *(name for name in after if name not in before)]:
        if name not in after or name not in before:
            found.append(f"{name}: only {'after' if name in after else 'before'}")
            continue
        keys = [key for key in before[name] if before[name][key] != after[name].get(key)]
        if keys:
            told = [
                f"{key} {before[name][key]} -> {after[name].get(key)}" for key in keys if key in ("bytes", "seconds")
            ]
            found.append("; ".join([f"{name}: {', '.join(keys)}", *told]))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Hashes of what named configurations compute.")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--write", type=Path, metavar="FILE", help="write the table")
    choice.add_argument("--check", type=Path, metavar="FILE", help="make the table again and compare")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.write:
        rows = all_rows()
        options.write.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
        print(f"{len(rows)} configurations written to {options.write}")
        return 0
    if options.check:
        before, after = json.loads(options.check.read_text())["rows"], all_rows()
    else:
        before, after = loop_rows(), loop_rows()
    found = differences(before, after)
    print("\n".join(found) or f"{len(after)} configurations, all the same")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
