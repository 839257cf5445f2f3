"""The workers of an island that joins a run: one has its seat and leads, the others follow it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from isles.comm.call import Ledger
from isles.comm.credentials import Token
from isles.comm.elastic.messages import Entry
from isles.comm.elastic.rounds.decision import Decision
from isles.comm.elastic.rounds.island import IslandGroup
from isles.comm.elastic.told import PlaceLine
from isles.comm.errors import Malformed
from isles.comm.group import Group
from isles.comm.mesh import Mesh
from isles.training.elastic.entering import Here, admitted, connect, seated, train
from isles.training.elastic.joining import Participant
from isles.training.elastic.worker import ElasticWorker
from isles.training.running.starting import deadlines

_FAR = 1 << 40  # rounds: the leader knows the last one


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
            tell=partial(_tell_of, places.place),
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


def _tell_of(place: int, line: str) -> None:
    _tell(f"place {place}: {line}")
