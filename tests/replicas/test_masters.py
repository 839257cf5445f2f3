"""Inner optimizers that keep copies of the weights: what lands is not undone by their next step."""

from __future__ import annotations

from typing import Any

import pytest
import schedulefree
import torch
from torch import Tensor, nn

import isles
from isles.comm.mesh import Mesh
from isles.replicas.masters import WeightCopies
from tests.gloo import run_gloo
from tests.replicas.workers import RUNS, Net, bits, loss_of, sgd, train_step, weights

METHODS = ["localsgd", "diloco", "noloco", "streaming-diloco", "sparta", "dilocox"]


def run(worker: Any, workers: int, *args: Any) -> list[Any]:
    return isles.run_virtual(worker, workers, args=args)


class Masters(torch.optim.Optimizer):
    """SGD on float32 copies, as mixed precision is trained. where: "state", "list", or "offers", a list that is read
    anew after a landing.
    """

    def __init__(self, model: nn.Module, lr: float, where: str = "state") -> None:
        super().__init__(model.parameters(), {"lr": lr})
        self.where, self.held = where, dict[nn.Parameter, Tensor]()
        if where == "offers":
            self.after_landing = lambda parameters: self.held.clear()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                held = self.state[p] if self.where == "state" else self.held
                master = held.setdefault("master" if self.where == "state" else p, p.detach().float().clone())
                master.sub_(p.grad.float(), alpha=group["lr"])
                p.copy_(master)


class Lookahead(torch.optim.Optimizer):
    """SGD whose weights return every third step to the middle between them and slow ones (Zhang et al., 2019)."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        super().__init__(model.parameters(), {"lr": lr})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.detach().clone())
                p.sub_(p.grad, alpha=group["lr"])
                if self.steps % 3 == 0:
                    slow.lerp_(p, 0.5)
                    p.copy_(slow)


def trained(world: Mesh, name: str, kind: str, every: int = 3, steps: int = 13) -> str:
    method, options = RUNS.get(name, (name, {}))
    model = Net()
    inner = sgd(model, 0.05) if kind == "sgd" else Masters(model, 0.05, kind)
    if "sync_every" in options:
        options = {**options, "sync_every": every}
    optimizer = isles.method(method)(model, inner, world.outer, **options)
    for step in range(1, steps + 1):
        train_step(optimizer, world.rank, step)
    return bits(weights(optimizer.consolidate()))


@pytest.mark.parametrize("name", METHODS)
def test_masters_follow_what_lands(name: str) -> None:
    """SGD on copies that are as exact as the weights is SGD, to the bit."""
    assert run(trained, 2, name, "state") == run(trained, 2, name, "sgd")


def test_in_processes() -> None:
    assert run_gloo(trained, 2, args=("diloco", "state")) == run(trained, 2, "diloco", "sgd")


def test_an_optimizer_may_read_the_weights_anew_itself() -> None:
    assert run(trained, 2, "diloco", "offers") == run(trained, 2, "diloco", "sgd")


def test_a_copy_out_of_reach_is_refused() -> None:
    """By the step behind the third landing that it undoes, in one line with the mend."""
    with pytest.raises(ValueError, match=r"Masters keeps a copy .* give it a method after_landing\(parameters\)"):
        run(trained, 2, "localsgd", "list", 5, 17)
    assert len(set(run(trained, 2, "localsgd", "sgd", 5, 17))) == 1


def coarse(world: Mesh, name: str, keeps: bool) -> float:
    """bfloat16 weights: how far replicas are apart a step after the last round."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 24), nn.Tanh(), nn.Linear(24, 7)).bfloat16()
    inner = Masters(model, 0.2) if keeps else torch.optim.SGD(model.parameters(), lr=0.2)
    optimizer = isles.method(name)(model, inner, world.outer, **({} if name == "none" else {"sync_every": 5}))
    for step in range(1, 22):
        train_step(optimizer, world.rank, step)
    return optimizer.replica_std()


def test_masters_of_coarser_weights_keep_replicas_together() -> None:
    """One step after a round replicas are about as far apart as without masters, and not as without any round."""
    ways = ("localsgd", True), ("localsgd", False), ("none", True)
    with_masters, plain, never = (run(coarse, 2, *way)[0] for way in ways)
    assert with_masters < 1.5 * plain and with_masters < 0.8 * never


def test_slow_weights_move_as_the_weights_do() -> None:
    """Without a third step since, the slow weights are those of step 3, moved by the round of step 4."""

    def worker(world: Mesh) -> None:
        model = Net(dtype=torch.float64)
        inner = Lookahead(model, 0.05)
        optimizer = isles.DiLoCo(model, inner, world.outer, sync_every=4)
        for step in range(1, 4):
            train_step(optimizer, world.rank, step)
        held = [inner.state[p]["slow"].clone() for p in model.parameters()]
        plain = Net(dtype=torch.float64)
        plain.load_state_dict(model.state_dict())
        loss_of(plain, world.rank, 4).backward()
        sgd(plain, 0.05).step()
        train_step(optimizer, world.rank, 4)
        for p, old, before in zip(model.parameters(), held, plain.parameters(), strict=True):
            assert not torch.equal(p, before)
            torch.testing.assert_close(inner.state[p]["slow"], old + (p - before).detach(), rtol=0, atol=1e-14)

    run(worker, 2)


def test_moments_that_equal_zero_weights_are_no_copies() -> None:
    """A bias that begins at zero and its momentum, which is zero before a gradient comes: only what is a copy moves."""

    def worker(world: Mesh) -> Tensor:
        model = nn.Linear(6, 8)
        nn.init.zeros_(model.bias)
        inner = torch.optim.SGD(
            [{"params": [model.weight], "momentum": 0.0}, {"params": [model.bias], "momentum": 0.9}], lr=0.1
        )
        optimizer = isles.LocalSGD(model, inner, world.outer, sync_every=1)
        model.weight.grad, model.bias.grad = torch.ones(8, 6), torch.zeros(8)
        optimizer.step()  # now the momentum of the bias is zero, as the bias is
        model.bias.grad = torch.full((8,), float(1 + world.rank))
        optimizer.step()  # the momentum is the gradient, 1 and 2; the bias lands at -0.15
        return inner.state[model.bias]["momentum_buffer"]

    for rank, momentum in enumerate(run(worker, 2)):
        assert torch.equal(momentum, torch.full((8,), float(1 + rank)))


def free(world: Mesh, name: str) -> tuple[float, float, float, bool]:
    """schedule-free AdamW: first and last loss, spread a step after a round, whether modes pass through."""
    model = Net()
    inner = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.02, warmup_steps=0)
    optimizer: Any = isles.method(name)(model, inner, world.outer, sync_every=5)
    optimizer.train()
    first = float(loss_of(model, world.rank, 1).detach())
    for step in range(1, 42):
        train_step(optimizer, world.rank, step)
    spread = optimizer.replica_std()
    live = weights(model)
    optimizer.eval()
    passes = not inner.param_groups[0]["train_mode"] and not torch.equal(live, weights(model))
    optimizer.train()
    torch.testing.assert_close(weights(model), live, rtol=0, atol=1e-5)
    return first, float(loss_of(optimizer.consolidate(), world.rank, 1).detach()), spread, passes


@pytest.mark.parametrize("name", ["localsgd", "diloco", "noloco"])
def test_schedule_free(name: str) -> None:
    """The real package: its z moves with what lands, or replicas would come apart as without any exchange."""
    alone = run(free_alone, 2)
    for first, last, spread, passes in run(free, 2, name):
        assert last < first and spread < 0.5 * alone[0] and passes


def test_the_z_of_schedule_free_moves_however_far_it_is() -> None:
    weight = nn.Parameter(torch.arange(40.0))
    inner = schedulefree.SGDScheduleFree([weight], lr=0.1)
    inner.train()
    weight.grad = torch.ones(40)
    inner.step()
    inner.state[weight]["z"].fill_(-1000.0)
    with WeightCopies(inner, [weight]).landing(1):
        weight.data.add_(2.0)
    assert torch.equal(inner.state[weight]["z"], torch.full((40,), -998.0))


def free_alone(world: Mesh) -> float:
    model = Net()
    inner = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.02, warmup_steps=0)
    optimizer = isles.method("none")(model, inner, world.outer)
    inner.train()
    for step in range(1, 42):
        train_step(optimizer, world.rank, step)
    return optimizer.replica_std()


def test_an_optimizer_without_modes_has_none() -> None:
    def worker(world: Mesh) -> bool:
        model = Net()
        return hasattr(isles.LocalSGD(model, sgd(model), world.outer, sync_every=2), "train")

    assert run(worker, 1) == [False]
