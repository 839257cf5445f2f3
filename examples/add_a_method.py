"""A method of one's own in a few lines: plain pair gossip, on virtual workers, against no communication.

    python examples/add_a_method.py

The same class works everywhere else: `isles train --method examples.add_a_method:Gossip`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

import isles

# The method, from here. --------------------------------------------------------------------------------------------
from isles.comm.codecs import codec
from isles.replicas.parts.cadence import EveryH
from isles.replicas.parts.interfaces import Answer, Composition, OuterRule
from isles.replicas.parts.landing import Replace
from isles.replicas.parts.mixing import RandomGroups
from isles.replicas.sync import MethodConfig


@dataclass(frozen=True, kw_only=True)
class GossipConfig(MethodConfig):
    """sync_every: inner steps between two exchanges. seed: of the pairs."""

    sync_every: int = 10
    seed: int = 0


@dataclass(frozen=True)
class PairMean(OuterRule):
    """anchor = mean of the pair's live weights."""

    def form(self, out: Tensor, live: Tensor, reference: Tensor, anchor: Tensor) -> None:
        out.copy_(live)  # what travels

    def apply(self, anchor: Tensor, answer: Answer, vectors: Mapping[str, Tensor]) -> None:
        anchor.copy_(answer.mean)  # what the answer does


class Gossip(isles.OuterSync):
    """Every `sync_every` steps: theta_i <- (theta_i + theta_j) / 2 with a random partner j."""

    Config = GossipConfig

    def compose(self) -> Composition:
        every, pairs = EveryH(self.config.sync_every), RandomGroups(2, self.config.seed)
        return Composition(cadence=every, mixing=pairs, codec=codec("none"), rule=PairMean(), landing=Replace())


# To here. -----------------------------------------------------------------------------------------------------------


def worker(world: isles.Mesh, method: type[isles.ReplicaSync]) -> tuple[float, float, float]:
    """Fit a noisy linear map on this worker's own 20 rows; (replica's loss, spread, the one model's loss)."""
    truth = torch.randn(30, 1, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1 + world.rank)
    x = torch.randn(20, 30, generator=generator)  # fewer rows than unknowns: alone, nobody can find the truth
    y = x @ truth + 0.5 * torch.randn(20, 1, generator=generator)
    model = torch.nn.Linear(30, 1)
    optimizer = method(model, torch.optim.SGD(model.parameters(), lr=0.02), world.outer)
    for _ in range(300):
        (model(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.finish()

    def judge() -> float:
        return float((model.weight.detach().T - truth).square().sum())

    alone, spread = judge(), optimizer.replica_std()
    optimizer.consolidate()
    return alone, spread, judge()


def main() -> None:
    """Eight workers over home connections."""
    torch.manual_seed(0)
    print("method    a replica's loss    spread    the one model's loss")
    for name, method in (("none", isles.NoSync), ("gossip", Gossip)):
        results = isles.run_virtual(worker, 8, links="home-fibre", args=(method,))
        replica = sum(alone for alone, _, _ in results) / len(results)
        print(f"{name:6s} {replica:19.3f} {results[0][1]:9.4f} {results[0][2]:23.3f}")


if __name__ == "__main__":
    main()
