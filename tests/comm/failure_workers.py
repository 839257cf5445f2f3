"""What the worker processes of test_failures.py run. Times are the host's: all workers share one machine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import torch

from isles.comm.codecs import codec
from isles.comm.collectives import basic as collectives
from isles.comm.collectives.basic import Stamp
from isles.comm.collectives.mean import mean
from isles.comm.errors import CommError, DeadlinePassed, Diverged
from isles.comm.group import Group
from isles.comm.mesh import Mesh
from isles.comm.tags import Tag
from isles.comm.transport import Steps, Work


def reported(action) -> tuple[str, int, float]:
    """(class of the error that `action` raises, or "" ; the peer it names, seconds until then)."""
    start = time.monotonic()
    try:
        action()
    except CommError as error:
        peer = error.peer if isinstance(error, (DeadlinePassed, Diverged)) else getattr(error, "rank", -9)
        return type(error).__name__, peer, time.monotonic() - start
    return "", -9, time.monotonic() - start


def swap(group: Group, position: int, value: float, deadline: float) -> float:
    """Exchange one number over `outer`."""
    call = group.call("outer")
    steps = collectives.exchange(call, position, torch.tensor([value]))
    return float(group.start(steps, "outer", deadline).wait())


def keeps_going(group: Group, position: int, seconds: float) -> tuple[int, float]:
    """Exchange with one member again and again, both for `seconds`: (exchanges, longest gap between two)."""
    start = before = time.monotonic()
    count, gap, going = 0, 0.0, 1.0
    while going:
        mine = float(time.monotonic() - start < seconds)
        going = mine * swap(group, position, mine, 20.0)
        time.sleep(0.005)  # or two processes compute all the time
        now = time.monotonic()
        count, gap, before = count + 1, max(gap, now - before), now
    return count, gap


def silent(world: Mesh, deadline: float) -> dict[str, object]:
    """Worker 3 says nothing for a while: 0 gives it up, 1 and 2 notice nothing, and 3 is welcome later."""
    group, rank = world.world, world.rank
    connection_state: dict[str, object] = {}
    group.barrier()
    if rank == 0:
        connection_state["told"] = reported(lambda: swap(group, 3, 1.0, deadline))
        call = group.call("outer", round=3)
        forgotten = group.start(mean(call, torch.ones(9), codec("none")), "outer", 0.2)
        time.sleep(0.3)
        connection_state["over"] = forgotten.done()  # nobody waited: it is over all the same
        connection_state["forgotten"] = reported(forgotten.wait)
    elif rank == 3:
        time.sleep(deadline + 0.8)
        connection_state["told"] = reported(lambda: swap(group, 0, 3.0, 10.0))  # 0 did send before it gave up
    else:
        connection_state["pair"] = keeps_going(group, 3 - rank, deadline + 0.5)
    if rank in (0, 3):
        connection_state["later"] = swap(group, 3 - rank, 10.0 + rank, 10.0)
    group.barrier()
    return connection_state


def killed(world: Mesh) -> dict[str, object]:
    """Worker 3 is killed while 0 waits for it; 1 and 2 go on, and so do all three survivors."""
    group, rank = world.world, world.rank
    connection_state: dict[str, object] = {}
    group.barrier()
    if rank == 3:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        connection_state["told"] = reported(lambda: swap(group, 3, 1.0, 20.0))
        connection_state["again"] = reported(lambda: swap(group, 3, 1.0, 20.0))
        connection_state["mean"] = reported(
            lambda: group.start(mean(group.call("outer", 0), torch.ones(99), codec("none"), Stamp(0))).wait()
        )
    else:
        connection_state["pair"] = keeps_going(group, 3 - rank, 1.5)
        # In a mean of all four everyone waits for 3 itself, so everyone is told the true culprit.
        connection_state["mean"] = reported(
            lambda: group.start(mean(group.call("outer", 0), torch.ones(99), codec("none"), Stamp(0))).wait()
        )
    survivors = group.among([0, 1, 2])
    buffer = torch.full((1000,), float(rank))
    survivors.mean(buffer, codec("none"))
    connection_state["survivors"] = buffer.unique().tolist()
    return connection_state


def stopped(world: Mesh, deadline: float) -> dict[str, object]:
    """Worker 3 is stopped (as by Ctrl-Z) and continued when 0 has given it up."""
    group, rank = world.world, world.rank
    connection_state: dict[str, object] = {}
    pids = [int(pid) for pid in group.all_gather(torch.tensor([os.getpid()]))]
    group.barrier()
    if rank == 3:
        os.kill(os.getpid(), signal.SIGSTOP)
        connection_state["late"] = swap(group, 0, 3.0, 20.0)
    elif rank == 0:
        connection_state["told"] = reported(lambda: swap(group, 3, 1.0, deadline))
        connection_state["everyone"] = reported(
            lambda: group.mean(torch.ones(9), codec("none"))
        )  # within the control deadline
        time.sleep(1.0)  # 1 and 2 came to the mean a little later
        os.kill(pids[3], signal.SIGCONT)
    else:
        connection_state["pair"] = keeps_going(group, 3 - rank, deadline + 0.3)
        connection_state["everyone"] = reported(lambda: group.mean(torch.ones(9), codec("none")))
    if rank == 3:
        connection_state["everyone"] = reported(lambda: group.mean(torch.ones(9), codec("none")))
    if rank in (0, 3):
        connection_state["later"] = swap(group, 3 - rank, 10.0 + rank, 20.0)
    return connection_state


def stopped_for_good(world: Mesh) -> None:
    """Worker 1 is stopped and never continued; worker 0 raises what it is told."""
    world.world.barrier()
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    swap(world.world, 1 - world.rank, 1.0, 0.7)


def deserted(world: Mesh) -> dict[str, object]:
    """Receives from anyone when one of three is dead: the other's message still comes."""
    group, rank = world.world, world.rank
    one, tag = torch.full((1,), rank, dtype=torch.uint8), Tag("control", 7)

    def message(start: Callable[[], Work], seconds: float) -> int:
        def steps() -> Steps[int]:
            work = start()
            yield work
            return -1 if work.peer is None else work.peer

        return group.start(steps(), deadline=seconds).wait()

    group.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        time.sleep(0.5)
        message(lambda: group.transport.send(0, one, tag), 5.0)
        return {}
    connection_state: dict[str, object] = {
        "sender": message(lambda: group.transport.recv(None, one, tag), 10.0),
        "sent": int(one),
    }
    connection_state["nothing more"] = reported(lambda: message(lambda: group.transport.recv(None, one, tag), 0.3))
    connection_state["dead"] = reported(lambda: message(lambda: group.transport.recv(2, one, tag), 10.0))
    return connection_state


def everything(world: Mesh, seed: int) -> float:
    """A bit of all there is, with transfers left behind on purpose; returns a mean."""
    group, rank = world.world, world.rank
    buffer = torch.full((10_000,), float(rank + seed))
    flights = [
        group.start(mean(group.call("outer", seed, fragment), buffer.clone(), codec(name), Stamp(seed)), "outer")
        for fragment, name in enumerate(("none", "bf16", "fp16", "int8"))
    ]
    group.mean(buffer, codec("none"))
    for transfer in flights:
        transfer.wait()
    # Nobody answers these: a receive that never ends, and a transfer that was given up.
    group.start(collectives.exchange(group.call("eval", round=rank), group.others[0], torch.zeros(10)), "eval")
    abandoned = group.start(collectives.exchange(group.call("inner", round=rank), group.others[1], torch.zeros(10)))
    assert not abandoned.done()
    return buffer[0].item()
