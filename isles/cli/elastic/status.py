"""`isles status`: who takes part in a run, as its lighthouse reports it, or as the files of a run directory say."""

from __future__ import annotations

import json as json_module
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Annotated, Any

import typer
from typing_extensions import override

from isles.base.errors import printable
from isles.cli.elastic.join import RunToken, read_token
from isles.cli.terminal import end_in_order, print_table
from isles.report.panels import Table
from isles.report.units import format_bytes, format_seconds

_EACH = 2.0  # seconds between two looks of --watch
_NAMES = ("machine", "address", "way", "place", "fingerprint")  # columns of words


def status(
    run: Annotated[str, typer.Argument(metavar="RUN|HOST:PORT", help="A run directory, or a lighthouse's address.")],
    token: RunToken = None,
    watch: Annotated[bool, typer.Option("--watch", help="Look again every 2 seconds, until Ctrl-C.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, one line a look.")] = False,
    metrics_port: Annotated[
        int | None, typer.Option(help="Serve Prometheus metrics at this port of 127.0.0.1, until Ctrl-C.")
    ] = None,
) -> None:
    """Show the members of a run: machines, addresses, progress, speed, how they reach each other, and refusals."""
    end_in_order()
    if metrics_port is not None:
        if not 0 < metrics_port < 65536:
            raise ValueError(f"--metrics-port {metrics_port}: choose 1 to 65535")
        _serve(lambda: prometheus(_look(run, token)[1]), metrics_port)
    while True:
        facts, rows = _look(run, token)
        if json:
            print(json_module.dumps({**facts, "members": rows}), flush=True)
        else:
            print("; ".join(f"{name} {value}" if value != "" else name for name, value in facts["run"].items()))
            shown = [name for name in rows[0] if any(row[name] not in ("", None) for row in rows)] if rows else []
            names = sorted(shown, key=lambda name: name not in _NAMES)
            cells = [[_cell(name, row[name]) for name in names] for row in rows]
            print_table(Table(heads=names, rows=cells, names=sum(name in _NAMES for name in names)))
            _print_beside(facts)
        if not watch:
            return
        time.sleep(_EACH)


def _look(run: str, token: str | None) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(facts of the run, a row for each member). OSError and ValueError as `run_status`, and for no run directory."""
    if not Path(run).is_dir():
        return _asked(run, token)
    if (Path(run) / "lighthouse.json").is_file() and not (Path(run) / "summary.json").is_file():
        from isles.comm.tcp import written
        from isles.training.lighthouse.server import read_address

        at, secret = read_address(Path(run)), Path(run) / "credentials"
        try:
            own = token or (str(_own_token(secret)) if secret.is_dir() else None)
            return _asked(written(at.host, at.port), own)
        except OSError:
            return _read(Path(run), "its lighthouse does not answer; this is what its files say")
    return _read(Path(run), "")


def prometheus(rows: list[dict[str, Any]]) -> str:
    """The numbers of all members, in Prometheus' text format."""
    lines = []
    for row in rows:
        labels = f'member="{row["member"]}",machine={json_module.dumps(row["machine"])}'
        numbers = {key: value for key, value in row.items() if isinstance(value, int | float) and key != "member"}
        lines += [f"isles_member_{key.replace(' ', '_')}{{{labels}}} {value}" for key, value in numbers.items()]
    return "\n".join(lines) + "\n"


def _serve(text: Callable[[], str], port: int) -> None:
    """Answer each GET with `text`, on this machine only; 503 while it cannot be had."""

    class Answer(BaseHTTPRequestHandler):
        timeout = 10.0

        def do_GET(self) -> None:
            try:
                code, body = 200, text()
            except (OSError, ValueError) as error:
                code, body = 503, f"{error}\n"
            self.send_response(code)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(body.encode())

        @override
        def log_message(self, format: str, *of: Any) -> None:
            """Nothing: each look would be a line."""

    HTTPServer(("127.0.0.1", port), Answer).serve_forever()


def _own_token(folder: Path) -> Any:
    from isles.comm.credentials import read

    return read(folder).token


def _asked(address: str, token: str | None) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Ask the lighthouse."""
    from isles.membership.messages import spoken
    from isles.membership.requests import run_status

    now: Any = run_status(address, read_token(token))
    in_rounds = hasattr(now, "members")  # a run of whole replicas; else of peers
    members = now.members if in_rounds else sorted(now.peers, key=lambda one: (one.stage < 0, one.stage))
    known = {member: more for member, *more in now.machines}
    ways = {by: sorted({row[2].partition(" ")[0] for row in now.paths if row[0] == by} - {""}) for by in known}
    newest = now.round if in_rounds else now.step
    rows = []
    for one in members:
        at = one.round if in_rounds else one.step
        machine, address, since = known.get(one.member, ("", "", None))
        row: dict[str, Any] = {"machine": machine, "address": address, "way": " ".join(ways.get(one.member, []))}
        row |= {"place": one.state if in_rounds else _place(one, now.clustered), "fingerprint": spoken(one.identity)}
        row |= {"member": one.member, "round" if in_rounds else "step": at, "behind": max(newest - at, 0)}
        row |= {"a step" if in_rounds else "a microbatch": one.seconds or None}
        if not in_rounds:
            row |= {"counted": one.counted, "queue": round(one.queue, 1), "heard": one.heard}
        rows.append({**row, "here for": since})
    if in_rounds:
        facts: dict[str, Any] = {"waiting for the first view": ""}
        if now.view >= 0:
            facts = {f"round {now.round}" + (f" of {now.last}" if now.last else ""): "", "view": now.view}
    else:
        facts = {
            f"step {now.step} of {now.last}" + (f", {format_seconds(now.since)} ago" if now.since >= 0 else ""): ""
        }
        facts["clusters begun:" if now.clustered else "swarms begun:"] = now.epoch
        facts |= {now.wanted: ""} if now.wanted else {}
    if not in_rounds or now.view >= 0:
        facts["states saved:"] = f"step {now.saved}" if now.saved else "none yet"
    return {"run": facts, "paths": now.paths, "refused": now.refused}, rows


def _place(peer: Any, clustered: bool) -> str:
    """The stage of a peer, or the cluster and stage of a node."""
    if not peer.coordinates:
        return "waiting" if peer.stage < 0 else "standby" if clustered else f"stage {peer.stage}"
    number, at, stages, is_whole = peer.coordinates
    return f"cluster {number}{'' if is_whole else ', broken'}: stage {at} of {stages}"


def _read(run: Path, why: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What the files of a run directory say."""
    from isles.membership.run_log import JOURNAL, read_history
    from isles.report.rundir import read_run
    from isles.training.elastic.metrics import recorded

    found = read_run(run)
    there = read_history(recorded(run)[0] if (run / JOURNAL).is_file() else [])
    rows: list[dict[str, Any]] = []
    for worker, log in found.workers.items():
        clock = sorted(log.clock.items())
        (before, began), (step, ended) = (clock[-2], clock[-1]) if len(clock) > 1 else ((0, 0.0), (log.last_step, 0.0))
        pace = (ended - began) / (step - before) if step > before and ended > began else None
        row = {"machine": printable(there.machines.get(worker, ""), 40), "member": worker, "step": step}
        rows.append({**row, "behind": found.last_step - step, "a step": pace})
    state = "is complete" if found.summary is not None else why or ("runs" if _runs(run) else "does not run")
    return {"run": {f"{run} {state}": "", "step": found.last_step}, "paths": [], "refused": []}, rows


def _runs(run: Path) -> bool:
    """Whether a process holds the lock of the run."""
    from isles.training.records.rundir import lock_run

    try:
        with lock_run(run):
            return False
    except (OSError, ValueError):
        return True


def _cell(name: str, value: Any) -> str:
    if value is None or value == "":
        return "-"
    return format_seconds(value) if name in ("a step", "a microbatch", "heard", "here for") else str(value)


def _print_beside(facts: dict[str, Any]) -> None:
    """Print the paths between members, and what was refused."""
    rows = [
        [f"{by} to {to}", way or "-", format_seconds(trip) if trip else "-", format_bytes(sent), format_bytes(taken)]
        for by, to, way, trip, sent, taken in facts["paths"]
    ]
    if rows:
        print_table(Table(heads=["path", "way", "round trip", "sent", "taken"], rows=rows, names=2))
    for by, member, why, times in facts["refused"]:
        whom = "somebody" if member < 0 else f"worker {member}"
        print(f"refused {times} times by {'the lighthouse' if by < 0 else f'worker {by}'}: {whom}: {why}")
