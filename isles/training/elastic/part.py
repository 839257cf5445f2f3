"""Taking part in a run whose workers come and go: as one worker, or as the workers of an island."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial

from isles.comm.credentials import Token
from isles.comm.elastic.rounds.island import IslandGroup
from isles.comm.errors import CommError
from isles.errors import printable
from isles.launch.workers import LocalWorkers, raise_first
from isles.training.config.sections import Config
from isles.training.elastic.entering import Here, admitted, seated, train
from isles.training.elastic.island import island_worker
from isles.training.elastic.joining import Participant
from isles.training.running.interrupts import first_interrupt
from isles.training.running.starting import deadlines


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
