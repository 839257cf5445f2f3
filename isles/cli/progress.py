"""Live progress of a run: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from typing_extensions import override

from isles.base.schema import USAGE

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
        disable=not console.is_terminal,
    )


class Progress:
    """Fed with lines of metrics.jsonl from all workers; shows the slowest worker's step, mean loss, bytes and time
    left. bar: where it is shown, beside others; its own by default. plain: what plain lines begin with.
    """

    def __init__(self, method: str, workers: int, steps: int, bar: Bar | None = None, plain: str = "") -> None:
        self.steps, self.workers, self.plain = steps, workers, plain
        self.latest: dict[int, dict[str, Any]] = {}
        self.next_plain = 0
        self.bar = bar or bars()
        self.console = self.bar.console
        self.task = self.bar.add_task(method, total=steps, workers=workers, loss="-", sent="-")

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def notice(self, text: str) -> None:
        """Show a remark about the settings."""
        self.console.print(f"note: {text}", highlight=False, markup=False, emoji=False, soft_wrap=True)

    def counted(self) -> list[dict[str, Any]]:
        """The newest line of each worker; none until there is one of all."""
        return list(self.latest.values()) if len(self.latest) >= self.workers else []

    def line(self, line: dict[str, Any]) -> None:
        """Take in one worker's line."""
        from isles.report.units import format_bytes

        self.latest[line["worker"]] = line
        lines = self.counted()
        if not lines:
            return
        step = min(entry["step"] for entry in lines)
        loss = sum(entry["loss"] for entry in lines) / len(lines)
        sent = (
            format_bytes(sum(entry["bytes_sent"] for entry in lines) / len(lines)) + " a worker" + format_usage(lines)
        )
        self.bar.update(self.task, completed=step, loss=f"{loss:.3f}", sent=sent, workers=self.workers)
        if not self.console.is_terminal and (step >= self.next_plain or step == self.steps):
            self.next_plain = step + max(self.steps // _PLAIN_LINES, 1)
            text = f"{self.plain}step {step}/{self.steps}  loss {loss:.3f}  sent {sent}"
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)


def format_usage(lines: Sequence[dict[str, Any]]) -> str:
    """Of the GPUs of the workers that have one: tokens per second of all, mean MFU, the most memory that one takes."""
    from isles.report.units import format_bytes, format_percent

    columns = {key: [line[key] for line in lines if line.get(key) is not None] for key in USAGE}
    speeds, shares, peaks = columns["tokens_per_second"], columns["mfu"], columns["memory_peak_bytes"]
    text = f"  {sum(speeds):,.0f} tokens/s" if speeds else ""
    text += f"  MFU {format_percent(sum(shares) / len(shares))}" if shares else ""
    return text + (f"  peak {format_bytes(max(peaks))}" if peaks else "")


class ComingAndGoing(Progress):
    """Progress of the workers that are there: one that is lost does not hold the bar up. members: their seats now."""

    def __init__(self, method: str, steps: int) -> None:
        super().__init__(method, 0, steps)
        self.members: Callable[[], Sequence[int]] = list

    @override
    def counted(self) -> list[dict[str, Any]]:
        there = self.members()
        self.workers = len(there)
        self.latest = {member: line for member, line in self.latest.items() if member in there}
        return list(self.latest.values())
