"""What commands share: options, tables and sheets on the terminal, progress (a bar on a terminal, plain lines
elsewhere), checks of `isles doctor`, and signals before a run has begun.
"""

from __future__ import annotations

import gc
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import wraps
from inspect import Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from typing_extensions import override

from isles.base.errors import nearest
from isles.base.parsing import parse_json
from isles.base.schema import USAGE
from isles.data.config import PREPARING
from isles.report.panels import Table
from isles.report.units import format_bytes, format_percent, format_seconds

if TYPE_CHECKING:
    from isles.report.sheet import Sheet


def aligned(rows: Sequence[Sequence[str]], left_aligned: Container[int] = ()) -> list[str]:
    """Lines of a table: columns of `left_aligned` to the left, of numbers to the right. They are as wide as they are: a
    terminal that is too narrow wraps lines, which is better than cutting numbers.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    columns = range(len(widths))
    cells = (
        [row[at].ljust(widths[at]) if at in left_aligned else row[at].rjust(widths[at]) for at in columns]
        for row in rows
    )
    return ["  ".join(row).rstrip() for row in cells]


def print_table(table: Table) -> None:
    """With its heads."""
    print("\n".join(aligned([table.heads, *table.rows], range(table.names))))


def print_named(rows: Mapping[str, object]) -> None:
    """A line for each name, with what it stands for."""
    width = max(map(len, rows))
    for name, what in rows.items():
        print(f"{name:<{width}}  {what}")


def _known(device: str | None) -> str | None:
    """ValueError where --device names none."""
    from isles.models.config import check_device

    check_device("auto" if device is None else device, "--device")
    return device


ConfigFile = Annotated[str | None, typer.Argument(metavar="[CONFIG.toml]", help="Default: the embedded small run.")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Any setting; repeatable.")]
InnerSteps = Annotated[int | None, typer.Option(help="Inner steps a worker.")]
Device = Annotated[str, typer.Option(callback=_known, help="auto, cpu, cuda or cuda:N.")]
OwnDevice = Annotated[str | None, typer.Option(callback=_known, help="auto, cpu, cuda or cuda:N. Default: the run's.")]
As = Annotated[str | None, typer.Option("--as", metavar="MODEL", help='Time and bytes as of "1B", or "1B, A100".')]
Trust = Annotated[
    bool, typer.Option("--trust", help="Import and run what the run's config.toml names, though it was made elsewhere.")
]


def _shorthands(
    data: Annotated[str | None, typer.Option(help="Text to train on: a file or a folder (data.path).")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak inner learning rate (inner.lr).")] = None,
    model: Annotated[str | None, typer.Option(help="A size (10M), a transformers folder, or package:function.")] = None,
    tokens: Annotated[str | None, typer.Option(help="Tokens of all workers, such as 10M, instead of steps.")] = None,
) -> None:
    """Settings that are asked for most."""


def takes_settings(command: Callable[..., None]) -> Callable[..., None]:
    """`command`, which has --set, with the options of `_shorthands`."""
    own, more = (signature(function, eval_str=True).parameters for function in (command, _shorthands))

    @wraps(command)
    def run(*path: Any, set_: list[str] | None = None, **options: Any) -> None:
        from isles.training.config.reading import settings_named

        provided = settings_named({name: one for name in more if (one := options.pop(name, None)) is not None})
        short = [f"{key}={json.dumps(value)}" for key, value in provided.items()]
        command(*path, set_=[*short, *(set_ or [])] or None, **options)

    run.__signature__ = Signature([*own.values(), *more.values()])  # type: ignore[attr-defined]
    run.__annotations__ = {name: one.annotation for name, one in {**own, **more}.items()}
    return run


def explain(error: Any) -> str:
    """The message of click's usage error, with what the user may have meant."""
    message: str = error.format_message()
    command: Any = getattr(error.ctx, "command", None)
    options = [name for one in getattr(command, "params", ()) for name in one.opts if name.startswith("--")]
    if below := re.match(r"No such command '(.+?)'", message):
        close = nearest(below[1], command.commands)
        hint = f"did you mean {close!r}? " if close else ""
        return f"no such command {below[1]!r}: {hint}choose one of {', '.join(command.commands)}"
    if extra := re.fullmatch(r"Got unexpected extra argument.*? \((.+)\)", message):
        return f"{message}; write --data {extra[1]}" if "--data" in options and Path(extra[1]).exists() else message
    if name := getattr(error, "option_name", None) if message.startswith("No such option") else None:
        from isles.training.config.reading import settings_like

        close = nearest(name.lstrip("-"), [one.lstrip("-") for one in options])  # the dashes would make all names alike
        like = settings_like(name.lstrip("-")) if "--set" in options and close is None else []
        meant = f"--{close}" if close else f"--set {like[0]}=..." if like else ""
        return f"no such option {name}" + (f": did you mean {meant}?" if meant else "")
    return message


class _Log:
    """How a command logs. as_json: an object a line on stdout, in place of text."""

    as_json = False


def _logs(kind: str) -> str:
    if kind not in ("text", "json"):
        raise ValueError(f"--log {kind}: choose text or json")
    _Log.as_json = kind == "json"
    return kind


Log = Annotated[
    str, typer.Option(callback=_logs, metavar="text|json", help="json: an object a line on stdout, nothing else there.")
]


def log_event(event: str, **values: Any) -> bool:
    """Log one event with --log json; returns whether that is so. A value that is no number any more becomes null."""
    if _Log.as_json:
        from isles.training.records.rundir import as_json

        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        print(as_json({"time": now, "event": event, **values}), flush=True)
    return _Log.as_json


def say(text: str, level: str = "info", prefix: str = "") -> None:
    """A line for the user. level: "info", "warning" or "error". prefix: of the line as text, which goes to stderr."""
    if not log_event("notice", level=level, text=text):
        print(prefix + text, file=sys.stderr, flush=True)


def end_in_order() -> None:
    """SIGTERM, SIGUSR1, and SIGHUP unless it is ignored (nohup), end the command by way of Python: no process stays
    behind.
    """
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: sys.exit(128 + number))


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, nothing else.")]
OutFolder = Annotated[Path | None, typer.Option(help="Also write CSV, JSON, PNG and HTML into this directory.")]


def show(made: Sheet, json: bool, out: Path | None) -> None:
    """Print it. out: also write it into this directory."""
    if json:
        from isles.report.sheet import as_json

        print(as_json(made))
    else:
        print(made.title, made.subtitle, made.what, "", sep="\n")
        print_table(made.table)
        print()
        for note in made.notes:
            print(f"note: {note}")
    if out is not None:
        from isles.report.sheet import write_sheet

        for path in write_sheet(made, out):
            print(path, file=sys.stderr if json else sys.stdout)


@contextmanager
def alone() -> Iterator[None]:
    """Sketches are many small things, for which threads do not pay, and torch is not searched for garbage again and
    again.
    """
    from isles.base.modes import torch_threads

    gc.freeze()
    try:
        with torch_threads(1):
            yield
    finally:
        gc.unfreeze()


_SHOWN_EVERY = 10.0  # seconds between two plain lines of progress of the data
_PLAIN_LINES = 10  # over a whole run, where there is no terminal


def bars() -> Bar:
    """A display for bars of one or more runs; hidden where there is no terminal."""
    console = Console(stderr=True)
    return Bar(
        TextColumn("[bold]{task.description}[/] {task.fields[workers]} workers"),
        BarColumn(),
        TextColumn("step {task.completed:.0f}/{task.total:.0f}  loss {task.fields[loss]}  sent {task.fields[sent]}"),
        TimeRemainingColumn(),
        console=console,
        disable=_Log.as_json or not console.is_terminal,
    )


class Progress:
    """Fed with lines of metrics.jsonl from all workers; shows the slowest worker's step, mean loss, bytes and time
    left. bar: where it is shown, beside others; its own by default. plain: what plain lines begin with.
    """

    def __init__(self, method: str, workers: int, steps: int, bar: Bar | None = None, plain: str = "") -> None:
        self.method, self.steps, self.workers, self.plain = method, steps, workers, plain
        self.latest: dict[int, dict[str, Any]] = {}
        self.next_plain = 0
        self.next_shown = 0.0
        self.began: tuple[float, int] | None = None  # the first line here: when, and its step
        self.logged = 0, 0, time.monotonic()  # step, tokens of all workers, and when
        self.bar = bar or bars()
        self.console = self.bar.console
        self.task = self.bar.add_task(method, total=steps, workers=workers, loss="-", sent="-")

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def notice(self, text: str) -> None:
        """Show a remark, a line about a member, or a line of progress, which on a terminal is the bar's."""
        preparing = text.startswith(PREPARING)
        self.bar.update(self.task, description=text if preparing else self.method)
        if preparing and (self.console.is_terminal or time.monotonic() < self.next_shown):
            return
        self.next_shown = time.monotonic() + _SHOWN_EVERY
        note = "" if text.startswith(("+ ", "- ")) else "note: "
        if not log_event("notice", level="info", text=text):
            self.console.print(note + text, highlight=False, markup=False, emoji=False, soft_wrap=True)

    def counted(self) -> list[dict[str, Any]]:
        """The newest line of each worker; none until there is one of all."""
        return list(self.latest.values()) if len(self.latest) >= self.workers else []

    def line(self, line: dict[str, Any]) -> None:
        """Take in one worker's line."""
        self.latest[line["worker"]] = line
        lines = self.counted()
        if not lines:
            return
        step = min(entry["step"] for entry in lines)
        loss = sum(entry["loss"] for entry in lines) / len(lines)
        if _Log.as_json:
            self._log(step, loss, lines)
            return
        sent = format_bytes(sum(entry["bytes_sent"] for entry in lines) / len(lines)) + " a worker"
        sent += f"  lr {lines[0]['lr']:.3g}" + format_usage(lines)
        self.bar.update(self.task, completed=step, loss=f"{loss:.3f}", sent=sent, workers=self.workers)
        if not self.console.is_terminal and (step >= self.next_plain or step == self.steps):
            self.next_plain = step + max(self.steps // _PLAIN_LINES, 1)
            text = f"{self.plain}step {step}/{self.steps}  loss {loss:.3f}  sent {sent}{self._left(step)}"
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _left(self, step: int) -> str:
        """The time that the remaining steps take at the pace since the first line here; "" before and after."""
        began, first = self.began = self.began or (time.monotonic(), step)
        if not first < step < self.steps:
            return ""
        return f"  {format_seconds((time.monotonic() - began) / (step - first) * (self.steps - step))} left"

    def _log(self, step: int, loss: float, lines: Sequence[dict[str, Any]]) -> None:
        """A step, once all workers have reached it: mean loss, tokens of all, bytes sent by a worker."""
        before, last, then = self.logged
        if step <= before:
            return
        tokens, now = sum(entry["tokens"] for entry in lines), time.monotonic()
        rate = round((tokens - last) / (now - then), 1) if before else None  # first the workers started
        self.logged = step, tokens, now
        sent = round(sum(entry["bytes_sent"] for entry in lines) / len(lines))
        counts = {"tokens": tokens, "tokens_per_second": rate, "bytes_sent_per_worker": sent}
        norms = [entry["gradient_norm"] for entry in lines if entry.get("gradient_norm") is not None]
        course = {"lr": lines[0]["lr"], "gradient_norm": sum(norms) / len(norms) if norms else None}
        values = [entry["val_loss"] for entry in lines if entry.get("val_loss") is not None]
        validated = {"val_loss": sum(values) / len(values)} if values else {}
        log_event("step", step=step, steps=self.steps, workers=self.workers, loss=loss, **validated, **course, **counts)


def format_usage(lines: Sequence[dict[str, Any]]) -> str:
    """Mean norm of the workers' gradients, tokens per second of all; of GPUs mean MFU, and the most memory of one."""
    columns = {key: [line[key] for line in lines if line.get(key) is not None] for key in ("gradient_norm", *USAGE)}
    norms = columns["gradient_norm"]
    speeds, shares, peaks = columns["tokens_per_second"], columns["mfu"], columns["memory_peak_bytes"]
    text = f"  gradient {sum(norms) / len(norms):.3g}" if norms else ""
    text += f"  {sum(speeds):,.0f} tokens/s" if speeds else ""
    text += f"  MFU {format_percent(sum(shares) / len(shares))}" if shares else ""
    return text + (f"  peak {format_bytes(max(peaks))}" if peaks else "")


class ComingAndGoing(Progress):
    """Progress of the workers that are there: one that is lost does not hold the bar up. members: their members now."""

    def __init__(self, method: str, steps: int) -> None:
        super().__init__(method, 0, steps)
        self.members: Callable[[], Sequence[int]] = list

    @override
    def counted(self) -> list[dict[str, Any]]:
        there = self.members()
        self.workers = len(there)
        self.latest = {member: line for member, line in self.latest.items() if member in there}
        return list(self.latest.values())


_SECONDS = 300.0  # for torch to be loaded from a slow disk
_LOOK = """
import json, torch, torch.distributed as dist
there = dist.is_available()
names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
print(json.dumps([torch.__version__, there and dist.is_gloo_available(), there and dist.is_nccl_available(), names]))
"""


@dataclass(frozen=True)
class Check:
    """One line of the doctor's."""

    name: str
    good: bool
    found: str


def of_torch() -> Iterator[Check]:
    """Whether torch can be used here. Asked in a process of its own, which a broken library may end."""
    try:
        done = subprocess.run([sys.executable, "-c", _LOOK], capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        yield Check("torch", False, f"was not loaded within {_SECONDS:g} s: look at the disk that it is on")
        return
    try:
        version, gloo, nccl, names = parse_json(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        message = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        yield Check("torch", False, f"cannot be imported ({message[:200]}); install it: pip install torch")
        return
    yield Check("torch", True, version)
    yield Check("gloo", gloo, "workers talk over it" if gloo else "missing: install a build of torch that has it")
    yield Check("nccl", True, "there" if nccl else "not in this build (only islands of several GPUs want it)")
    yield Check("gpu", True, ", ".join(names) or "none that torch sees: workers compute on the CPU")
