"""Methods of one's own in a few lines each, on virtual workers, against no communication: plain pair gossip, and an
outer rule that remembers.

    python examples/add_a_method.py

The same classes work everywhere else: `isles train --method examples.add_a_method:Gossip`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

import isles

# The method, from here. --------------------------------------------------------------------------------------------
from isles.comm.codecs import codec
from isles.replicas.config import MethodConfig
from isles.replicas.parts.choices import EveryH, RandomGroups, Replace
from isles.replicas.parts.interfaces import Answer, Composition, OuterRule, RuleState


@dataclass(frozen=True, kw_only=True)
class GossipConfig(MethodConfig):
    sync_every: int = 10
    """Inner steps between two exchanges."""
    seed: int = 0
    """Seed of the pairs."""


@dataclass(frozen=True)
class PairMean(OuterRule):
    """anchor = mean of the pair's live weights."""

    def form(self, out: Tensor, live: Tensor, reference: Tensor, anchor: Tensor) -> None:
        out.copy_(live)  # what travels

    def apply(self, anchor: Tensor, answer: Answer, state: RuleState, round: int) -> None:
        anchor.copy_(answer.mean)  # what the answer does


class Gossip(isles.OuterSync):
    """Every `sync_every` steps: theta_i <- (theta_i + theta_j) / 2 with a random partner j."""

    Config = GossipConfig

    def compose(self) -> Composition:
        every, pairs = EveryH(self.config.sync_every), RandomGroups(2, self.config.seed)
        return Composition(cadence=every, mixing=pairs, codec=codec("none"), rule=PairMean(), landing=Replace())


# To here. -----------------------------------------------------------------------------------------------------------

# An outer rule of one's own for a method that is there: a vector kept from round to round, and which round it is. -----


@dataclass(frozen=True, kw_only=True)
class Settling(OuterRule):
    """v <- v / 2 + g;  anchor <- anchor - v / sqrt(t): a momentum whose rate falls with the rounds t."""

    vectors = ("momentum",)  # zeros at the start; `start` would name other values

    # Without a `form` of its own a rule sends the outer gradient g.
    def apply(self, anchor: Tensor, answer: Answer, state: RuleState, round: int) -> None:
        v = state.vectors["momentum"].mul_(0.5).add_(answer.mean)
        anchor.sub_(v, alpha=round**-0.5)


class Settled(isles.FedAvg):
    """FedAvg with that rule; settings, codecs, checkpoints and islands come along."""

    def compose(self) -> Composition:
        return replace(super().compose(), rule=Settling())


# To here, again. ----------------------------------------------------------------------------------------------------


def worker(world: isles.Mesh, method: type[isles.ReplicaSync], options: dict[str, int]) -> tuple[float, float, float]:
    """Fit a noisy linear map on this worker's own 20 rows; (replica's loss, spread, the one model's loss)."""
    truth = torch.randn(30, 1, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1 + world.rank)
    x = torch.randn(20, 30, generator=generator)  # fewer rows than unknowns: alone, nobody can find the truth
    y = x @ truth + 0.5 * torch.randn(20, 1, generator=generator)
    model = torch.nn.Linear(30, 1)
    optimizer = method(model, torch.optim.SGD(model.parameters(), lr=0.02), world.outer, **options)
    for _ in range(120):
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
    every = {"sync_every": 10}
    for name, method, options in (("none", isles.NoSync, {}), ("gossip", Gossip, every), ("settled", Settled, every)):
        results = isles.run_virtual(worker, 8, links="home-fibre", args=(method, options))
        replica = sum(alone for alone, _, _ in results) / len(results)
        print(f"{name:7s} {replica:18.3f} {results[0][1]:9.4f} {results[0][2]:23.3f}")


if __name__ == "__main__":
    main()
