"""What the worker processes of test_group.py run."""

from __future__ import annotations

import time
from dataclasses import astuple
from typing import Any

import torch

import isles
from isles.base.modes import torch_threads
from isles.comm.codecs import codec
from isles.comm.collectives import basic as collectives
from isles.comm.collectives.mean import mean
from isles.comm.group import Group
from isles.comm.mesh import Mesh


def refusal(action) -> str:
    """The text of the ValueError that `action` raises."""
    try:
        action()
    except ValueError as error:
        return str(error)
    return "not refused"


def everyone_sends(world: Mesh) -> dict[str, object]:
    """all_gather, exchange, all_to_all and barrier among four, and in groups of another order."""
    group, rank = world.world, world.rank
    connection_state: dict[str, object] = {}
    connection_state["gathered"] = [
        [int(x) for x in part] for part in group.all_gather(torch.tensor([rank, rank * rank]))
    ]
    kinds = [torch.bool, torch.int16, torch.float16, torch.bfloat16, torch.complex64, torch.float8_e4m3fn]
    connection_state["kinds"] = all(
        [float(abs(x.to(torch.complex64))) for x in group.all_gather(torch.full((), rank, dtype=torch.int64).to(kind))]
        == [float(bool(r)) if kind is torch.bool else r for r in range(4)]
        for kind in kinds
    )
    connection_state["empty"] = [part.shape for part in group.all_gather(torch.empty(0, 3))]
    connection_state["strided"] = [
        part.tolist() for part in group.all_gather(torch.full((2, 2), float(rank)).t()[:, :1])
    ]

    # Everyone with everyone, all partners in one order: the pair (a, b) meets at shift a xor b.
    swapped = {shift ^ rank: int(group.exchange(shift ^ rank, torch.tensor([10 * rank]))) for shift in (1, 2, 3)}
    connection_state["swapped"] = swapped == {peer: 10 * peer for peer in range(4) if peer != rank}

    # outgoing[p] has rank * p entries: none at all between some pairs.
    outgoing = [torch.full((rank * peer,), 10.0 * rank + peer) for peer in range(4)]
    incoming = [torch.full((rank * peer,), -1.0) for peer in range(4)]
    group.all_to_all(outgoing, incoming)
    connection_state["all to all"] = all(
        torch.equal(incoming[p], torch.full((rank * p,), 10.0 * p + rank)) for p in range(4)
    )

    # Positions are the order of the list, whatever the ranks.
    shuffled = group.among([2, 0, 3, 1])
    connection_state["positions"] = (shuffled.rank, shuffled.ranks[shuffled.rank], shuffled.size)
    connection_state["gathered in order"] = [int(x) for x in shuffled.all_gather(torch.tensor([rank]))]
    inner = shuffled.among([1, 3] if rank in (0, 1) else [2, 0])  # positions of positions
    connection_state["pair"] = (inner.ranks, int(inner.exchange(1 - inner.rank, torch.tensor([rank]))))
    connection_state["alone"] = [int(x) for x in group.among([rank]).all_gather(torch.tensor([rank]))]

    # A barrier lets nobody through before the last has come.
    time.sleep(0.3 if rank == 2 else 0.0)
    came = time.time()
    group.barrier()
    connection_state["barrier"] = (came, time.time())

    connection_state["refusals"] = [
        refusal(lambda: group.among([(rank + 1) % 4])),
        refusal(lambda: group.among([rank, rank])),
        refusal(lambda: group.exchange(rank, torch.zeros(1))),
        refusal(lambda: group.exchange(4, torch.zeros(1))),
        refusal(lambda: group.exchange(-1, torch.zeros(1))),
        refusal(lambda: group.broadcast(torch.zeros(1), source=4)),
        refusal(lambda: group.broadcast(torch.zeros(2, 2).t()[:1], source=0)),
    ]
    group.barrier()  # nothing of the above is on its way
    return connection_state


def broadcasts(world: Mesh) -> list[str]:
    """From every source in groups of 1 to 5, in two orders; returns what was wrong."""
    wrong = []
    for size in range(1, world.size + 1):
        for ranks in (list(range(size)), list(reversed(range(size)))):
            if world.rank not in ranks:
                continue
            group = world.world.among(ranks)
            for source in range(size):
                data = torch.full((3, 7), float(100 * size + source) if group.rank == source else -1.0)
                group.broadcast(data, source)
                if not (data == 100 * size + source).all():
                    wrong.append(f"{ranks} from {source}: {data[0, 0]}")
    return wrong


def at_once(world: Mesh) -> dict[str, object]:
    """Transfers that are under way together."""
    group, rank = world.world, world.rank
    connection_state: dict[str, object] = {}

    # A broadcast's inner nodes send when they have received: what starts behind it must not take its place.
    mixed = []
    for turn in range(20):
        data = torch.full((8,), float(turn) if rank == 0 else -1.0)
        first = group.start(collectives.broadcast(group.call(), data))
        second = group.start(collectives.all_gather(group.call(), torch.full((8,), 100.0 + rank)))
        third = group.start(collectives.broadcast(group.call(), other := torch.full((4,), 50.0 + rank), 3))
        third.wait(), first.wait()
        gathered = [part.unique().tolist() for part in second.wait()]
        if (data != turn).any() or (other != 53).any() or gathered != [[100.0], [101.0], [102.0], [103.0]]:
            mixed.append((turn, data.tolist(), other.tolist(), gathered))
    connection_state["mixed up"] = mixed

    # Two overlapping groups and the same channel.
    pair = group.among([rank & 2, (rank & 2) + 1], "outer")
    wide, narrow = torch.full((100_000,), float(rank)), torch.full((50_000,), float(rank))
    flights = [
        pair.start(mean(pair.call(), narrow, codec("none"))),
        group.start(mean(group.call("outer"), wide, codec("none")), "outer"),
    ]
    connection_state["progress"] = [
        patience(flight.done) for flight in flights
    ]  # nobody waits: it happens behind the computation
    flights[1].wait(), flights[0].wait()
    connection_state["means"] = (wide.unique().tolist(), narrow.unique().tolist())
    connection_state["not blocked"] = group.traffic["outer"].blocked_seconds

    # 0 starts with 1, then with 2; 1 comes only when 0 is done with 2: the later transfer ends first.
    if rank == 0:
        early = group.start(collectives.exchange(group.call(), 1, torch.tensor([1])))
        later = group.start(collectives.exchange(group.call(), 2, torch.tensor([2])))
        connection_state["order"] = [int(later.wait()), early.done()]
        group.exchange(1, torch.zeros(1), "eval")
        connection_state["order"] += [int(early.wait()), int(early.wait()), early.done()]
    elif rank == 1:
        group.exchange(0, torch.zeros(1), "eval")
        group.exchange(0, torch.tensor([11]))
    elif rank == 2:
        group.exchange(0, torch.tensor([22]))

    # A second world over the same transport goes on counting where the first one is.
    again = isles.init().world
    late = group.start(collectives.exchange(group.call(), rank ^ 1, torch.tensor([7.0, 7.0])))
    connection_state["second world"] = [float(x) for x in again.exchange(rank ^ 1, torch.tensor([float(rank)]))]
    late.wait()
    return connection_state


def patience(condition, seconds: float = 10.0) -> bool:
    """Whether `condition()` comes true within `seconds`."""
    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at:
        if condition():
            return True
        time.sleep(0.002)
    return False


def counted(world: Mesh) -> dict[str, tuple]:
    """(bytes sent, bytes received, messages sent, messages received) of single operations of three workers."""
    group, rank = world.world, world.rank

    def cost(action, channel: str = "control") -> tuple:
        before = astuple(group.traffic[channel])[:4]
        total = group.traffic.total("bytes_sent")
        action()
        after = astuple(group.traffic[channel])[:4]
        assert group.traffic.total("bytes_sent") - total == after[0] - before[0], "another channel was charged"
        return tuple(new - old for new, old in zip(after, before, strict=True))

    x = torch.zeros(1000)
    return {
        "all_gather": cost(lambda: group.all_gather(x)),
        "eval": cost(lambda: group.all_gather(x, channel="eval"), "eval"),
        "exchange": cost(lambda: group.exchange(1 - rank, x)) if rank < 2 else cost(lambda: None),
        "broadcast": cost(lambda: group.broadcast(x, 1)),
        "mean": cost(lambda: group.mean(x, codec("bf16"))),
    }


def failing(world: Mesh) -> list[str]:
    """A protocol's own error is raised by every wait; a protocol that mends a lost message goes on."""
    group: Group = world.world

    def broken(after: int):
        for _ in range(after):
            yield []
        if after == 2:
            yield from collectives.exchange(group.call(), 1 - group.rank, torch.zeros(1))
        raise KeyError("mine")

    texts = []
    for after in range(3):
        transfer = group.start(broken(after))
        for _ in range(2):
            try:
                transfer.wait()
            except KeyError as error:
                texts.append(str(error))
    return texts


def threads_untouched(world: Mesh) -> list[int]:
    """torch's thread counts as the computation and a new thread see them, after messages."""
    import threading

    group, connection_state = world.world, [torch.get_num_threads()]
    for _ in range(3):
        group.all_gather(torch.zeros(10_000))
    probe = threading.Thread(target=lambda: connection_state.append(torch.get_num_threads()))
    probe.start()
    probe.join()
    return [*connection_state, torch.get_num_threads()]


def threads_follow(world: Mesh) -> list[int]:
    """torch's thread counts where reductions run, before and after the computation takes another one."""

    def asked() -> Any:
        yield [world.transport.event(0.001)]
        return torch.get_num_threads()

    connection_state = [world.world.start(asked()).wait()]
    with torch_threads(3):
        connection_state.append(world.world.start(asked()).wait())
    return connection_state
