"""`isles status`: who takes part in a run, as its lighthouse reports it, or as the files of a run directory say."""

from __future__ import annotations

import json as json_module
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

import typer
from typing_extensions import override

from isles.base.errors import printable
from isles.cli.elastic.join import RunToken, read_token
from isles.cli.terminal import end_in_order, print_table
from isles.report.panels import Table
from isles.report.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from isles.membership.messages import RunStatus

_EACH = 2.0  # seconds between two looks of --watch
_NAMES = ("machine", "address", "way", "role", "fingerprint")  # columns of words
_SECONDS = ("a step", "a microbatch", "ago", "heard", "here for")
_RATES = ("queue", "steps/s")


def status(
    run: Annotated[str, typer.Argument(metavar="RUN|HOST:PORT", help="A run directory, or a lighthouse's address.")],
    token: RunToken = None,
    watch: Annotated[bool, typer.Option("--watch", help="Look again every 2 seconds, until Ctrl-C.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, one line a look.")] = False,
    metrics_port: Annotated[
        int | None,
        typer.Option(help="Serve Prometheus metrics at this port of 127.0.0.1, until Ctrl-C.", min=1, max=65535),
    ] = None,
) -> None:
    """Show the members of a run: machines, addresses, progress, speed, how they reach each other, and refusals."""
    end_in_order()
    if metrics_port is not None:
        _serve(lambda: prometheus(_rows(_look(run, token))), metrics_port)
    while True:
        now = _look(run, token)
        if json:
            beside = {"run": now.text, "saved": now.saved, "paths": now.paths, "refused": now.refused}
            print(json_module.dumps({**beside, "members": _rows(now)}), flush=True)
        else:
            _print(now)
        if not watch:
            return
        time.sleep(_EACH)


def _look(run: str, token: str | None) -> RunStatus:
    """Ask the run's lighthouse, or read its files. OSError and ValueError as `run_status`, and for no run directory."""
    from isles.membership.requests import run_status

    folder = Path(run)
    if not folder.is_dir():
        if ":" not in run:
            raise ValueError(f"{run}: no such run directory, and no address: write HOST:PORT")
        return run_status(run, read_token(token))
    if (folder / "lighthouse.json").is_file() and not (folder / "summary.json").is_file():
        from isles.comm.credentials import read
        from isles.comm.tcp import written
        from isles.training.lighthouse.server import read_address

        at, secret = read_address(folder), folder / "credentials"
        own = read(secret).token if token is None and secret.is_dir() else read_token(token)
        try:
            return run_status(written(at.host, at.port), own)
        except OSError:
            return _read(folder, "its lighthouse does not answer; this is what its files say")
    return _read(folder)


def _read(run: Path, why: str = "") -> RunStatus:
    """What the files of a run directory say. why: its lighthouse is not asked."""
    from isles.membership.messages import MemberStatus, RunStatus
    from isles.membership.run_log import read_history
    from isles.report.rundir import read_run
    from isles.training.elastic.metrics import recorded

    found, machines, members = read_run(run), read_history(recorded(run)[0]).machines, []
    for worker, log in found.workers.items():
        (before, began), (step, ended) = [(0, 0.0), (log.last_step, 0.0), *sorted(log.clock.items())][-2:]
        pace = (ended - began) / (step - before) if step > before and ended > began else 0.0
        machine = printable(machines.get(worker, ""), 40)
        members.append(MemberStatus(worker, "", "", step, pace, machine=machine))
    age = time.time() - max(file.stat().st_mtime for file in run.iterdir())
    state = "is complete" if found.summary is not None else why or f"was written to {format_seconds(age)} ago"
    return RunStatus(f"{run} {state}; step {found.last_step}", "step", found.last_step, tuple(members))


def _rows(now: RunStatus) -> list[dict[str, Any]]:
    """A row for each member, by column; None and "" where nothing is known."""
    from isles.membership.messages import spoken

    rows = []
    for one in now.members:
        ways = sorted({way.partition(" ")[0] for by, _, way, *_ in now.paths if by == one.member} - {""})
        row: dict[str, Any] = {"machine": one.machine, "address": one.address, "way": " ".join(ways)}
        row |= {"role": one.role, "fingerprint": one.identity and spoken(one.identity), "member": one.member}
        row |= {now.unit: one.step, "behind": max(now.step - one.step, 0)}
        row |= {"a step" if one.queue is None else "a microbatch": one.seconds or None}
        row |= {"steps/s": one.rate, "last exchange": one.exchanged, "ago": one.ago}
        row |= {"counted": one.counted, "queue": one.queue, "heard": one.heard, "here for": one.since}
        rows.append(row)
    return rows


def _print(now: RunStatus) -> None:
    """Print the run, the members without empty columns, the paths between them, and what was refused."""
    saved = [] if now.saved is None else [f"states saved: {f'step {now.saved}' if now.saved else 'none yet'}"]
    print("; ".join([now.text, *saved]))
    rows = _rows(now)
    heads = sorted(dict.fromkeys(key for row in rows for key in row), key=lambda key: key not in _NAMES)
    heads = [key for key in heads if any(row.get(key) not in ("", None) for row in rows)]
    cells = [[_cell(key, row.get(key)) for key in heads] for row in rows]
    print_table(Table(heads=heads, rows=cells, names=sum(key in _NAMES for key in heads)))
    paths = [
        [f"{by} to {to}", way or "-", format_seconds(trip) if trip else "-", format_bytes(sent), format_bytes(taken)]
        for by, to, way, trip, sent, taken in now.paths
    ]
    if paths:
        print_table(Table(heads=["path", "way", "round trip", "sent", "taken"], rows=paths, names=2))
    for by, member, why, times in now.refused:
        whom = "somebody" if member < 0 else f"worker {member}"
        print(f"refused {times} times by {'the lighthouse' if by < 0 else f'worker {by}'}: {whom}: {why}")


def _cell(column: str, value: Any) -> str:
    if value is None or value == "":
        return "-"
    return format_seconds(value) if column in _SECONDS else f"{value:.1f}" if column in _RATES else str(value)


def prometheus(rows: Iterable[dict[str, Any]]) -> str:
    """The numbers of all members, in Prometheus' text format."""
    lines = []
    for row in rows:
        labels = f'member="{row["member"]}",machine={json_module.dumps(row["machine"])}'
        numbers = {key: value for key, value in row.items() if isinstance(value, int | float) and key != "member"}
        names = {key: key.replace(" ", "_").replace("/", "_per_") for key in numbers}
        lines += [f"isles_member_{names[key]}{{{labels}}} {value}" for key, value in numbers.items()]
    return "\n".join(lines) + "\n"


class _Quiet(WSGIRequestHandler):
    timeout = 10.0

    @override
    def log_message(self, format: str, *of: Any) -> None:
        """Nothing: each look would be a line."""


def _serve(text: Callable[[], str], port: int) -> None:
    """Answer each request with `text`, on this machine only; 503 while it cannot be had."""

    def answer(_: Any, start: Callable[..., Any]) -> list[bytes]:
        try:
            code, body = "200 OK", text()
        except (OSError, ValueError) as error:
            code, body = "503 Service Unavailable", f"{error}\n"
        start(code, [("Content-Type", "text/plain; version=0.0.4")])
        return [body.encode()]

    make_server("127.0.0.1", port, answer, handler_class=_Quiet).serve_forever()
