"""What the worker processes of test_mean.py run. No pytest in here: it would be loaded by every process."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass
from hashlib import sha256

import torch
from torch import Tensor

from isles.comm.codecs import codec
from isles.comm.codecs.base import as_bytes
from isles.comm.collectives.basic import HEADER_BYTES, Stamp
from isles.comm.collectives.mean import mean, sent_bytes
from isles.comm.errors import CommError
from isles.comm.group import Group
from isles.comm.mesh import Mesh

MODULE = sys.modules[mean.__module__]


@dataclass(frozen=True)
class Case:
    """One mean: a codec, a number of entries, their dtype, and the longest segment of the pipeline."""

    codec: str
    elements: int
    dtype: str = "float32"
    segment: int = 1 << 22


@dataclass(frozen=True)
class ConnectionState:
    """What one worker saw of a case; `wrong` lists what was not as it should be."""

    result: str
    counted: int
    promised: int
    wrong: tuple[str, ...]


def contribution(case: Case, rank: int) -> Tensor:
    """What worker `rank` brings: known to all, so that each can compute what should come out."""
    generator = torch.Generator().manual_seed(1000 * case.elements + rank)
    return torch.randn(case.elements, generator=generator, dtype=getattr(torch, case.dtype)) * 10.0**-rank


def in_rank_order(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total = total + part
    return total / len(parts)


def through(name: str, x: Tensor) -> Tensor:
    form = codec(name)
    return form.decode(form.encode(x).clone(), x.numel(), x.dtype).clone()


def one(group: Group, case: Case, round: int) -> ConnectionState:
    """Run a case and compare with the definition, to the bit."""
    MODULE._SEGMENT = case.segment
    form = codec(case.codec)
    buffer = contribution(case, group.rank)
    own = torch.full_like(buffer, float("nan"))
    before = group.traffic["outer"].bytes_sent
    group.start(mean(group.call("outer", round), buffer, form, Stamp(round, 77), own), "outer").wait()
    counted = group.traffic["outer"].bytes_sent - before

    sent = [contribution(case, rank) for rank in range(group.size)]
    decoded = [through(case.codec, x) for x in sent]
    expected = in_rank_order(decoded)
    if group.size != 2:  # two shots encode the mean once more
        expected = through(case.codec, expected)
    wrong = []
    if not torch.equal(buffer, expected):
        wrong.append(f"the mean is off by {(buffer - expected).abs().max():.3g}")
    if not torch.equal(own, decoded[group.rank]):
        wrong.append("`own` is not what the others decoded")
    if form.lossless and not torch.equal(buffer, in_rank_order(sent)):
        wrong.append("lossless, but not the sum in rank order over the size")
    promised = sent_bytes(case.elements, buffer.dtype, form, group.size, group.rank)
    return ConnectionState(sha256(as_bytes(buffer).numpy().tobytes()).hexdigest(), counted, promised, tuple(wrong))


def trusting(group: Group) -> Group:
    """The same: what they bring is of different sizes on purpose."""
    group.ledger.trust.ratio = math.inf
    return group


def all_cases(world: Mesh, cases: list[Case]) -> list[ConnectionState]:
    """Every case in turn, one round each."""
    before = MODULE._SEGMENT
    trusting(world.outer)
    connection_state = [one(world.outer, case, round) for round, case in enumerate(cases)]
    if world.transport.native:  # this process goes on to other tests
        MODULE._SEGMENT = before
    return connection_state


def stopwatch(error: CommError) -> tuple[str, int, str]:
    peer = getattr(error, "peer", getattr(error, "rank", -9))
    return type(error).__name__, peer, str(error)


def attempt(group: Group, round: int | None, stamp: Stamp, value: float, deadline: float = 20.0, **kinds: int):
    """A mean of 1000 equal entries: its value, or what it raised as (class, peer, text)."""
    buffer = torch.full((1000,), value)
    part = kinds.pop("part", 0)
    try:
        group.start(
            mean(group.call("outer", round, **kinds), buffer, codec("none"), stamp, part=part), "outer", deadline
        ).wait()
    except CommError as error:
        return stopwatch(error)
    assert (buffer == buffer[0]).all()
    return buffer[0].item()


def diverging(world: Mesh) -> dict[str, object]:
    """Means in which one of three workers is elsewhere, and one in which all are together again after each."""
    group, rank = world.outer, world.rank
    value = float(rank)
    connection_state: dict[str, object] = {}
    for case, (odd, round, stamp) in enumerate(
        [
            ("step", 10, Stamp(11 if rank == 1 else 10)),
            ("digest", 11, Stamp(11, -5 if rank == 2 else 5)),
            ("round", 12 + (1 << 21) * (rank == 0), Stamp(12)),  # the same address on the wire
            ("unnumbered", None, Stamp(3 if rank == 1 else 4)),
        ]
    ):
        connection_state[odd] = attempt(group, round, stamp, value)
        connection_state[f"after {odd}"] = attempt(group, 20 + case, Stamp(20), value)
    connection_state["after unnumbered, unnumbered"] = attempt(group, None, Stamp(5), value)
    return connection_state


def late(world: Mesh) -> dict[str, object]:
    """Worker 1 comes to round 7 when worker 0 has given it up; then both do round 8. Headers, step and hash agree."""
    group, rank = world.outer, world.rank
    connection_state: dict[str, object] = {}
    if rank == 1:
        time.sleep(0.8)
    connection_state["round 7"] = attempt(group, 7, Stamp(1), 100.0 + rank, deadline=0.4 if rank == 0 else 5.0)
    connection_state["round 8"] = attempt(group, 8, Stamp(1), 200.0 + rank)
    # Without rounds the calls count: the one that failed on both sides is behind them.
    if rank == 1:
        time.sleep(0.8)
    connection_state["unnumbered"] = attempt(group, None, Stamp(1), 300.0 + rank, deadline=0.4 if rank == 0 else 5.0)
    connection_state["unnumbered, next"] = attempt(group, None, Stamp(1), 400.0 + rank)
    # Different rounds never meet.
    connection_state["apart"] = attempt(group, 30 + rank, Stamp(1), 1.0, deadline=0.4)
    connection_state["together"] = attempt(group, 40, Stamp(1), 500.0 + rank)
    return connection_state


def several(world: Mesh) -> list[float]:
    """Six means of three fragments and two parts of one round under way at once, waited for in reverse."""
    group = trusting(world.outer)
    flights = []
    for fragment in range(3):
        for part in range(2):
            buffer = torch.full((5000 + fragment,), float(10 * fragment + part + 100 * group.rank))
            call = group.call("outer", 4, fragment)
            flights.append((buffer, group.start(mean(call, buffer, codec("none"), Stamp(4), part=part), "outer")))
    for _, flight in reversed(flights):
        flight.wait()
    return [buffer.unique().item() for buffer, _ in flights]


def unnumbered(world: Mesh) -> list[float]:
    """Eight means without a round under way at once: numbered in program order."""
    group = trusting(world.outer)
    buffers = [torch.full((100 * (index + 1),), index + 100.0 * group.rank) for index in range(8)]
    flights = [group.start(mean(group.call("outer"), buffer, codec("none"))) for buffer in buffers]
    for flight in reversed(flights):
        flight.wait()
    return [buffer.unique().item() for buffer in buffers]


HEADER = HEADER_BYTES
