"""`isles status`: the state of a run, as its lighthouse reports it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from isles.cli.elastic.join import RunToken, read_token
from isles.cli.terminal import end_in_order, print_table
from isles.report.panels import Table
from isles.report.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from isles.membership.messages import RunStatus, SwarmStatus


def status(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="The lighthouse's address.")],
    token: RunToken = None,
) -> None:
    """Show the members of a run, their progress and speed, their fingerprints, how they reach each other, and what was
    refused.
    """
    from isles.membership.messages import RunStatus
    from isles.membership.requests import run_status

    end_in_order()
    now = run_status(address, read_token(token))
    heads, rows, names = _replicas(now) if isinstance(now, RunStatus) else _swarm(now)
    print_table(Table(heads=heads, rows=rows, names=names))
    if now.paths:
        print_table(Table(heads=["path", "way", "round trip", "sent", "taken"], rows=[*map(_path, now.paths)], names=2))
    for by, member, why, times in now.refused:
        whom = "somebody" if member < 0 else f"worker {member}"
        print(f"refused {times} times by {'the lighthouse' if by < 0 else f'worker {by}'}: {whom}: {why}")


def _path(row: tuple[int, int, str, float, int, int]) -> list[str]:
    by, to, way, trip, sent, taken = row
    return [f"{by} to {to}", way or "-", format_seconds(trip) if trip else "-", format_bytes(sent), format_bytes(taken)]


def _replicas(now: RunStatus) -> tuple[list[str], list[list[str]], int]:
    from isles.membership.messages import spoken

    last = f" of {now.last}" if now.last else ""
    print(f"round {now.round}{last}; view {now.view}" if now.view >= 0 else "waiting for the first view")
    rows = []
    for one in now.members:
        seconds = format_seconds(one.seconds) if one.seconds else "-"
        rows.append([spoken(one.identity), one.seen or "-", one.state, str(one.member), str(one.round), seconds])
    return ["fingerprint", "seen at", "state", "worker", "round", "inner step"], rows, 3


def _swarm(now: SwarmStatus) -> tuple[list[str], list[list[str]], int]:
    step = f"step {now.step} of {now.last}"
    step += f", {format_seconds(now.since)} ago" if now.since >= 0 else ""
    saved = f"step {now.saved}" if now.saved else "none yet"
    begun = "clusters" if now.clustered else "swarms"
    print(f"{step}; states saved: {saved}; {begun} begun: {now.epoch}" + (f"; {now.wanted}" if now.wanted else ""))
    if now.clustered:
        print(_clusters(now))
    return (*(_by_cluster(now) if now.clustered else _by_stage(now)), 0)


def _by_stage(now: SwarmStatus) -> tuple[list[str], list[list[str]]]:
    from isles.membership.messages import spoken

    rows = []
    for one in sorted(now.peers, key=lambda one: (one.stage < 0, one.stage, one.member)):
        stage = str(one.stage) if one.stage >= 0 else "waiting"
        seconds = format_seconds(one.seconds) if one.seconds else "-"
        counts = [str(one.member), str(one.step), str(one.counted)]
        rows.append(
            [stage, *counts, seconds, f"{one.queue:.1f}", f"{format_seconds(one.heard)} ago", spoken(one.identity)]
        )
    return ["stage", "member", "step", "counted", "a microbatch", "queue", "heard", "fingerprint"], rows


def _by_cluster(now: SwarmStatus) -> tuple[list[str], list[list[str]]]:
    from isles.membership.messages import spoken

    rows = []
    for one in sorted(now.peers, key=lambda one: (not one.coordinates, one.coordinates, one.stage < 0, one.member)):
        cluster, stage = "standby" if one.stage >= 0 else "waiting", "-"
        if one.coordinates:
            number, at, stages, is_whole = one.coordinates
            cluster, stage = f"{number}" if is_whole else f"{number}, broken", f"{at} of {stages}"
        seconds = format_seconds(one.seconds) if one.seconds else "-"
        rows.append(
            [
                cluster,
                stage,
                str(one.member),
                str(one.step),
                seconds,
                f"{format_seconds(one.heard)} ago",
                spoken(one.identity),
            ]
        )
    return ["cluster", "stage", "member", "step", "a microbatch", "heard", "fingerprint"], rows


def _clusters(now: SwarmStatus) -> str:
    """The number of clusters by state, as text."""
    whole = {one.coordinates[0] for one in now.peers if one.coordinates and one.coordinates[3]}
    broken = {one.coordinates[0] for one in now.peers if one.coordinates} - whole
    aside = sum(not one.coordinates for one in now.peers)
    text = f"{len(whole)} cluster{'s' * (len(whole) != 1)} at work"
    text += f", {len(broken)} broken" if broken else ""
    return text + (f"; {aside} node{'s' * (aside > 1)} without a stage" if aside else "")
