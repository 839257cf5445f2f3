"""Peers that go to another stage in the middle of a run: what they take over, and what it does to the run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from isles.comm.mesh import Mesh
from isles.data import Corpus, load_corpus
from isles.training.config.sections import Config
from isles.training.kinds import layout_of
from isles.training.stage_runner import planned_cut
from isles.training.swarm.step import stage_costs
from isles.training.swarm.trainer import SwarmTrainer
from tests.pipeline.swarm import killing
from tests.training.swarm.test_swarm import alone, config, furthest

__all__ = ["alone"]


def trained(world: Mesh, read: Config, corpus: Corpus) -> dict[str, Any]:
    """A whole run, and what this worker has in the end."""
    trainer = SwarmTrainer(read, world.arranged(layout_of(read)), corpus)
    trainer.run(None)
    step = trainer.model_step
    state = trainer.optimizer.inner_state()["state"]
    moments = {f"{number}.{name}": value for number, own in state.items() for name, value in own.items()}
    return {
        "stage": step.swarm.stages[world.rank],
        "stages": list(step.swarm.stages),
        "moves": step.moves,
        "weights": {name: tensor.clone() for name, tensor in trainer.optimizer.weights().items()},
        "moments": moments,
        "rate": trainer.schedule.get_last_lr(),
        "counted": step.swarm.peer.counts.counted,
        "clock": world.transport.now(),
    }


def run(deaths: dict[int, int], *more: str, **virtual: Any) -> list[dict[str, Any] | None]:
    read = config(*more)
    virtual = {"links": "lan", "step_seconds": 1.0} | virtual
    done = killing.run(trained, read.world.workers, (read, load_corpus(read.data)), deaths, **virtual)
    return [None if each is None else each[0] for each in done]


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


MOVES = (
    "pipeline.swarm.rebalance=throughput",
    "pipeline.swarm.rebalance_every=0.5",
    "pipeline.swarm.hysteresis=0.05",
    "run.validate_every=3",
)


def check_alike(done: list[dict[str, Any] | None]) -> None:
    """Peers of a stage hold the same bits: weights, moments, rate."""
    for one in done:
        for other in done:
            if one is not None and other is not None and one["stage"] == other["stage"]:
                assert same(one["weights"], other["weights"]) and same(one["moments"], other["moments"])
                assert one["rate"] == other["rate"]


def test_who_moves_has_the_bits_of_the_others(alone: Any) -> None:
    """Six peers of which four serve the first stage, and one the last, whose work is 2.5 times as much."""
    done = run({}, *MOVES, "pipeline.swarm.peers=[4,1,1]", "world.workers=6")
    assert sum(each["moves"] for each in done if each is not None) >= 2
    assert all(each is not None and each["stages"].count(stage) >= 1 for each in done for stage in range(3))
    check_alike(done)
    weights = {name: tensor for each in done if each is not None for name, tensor in each["weights"].items()}
    assert furthest(weights, alone[1]) < 1e-12


@pytest.mark.long
def test_a_donor_that_is_lost_is_replaced_by_the_next(alone: Any) -> None:
    """The first peer of the stage that others come to dies, at moments around the first step with a move."""
    for victim, message in [(5, message) for message in range(150, 240, 10)]:
        done = run({victim: message}, *MOVES, "pipeline.swarm.peers=[4,1,2]", "world.workers=7")
        assert done[victim] is None
        check_alike(done)
        weights = {name: tensor for each in done if each is not None for name, tensor in each["weights"].items()}
        assert furthest(weights, alone[1]) < 1e-12


class Timed(SwarmTrainer):
    """Remembers when each step ended, and who served what in it."""

    ends: list[tuple[float, list[int]]]

    def step(self) -> None:
        super().step()
        members = self.model_step.swarm.agreement.members
        stages = [stage if rank in members else -1 for rank, stage in enumerate(self.model_step.swarm.stages)]
        self.ends = [*getattr(self, "ends", []), (self.world.transport.now(), stages)]


def timed(world: Mesh, read: Config, corpus: Corpus) -> list[tuple[float, list[int]]]:
    trainer = Timed(read, world.arranged(layout_of(read)), corpus)
    trainer.run(None)
    return trainer.ends


@pytest.mark.long
def test_a_stage_that_loses_half_of_its_peers_gets_others() -> None:
    """3 stages x 4 equal peers, 2 of the last stage lost: 85 % of what 10 peers can do, after two looks."""
    period, microbatches = 30.0, 96
    read = config(
        "pipeline.swarm.peers=[4,4,4]",
        "world.workers=12",
        "pipeline.swarm.rebalance=throughput",
        f"pipeline.swarm.rebalance_every={period}",
        "pipeline.swarm.hysteresis=0.05",
        "data.batch_size=96",
        f"pipeline.microbatches={microbatches}",
        "pipeline.swarm.forward_deadline=1e6",
        "pipeline.swarm.backward_deadline=1e6",
        "run.validate_every=0",
        "run.steps=10",
    )
    seconds = 96.0  # of a step on one worker
    more = {"links": "lan", "step_seconds": seconds}
    done = killing.run(timed, 12, (read, load_corpus(read.data)), {8: 700, 9: 700}, **more)
    ends = next(each[0] for each in done if each is not None)
    costs = stage_costs(planned_cut(read))
    whole = sum(costs)

    def rate(counts: tuple[int, ...]) -> float:
        """Microbatches a second of so many peers a stage."""
        return min(count / cost for count, cost in zip(counts, costs, strict=True)) * whole * microbatches / seconds

    lost_in = next(number for number, (_, stages) in enumerate(ends) if -1 in stages)
    best = max(rate((a, b, 10 - a - b)) for a in range(1, 9) for b in range(1, 10 - a))
    settled = next(number for number, (end, _) in enumerate(ends) if end > ends[lost_in][0] + 2 * period) + 1
    reached = microbatches / (ends[settled + 1][0] - ends[settled][0])
    print("reached", reached / best, "without", rate((4, 4, 2)) / best, [stages for _, stages in ends][-1])
    assert reached >= 0.85 * best
