"""The workers of an island that joins a run: one has its seat and leads, the others follow it."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from functools import partial

import torch

from isles.comm.call import Ledger
from isles.comm.credentials import Token
from isles.comm.elastic.company import ask
from isles.comm.elastic.gifts import Giver
from isles.comm.elastic.island import FollowingRoster, IslandGroup
from isles.comm.elastic.keys import signature
from isles.comm.elastic.messages import Entry
from isles.comm.elastic.transport import ElasticTransport
from isles.comm.errors import Malformed
from isles.comm.group import Group
from isles.comm.mesh import Mesh
from isles.data import load_corpus
from isles.training.elastic.acts import Acts, follow_leader
from isles.training.elastic.entering import Here, admitted, listening, seated, train
from isles.training.elastic.given import giver_of
from isles.training.running.starting import deadlines

_FAR = 1 << 40  # rounds: the leader knows the last one


def island_worker(world: Mesh, address: str, token: Token, here: Here) -> str:
    """What each process of an island does; the leader's result says how it ended."""
    with ExitStack() as stack:
        entrance = admitted(stack, address, token, here, tell=_tell)
        places = IslandGroup(world, entrance.config.world.outer_deadline)
        if places.place == 0:
            with seated(entrance, places, tell=_tell) as worker:
                return train(worker, address, _tell)
        config, session = entrance.config, entrance.session
        torch.set_num_threads(config.world.threads)
        corpus = load_corpus(config.data)
        said = places.hear()
        if said["act"] != "seat":
            raise Malformed(0, "the leader of this island has no seat")
        entry = Entry(int(said["seat"]), str(said["key"]))
        asking = partial(ask, session, signature(entry.seat, entry.key))
        links = listening(stack, entrance, entry, asking, places.place, tell=partial(_tell_of, places.place))
        transport = ElasticTransport(session, entry.seat, config.replicas_in_all, guide=links, place=places.place)
        stack.callback(transport.close)
        links.start(transport)
        gifts = Giver(session, giver_of(entry.seat, places.place), _tell)
        stack.callback(gifts.close)
        alone = Group(transport, (entry.seat,), "outer", deadlines(config), Ledger())
        acts = Acts(
            config,
            alone,
            FollowingRoster(alone, places),
            places,
            gifts,
            corpus,
            entrance.folder,
            report=lambda event: None,
            last=lambda: _FAR,
        )
        acts.refusals = session.refused
        stack.callback(acts.close)
        follow_leader(acts, places)
    return ""


def _tell(line: str) -> None:
    print(f"isles: {line}", file=sys.stderr, flush=True)


def _tell_of(place: int, line: str) -> None:
    _tell(f"place {place}: {line}")
