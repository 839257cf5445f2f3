"""Whether a change of the code changed what a run computes: named runs, and hashes of what came out.

    python -m benchmarks.same_bits --write FILE    before the change
    python -m benchmarks.same_bits --check FILE    after it: which runs differ, and in what
    python -m benchmarks.same_bits                 the training loops on the virtual clock, twice: they must not differ

--halfway FOLDER, with both: runs that can be gone on with are kept in FOLDER as they are after some steps, and the
changed code goes on with them, to the same end. FOLDER must stay where it is. --only WORDS: the runs whose names have
these words.

A row holds the hashes of all workers' weights, of their losses and of the tensors in their optimizers' state, the bytes
that each worker sent and its clock at the end; or how a command ended that was refused. A table is good for one machine
and one version of torch: others round differently. Nothing below the public names of `isles` and its command is used
here, so files may move; words of commands and settings are in `_named_runs`. Exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import pickle
import random
import runpy
import shutil
import sys
import tempfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import isles
from benchmarks._measure import machine
from benchmarks._named_runs import (
    COMMANDS,
    FILES,
    LOOPS,
    MEMORY_PLAN,
    PATHS_PLAN,
    PLANS,
    REPLAY,
    RESUME,
    Command,
    Loop,
)

STEPS = 8
HALF = "half.pickle"  # of a loop: what its workers had then
SUMMARY, MODEL, METRICS, SHARDS = "summary.json", "model.safetensors", "metrics.jsonl", "checkpoints/*/*.safetensors"
LOSSES = ("loss", "val_loss", "replica_std")  # in a line of metrics
ENDS = ("val_loss", "val_loss_replicas", "replica_std")  # in a summary

Row = dict[str, Any]


class Run(NamedTuple):
    """begin leaves in a folder what there is halfway, or at the end; end makes the row of it. goes_on: halfway."""

    begin: Callable[[Path], None]
    end: Callable[[Path], Row]
    goes_on: bool


class Refused(Exception):
    """A command ended with an exit code. said: what it printed."""

    def __init__(self, code: object, said: str) -> None:
        super().__init__(said)
        self.code = code


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


def numbers(values: Iterable[float | None]) -> bytes:
    """Every bit of them; None: a loss that nobody could tell."""
    return " ".join("none" if value is None else value.hex() for value in values).encode()


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
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        first=nn.Linear(5, 11), act=nn.Tanh(), second=nn.Linear(11, 7, bias=False)
    )
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
    losses, before = [], 0 if files else world.world.traffic.total("bytes_sent")
    while optimizer.steps < steps:
        losses.append(train_step(loop, optimizer, world.rank))
    if steps < STEPS:
        return {"losses": losses, "file": saved(optimizer)}
    weights = [content(each) for each in optimizer.model.parameters()]
    optimizer.finish()
    sent, seconds = world.world.traffic.total("bytes_sent") - before, world.transport.now()
    state = unnamed(tensors_in(optimizer.state_dict()))
    with optimizer.evaluation_weights() as judged:
        weights += [content(each) for each in judged.parameters()]
    losses.append(optimizer.replica_std())
    weights += [content(each) for each in optimizer.consolidate().parameters()]
    return {"weights": weights, "losses": losses, "state": state, "sent": sent, "seconds": seconds}


def train_all(world: Any, names: Sequence[str]) -> dict[str, Row]:
    """A worker's loops of these names in turn, in one world: starting processes costs more than training."""
    found = {}
    for name in names:
        found[name] = train(world, LOOPS[name], STEPS)
        world.world.barrier()
    return found


def begin_loop(loop: Loop, place: Path) -> None:
    """Its steps before `loop.resume`, into HALF."""
    before = simulated(loop, loop.resume) if loop.resume else []
    (place / HALF).write_bytes(pickle.dumps(before))


def end_loop(loop: Loop, place: Path) -> Row:
    """Its other steps, and its row."""
    before = pickle.loads((place / HALF).read_bytes())
    ends = simulated(loop, STEPS, [each["file"] for each in before])
    return loop_row([one["losses"] for one in before], ends)


def simulated(loop: Loop, *args: Any) -> list[Row]:
    """`train` on the virtual clock."""
    clock: dict[str, Any] = {"links": isles.Links(bandwidth=1e5, latency=0.02), "inner": loop.inner, **loop.clock}
    return isles.run_virtual(train, loop.workers, args=(loop, *args), **clock)


def loop_row(losses: Sequence[Sequence[float]], ends: Sequence[Row]) -> Row:
    """losses: of the steps before."""
    return {
        "weights": digest(part for end in ends for part in end["weights"]),
        "losses": digest(map(numbers, [*losses, *(end["losses"] for end in ends)])),
        "state": digest(end["state"].encode() for end in ends),
        "bytes": [end["sent"] for end in ends],
        "seconds": [repr(end["seconds"]) for end in ends],
    }


def real_rows(only: str) -> Iterator[tuple[str, Row]]:
    """All loops that no clock decides on, in real processes over gloo: a world for each number of workers."""
    by_size: dict[int, list[str]] = defaultdict(list)
    for name, loop in LOOPS.items():
        if not (loop.clock or loop.resume) and only in f"{name}, real":
            by_size[loop.workers].append(name)
    for size, names in sorted(by_size.items()):
        workers = isles.run_local(train_all, size, args=(names,))
        for name in names:
            yield f"{name}, real", loop_row([], [one[name] for one in workers]) | {"seconds": []}


# ---------------------------------------------------------------------------------------------------------------------
# Commands


def command(*arguments: str) -> str:
    """`isles ARGUMENTS` in this process; what it prints. Refused if it fails."""
    out, error = io.StringIO(), io.StringIO()
    with patch.object(sys, "argv", ["isles", *arguments]), contextlib.ExitStack() as quiet:
        quiet.enter_context(contextlib.redirect_stdout(out))
        quiet.enter_context(contextlib.redirect_stderr(error))
        try:
            runpy.run_module("isles", run_name="__main__")
        except SystemExit as end:
            if end.code in (1, 2):
                raise Refused(end.code, error.getvalue().strip()) from end
            if end.code:  # interrupted, and so is the table
                raise
    return out.getvalue()


def made(words: Sequence[str], settings: Sequence[str] = (), **places: Path) -> list[str]:
    """Arguments with the places in them."""
    return [word.format(**places) for word in (*words, *(part for each in settings for part in ("--set", each)))]


def write_text(path: Path) -> None:
    """Words to train on, the same everywhere."""
    draw = random.Random(0)
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "again.\n"]
    path.write_text(" ".join(draw.choice(words) for _ in range(20_000)), encoding="utf-8")


def prepare(home: Path) -> None:
    """The files that settings name."""
    home.mkdir(parents=True, exist_ok=True)
    write_text(home / "text.txt")
    for name, text in FILES.items():
        (home / name).write_text(text)
    command(*made(PATHS_PLAN, home=home))


def begin_command(asked: Command, home: Path, place: Path) -> None:
    """The run, without its end where that is to be made again."""
    command(*made([*asked.command, "--out", "{run}"], asked.settings, run=place, home=home))  # into an empty folder
    if asked.resume is not None:
        (place / SUMMARY).unlink()
        (place / MODEL).unlink()


def end_command(asked: Command, place: Path) -> Row:
    """The end, and the row."""
    if asked.resume is not None:
        command(*made([*RESUME, *asked.resume], run=place))
    (summary,) = place.rglob(SUMMARY)
    if asked.replay:
        command(*made(REPLAY, run=summary.parent))
    return row_of(summary.parent)


def row_of(out: Path) -> Row:
    """What a run directory says. Real processes have a clock of their own, and when bytes leave hangs on it."""
    summary = json.loads((out / SUMMARY).read_text())
    by_worker: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for line in map(json.loads, (out / METRICS).read_text().splitlines()):
        by_worker[line.get("worker", -1)].append(line)
    losses, last = [], []
    for worker, lines in sorted(by_worker.items()):
        lines.sort(key=lambda line: line["step"])
        losses.append([line[key] for line in lines for key in LOSSES if key in line])
        last += lines[-1:] if worker >= 0 and summary["backend"] == "virtual" else []
    model = load_file(out / MODEL)
    shards = [load_file(shard) for shard in out.glob(SHARDS)]
    states = [tensor for shard in shards for name, tensor in shard.items() if name != "__structure__"]  # and times
    seconds = [*(line["clock_seconds"] for line in last), summary["virtual_seconds"]]
    return {
        "weights": digest(content(model[name]) for name in sorted(model)),
        "losses": digest(map(numbers, [*losses, [summary[key] for key in ENDS]])),
        "state": unnamed(states),
        "bytes": [*(line["bytes_sent"] for line in last), summary["bytes_sent_per_worker"]],
        "seconds": [repr(value) for value in seconds if value is not None],
    }


def plan_row(settings: Sequence[str]) -> Row:
    """Every value of a plan of memory, whatever it is called."""
    return {"plan": digest(map(str.encode, values_in(json.loads(command(*made(MEMORY_PLAN, settings))))))}


def values_in(tree: Any) -> list[str]:
    """What is not a name in it."""
    if isinstance(tree, (dict, list)):
        return [value for entry in (tree.values() if isinstance(tree, dict) else tree) for value in values_in(entry)]
    return [repr(tree)]


# ---------------------------------------------------------------------------------------------------------------------
# The table


def loop_runs() -> dict[str, Run]:
    """The loops on the virtual clock."""
    return {
        name: Run(partial(begin_loop, loop), partial(end_loop, loop), loop.resume is not None)
        for name, loop in LOOPS.items()
    }


def command_runs(home: Path) -> dict[str, Run]:
    """The commands. home: of the files that settings name."""
    return {
        name: Run(
            partial(begin_command, asked, home), partial(end_command, asked), asked.resume is not None or asked.replay
        )
        for name, asked in COMMANDS.items()
    }


def rows(runs: Mapping[str, Run], only: str, keep: Path | None = None) -> dict[str, Row]:
    """Of the runs whose names hold `only`. keep: where those that can be gone on with are kept halfway."""

    def whole(name: str, run: Run) -> Row:
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            run.begin(place)
            if keep is not None and run.goes_on:
                shutil.copytree(place, keep / name)
            return run.end(place)

    return {name: guarded(name, partial(whole, name, run)) for name, run in runs.items() if only in name}


def rows_from_halfway(runs: Mapping[str, Run], only: str, keep: Path) -> dict[str, Row]:
    """Of the runs that were kept."""

    def rest(name: str, run: Run) -> Row:
        with tempfile.TemporaryDirectory() as folder:
            return run.end(shutil.copytree(keep / name, Path(folder), dirs_exist_ok=True))

    return {
        name: guarded(name, partial(rest, name, run))
        for name, run in runs.items()
        if only in name and (keep / name).is_dir()
    }


def all_rows(only: str, home: Path, keep: Path | None = None) -> dict[str, Row]:
    """The whole table."""
    prepare(home)
    found = rows(loop_runs(), only, keep) | dict(real_rows(only)) | rows(command_runs(home), only, keep)
    plans = {name: settings for name, settings in PLANS.items() if only in name}
    return found | {name: guarded(name, partial(plan_row, settings)) for name, settings in plans.items()}


def guarded(name: str, make: Callable[[], Row]) -> Row:
    """The row, or how the run ended that was refused or broke off: one must not cost the others their rows."""
    try:
        return make()
    except Exception as error:
        code = error.code if isinstance(error, Refused) else type(error).__name__
        print(f"{name}: ended with {code}: {(str(error).splitlines() or [''])[-1]}", file=sys.stderr)
        return {"end": code}


def differences(before: Mapping[str, Row], after: Mapping[str, Row]) -> list[str]:
    """One line for each run that is not as before."""
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
    parser = argparse.ArgumentParser(description="Hashes of what named runs compute.")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--write", type=Path, metavar="FILE", help="write the table")
    choice.add_argument("--check", type=Path, metavar="FILE", help="make the table again and compare")
    parser.add_argument("--halfway", type=Path, metavar="FOLDER", help="keep runs halfway, or go on with them")
    parser.add_argument("--only", default="", metavar="WORDS", help="only runs whose names have them")
    options = parser.parse_args()
    torch.set_num_threads(1)
    only, halfway = options.only, options.halfway and options.halfway.resolve()
    if options.write and halfway and halfway.exists():
        parser.error(f"--halfway {halfway}: is there already; name a new folder")
    with tempfile.TemporaryDirectory() as folder:
        if options.write:
            found = all_rows(only, halfway or Path(folder), halfway)
            options.write.write_text(json.dumps({"machine": machine(), "rows": found}, indent=1) + "\n")
            print(f"{len(found)} runs written to {options.write}")
            return 0
        if options.check:
            table = json.loads(options.check.read_text())
            if table["machine"] != machine():
                print(f"the table is of another machine: {table['machine']}", file=sys.stderr)
            before = {name: one for name, one in table["rows"].items() if only in name}
            after = all_rows(only, Path(folder))
            if halfway:
                again = rows_from_halfway(loop_runs() | command_runs(halfway), only, halfway)
                before |= {f"{name}, from halfway": before[name] for name in again}
                after |= {f"{name}, from halfway": one for name, one in again.items()}
        else:
            before, after = rows(loop_runs(), only), rows(loop_runs(), only)
    told = differences(before, after)
    print("\n".join(told) or f"{len(after)} runs, all the same")
    return int(bool(told))


if __name__ == "__main__":
    sys.exit(main())
