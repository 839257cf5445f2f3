"""Nodes of clusters that are killed, leave and come while they average; each round moves what a node holds by numbers
that anybody can add up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from isles.comm.errors import CommError
from isles.comm.mesh import Mesh
from isles.models.cuts import pieces
from isles.models.stages import Stage
from isles.network.clusters import NO_FIGURES, ClusterGrowth, ModelLoad
from isles.pipeline.ravnest.agreement import ClusterAgreement, admit_joiners, cluster_inbox, request_admission
from isles.pipeline.ravnest.assignment import ClusterAssignment
from isles.pipeline.ravnest.averaging import ClusterAverage, SharedSegment, refinement
from tests.pipeline.ravnest.averages import THREE
from tests.pipeline.ravnest.nodes import BLOCKS, Wet, stepper

GROWTH = ClusterGrowth(ModelLoad(flops=(1e9,) * BLOCKS, weights=(1e6,) * BLOCKS, saved=(1e5,) * BLOCKS, stream=1e4))
FOUNDERS = 6


@dataclass(frozen=True)
class MessageAccounting:
    """comes: by rank behind the founders, the second at which it asks to come. leaves: by rank, after which round."""

    rounds: int
    comes: dict[int, float] = field(default_factory=dict)
    leaves: dict[int, int] = field(default_factory=dict)


class Averaged(NamedTuple):
    """What a node has after a round: which clusters the mean is of, who is in which seat, and what it holds."""

    whole: list[int]
    assignment: ClusterAssignment
    held: dict[str, Tensor]


def moved(round: int, cluster: int, shape: torch.Size) -> Tensor:
    """By how much a cluster moves every tensor of that shape in a round: a multiple of 1/64, so that sums are exact."""
    drawn = torch.randint(-64, 65, shape, generator=torch.Generator().manual_seed(1009 * round + cluster))
    return drawn.float() / 64


@cache
def segments(cuts: tuple[tuple[int, ...], ...]) -> list[SharedSegment]:
    """Of clusters that are cut there."""
    model = Wet(0.0)
    stages = [[Stage(model, piece) for piece in pieces(own, BLOCKS, loss_at_origin=False)] for own in cuts]
    return refinement([{n: [*dict(s.named_parameters())] for n, s in enumerate(own)} for own in stages])


@cache
def start() -> dict[str, Tensor]:
    return {name: own.detach().double() for name, own in Wet(0.0).named_parameters()}


class ChangingNode:
    """One node, from its first round on."""

    def __init__(self, world: Mesh, agreement: ClusterAgreement) -> None:
        self.world, self.agreement = world, agreement
        self.average = ClusterAverage(agreement, segments(agreement.assignment.cuts))
        self.stage: Stage | None = None

    def serve(self) -> None:
        """Hold what this node's place asks for; nothing where it has none."""
        assignment, rank = self.agreement.assignment, self.world.rank
        self.average.recut(segments(assignment.cuts))
        coordinates = assignment.coordinates_of(rank)
        has_source = any(rank == source for source, _ in assignment.handovers)
        if coordinates is not None:
            cluster, here = coordinates
            piece = pieces(assignment.cuts[cluster], BLOCKS, loss_at_origin=False)[here]
            if self.stage is None or self.stage.piece != piece:
                self.stage = Stage(Wet(0.0), piece)
        if (coordinates is not None or has_source) and self.stage is not None:
            self.average.serve(self.stage, stepper("sgd", list(self.stage.parameters())))

    def round(self, number: int) -> Averaged | None:
        """One more; None where this node has left after it."""
        agreement, coordinates = self.agreement, self.agreement.assignment.coordinates_of(self.world.rank)
        if agreement.trains and self.stage is not None and coordinates is not None:
            with torch.no_grad():
                for own in self.stage.parameters():
                    own += moved(number, coordinates[0], own.shape)
        self.world.transport.compute(1.0)
        whole = self.average.average(number, 1)
        trained = agreement.trains and self.stage is not None
        held = {name: own.detach().clone() for name, own in self.stage.named_parameters()} if trained else {}  # type: ignore[union-attr]
        told = Averaged(whole, agreement.assignment, held)
        admit_joiners(agreement, {"round": number})
        while agreement.repair() and not agreement.has_departed:
            self.serve()
            self.average.load(number)
        if agreement.has_departed:
            return None
        self.serve()
        return told


def change(world: Mesh, accounting: MessageAccounting) -> dict[int, Averaged]:
    """By round, what this node had; until it has left, or is lost."""
    torch.set_num_threads(1)
    inbox, rank, first = cluster_inbox(world.world, 5, 1 << 20), world.rank, 0
    if rank < FOUNDERS:
        agreement = ClusterAgreement(inbox, world.world, ClusterAssignment.of(THREE, range(FOUNDERS)), GROWTH)
    else:
        world.transport.compute(accounting.comes[rank])
        try:
            welcome = request_admission(inbox, range(rank), NO_FIGURES)
        except CommError:  # everybody whom it could have met has gone
            return {}
        assert welcome is not None
        agreement = ClusterAgreement(inbox, world.world, welcome.assignment, GROWTH)
        first = welcome.facts["round"] + 1
    node = ChangingNode(world, agreement)
    if first:
        while agreement.repair():
            node.serve()
            node.average.load(first - 1)
    node.serve()
    found: dict[int, Averaged] = {}
    for number in range(first, accounting.rounds):
        if accounting.leaves.get(rank, accounting.rounds) <= number:
            agreement.leave()
        told = node.round(number)
        if told is None:
            break
        found[number] = told
    return found


def expected(before: dict[str, Tensor], number: int, whole: list[int]) -> dict[str, Tensor]:
    """What everybody holds after a round: what all held before, and the mean of what the clusters that were whole moved
    by.
    """
    return {
        name: own + torch.stack([moved(number, one, own.shape).double() for one in whole]).mean(0)
        for name, own in before.items()
    }
