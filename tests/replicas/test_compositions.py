"""Named compositions: points of the custom space to the bit, and what their papers promise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import isles
from isles.comm.codecs import form
from isles.comm.mesh import Mesh
from isles.replicas.methods.diloco import Nesterov
from isles.replicas.parts.choices import EveryH, Everyone, Replace
from isles.replicas.parts.interfaces import Composition
from tests.replicas.workers import HALVES, LINKS, Net, adamw, sgd, train_step, weights, wrap

STEPS = 10


def run(world: Mesh, name: str, options: dict[str, Any]) -> list[Any]:
    """Losses, and the weights in the end."""
    model = Net(seed=world.rank)
    optimizer = isles.method(name)(model, adamw(model), world.outer, **options)
    losses = [train_step(optimizer, world.rank, step) for step in range(1, STEPS + 1)]
    optimizer.finish()
    return [*losses, *weights(optimizer.model).tolist()]


def ran(name: str, options: dict[str, Any], workers: int = 3) -> list[Any]:
    return isles.run_virtual(run, workers, links=LINKS, args=(name, {"sync_every": 3, **options}))


POINTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("diloco", {}, {}),
    ("diloco", {"codec": "powersgd:1", "error_feedback": "local"}, {"codec": "powersgd:1", "error_feedback": "local"}),
    ("localsgd", {}, {"rule": "average"}),
    ("postlocal-sgd", {"every_step_until": 4}, {"rule": "average", "every_step_until": 4}),
    ("sparta", {"fraction": 0.3}, {"rule": "average", "codec": "randk:0.3"}),
    ("fedavg", {}, {"rule": "sgd"}),
    ("slowmo", {"outer_momentum": 0.6}, {"rule": "heavy_ball", "outer_momentum": 0.6}),
    (
        "sparseloco",
        {},
        {"rule": "sgd", "outer_lr": 0.4, "codec": "topk:64+int2", "error_feedback": "local", "feedback_decay": 0.95},
    ),
    (
        "streaming-diloco",
        {"fragments": HALVES},
        {"outer_lr": 0.4, "codec": "fp4", "fragments": HALVES, "overlap_steps": 1, "landing": "blend"},
    ),
    ("delayed", {}, {"outer_lr": 0.1, "outer_delay": 1}),
    ("eager", {"outer_delay": 2}, {"outer_lr": 0.4, "outer_delay": 2, "reading": "eager"}),
    (
        "dilocox",
        {"rank": 1, "window": 0, "start_compress": 0},
        {
            "outer_lr": 0.4,
            "outer_delay": 1,
            "landing": "carry",
            "codec": "powersgd:1+int4",
            "error_feedback": "local",
        },
    ),
    ("noloco", {}, {"mixing": "groups", "rule": "noloco"}),
    (
        "streaming-noloco",
        {"fragments": HALVES},
        {"mixing": "groups", "rule": "noloco", "fragments": HALVES, "overlap_steps": 1, "landing": "blend"},
    ),
]


@pytest.mark.parametrize(("name", "options", "parts"), POINTS, ids=[name for name, _, _ in POINTS])
def test_named_methods_are_points_of_the_custom_space(
    name: str, options: dict[str, Any], parts: dict[str, Any]
) -> None:
    """To the bit: every loss, and the weights at the end."""
    assert ran(name, options) == ran("custom", parts)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("streaming-noloco", {"fragments": "whole", "overlap_steps": 0, "merge_alpha": 0.0}), ("noloco", {})),
        (("slowmo", {"outer_momentum": 0.0}), ("fedavg", {})),
        (("postlocal-sgd", {"every_step_until": 0}), ("localsgd", {})),
        (("postlocal-sgd", {"every_step_until": STEPS}), ("localsgd", {"sync_every": 1})),
        (("sparta", {"fraction": 1.0}), ("localsgd", {})),
    ],
)
def test_limits_are_simpler_methods(one: tuple[str, dict[str, Any]], other: tuple[str, dict[str, Any]]) -> None:
    """To the bit."""
    assert ran(*one) == ran(*other)


def test_fedavg_is_local_sgd_up_to_rounding() -> None:
    """Averaging changes with rate 1 is averaging parameters."""
    torch.testing.assert_close(torch.tensor(ran("fedavg", {})), torch.tensor(ran("localsgd", {})), rtol=1e-5, atol=1e-6)


def test_slowmo_is_torch_s_heavy_ball() -> None:
    """The anchors over five rounds against torch.optim.SGD(momentum) on the same outer gradients, to 1e-6."""

    def worker(world: Mesh) -> None:
        model = Net()
        optimizer: Any = wrap(world, "slowmo", model, sgd, sync_every=2, outer_lr=0.8, outer_momentum=0.6)
        theirs = torch.nn.Parameter(optimizer.fragments[0].anchor.clone())
        reference = torch.optim.SGD([theirs], lr=0.8, momentum=0.6)
        for step in range(1, 11):
            before = weights(model)
            theirs_before = theirs.detach().clone()
            train_step(optimizer, 0, step)  # the same data for all, so the mean is everyone's own
            if step % 2 == 0:
                inner = before - 0.1 * torch.cat([p.grad.reshape(-1) for p in copied(before, step)])
                theirs.grad = theirs_before - inner
                reference.step()
                torch.testing.assert_close(optimizer.fragments[0].anchor, theirs.detach(), rtol=1e-6, atol=1e-6)

    isles.run_virtual(worker, 2, links=LINKS)


def copied(flat: Tensor, step: int) -> list[Any]:
    """The parameters of a model with these weights and the gradient of worker 0's loss at `step`."""
    from tests.replicas.workers import loss_of

    model = Net()
    torch.nn.utils.vector_to_parameters(flat, model.parameters())
    loss_of(model, 0, step).backward()
    return list(model.parameters())


def test_sparta_averages_its_part_and_leaves_the_rest() -> None:
    """One exchange: about a fraction of the entries is equal on all workers and is their mean, all others are as the
    inner step left them; the mean over workers is what it was.
    """

    def worker(world: Mesh) -> tuple[Tensor, Tensor]:
        model = Net()
        optimizer = wrap(world, "sparta", model, sgd, sync_every=2, fraction=0.3)
        train_step(optimizer, world.rank, 1)
        for parameter in model.parameters():
            parameter.data.add_(world.rank)  # far apart
        from tests.replicas.workers import loss_of

        loss_of(model, world.rank, 2).backward()
        alone = weights(model) - 0.1 * torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
        optimizer.step()
        return alone, weights(model)

    results = isles.run_virtual(worker, 3, links=LINKS)
    alone, together = (torch.stack([result[i] for result in results]) for i in (0, 1))
    met = (together == together[0]).all(0)
    assert 0.15 < float(met.float().mean()) < 0.45
    torch.testing.assert_close(together[:, ~met], alone[:, ~met])
    torch.testing.assert_close(together[0, met], alone[:, met].mean(0))
    torch.testing.assert_close(together.mean(0), alone.mean(0))


def test_low_rank_cannot_stand_in_for_a_lost_answer() -> None:
    """A composition of one's own: late, low rank, and going on alone."""
    rule = Nesterov(lr=0.7, momentum=0.9)
    parts: dict[str, Any] = {"mixing": Everyone(), "codec": form("powersgd:2"), "rule": rule, "landing": Replace()}
    Composition(cadence=EveryH(3), on_peer_failure="solo", **parts)
    with pytest.raises(ValueError, match="known only with the mean"):
        Composition(cadence=EveryH(3, rounds_late=1), on_peer_failure="solo", **parts)
