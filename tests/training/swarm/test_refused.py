"""A refusal by one peer alone inside an exchange of a stage: nobody waits for those who have given the exchange up."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

import isles
from isles.comm.collectives.message_queue import MessageHeader
from isles.comm.errors import CommError
from isles.comm.mesh import Mesh
from isles.comm.tags import CHANNELS
from isles.data import Corpus, load_corpus
from isles.pipeline.peers.inbox import OUTER
from isles.training.config.sections import Config
from isles.training.kinds import layout_of
from tests.training.swarm import oracle
from tests.training.swarm.test_outer import config

SMALL = ["pipeline.swarm.peers=[2,3]", "pipeline.stages=2", "world.workers=5", "model.layers=2", "run.steps=2"]
GROUPS = {"diloco": [], "noloco": ["replicas.group_size=3"]}
LIAR = 3  # of stage 1, whose peers are 2, 3 and 4


class Timed(oracle.Recorded):
    """Notes when each of its steps was over."""

    def __init__(self, *of: Any) -> None:
        super().__init__(*of)
        self.ends: list[float] = []

    def step(self) -> None:
        super().step()
        self.ends.append(self.world.transport.now())


def lie(trainer: oracle.Recorded, to: int, what: str) -> None:
    """Have this peer's messages of exchanges come to `to` as none that can be."""
    queue = trainer.model_step.swarm.agreement.inbox.queue
    honest = queue.send

    def send(position: int, note: MessageHeader, body: Any = None) -> None:
        is_of_exchange = note.kind == OUTER and note.queue == CHANNELS.index("outer")
        if is_of_exchange and position == to and body is not None and body.numel():
            body = torch.full_like(body, 0xFF) if what == "garbage" else body[:-8].clone()
        honest(position, note, body)

    queue.send = send  # type: ignore[method-assign]


def train(world: Mesh, read: Config, corpus: Corpus, to: int, what: str) -> Any:
    torch.set_num_threads(1)
    trainer = Timed(read, world.arranged(layout_of(read)), corpus)
    if world.rank == LIAR:
        lie(trainer, to, what)
    try:
        trainer.run(None)
    except CommError as error:
        return str(error)
    (fragment,) = cast(Any, trainer.optimizer).fragments
    swarm = trainer.model_step.swarm
    refused = dict(swarm.agreement.inbox.queue.refused)
    return swarm.stages[world.rank], fragment.anchor.clone(), swarm.agreement.members, refused, trainer.ends


@pytest.mark.parametrize(
    ("method", "to", "what"),  # in groups of three: with whom one refuses, another waits
    [
        ("diloco", 2, "garbage"),
        ("noloco", 4, "length"),
        pytest.param("diloco", 4, "length", marks=pytest.mark.long),
        pytest.param("noloco", 2, "garbage", marks=pytest.mark.long),
    ],
)
def test_nobody_waits_for_an_exchange_that_another_has_given_up(method: str, to: int, what: str) -> None:
    """One peer alone refuses: all who are honest go on at once, without the liar; replicas of one mean stay alike."""
    read = config(method, *SMALL, "replicas.sync_every=1", "pipeline.microbatches=3", *GROUPS[method])
    links = isles.Links(bandwidth=1e7, latency=0.02)
    done = isles.run_virtual(train, 5, links=links, args=(read, load_corpus(read.data), to, what), step_seconds=0.3)
    print(*(each if isinstance(each, str) else (each[0], *each[2:]) for each in done), sep="\n")
    honest = [each for rank, each in enumerate(done) if rank != LIAR]
    assert all(not isinstance(each, str) for each in honest) and isinstance(done[LIAR], str)
    assert done[to][3].keys() == {LIAR} and all(each[2] == (0, 1, 2, 4) for each in honest)
    assert max(end for each in honest for end in each[4]) < read.world.outer_deadline / 10
    for stage in (0, 1) if method == "diloco" else ():
        one, other = (each[1] for each in honest if each[0] == stage)
        assert torch.equal(one, other)
