"""Taking part in a run whose workers come and go: as one worker, or as the workers of an island, of whom one has its
seat and leads, and the others follow it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

from isles.comm.call import Ledger
from isles.comm.credentials import Token
from isles.comm.elastic.messages import Entry
from isles.comm.elastic.rounds.decision import Decision
from isles.comm.elastic.rounds.island import IslandGroup
from isles.comm.elastic.told import PlaceLine
from isles.comm.errors import CommError, Malformed
from isles.comm.group import Group
from isles.comm.mesh import Mesh
from isles.errors import printable
from isles.launch.workers import LocalWorkers, raise_first
from isles.training.config.sections import Config
from isles.training.elastic.entering import Here, admitted, connect, seated, train
from isles.training.elastic.joining import Participant
from isles.training.elastic.worker import ElasticWorker
from isles.training.running.interrupts import first_interrupt
from isles.training.running.starting import deadlines

_FAR = 1 << 40  # rounds: the leader knows the last one


def take_part(address: str, token: Token, here: Here, *, tell: Callable[[str], None]) -> str:
    """Join the run at `address`, and train until it ends or this worker is told to leave; how it ended, in a line.
    Where the run is one of islands this starts the workers of one, in processes of their own.

    Arguments and errors as `admitted`; OSError also where the run goes on without this worker.
    """
    with ExitStack() as stack:
        entrance = admitted(stack, address, token, here, tell=tell)
        if entrance.config.world.inner == 1:
            with seated(entrance, IslandGroup(), tell=tell) as worker, first_interrupt(partial(_leave, worker)):
                return train(worker, address, tell)
        config = entrance.config
    return _as_island(config, (address, token, here))


def _leave(worker: Participant) -> None:
    worker.leaving.set()
    said = "isles: leaving once the others have a plan without this worker; Ctrl-C again ends it at once\n"
    with suppress(OSError, ValueError):
        os.write(sys.stderr.fileno(), said.encode())  # in a handler: whoever prints may be in the middle of it


def _as_island(config: Config, where: tuple[str, Token, Here]) -> str:
    """All workers of an island, in processes of their own; how it ended. OSError where one of them is lost: the island
    leaves the run then.
    """
    inner, threads = config.world.inner, config.world.start_threads
    pool = LocalWorkers(island_worker, inner, args=where, threads=threads, deadlines=deadlines(config))
    try:
        with first_interrupt(pool.stop):
            results = pool.join()
        raise_first(results, pool.failures)
    except CommError as error:
        raise OSError(f"this island has left the run, for it lost a worker: {printable(str(error), 300)}") from None
    return results[0]


def island_worker(world: Mesh, address: str, token: Token, here: Here) -> str:
    """What each process of an island does; the leader's result says how it ended."""
    if world.rank == 0:
        with leading(world, address, token, here) as worker:
            return train(worker, address, _tell)
    follow(world, address, token, here)
    return ""


@contextmanager
def leading(world: Mesh, address: str, token: Token, here: Here) -> Iterator[Participant]:
    """The leader of an island, in its seat until the block ends. Errors as `admitted`."""
    with ExitStack() as stack:
        entrance = admitted(stack, address, token, here, tell=_tell)
        places = IslandGroup(world, entrance.config.world.outer_deadline)
        yield stack.enter_context(seated(entrance, places, tell=_tell))


def follow(world: Mesh, address: str, token: Token, here: Here) -> None:
    """Be another worker of an island, until its leader says that this is the end. Errors as `admitted`."""
    with ExitStack() as stack:
        entrance = admitted(stack, address, token, here, tell=_tell)
        places = IslandGroup(world, entrance.config.world.outer_deadline)
        config, session = entrance.config, entrance.session
        certificates = entrance.shown(places)
        said = places.next_decision(lambda: Decision(kind="end"))  # never asked: the leader decides
        if said.kind != "seat":
            raise Malformed(0, "the leader of this island has no seat")
        line = PlaceLine(session, Entry(said.seat, said.key), places.place)
        transport, gifts = connect(
            stack,
            entrance,
            line,
            places,
            certificates,
            size=config.replicas_in_all,
            tell=lambda line: _tell(f"place {places.place}: {line}"),
        )
        worker = ElasticWorker(
            config,
            Group(transport, (said.seat,), "outer", deadlines(config), Ledger()),
            None,
            places,
            gifts,
            entrance.corpus,
            entrance.folder,
            report=lambda event: None,
            last=lambda: _FAR,
        )
        worker.refusals = session.refused
        stack.callback(worker.close)
        worker.obey()


def _tell(line: str) -> None:
    print(f"isles: {line}", file=sys.stderr, flush=True)
