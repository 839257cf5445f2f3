"""A user's habits with parameters and wrappers: what is exchanged is what is trained, and one method steps it."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.optim.lr_scheduler import LambdaLR

import isles
from isles.base.wrapping import SeveralOptimizers, fresh_state
from isles.comm.mesh import Mesh
from isles.replicas.flat import all_names
from tests.covers import cover
from tests.gloo import run_gloo
from tests.replicas.workers import LINKS, Net, adamw, bits, loss_of, sgd, train_step, weights, wrap

Inner = Callable[[nn.Module], Any]


def run(worker: Any, workers: int = 2, *args: Any, **options: Any) -> Any:
    return isles.run_virtual(worker, workers, links=LINKS, args=args, **options)


def two(model: nn.Module) -> list[torch.optim.Optimizer]:
    """One for matrices, one for the rest, as nanochat steps them."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    rest = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    return [torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(rest, lr=0.02)]


# Several optimizers of one model.


def one_of_two_kinds(model: nn.Module) -> torch.optim.Optimizer:
    """As `two`, of one kind: the oracle of two of the same kind."""
    first, second = two(model)
    return torch.optim.AdamW([{"params": first.param_groups[0]["params"], "lr": 0.01}, *second.param_groups], lr=0.02)


def two_of_a_kind(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.AdamW(group["params"], lr=rate)
        for group, rate in zip(one_of_two_kinds(model).param_groups, (0.01, 0.02), strict=True)
    ]


def trained(world: Mesh, name: str, inner: Inner, file: bytes | None = None) -> tuple[str, bytes]:
    """Eight steps with a schedule on each optimizer; a checkpoint after the fifth, or from it on."""
    model = Net()
    inners = inner(model)
    optimizer = wrap(world, name, model, lambda _: inners)
    schedules = [LambdaLR(one, lambda step: 0.9**step) for one in (inners if isinstance(inners, list) else [inners])]
    if file is not None:
        state = torch.load(io.BytesIO(file), weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        for schedule, own in zip(schedules, state["schedules"], strict=True):
            schedule.load_state_dict(own)
    saved = io.BytesIO()
    while optimizer.steps < 8:
        train_step(optimizer, world.rank, optimizer.steps + 1)
        for schedule in schedules:
            schedule.step()
        if optimizer.steps == 5:
            own = [schedule.state_dict() for schedule in schedules]
            torch.save({"optimizer": optimizer.state_dict(), "model": model.state_dict(), "schedules": own}, saved)
    optimizer.finish()
    return bits(weights(model)), saved.getvalue()


@pytest.mark.parametrize("name", ["ddp", "diloco", "noloco", "ist"])
def test_several_optimizers_are_as_one_with_groups(name: str) -> None:
    """To the bit, with a schedule on each; and a run goes on from its checkpoint in the middle of a round."""
    as_one = run(trained, 2, name, one_of_two_kinds)
    several = run(trained, 2, name, two_of_a_kind)
    assert [weights for weights, _ in several] == [weights for weights, _ in as_one]

    def again(world: Mesh) -> str:
        return trained(world, name, two_of_a_kind, several[world.rank][1])[0]

    if name != "ist":  # whose checkpoint is that of a subnet
        assert run(again) == [weights for weights, _ in several]


def test_several_optimizers_share_what_they_hold() -> None:
    """Groups and states are live, a group is added to the one that is to step it, copies are whole, a method's healing
    forgets the moments of all.
    """
    model = Net()
    inner = two(model)
    whole = SeveralOptimizers(inner)
    loss_of(model, 0, 1).backward()
    whole.step()
    assert [group["lr"] for group in whole.param_groups] == [0.1, 0.02]
    inner[0].param_groups[0]["lr"] = 0.05
    assert whole.param_groups[0]["lr"] == 0.05 and set(whole.state) == set(model.parameters())
    assert whole.state[model.bias] is inner[1].state[model.bias] and len(whole.state) == 3
    with pytest.raises(ValueError, match="which of the inner optimizers is it for"):
        whole.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    inner[1].add_param_group({"params": [extra := nn.Parameter(torch.ones(1))]})
    assert len(whole.param_groups) == 3 and extra not in whole.state and whole.state[extra] == {}
    del whole.state[extra]
    with pytest.raises(KeyError):
        whole.state[nn.Parameter(torch.ones(1))]
    assert pickle.loads(pickle.dumps(whole)).param_groups[0]["lr"] == 0.05
    copied = copy.deepcopy(whole)
    copied.state.clear()
    assert len(whole.state) == 3 and not inner[1].state.get(extra)
    whole.zero_grad()
    assert model.first.grad is None
    fresh_state(whole)
    assert not whole.state and not inner[1].state
    with pytest.raises(ValueError, match="stepped twice: divide them"):
        SeveralOptimizers([sgd(model), inner[1]])


def test_what_the_optimizer_does_not_hold_is_reported() -> None:
    """The first names, by the first worker; none where all are held, or frozen. No list with a method in it."""

    def worker(world: Mesh, name: str) -> int:
        model = Net()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            wrap(world, name, model, lambda model: two(model)[0])
            reported = len(caught)
            assert not caught or "1 trainable parameters (bias) are not in the optimizer" in str(caught[0].message)
            wrap(world, name, model, two)
            model.bias.requires_grad_(False)
            wrap(world, name, model, lambda model: two(model)[0])
            assert len(caught) == reported
        with pytest.raises(ValueError, match="none may be a method"):
            wrap(world, name, model, lambda m: [isles.DDP(m, sgd(m), world.outer), two(m)[0]])
        return reported

    for name in ("ddp", "diloco", "noloco"):
        assert run(worker, 1, name) == [1]


# Two methods around one parameter.


def around(world: Mesh, name: str, model: nn.Module, inner: Any) -> isles.ReplicaSync:
    if name != "islands":
        return wrap(world, name, model, lambda _: inner)
    mesh = isles.mesh(outer=1, inner=world.size)
    return isles.DiLoCo(model, isles.DDP(model, inner, mesh.inner), mesh.outer, sync_every=3)


@pytest.mark.parametrize(
    ("older", "newer"), [("ddp", "diloco"), ("noloco", "ddp"), ("diloco", "diloco"), ("islands", "ddp")]
)
def test_of_two_methods_around_a_parameter_the_newer_steps(older: str, newer: str) -> None:
    """The older one's step is refused; made anew with the same inner optimizer a method trains on, and what was there
    before sends nothing.
    """

    def worker(world: Mesh) -> tuple[str, int]:
        model = Net()
        inner = sgd(model)
        before = around(world, older, model, inner)
        train_step(before, world.rank, 1)
        now = wrap(world, newer, model, lambda _: inner)
        sent = sent_by(world)
        loss_of(model, world.rank, 2).backward()
        with pytest.raises(
            ValueError, match=rf"made around the same parameters after this .*isles\.{type(before).__name__}"
        ):
            before.step()
        for step in range(3, 6):
            train_step(now, world.rank, step)
        now.finish()
        return bits(weights(now.consolidate())), sent_by(world) - sent

    (first, sent), (second, _) = run(worker)
    assert first == second
    assert sent == run(once, 2, newer)[0]


def sent_by(world: Mesh) -> int:
    return sum(world.world.traffic[channel].bytes_sent for channel in ("outer", "inner"))


def once(world: Mesh, name: str) -> int:
    """Bytes of three steps of `name` alone, and of one backward pass."""
    model = Net()
    now = wrap(world, name, model, sgd)
    sent = world.world.traffic["outer"].bytes_sent
    loss_of(model, world.rank, 2).backward()
    for step in range(3, 6):
        train_step(now, world.rank, step)
    now.finish()
    now.consolidate()
    return world.world.traffic["outer"].bytes_sent - sent


@pytest.mark.parametrize("name", ["streaming, int4", "noloco", "dct-dp"])
def test_two_models_are_exchanged_side_by_side(name: str) -> None:
    """As a GAN's are: each ends as it does alone, though messages of both are under way at once."""

    def worker(world: Mesh, seeds: tuple[int, ...]) -> list[str]:
        optimizers = [wrap(world, name, Net(seed)) for seed in seeds]
        for step in range(1, 9):
            for optimizer in optimizers:
                loss_of(optimizer.model, world.rank, step).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return [bits(weights(optimizer.consolidate())) for optimizer in optimizers]

    first, second = (run(worker, 2, (seed,)) for seed in (1, 2))
    assert run(worker, 2, (1, 2)) == [one + other for one, other in zip(first, second, strict=True)]


# Parameters that take others' places.


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 6), nn.Linear(6, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))  # type: ignore[no-any-return]


def assigned(model: Head) -> None:
    model.load_state_dict({name: own + 1 for name, own in model.state_dict().items()}, assign=True)


def replaced(model: Head) -> None:
    model.head = nn.Linear(6, 7)


def frozen(model: Head) -> None:
    model.head.weight = nn.Parameter(model.head.weight.detach().clone(), requires_grad=False)


def normed(model: Head) -> None:
    nn.utils.parametrizations.weight_norm(model.body)


CHANGES = [(assigned, "body.weight"), (replaced, "head.weight"), (normed, "body.p"), (frozen, "head.weight")]


@pytest.mark.parametrize(("change", "name"), CHANGES)
@pytest.mark.parametrize("method", ["ddp", "noloco"])
def test_parameters_in_place_of_others_are_refused(method: str, change: Callable[[Head], None], name: str) -> None:
    def worker(world: Mesh) -> None:
        model = Head()
        optimizer = wrap(world, method, model, sgd)
        train_step(optimizer, world.rank, 1)
        change(model)
        loss_of(model, world.rank, 2).backward()
        with pytest.raises(ValueError, match=f"^{name}.* is another parameter than when the optimizer was made"):
            optimizer.step()

    run(worker, 1)


def test_modules_without_new_parameters_may_change() -> None:
    """An activation, frozen layers, a hook's module: nothing of it is trained. What is new later is found still."""

    def worker(world: Mesh) -> None:
        model = Head()
        optimizer = wrap(world, "diloco", model, sgd)
        model.extra = nn.Sequential(nn.Tanh(), nn.Linear(2, 2).requires_grad_(False))
        train_step(optimizer, world.rank, 1)
        del model.extra
        train_step(optimizer, world.rank, 2)
        replaced(model)
        loss_of(model, world.rank, 3).backward()
        with pytest.raises(ValueError, match=r"head\.weight is another parameter"):
            optimizer.step()

    run(worker, 1)


def sharded_steps(world: Mesh, looks: bool) -> str:
    mesh = isles.mesh(outer=1, inner=world.size)
    model = isles.shard(Net(), mesh.inner, reshard_after_forward=False)
    inside = isles.FSDP(model, sgd(model), mesh.inner, reshard_after_forward=False)
    optimizer = isles.DiLoCo(model, inside, mesh.outer, sync_every=2)
    for step in range(1, 4):
        loss_of(model, world.rank, step).backward()
        if looks:
            with torch.no_grad():
                loss_of(model, world.rank, 99)
        optimizer.step()
        optimizer.zero_grad()
    return bits(weights(optimizer.consolidate()))


def test_a_sharded_model_may_be_evaluated_before_its_step() -> None:
    """A loss between backward and step gathers weights, which the next pass must not take for those of after it; the
    model's parameters are then others, which nobody minds. So inside an island, whose method steps as it does alone.
    """
    assert run_gloo(sharded_steps, args=(True,)) == run_gloo(sharded_steps, args=(False,))


# Names.


class Heads(nn.Module):
    """Layers of one shape, in the order of `names`."""

    def __init__(self, names: list[str], buffers: bool = False) -> None:
        super().__init__()
        self.body = nn.Linear(5, 7)
        kind = partial(nn.BatchNorm1d, affine=False) if buffers else lambda size: nn.Linear(size, size)
        self.heads = nn.ModuleDict({name: kind(7) for name in names})

    def forward(self, x: Tensor) -> Tensor:
        return sum(head(self.body(x)) for head in self.heads.values())  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("name", "buffers", "odd"), cover(["ddp", "localsgd", "noloco"], [False, True], [0, 2], each=2)
)
def test_another_order_of_the_same_layers_is_reported(name: str, buffers: bool, odd: int) -> None:
    def worker(world: Mesh) -> None:
        wrap(world, name, Heads(["b", "a"] if world.rank == odd else ["a", "b"], buffers), sgd)

    for error in run(worker, 3, return_errors=True):
        assert isinstance(error, isles.Diverged) and error.peer == odd
        assert "from number 3 on (heads." in str(error) and "in the same order on all" in str(error)


def test_another_order_across_islands_is_reported() -> None:
    """Each island agrees on its own: the method across them finds it."""

    def worker(world: Mesh) -> None:
        model = Heads(["b", "a"] if world.rank >= 2 else ["a", "b"])
        isles.DiLoCo(model, isles.DDP(model, sgd(model), world.inner), world.outer, sync_every=2)

    for error in run(worker, 4, inner=2, return_errors=True):
        assert isinstance(error, isles.Diverged) and "from number 3 on (heads." in str(error)


@pytest.mark.parametrize("name", ["ddp", "dct-dp", "demo"])
def test_groups_of_the_same_shapes_are_distinguished(name: str) -> None:
    """The model is the same; which head decays follows the order of a set."""

    def worker(world: Mesh) -> None:
        model = Heads(["a", "b"])
        decays = model.heads["b" if world.rank else "a"].weight
        others = [own for own in model.parameters() if own is not decays]
        groups = [{"params": [decays], "weight_decay": 0.1}, {"params": others}]
        wrap(world, name, model, lambda _: torch.optim.SGD(groups, lr=0.1))

    for error in run(worker, 2, return_errors=True):
        assert isinstance(error, isles.Diverged) and "its method, settings or model shapes differ" in str(error)


def test_wrappers_do_not_change_names() -> None:
    """One worker compiles its model, another has it inside a container that is called `module`."""

    def worker(world: Mesh) -> str:
        model: nn.Module = Net()
        if world.rank == 0:
            model = torch.compile(model, backend="eager")  # type: ignore[assignment]
        elif world.rank == 1:
            outer = nn.Module()
            outer.module = model
            model = outer
        optimizer = wrap(world, "diloco", model, sgd)
        return str(optimizer.state_dict()["names"])

    assert set(run(worker, 3)) == {"['first', 'bias', 'second']"}


def test_names_keep_parts_that_look_like_wrappers() -> None:
    """Only a whole part of a name is a wrapper's: `submodule` is the user's own."""
    model = nn.Module()
    model.submodule, model.module = nn.Linear(2, 2), nn.Linear(2, 2)
    assert all_names(model) == ["submodule.weight", "submodule.bias", "weight", "bias"]


@pytest.mark.parametrize("name", ["ddp", "diloco"])
def test_a_state_of_another_order_is_refused(name: str) -> None:
    def worker(world: Mesh) -> None:
        state = wrap(world, name, Heads(["a", "b"]), sgd).state_dict()
        other = wrap(world, name, Heads(["b", "a"]), sgd)
        with pytest.raises(
            ValueError, match=r"parameter 3 of the state is heads\.a\.weight, and of the model heads\.b"
        ):
            other.load_state_dict(state)
        other.load_state_dict(state | {"names": other.state_dict()["names"]})

    run(worker, 1)


# Steps of the inner optimizer.


@pytest.mark.parametrize("name", ["ddp", "diloco", "noloco", "none"])
def test_the_inner_optimizer_is_not_stepped_by_hand(name: str) -> None:
    """Neither one nor several; a schedule on it, a copy, and training on after `consolidate` are fine."""

    def worker(world: Mesh) -> None:
        for inner in (sgd, two):
            model = Net()
            own = inner(model)
            optimizer = wrap(world, name, model, lambda _, own=own: own)
            each = own if isinstance(own, list) else [own]
            schedules = [LambdaLR(one, lambda step: 0.9**step) for one in each]
            for step in range(1, 3):
                train_step(optimizer, world.rank, step)
                for schedule in schedules:
                    schedule.step()
                with pytest.raises(
                    ValueError, match=r"step\(\) of the inner optimizer, .*isles\.\w+\(\.\.\.\) returned"
                ):
                    each[-1].step()
            copy.deepcopy(each[0]).step()
            pickle.loads(pickle.dumps(each[0])).step()
            optimizer.consolidate()
            each[0].step()
            train_step(optimizer, world.rank, 3)
            with pytest.raises(ValueError, match="of the inner optimizer"):
                each[0].step()

    run(worker, 2)


def test_inside_an_island_nobody_steps_by_hand() -> None:
    """Neither the island's method nor what is inside it."""

    def worker(world: Mesh) -> None:
        model = Net()
        inner = sgd(model)
        inside = isles.DDP(model, inner, world.inner)
        optimizer = isles.DiLoCo(model, inside, world.outer, sync_every=2)
        for step in range(1, 4):
            train_step(optimizer, world.rank, step)
            for one, name in ((inside, "DiLoCo"), (inner, "DDP")):
                with pytest.raises(ValueError, match=f"which has {name} around it"):
                    one.step()

    run(worker, 4, inner=2)


class Fails(torch.optim.SGD):
    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise RuntimeError("the user's own")
        return super().step(closure)


@pytest.mark.parametrize("name", ["ddp", "diloco", "islands"])
def test_after_a_step_that_failed_nobody_steps_by_hand(name: str) -> None:
    def worker(world: Mesh) -> None:
        model = Net()
        inner = Fails(model.parameters(), lr=0.1)
        optimizer = around(world, name, model, inner)
        inner.fails = True
        with pytest.raises(RuntimeError, match="the user's own"):
            train_step(optimizer, world.rank, 1)
        inner.fails = False
        with pytest.raises(ValueError, match="of the inner optimizer"):
            inner.step()

    run(worker, 2)


# What talks by itself.


class ZeroRedundancyOptimizer(torch.optim.SGD):
    """torch's, which needs processes, is found by its name."""


class PostLocalSGDOptimizer(torch.optim.SGD):
    """The same."""


class FullyShardedDataParallel(nn.Sequential):
    """Torch's first one, whose parameters are plain ones."""


class Averages(torch.optim.SGD):
    """Sums gradients over processes in its step, as optimizers for many processes do (nanochat's DistAdamW)."""

    def __init__(self, model: nn.Module, group: Any) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.group = group

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            dist.all_reduce(parameter.grad, group=self.group)
        super().step()


class NaiveSyncBatchNorm(nn.BatchNorm1d):
    """As other libraries call theirs."""


def test_what_sends_by_itself_is_refused() -> None:
    def worker(world: Mesh) -> None:
        model = Net()
        for inner in (
            ZeroRedundancyOptimizer(model.parameters(), lr=0.1),
            [ZeroRedundancyOptimizer(model.parameters())],
            PostLocalSGDOptimizer(model.parameters()),
        ):
            with pytest.raises(ValueError, match=r"sends weights to all workers.*isles\.shard\(model, world\.inner\)"):
                isles.DDP(model, inner, world.outer)
        whole = FullyShardedDataParallel(model)
        with pytest.raises(ValueError, match=r"sharded by torch.*isles\.shard\(model, world\.inner\)"):
            isles.DiLoCo(whole, sgd(whole), world.outer)

    run(worker, 2)


def talkers(world: Mesh) -> list[str]:
    """Real processes: what is said of a SyncBatchNorm, of optimizers that talk, and of the user's own
    `fully_shard`.
    """
    from torch.distributed import optim
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    message = []
    for group in (None, dist.new_group([world.rank], use_local_synchronization=True)):
        model = nn.Sequential(nn.Linear(5, 7), nn.SyncBatchNorm(7, process_group=group), nn.Linear(7, 7)).eval()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train_step(wrap(world, "diloco", model, sgd), world.rank, 1)
            optimizer = wrap(world, "noloco", Net(), lambda model, group=group: Averages(model, group))
            for step in range(1, 3):
                train_step(optimizer, world.rank, step)
        message.append("; ".join(str(one.message) for one in caught))
    model = nn.Sequential(nn.Linear(5, 7))
    fully_shard(model, mesh=init_device_mesh("cpu", (world.size,)))
    try:
        wrap(world, "diloco", model, sgd)
    except ValueError as error:
        message.append(str(error))
    model = Net()
    zero = optim.ZeroRedundancyOptimizer([model.first], torch.optim.SGD, lr=0.1)
    try:
        wrap(world, "noloco", model, lambda _: [two(model)[1], zero])
    except ValueError as error:
        message.append(str(error))
    return message


def test_what_talks_in_processes_is_reported() -> None:
    (norm, alone, sharded, zero), (quiet, _, *again) = run_gloo(talkers, 2)
    assert "1 is a SyncBatchNorm: torch averages over these workers" in norm
    assert "Averages calls torch.distributed.all_reduce: it talks to these workers in every inner step" in norm
    assert norm.count("these workers") == 2 and not alone and not quiet
    assert [sharded, zero] == again and "isles.shard(model, world.inner)" in sharded
    assert "ZeroRedundancyOptimizer sends weights to all workers" in zero


def converted(model: nn.Sequential) -> None:
    nn.SyncBatchNorm.convert_sync_batchnorm(model)


def others(model: nn.Sequential) -> None:
    before, model[1] = model[1], NaiveSyncBatchNorm(7)
    model[1].weight, model[1].bias = before.weight, before.bias


def late_talkers(world: Mesh, name: str) -> list[str]:
    """Real processes: what is said of what comes into a model that has trained already."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    message = []
    for change in (converted, others):
        model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 7)).eval()
        optimizer = wrap(world, name, model, sgd)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train_step(optimizer, world.rank, 1)
            change(model)
            for step in range(2, 4):
                train_step(optimizer, world.rank, step)
        message.append("; ".join(str(one.message) for one in caught))
    fully_shard(model, mesh=init_device_mesh("cpu", (world.size,)))
    try:
        optimizer.step()
    except ValueError as error:
        message.append(str(error))
    return message


@pytest.mark.parametrize("name", ["ddp", "diloco"])
def test_what_talks_from_the_second_step_on_is_reported(name: str) -> None:
    (norm, other, sharded), (*quiet, again) = run_gloo(late_talkers, 2, args=(name,))
    assert [message.count("1 is a SyncBatchNorm: torch averages") for message in (norm, other, *quiet)] == [1, 1, 0, 0]
    assert sharded == again and "isles.shard(model, world.inner)" in sharded


def island_talkers(world: Mesh) -> list[str]:
    """Real processes, two islands of two: a SyncBatchNorm over the workers of an island, and over all."""
    mesh = isles.mesh(outer=2, inner=2)
    own = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][world.rank // 2]
    message = []
    for group in (own, None):
        model = nn.Sequential(nn.Linear(5, 7), nn.SyncBatchNorm(7, process_group=group), nn.Linear(7, 7)).eval()
        optimizer = isles.DiLoCo(model, isles.DDP(model, sgd(model), mesh.inner), mesh.outer, sync_every=2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train_step(optimizer, world.rank, 1)
        message.append("; ".join(str(one.message) for one in caught))
    return message


def test_an_island_may_talk_among_its_workers() -> None:
    """Who steps as one may; across islands the first worker of each group is told."""
    reported = run_gloo(island_talkers, 4)
    assert [own for own, _ in reported] == [""] * 4
    assert [message.count("1 is a SyncBatchNorm") for _, message in reported] == [1, 1, 0, 0]


# Torch's tools.


@pytest.mark.parametrize(
    ("name", "inner"), cover(["ddp", "diloco", "noloco", "diloco, topk"], [adamw, two, sgd], each=1)
)
def test_distributed_checkpoint(name: str, inner: Inner) -> None:
    """`get_state_dict` and `set_state_dict` by names: no step is counted, nothing is sent, and a run goes on to the
    bit from the middle of a round.
    """

    def worker(world: Mesh, file: bytes | None) -> tuple[str, bytes]:
        model = Net(seed=world.rank if file is None else 9)
        optimizer = wrap(world, name, model, inner)
        sent = world.world.traffic["outer"].bytes_sent
        before = weights(model)
        fresh = get_optimizer_state_dict(model, optimizer)
        assert set(fresh) == {"state", "param_groups"} and fresh["param_groups"][0]["params"][0] == "first"
        assert bool(fresh["state"]) == bool(optimizer.state) == (inner is not sgd)
        assert optimizer.steps == 0 and world.world.traffic["outer"].bytes_sent == sent
        assert torch.equal(before, weights(model))
        if file is not None:
            state = torch.load(io.BytesIO(file), weights_only=True)
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        saved = io.BytesIO()
        while optimizer.steps < 8:
            train_step(optimizer, world.rank, optimizer.steps + 1)
            if optimizer.steps == 5:
                parts = get_state_dict(model, optimizer)
                torch.save(dict(zip(("model", "optimizer"), parts, strict=True)), saved)
        optimizer.finish()
        return bits(weights(model)), saved.getvalue()

    first = run(worker, 2, None)
    assert [again for again, _ in run(lambda world: worker(world, first[world.rank][1]))] == [own for own, _ in first]


FORMS = {"flat": {"flatten_optimizer_state_dict": True}, "full": {"full_state_dict": True, "cpu_offload": True}}


@pytest.mark.parametrize(("name", "form"), cover(["ddp", "streaming, int4", "noloco"], list(FORMS), each=1))
def test_distributed_checkpoint_in_other_forms(name: str, form: str) -> None:
    """Flat for pipelines, and full; what a method keeps is there once, whatever torch does to empty containers."""
    inner: Inner = two if name == "streaming, int4" else adamw
    options = StateDictOptions(**FORMS[form])

    def worker(world: Mesh, file: bytes | None) -> tuple[str, bytes]:
        model = Net(seed=world.rank if file is None else 9)
        optimizer = wrap(world, name, model, inner)
        if file is not None:
            state = torch.load(io.BytesIO(file), weights_only=True)
            parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
            set_state_dict(model, optimizer, **parts, options=options)
        saved = io.BytesIO()
        while optimizer.steps < 8:
            train_step(optimizer, world.rank, optimizer.steps + 1)
            if optimizer.steps == 4:
                parts = dict(
                    zip(("model", "optimizer"), get_state_dict(model, optimizer, options=options), strict=True)
                )
                assert form != "flat" or sum(key.endswith(".isles") for key in parts["optimizer"]) == 1
                torch.save(parts, saved)
        return bits(weights(optimizer.consolidate())), saved.getvalue()

    first = run(worker, 2, None)
    assert [again for again, _ in run(lambda world: worker(world, first[world.rank][1]))] == [own for own, _ in first]


def test_distributed_checkpoint_of_an_island() -> None:
    """The states of all methods one in another come along, in the flat form too; a plain optimizer's is refused."""

    def worker(world: Mesh) -> list[str]:
        def made(seed: int) -> isles.ReplicaSync:
            model = Net(seed)
            return isles.DiLoCo(model, isles.DDP(model, adamw(model), world.inner), world.outer, sync_every=3)

        optimizer = made(0)
        for step in range(1, 6):
            train_step(optimizer, world.rank, step)
        model_state, state = get_state_dict(optimizer.model, optimizer)
        model_state, state = copy.deepcopy(model_state), copy.deepcopy(state)
        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        flattened = copy.deepcopy(get_optimizer_state_dict(optimizer.model, optimizer, options=flat))
        for step in range(6, 9):
            train_step(optimizer, world.rank, step)
        results = [bits(weights(optimizer.model))]
        for form, options in ((state, None), (flattened, flat)):
            again = made(1)
            with pytest.raises(ValueError, match="a plain optimizer's, without what DiLoCo keeps"):
                again.load_state_dict(adamw(Net()).state_dict())
            set_optimizer_state_dict(again.model, again, form, options=options)
            again.model.load_state_dict(model_state)
            for step in range(6, 9):
                train_step(again, world.rank, step)
            results.append(bits(weights(again.model)))
        return results

    for results in run(worker, 4, inner=2):
        assert len(set(results)) == 1


@pytest.mark.parametrize("name", ["ddp", "noloco"])
def test_hooks_run_once(name: str) -> None:
    """Those of steps and states, on the method and on the inner optimizer; what they return counts."""

    def worker(world: Mesh) -> list[str]:
        model, calls = Net(), []
        inner = adamw(model)
        optimizer = wrap(world, name, model, lambda _: inner)
        for one, who in ((optimizer, "method"), (inner, "inner")):
            one.register_step_pre_hook(lambda *_, who=who: calls.append(f"{who} before"))
            one.register_step_post_hook(lambda *_, who=who: calls.append(f"{who} after"))
            one.register_state_dict_pre_hook(lambda *_, who=who: calls.append(f"{who} saves"))
            one.register_state_dict_post_hook(lambda _, state, who=who: {**state, f"by {who}": 1})
            one.register_load_state_dict_pre_hook(
                lambda _, state, who=who: calls.append(f"{who} {state.get(f'by {who}')}")
            )
            one.register_load_state_dict_post_hook(lambda *_, who=who: calls.append(f"{who} loaded"))
        train_step(optimizer, world.rank, 1)
        state = optimizer.state_dict()
        assert state["method"] and state["inner"]["by inner"] == 1
        optimizer.load_state_dict(state)
        return calls

    step = ["method before", "inner before", "inner after", "method after"]
    state = ["method saves", "inner saves", "method 1", "inner 1", "inner loaded", "method loaded"]
    assert run(worker, 1) == [[*step, *state]]


def test_hooks_of_the_method_inside_an_island_run() -> None:
    """Once, with and without a gradient scaler in torch's order."""

    def worker(world: Mesh, scaled: bool) -> list[str]:
        model, calls = Net(), []
        inner = adamw(model)
        optimizer = around(world, "islands", model, inner)
        for one, who in ((optimizer, "across"), (optimizer.inner, "inside"), (inner, "inner")):
            one.register_step_pre_hook(lambda *_, who=who: calls.append(who))
            one.register_step_post_hook(lambda *_, who=who: calls.append(f"after {who}"))
        scaler = torch.amp.GradScaler("cpu", enabled=scaled)
        scaler.scale(loss_of(model, world.rank, 1)).backward()
        scaler.step(optimizer)
        return calls

    for scaled in (False, True):
        assert run(worker, 2, scaled)[0] == ["across", "inside", "inner", "after inner", "after inside", "after across"]


# States of other worlds.


@pytest.mark.parametrize("name", ["localsgd", "noloco", "demo", "ddp, int4"])
def test_the_state_of_another_worker_is_refused(name: str) -> None:
    """Of another rank, and of as many workers as are no longer there."""

    def worker(world: Mesh, file: bytes | None) -> bytes:
        inner = sgd if name == "demo" else adamw
        optimizer = wrap(world, name, Net(), inner)
        if file is not None:
            state = torch.load(io.BytesIO(file), weights_only=True)
            with pytest.raises(ValueError, match=r"the state is of worker 1 in a group of \[0, 1, 2\], this is worker"):
                optimizer.load_state_dict(state)
        saved = io.BytesIO()
        torch.save(optimizer.state_dict(), saved)
        return saved.getvalue()

    states = run(worker, 3, None)
    run(worker, 2, states[1])


def test_one_state_does_for_all_workers_of_ddp() -> None:
    """What they keep is equal: rank 0 saves and all load, as many as there are then. Counters stay their own."""

    def worker(world: Mesh, state: Any) -> Any:
        optimizer = wrap(world, "ddp", Net(), adamw)
        if state is not None:
            optimizer.model.load_state_dict(state[1])
            sent = world.world.traffic.state_dict()
            optimizer.load_state_dict(copy.deepcopy(state[0]))  # as from a file each
            assert world.world.traffic.state_dict() == sent
        for _ in range(2):
            train_step(optimizer, world.rank, optimizer.steps + 1)
        return optimizer.state_dict(), optimizer.model.state_dict(), optimizer.steps

    first = run(worker, 2, None)[0]
    again = run(worker, 3, first[:2])
    assert [steps for *_, steps in again] == [4, 4, 4]
    assert len({bits(torch.cat([own.reshape(-1) for own in model.values()])) for _, model, _ in again}) == 1


# In processes of their own.


def habits(world: Mesh, folder: str) -> list[str]:
    """Two optimizers; dcp.save and dcp.load, a folder for each worker; then what is refused."""
    import torch.distributed.checkpoint as dcp

    message = [trained(world, "ddp", two_of_a_kind)[0]]
    states, mine = [], f"{folder}/{world.rank}"
    for seed in (0, 1):
        model = Net(seed)
        optimizer = wrap(world, "noloco", model, adamw)
        if seed:
            state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            dcp.load(state, checkpoint_id=mine, no_dist=True)
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        while optimizer.steps < 8:
            train_step(optimizer, world.rank, optimizer.steps + 1)
            if optimizer.steps == 5 and not seed:
                parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
                dcp.save(parts, checkpoint_id=mine, no_dist=True)
        states.append(bits(weights(model)))
    message.append(str(states[0] == states[1]))
    body = Head()
    optimizer = wrap(world, "diloco", body, sgd)
    for change, step in ((int, optimizer.inner.step), (lambda: replaced(body), optimizer.step)):
        change()
        loss_of(body, world.rank, 1).backward()
        try:
            step()
        except ValueError as error:
            message.append(str(error))
    wrap(world, "diloco", body, sgd)
    try:
        optimizer.step()
    except ValueError as error:
        message.append(str(error))
    try:
        wrap(world, "diloco", Heads(["a", "b"][:: 1 - 2 * world.rank]), sgd)
    except isles.Diverged as error:
        message.append(f"{error.peer} {error.detail}")
    return message


def test_in_processes(tmp_path: Path) -> None:
    """As in the room, where the same run has the same bits."""
    first, second = run_gloo(habits, 2, args=(str(tmp_path),))
    several, resumed, inner, place, newer, names = first
    assert [several, second[0]] == [weights for weights, _ in run(trained, 2, "ddp", two_of_a_kind)]
    assert resumed == second[1] == "True"
    assert "of the inner optimizer" in inner and "is another parameter" in place and "after this DiLoCo" in newer
    assert names.startswith("1 from number 3 on (heads.a") and second[-1].startswith("1 from number 3 on (heads.b")
