"""Outer rules with a memory of rounds: FedAdam and FedYogi by hand and against torch, what a rule is told of rounds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import isles
from isles.comm.codecs import codec
from isles.comm.mesh import Mesh
from isles.replicas.methods.config import FedAdamConfig
from isles.replicas.methods.fedadam import Adam
from isles.replicas.methods.fedavg import Descent, FedAvg
from isles.replicas.methods.fedyogi import Yogi
from isles.replicas.parts.choices import EveryH, Everyone, Replace
from isles.replicas.parts.interfaces import Answer, Composition, RuleState
from tests.replicas.workers import HALVES, LINKS, Net, load, save, sgd, train_step, weights, wrap


def applied(rule: Adam | Yogi, gradients: list[float]) -> tuple[float, dict[str, float]]:
    """Where one weight that begins at 1 ends, and the rule's vectors."""
    anchor = torch.tensor([1.0], dtype=torch.float64)
    vectors = {name: torch.full_like(anchor, rule.start.get(name, 0.0)) for name in rule.vectors}
    for round, gradient in enumerate(gradients, start=1):
        rule.apply(anchor, Answer(torch.tensor([gradient], dtype=torch.float64)), RuleState(vectors), round)
    return float(anchor), {name: float(vector) for name, vector in vectors.items()}


def test_fedadam_by_hand() -> None:
    """Two rounds, b1 = 1/2, b2 = 3/4, tau = 1, lr = 1/2. Round 1: g = 3, m' = 3, v' = 9, step 1/2 * 3 / (3 + 1).
    Round 2: g = -1: m = 1/2 * 3/2 - 1/2 = 1/4, m' = 1/4 / (3/4) = 1/3;
    v = 3/4 * 9/4 + 1/4 = 31/16, v' = 31/16 / (7/16) = 31/7.
    """
    rule = Adam(lr=0.5, betas=(0.5, 0.75), tau=1.0)
    assert applied(rule, [3.0])[0] == pytest.approx(1 - 0.375, abs=1e-15)
    anchor, vectors = applied(rule, [3.0, -1.0])
    assert vectors == pytest.approx({"mean": 0.25, "square": 31 / 16}, abs=1e-15)
    assert anchor == pytest.approx(0.625 - 0.5 * (1 / 3) / (math.sqrt(31 / 7) + 1), abs=1e-15)


def test_fedyogi_by_hand() -> None:
    """b1 = 1/2, b2 = 3/4, tau = 1, lr = 1/2; v starts at 1. g = 1: v is g^2 and stays. g = 3: v grows by 9/4 to 13/4.
    Then g = 1: v falls by a quarter of 1, not of v, to 3. With tau = 1/2 v starts at its square, 1/4.
    """
    rule = Yogi(lr=0.5, momentum=0.5, b2=0.75, tau=1.0)
    anchor, vectors = applied(rule, [3.0])
    assert vectors == pytest.approx({"mean": 1.5, "square": 13 / 4}, abs=1e-15)
    assert anchor == pytest.approx(1 - 0.5 * 1.5 / (math.sqrt(13 / 4) + 1), abs=1e-15)
    assert applied(rule, [3.0, 1.0])[1] == pytest.approx({"mean": 1.25, "square": 3.0}, abs=1e-15)
    assert applied(rule, [1.0])[1]["square"] == 1.0
    assert applied(rule, [0.0, 0.0]) == (1.0, {"mean": 0.0, "square": 1.0})
    assert applied(replace(rule, tau=0.5), [0.0])[1]["square"] == 0.25


def test_fedadam_is_torch_s_adam() -> None:
    """The anchors over five rounds of two workers against torch.optim.Adam on the same mean changes, to 1e-6."""

    def worker(world: Mesh) -> None:
        model = Net(seed=world.rank)
        optimizer: Any = wrap(world, "fedadam", model, sync_every=2, outer_lr=0.05, outer_betas=(0.8, 0.9), tau=1e-2)
        (fragment,) = optimizer.fragments
        theirs = torch.nn.Parameter(fragment.anchor.clone())
        reference = torch.optim.Adam([theirs], lr=0.05, betas=(0.8, 0.9), eps=1e-2)
        sent: list[Tensor] = []
        whole, form = optimizer.round_exchange.send, optimizer.parts.codec

        def noted(fragment: Any, payload: Tensor, *rest: Any) -> Any:
            sent.append(payload.clone())
            return whole(fragment, payload, *rest)

        optimizer.round_exchange.send = noted
        for step in range(1, 11):
            train_step(optimizer, world.rank, step)
            if step % 2 == 0:
                mean = sent[-1].clone()
                world.outer.mean(mean, form)
                theirs.grad = mean
                reference.step()
                torch.testing.assert_close(fragment.anchor, theirs.detach(), rtol=1e-6, atol=1e-6)
        assert len(sent) == 5

    isles.run_virtual(worker, 2, links=LINKS)


@dataclass(frozen=True, kw_only=True)
class Told(Descent):
    """A rule that notes its rounds where it counts: an outer rate of lr / round, and a vector that begins at 5."""

    vectors = ("told",)

    @property
    def start(self) -> Mapping[str, float]:
        return {"told": 5.0}

    def apply(self, anchor: Tensor, answer: Answer, state: RuleState, round: int) -> None:
        state.vectors["told"].add_(round)
        anchor.sub_(answer.mean, alpha=self.lr / round)


class Slowing(FedAvg):
    def compose(self) -> Composition:
        cadence = EveryH(self.config.sync_every)
        return Composition(
            cadence=cadence, mixing=Everyone(), codec=codec("none"), rule=Told(lr=1.0), landing=Replace()
        )


def slowing(world: Mesh, steps: int, states: list[Any] | None = None) -> tuple[list[float], float, Any]:
    """Weights, what the rule noted, and the state after `steps` steps of H = 2, or after 9, which end the run."""
    model = Net(seed=world.rank)
    optimizer: Any = Slowing(model, torch.optim.SGD(model.parameters(), lr=0.1), world.outer, sync_every=2)
    if states is not None:
        load(optimizer, states[world.rank])
    while optimizer.steps < steps:
        train_step(optimizer, world.rank, optimizer.steps + 1)
    if steps == 9:
        optimizer.finish()
    return weights(model).tolist(), float(optimizer.fragments[0].vectors["told"][0]), save(optimizer)


def test_a_rule_gets_its_rounds_across_a_checkpoint() -> None:
    """Four rounds and the last, shorter one: 5 + 1 + 2 + 3 + 4 + 5, and the weights of the run without a break."""
    straight = isles.run_virtual(slowing, 2, links=LINKS, args=(9,))
    states = [state for _, _, state in isles.run_virtual(slowing, 2, links=LINKS, args=(5,))]
    resumed = isles.run_virtual(slowing, 2, links=LINKS, args=(9, states))
    assert [one[0] for one in straight] == [one[0] for one in resumed]
    alone = isles.run_virtual(slowing, 1, args=(9,))  # in one sweep, without an exchange
    assert [reported for _, reported, _ in (*straight, *resumed, *alone)] == [20.0] * 5


def test_the_blocks_and_fragments_of_a_model_count_alike() -> None:
    """A rule is told of its own fragment's rounds; with answers a round late from the first landing on."""

    def worker(world: Mesh) -> list[int]:
        optimizer: Any = wrap(world, "delayed", Net(), sync_every=2, fragments=HALVES)
        for step in range(1, 8):
            train_step(optimizer, world.rank, step)
        return [fragment.landed for fragment in optimizer.fragments]

    assert isles.run_virtual(worker, 2, links=LINKS) == [[3, 3], [3, 3]]


def test_a_round_that_all_skip_does_not_count() -> None:
    def worker(world: Mesh) -> tuple[int, int]:
        optimizer: Any = wrap(world, "fedadam", Net(), sgd, sync_every=1, error_feedback="local", codec="int8")
        for step in range(1, 4):
            if step == 2 and world.rank == 0:
                optimizer.parameters[0].data.fill_(math.nan)
            train_step(optimizer, world.rank, step)
        return optimizer.skipped, optimizer.fragments[0].landed

    assert isles.run_virtual(worker, 2, links=LINKS) == [(1, 2), (1, 2)]


@pytest.mark.parametrize(
    ("given", "reported"),
    [
        ({"outer_betas": (1.0, 0.9)}, r"outer_betas = \[1.0, 0.9\]: choose two in"),
        ({"outer_betas": (0.9,)}, "outer_betas"),
        ({"tau": 0.0}, "tau = 0.0: choose a positive number"),
        ({"outer_lr": 0.0}, "outer_lr"),
    ],
)
def test_settings_that_make_no_sense(given: dict[str, Any], reported: str) -> None:
    with pytest.raises(ValueError, match=reported):
        FedAdamConfig(**given)


def test_a_biased_codec_without_feedback_is_warned_about() -> None:
    """A rule that the table does not know by name still loses what its codec takes."""

    def worker(world: Mesh) -> list[str]:
        return wrap(world, "fedadam", Net(), sync_every=2, codec="sign").advise(100)

    (line,) = isles.run_virtual(worker, 1)[0]
    assert "never comes back" in line and 'error_feedback = "local"' in line


def test_a_first_value_is_of_one_of_the_vectors() -> None:
    class Wrong(Descent):
        @property
        def start(self) -> Mapping[str, float]:
            return {"tolt": 1.0}

    with pytest.raises(ValueError, match="start names 'tolt', which is none of its vectors"):
        Composition(cadence=EveryH(1), mixing=Everyone(), codec=codec("none"), rule=Wrong(lr=1.0), landing=Replace())
