"""The workers of an island that joins a run: one has its seat and leads, the others follow it."""

from __future__ import annotations

import sys
from contextlib import ExitStack

import torch

from isles.comm.call import Ledger
from isles.comm.credentials import Token
from isles.comm.elastic.company import ask
from isles.comm.elastic.gifts import Giver
from isles.comm.elastic.island import FollowingRoster, IslandGroup
from isles.comm.elastic.keys import introduction, signature
from isles.comm.elastic.messages import Find, Found
from isles.comm.elastic.session import Session
from isles.comm.elastic.transport import ElasticTransport
from isles.comm.errors import Malformed
from isles.comm.group import Group
from isles.comm.mesh import Mesh
from isles.data import load_corpus
from isles.training.elastic.acts import Acts, follow_leader
from isles.training.elastic.entering import Here, admitted, seated, train
from isles.training.elastic.states import giver_of
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
        seat, key = int(said["seat"]), str(said["key"])
        guide = _Introductions(session, seat, key)
        transport = ElasticTransport(session, seat, config.replicas_in_all, guide=guide, place=places.place)
        stack.callback(transport.close)
        gifts = Giver(session, giver_of(seat, places.place), _tell)
        stack.callback(gifts.close)
        alone = Group(transport, (seat,), "outer", deadlines(config), Ledger())
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
        stack.callback(acts.close)
        follow_leader(acts, places)
    return ""


class _Introductions:
    """What a follower shows to those at its place in other islands, see `isles.comm.elastic.transport.Guide`: all of
    its messages go over the lighthouse.
    """

    def __init__(self, session: Session, seat: int, key: str) -> None:
        self._session, self._key, self._word = session, key, signature(seat, key)

    def introduction(self, peer: int) -> bytes | None:
        found = ask(self._session, self._word, Find(peer))
        return bytes.fromhex(found.introduction) if isinstance(found, Found) else None

    def expected(self, sender: int) -> bytes:
        return introduction(self._key, sender)

    def met(self, seat: int, *, there: bool, direct: bool) -> None:
        """Over the lighthouse."""


def _tell(line: str) -> None:
    print(f"isles: {line}", file=sys.stderr, flush=True)
