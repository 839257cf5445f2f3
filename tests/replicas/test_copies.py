"""Inner optimizers that keep a copy of the weights: a landing reaches it too, or the method says that it cannot."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from schedulefree import AdamWScheduleFree
from torch import Tensor, nn

import isles
from isles.comm.mesh import Mesh
from isles.replicas.watch import copies_of
from tests.covers import cover, share
from tests.gloo import run_gloo
from tests.replicas.workers import RUNS, Net, Whole, bits, loss_of, sgd, train_step, weights, wrap

RATE = 0.05
PARTS = [name for name in RUNS if "sync_every" in RUNS[name][1]]


class Masters(torch.optim.Optimizer):
    """SGD on float32 copies, with a momentum that is zero at first, as a bias may be."""

    def __init__(self, model: nn.Module, rate: float = RATE) -> None:
        super().__init__(model.parameters(), {"lr": rate})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state.update(master=p.detach().float().clone(), momentum=torch.zeros_like(p))
                    state["master"].sub_(p.grad.float(), alpha=group["lr"])
                    p.copy_(state["master"])


class Elsewhere(torch.optim.Optimizer):
    """The same, whose copies are in no state; `Renewed` knows of landings."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": RATE})
        self.copies = {p: p.detach().clone() for group in self.param_groups for p in group["params"]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p, copy in self.copies.items():
            if p.grad is not None:
                copy.sub_(p.grad, alpha=RATE)
                p.copy_(copy)


class Renewed(Elsewhere):
    def after_landing(self, parameters: list[nn.Parameter]) -> None:
        for p in parameters:
            self.copies[p].copy_(p.detach())


class Lookahead(torch.optim.Optimizer):
    """k steps of SGD, then half a step of the slow weights to where they led."""

    def __init__(self, model: nn.Module, k: int = 5) -> None:
        super().__init__(model.parameters(), {"lr": RATE})
        self.k, self.count = k, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.detach().clone())
                p.sub_(p.grad, alpha=RATE)
                if self.count % self.k == 0:
                    p.copy_(slow.lerp_(p, 0.5))


class Own(torch.optim.SGD):
    """Somebody's own, which keeps nothing but a momentum."""


def run(worker: Any, workers: int = 2, *args: Any) -> list[Any]:
    return isles.run_virtual(worker, workers, args=args)


def trained(world: Mesh, name: str, inner: Callable[[nn.Module], Any]) -> str:
    model = (Whole if name.startswith("ist") else Net)(0)
    with torch.no_grad():
        model.bias.zero_()
    if name == "islands":
        mesh = isles.mesh(outer=2, inner=2)
        inside = isles.DDP(model, inner(model), mesh.inner)
        optimizer: isles.ReplicaSync = isles.DiLoCo(model, inside, mesh.outer, sync_every=3)
    else:
        optimizer = wrap(world, name, model, inner)
    for step in range(1, 9):
        train_step(optimizer, world.rank, step)
    live = bits(weights(model)) if not name.startswith("ist") else ""
    return live + bits(weights(optimizer.consolidate()))


def of_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return sgd(model, RATE)


@cache
def by_sgd(name: str, workers: int = 2) -> list[str]:
    """The oracle of optimizers that are another spelling of it."""
    return run(trained, workers, name, of_sgd)


@pytest.mark.parametrize("name", [*share(PARTS, 6, 9, ["localsgd", "noloco", "ist"]), "islands"])
def test_masters_take_what_has_landed(name: str) -> None:
    """Copies of float32 weights: the bits of plain SGD, of which these are another spelling."""
    workers = 4 if name == "islands" else 2
    assert run(trained, workers, name, Masters) == by_sgd(name, workers)


@pytest.mark.parametrize("name", ["diloco", "streaming, int4", "noloco"])
def test_an_optimizer_may_renew_its_copies_itself(name: str) -> None:
    assert run(trained, 2, name, Renewed) == by_sgd(name)


def test_who_renews_its_copies_is_left_alone() -> None:
    """Its state stays as its own step has left it, whatever is in it. torch's own optimizers are not looked at."""

    class Renews(Masters):
        def after_landing(self, parameters: list[nn.Parameter]) -> None:
            self.renewed = parameters

    def worker(world: Mesh) -> None:
        model = Net()
        optimizer: Any = wrap(world, "localsgd", model, Renews, sync_every=1)
        train_step(optimizer, world.rank, 1)
        assert optimizer.inner.renewed == list(model.parameters()), "that have landed"
        for p, before in zip(model.parameters(), Net().parameters(), strict=True):
            own = optimizer.state[p]["master"]  # by its own gradient, which is not the mean of both
            assert not torch.equal(own, p) and not torch.equal(own, before)
        assert not copies_of(torch.optim.AdamW(model.parameters()), list(model.parameters()))

    run(worker)


def of_two(matrices: Any, rest: Any) -> Callable[[nn.Module], Any]:
    """A list: one optimizer for matrices, one for what is left."""

    def inner(model: nn.Module) -> list[torch.optim.Optimizer]:
        parts = [[p for p in model.parameters() if (p.dim() == 2) == flat] for flat in (True, False)]
        return [kind(nn.ParameterList(part)) for kind, part in zip((matrices, rest), parts, strict=True)]

    return inner


@pytest.mark.parametrize(("matrices", "rest"), [(Masters, of_sgd), (Renewed, Masters), (of_sgd, Renewed)])
def test_each_of_several_optimizers_has_its_own_copies(matrices: Any, rest: Any) -> None:
    for name in ("localsgd", "noloco"):
        assert run(trained, 2, name, of_two(matrices, rest)) == by_sgd(name)


def test_one_worker_alone_lands_too() -> None:
    assert run(trained, 1, "diloco", Masters) == by_sgd("diloco", 1)


def test_masters_take_what_has_landed_over_gloo() -> None:
    assert run_gloo(trained, args=("diloco", Masters)) == by_sgd("diloco")


def test_masters_of_bfloat16_take_the_anchor_in_full() -> None:
    """Right after a round they are the float32 anchor, which is the same on both."""

    def worker(world: Mesh) -> tuple[str, str]:
        model = Net(dtype=torch.bfloat16)
        optimizer: Any = wrap(world, "diloco", model, Masters)
        for step in range(1, 7):
            train_step(optimizer, world.rank, step)
        masters = torch.cat([optimizer.state[p]["master"].reshape(-1) for p in model.parameters()])
        assert torch.equal(masters, optimizer.fragments[0].anchor)
        assert not torch.equal(masters, masters.bfloat16().float())
        return bits(masters), bits(weights(model).float())

    first, second = run(worker)
    assert first == second


def test_a_resumed_run_finds_its_masters_again() -> None:
    def worker(world: Mesh, inner: Any, stop: bool) -> str:
        model = Net()
        optimizer = wrap(world, "diloco", model, inner)
        for step in range(1, 12):
            train_step(optimizer, world.rank, step)
            if stop and step == 4:
                state, held = optimizer.state_dict(), model.state_dict()
                model = Net(5)
                optimizer = wrap(world, "diloco", model, inner)
                model.load_state_dict(held)
                optimizer.load_state_dict(state)
        return bits(weights(optimizer.consolidate()))

    assert run(worker, 2, Masters, True) == run(worker, 2, of_sgd, False)


@pytest.mark.parametrize("name", share(["localsgd", "diloco", "noloco", "streaming-diloco"], 0, 2))
def test_copies_out_of_reach_are_refused(name: str) -> None:
    """At the second landing that an inner step takes back, in one line with the mend."""

    def worker(world: Mesh, inner: Any) -> str:
        optimizer = wrap(world, name, Net(), inner)
        try:
            for step in range(1, 12):
                train_step(optimizer, world.rank, step)
        except (ValueError, isles.PeerLost) as error:
            return str(error)
        return ""

    reported = [text for inner in (Elsewhere, of_two(Elsewhere, Masters)) for text in run(worker, 2, inner)]
    reported = [text for text in reported if "is lost" not in text]
    assert len(reported) >= 2 and all(
        text.startswith("Elsewhere takes back what rounds have landed, for it keeps") for text in reported
    )
    assert all("after_landing(parameters)" in text and "\n" not in text for text in reported)


def test_short_rounds_tell_nothing_of_copies_out_of_reach() -> None:
    """One step may honestly lead back as far as a landing of two has led."""

    def worker(world: Mesh) -> int:
        optimizer = wrap(world, "localsgd", Net(), Elsewhere, sync_every=2)
        for step in range(1, 10):
            train_step(optimizer, world.rank, step)
        return optimizer.steps

    assert run(worker) == [9, 9]


@pytest.mark.parametrize(
    ("name", "rate"), cover(["localsgd", "diloco", "noloco", "postlocal-sgd"], [1e-3, 0.1, 0.4], each=1)
)
def test_an_optimizer_without_copies_is_left_alone(name: str, rate: float) -> None:
    """A momentum that is zero, as a bias is; small steps after large landings and large ones after small."""

    def own(model: nn.Module) -> torch.optim.Optimizer:
        return Own(model.parameters(), lr=rate, momentum=0.5)

    def plain(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.5)

    assert run(trained, 2, name, own) == run(trained, 2, name, plain)


# Copies that are near, and not equal: against two optimizers whose weights somebody averages by hand.


def by_hand(inner: Callable[[nn.Module], Any], key: str, every: int, steps: int) -> Tensor:
    models = [Net(), Net()]
    optimizers = [inner(model) for model in models]
    for step in range(1, steps + 1):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            loss_of(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        if step % every == 0:
            for pair in zip(*(model.parameters() for model in models), strict=True):
                mean = (pair[0].detach() + pair[1].detach()) / 2
                for p, optimizer in zip(pair, optimizers, strict=True):
                    optimizer.state[p][key] += mean - p.detach()
                    p.data.copy_(mean)
    return torch.stack([weights(model) for model in models])


def schedule_free(model: nn.Module) -> AdamWScheduleFree:
    optimizer = AdamWScheduleFree(model.parameters(), lr=0.01)
    optimizer.train()
    return optimizer


@pytest.mark.parametrize(("inner", "key"), [(Lookahead, "slow"), (schedule_free, "z")])
def test_near_copies_move_with_the_weights(inner: Any, key: str) -> None:
    """Lookahead's slow weights, and z of the real schedule-free AdamW; some inner steps after a round."""

    def worker(world: Mesh) -> Tensor:
        model = Net()
        optimizer = wrap(world, "localsgd", model, inner, sync_every=7)
        for step in range(1, 20):
            train_step(optimizer, world.rank, step)
        return weights(model)

    torch.testing.assert_close(torch.stack(run(worker)), by_hand(inner, key, 7, 19), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", share(["localsgd", "diloco", "noloco", "none", "ddp"], 2, 5, ["localsgd"]))
def test_schedule_free_is_used_as_its_documentation_says(name: str) -> None:
    """`train` and `eval` of the wrapper are those of the inner optimizer; replicas meet; the loss falls."""

    def worker(world: Mesh) -> tuple[Any, ...]:
        model = Net()
        optimizer: Any = wrap(world, name, model, lambda model: AdamWScheduleFree(model.parameters(), lr=0.05))
        optimizer.train()
        before = float(loss_of(model, 99, 0, 64))
        for step in range(1, 61):
            train_step(optimizer, world.rank, step)
        trained = weights(model)
        optimizer.eval()
        assert not torch.equal(weights(model), trained)
        judged = float(loss_of(model, 99, 0, 64))
        with pytest.raises(ValueError, match=r"call optimizer.train\(\) before finish\(\)"):
            optimizer.consolidate()
        optimizer.train()
        torch.testing.assert_close(weights(model), trained)
        spread = optimizer.replica_std()
        optimizer.finish()
        landed = weights(model)
        own = torch.cat([optimizer.state[p]["z"].reshape(-1) for p in model.parameters()])
        optimizer.consolidate()
        met = torch.cat([optimizer.state[p]["z"].reshape(-1) for p in model.parameters()])
        own += weights(model) - landed if name in ("noloco", "none") else 0.0
        optimizer.eval()
        return before, judged, spread, own, met, bits(weights(model))

    results = run(worker)
    for before, judged, spread, _, met, ends in results:
        assert judged < 0.8 * before and (spread < 0.02 or name == "none")
        torch.testing.assert_close(met, (results[0][3] + results[1][3]) / 2)
        assert ends == results[0][5], "the averages of all workers are one"


def test_an_optimizer_without_them_has_no_train_and_eval() -> None:
    def worker(world: Mesh) -> bool:
        optimizer = wrap(world, "localsgd", Net())
        return hasattr(optimizer, "train") or hasattr(optimizer, "eval")

    assert run(worker, 1) == [False]
