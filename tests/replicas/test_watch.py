"""What a user does to a model after its optimizer was made: frozen, thawed, unused, loaded and converted parameters."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isles
from isles.base.wrapping import Wrapping
from isles.comm.mesh import Mesh
from tests.replicas.workers import (
    HALVES,
    LINKS,
    RUNS,
    Net,
    adamw,
    batch,
    bits,
    load,
    loss_of,
    save,
    sgd,
    train_step,
    usual_inner,
    weights,
    wrap,
)

OWN = {name for name in RUNS if name.startswith("ist")}  # which cut shapes and hold no frozen ones
ALL = ["none", "ddp", "ddp, int4", "dct-dp", "localsgd", "diloco", "streaming-diloco", "delayed", "eager", "noloco"]
ALL += ["fedadam", "slowmo", "sparta", "dilocox", "demo", "streaming, int4", "custom, low rank"]


def run(worker: Any, workers: int = 2, *args: Any, **options: Any) -> Any:
    return isles.run_virtual(worker, workers, links=LINKS, args=args, **options)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=0.01)


# Frozen and thawed.


def frozen_at_seven(world: Mesh, name: str) -> tuple[list[Tensor], list[Tensor], str]:
    """`first` is frozen behind step 6 (a whole number of rounds): what it is from step 12 on, and all weights."""
    model = Net()
    optimizer = wrap(world, name, model)
    seen, others = [], []
    for step in range(1, 22):
        if step == 7:
            model.first.requires_grad_(False)
        train_step(optimizer, world.rank, step)
        if step >= 12:
            seen.append(model.first.detach().clone())
            others.append(model.second.detach().clone())
    optimizer.finish()
    seen.append(model.first.detach().clone())
    return seen, others, bits(weights(model))


@pytest.mark.parametrize("name", ALL)
def test_what_is_frozen_stays_where_it_is(name: str) -> None:
    """From the second round on (what was under way has landed) not a bit of it moves, the rest is trained; agreeing
    methods end with the same bits everywhere.
    """
    results = run(frozen_at_seven, 2, name)
    for seen, others, _ in results:
        assert all(torch.equal(one, seen[0]) for one in seen)
        assert not torch.equal(others[0], others[-1])
    if name not in ("none", "noloco", "sparta", "eager"):
        assert results[0][2] == results[1][2]


@pytest.mark.parametrize("name", ["ddp", "localsgd", "diloco", "noloco", "demo"])
def test_frozen_between_rounds_it_moves_not_at_all(name: str) -> None:
    """Of what is at rest when it is frozen; Nesterov's momentum would go on otherwise."""

    def worker(world: Mesh) -> bool:
        model = Net()
        optimizer = wrap(world, name, model)
        for step in range(1, 16):
            if step == 7:
                model.first.requires_grad_(False)
                before = model.first.detach().clone()
            train_step(optimizer, world.rank, step)
        optimizer.finish()
        return torch.equal(before, model.first)

    assert run(worker, 2) == [True, True]


@pytest.mark.parametrize("name", ["diloco", "streaming, int4", "custom, low rank"])
def test_the_round_in_which_it_is_frozen_counts(name: str) -> None:
    """Frozen in the middle of a round: what it learned until then is averaged, then it rests, on the same bits
    everywhere; thawed it is trained again. A checkpoint in the middle goes on to the bit.
    """

    def worker(world: Mesh, files: list[bytes] | None) -> Any:
        model = Net(seed=0 if files is None else 99)
        optimizer = wrap(world, name, model)
        if files is not None:
            model.first.requires_grad_(False)
            load(optimizer, files[world.rank])
        log, file = [], b""
        for step in range(optimizer.steps + 1, 25):
            if step in (5, 19):
                model.first.requires_grad_(step == 19)
            train_step(optimizer, world.rank, step)
            log.append(bits(weights(model)))
            if step == 11:
                file = save(optimizer)
            if step == 17:
                rest = model.first.detach().clone()
            if step == 18:
                assert torch.equal(rest, model.first)
        optimizer.finish()
        return [*log, bits(weights(model))], file, rest, model.first.detach()

    first = run(worker, 2, None)
    again = run(worker, 2, [file for _, file, *_ in first])
    for (log, _, rest, last), (later, *_) in zip(first, again, strict=True):
        assert log[11:] == later
        assert not torch.equal(rest, last)
    assert bits(first[0][2]) == bits(first[1][2]) and bits(first[0][3]) == bits(first[1][3])


@pytest.mark.parametrize("name", [name for name in RUNS if name not in OWN])
def test_what_is_thawed_later_is_refused(name: str) -> None:
    """A parameter that was frozen when the optimizer was made would be trained and never exchanged."""

    def worker(world: Mesh) -> None:
        model = Net()
        model.bias.requires_grad_(False)
        halves = {"fragments": (("first",), ("second",))} if RUNS[name][1].get("fragments") == HALVES else {}
        optimizer = wrap(world, name, model, lambda model: usual_inner(name)(model), **halves)
        train_step(optimizer, world.rank, 1)
        model.bias.requires_grad_(True)
        with pytest.raises(ValueError, match=r"bias was frozen when the optimizer was made.*make the optimizer anew"):
            train_step(optimizer, world.rank, 2)

    run(worker, 1)


def test_workers_that_freeze_different_parameters_are_reported() -> None:
    def worker(world: Mesh, name: str) -> None:
        model = Net()
        optimizer = wrap(world, name, model, sgd if name == "demo" else momentum)
        for step in range(1, 14):
            if step == 4:
                (model.first if world.rank else model.second).requires_grad_(False)
            train_step(optimizer, world.rank, step)

    for name in ("ddp", "diloco", "demo"):
        errors = run(worker, 2, name, return_errors=True)
        assert any(isinstance(error, isles.Diverged) for error in errors), errors


# Without a gradient.


class Branches(nn.Module):
    """Three branches, of which each batch uses those that its worker names."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        self.branches = nn.ParameterList([nn.Parameter(torch.randn(7, 5, generator=draw)) for _ in range(3)])

    def forward(self, x: Tensor, used: tuple[int, ...]) -> Tensor:
        return sum(torch.tanh(x @ self.branches[index].T) for index in used)  # type: ignore[return-value]


def branching(world: Mesh, name: str, options: dict[str, Any]) -> tuple[list[bool], str]:
    """Steps 1 and 2 use all; then worker 0 branch 0, worker 1 branches 0 and 1, nobody branch 2. Who moved then."""
    model = Branches()
    inner = usual_inner(name)(model)
    optimizer = isles.method(name)(model, inner, world.outer, **options)
    for step in range(1, 6):
        if step == 3:
            before = [branch.detach().clone() for branch in model.branches]
        x, y = batch(world.rank, step)
        used = (0, 1, 2) if step < 3 else ((0,), (0, 1))[world.rank]
        nn.functional.mse_loss(model(x, used), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = [not torch.equal(was, now) for was, now in zip(before, model.branches, strict=True)]
    return moved, bits(weights(model))


@pytest.mark.parametrize("options", [{}, {"bucket_megabytes": 1e-4}])
def test_ddp_leaves_alone_what_nobody_used(options: dict[str, Any]) -> None:
    """Adam's momentum and the weight decay move what somebody used, as much on those who did not; nothing else."""
    (mine, one), (theirs, other) = run(branching, 2, "ddp", options)
    assert mine == theirs == [True, True, False]
    assert one == other


def test_forms_that_lose_the_sign_of_zero_count_no_gradient_as_zero() -> None:
    """What the documentation says of them: weight decay and momentum go on, the same on all."""
    fed = {"error_feedback": "local"}  # without a loss
    forms = [("ddp", {"codec": "int8"}), ("ddp", fed), ("dct-dp", {"exclude_below": 1, "sparsity": 0.5})]
    for name, options in forms:
        (mine, one), (theirs, other) = run(branching, 2, name, options)
        assert mine == theirs == [True, True, True] and one == other


def test_a_gradient_of_negative_zeros_is_a_gradient() -> None:
    """A used parameter whose gradient is -0.0 everywhere: AdamW moves it, as one worker alone would."""

    def worker(world: Mesh, wrapped: bool) -> str:
        model = Net()
        optimizer: Any = wrap(world, "ddp", model, adamw) if wrapped else adamw(model)
        for step in (1, 2, 3):
            loss_of(model, 0, step).backward()
            if step == 2 and not wrapped:
                model.first.grad.copy_(torch.zeros_like(model.first).neg())  # type: ignore[union-attr]
            elif step == 2:
                optimizer.zero_grad()
                with optimizer.no_sync():
                    loss_of(model, 0, step).backward()
                model.first.grad.copy_(torch.zeros_like(model.first).neg())  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
        return bits(weights(model))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = run(worker, 1, False)
        assert run(worker, 2, False) == alone * 2


# Loaded and converted.


@pytest.mark.parametrize("name", ["none", "ddp", "dct-dp", "diloco", "demo"])
def test_loaded_weights_are_no_progress(name: str) -> None:
    """Weights loaded without their optimizer's state are refused in the next step; with it, in either order, and where
    they are the same again, nothing is said.
    """

    def worker(world: Mesh) -> None:
        model = Net()
        optimizer = wrap(world, name, model)
        train_step(optimizer, world.rank, 1)
        own = copy.deepcopy(model.state_dict())
        model.load_state_dict(Net(seed=5).state_dict())  # to look at them
        model.load_state_dict(own)
        train_step(optimizer, world.rank, 2)
        weights_now, state = copy.deepcopy(model.state_dict()), optimizer.state_dict()
        for first in ("model", "optimizer"):
            for what in ("model", "optimizer") if first == "model" else ("optimizer", "model"):
                clock = {"transport": world.transport.state_dict()}  # which goes on
                model.load_state_dict(weights_now) if what == "model" else optimizer.load_state_dict(state | clock)
            train_step(optimizer, world.rank, 3)
        model.load_state_dict(Net(seed=5).state_dict())
        with pytest.raises(ValueError, match=r"loaded into the model after its optimizer was made.*state_dict\(\)"):
            train_step(optimizer, world.rank, 4)

    run(worker, 2)


@pytest.mark.parametrize("name", ["none", "ddp", "diloco", "demo"])
def test_another_format_is_refused(name: str) -> None:
    def worker(world: Mesh) -> None:
        model = Net()
        optimizer = wrap(world, name, model)
        train_step(optimizer, world.rank, 1)
        model.bfloat16()
        with pytest.raises(ValueError, match=r"first is bfloat16 now and was float32 .* convert the model before"):
            train_step(optimizer, world.rank, 2)

    run(worker, 1)


def test_a_watched_model_can_be_copied_and_saved() -> None:
    """Copies tell nobody of what is loaded into them."""

    def worker(world: Mesh) -> None:
        model = Net()
        optimizer = wrap(world, "localsgd", model)
        twin, file = copy.deepcopy(model), io.BytesIO()
        torch.save(model, file)
        twin.load_state_dict(Net(seed=5).state_dict())
        train_step(optimizer, world.rank, 1)

    run(worker, 1)


# What no method can exchange.


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x)).sum()


UNFIT = [
    (lambda: nn.Linear(3, 3, dtype=torch.complex64), sgd, r"is complex, .* keep two real numbers an entry"),
    (lambda: nn.LazyLinear(3), sgd, r"lazy parameters .* run one batch through it before wrapping"),
    (Net, lambda model: torch.optim.LBFGS(model.parameters()), r"LBFGS evaluates its closure several times"),
]


@pytest.mark.parametrize("name", ["none", "ddp", "diloco", "noloco", "demo", "ist"])
@pytest.mark.parametrize(("make", "inner", "says"), UNFIT)
def test_what_cannot_be_exchanged_is_refused_in_one_line(name: str, make: Any, inner: Any, says: str) -> None:
    def worker(world: Mesh) -> None:
        model = make()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that lazy modules are new
            with pytest.raises(ValueError, match=says):
                isles.method(name)(model, inner(model), world.outer)

    run(worker, 1)


@pytest.mark.parametrize(("name", "max_norm"), [("ddp", None), ("dct-dp", None), ("demo", None), ("diloco", 1.0)])
def test_sparse_gradients(name: str, max_norm: float | None) -> None:
    """One line where they cannot be served; parameter methods exchange weights, and train with them."""

    def worker(world: Mesh, name: str, max_norm: float | None) -> None:
        model = Embedded()
        optimizer = isles.method(name)(model, sgd(model), world.outer, max_norm=max_norm)
        model(torch.tensor([1, 2 + world.rank])).backward()
        optimizer.step()
        optimizer.consolidate()

    with pytest.raises(ValueError, match=r"a gradient is sparse, .* sparse=False"):
        run(worker, 2, name, max_norm)
    run(worker, 2, "diloco", None)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(5, 5) for _ in range(4)])
        self.head = nn.Linear(5, 7)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


@pytest.mark.parametrize("pattern", ["sequential", "strided"])
def test_frozen_blocks_are_no_fragment(pattern: str) -> None:
    """Blocks 0 and 1 frozen: sequential fragments are blocks 2-3 and the head; what strided ones hold is left."""

    def worker(world: Mesh) -> list[int]:
        torch.manual_seed(0)
        model = Stack()
        model.blocks[:2].requires_grad_(False)
        optimizer: Any = wrap(world, "streaming-diloco", model, sync_every=4, fragments=pattern)
        for step in range(1, 10):
            train_step(optimizer, world.rank, step)
        optimizer.finish()
        return [len(fragment.indices) for fragment in optimizer.fragments]

    expected = [4, 2] if pattern == "sequential" else [2, 2, 2]
    assert run(worker, 2) == [expected, expected]


# The number of backward passes.


@pytest.mark.parametrize("name", ["ddp", "dct-dp"])
def test_workers_may_do_their_own_number_of_backward_passes_with_no_sync(name: str) -> None:
    """And without it as many everywhere: one line says so, and who did not."""

    def worker(world: Mesh, quiet: bool) -> str:
        model = Net()
        optimizer = wrap(world, name, model)
        for step in range(1, 4):
            passes = 1 + (step + world.rank) % 3
            for number in range(passes - 1):
                if quiet:
                    with optimizer.no_sync():
                        loss_of(model, world.rank, 10 * step + number).backward()
                else:
                    loss_of(model, world.rank, 10 * step + number).backward()
            train_step(optimizer, world.rank, step)
        return bits(weights(model))

    assert len(set(run(worker, 2, True))) == 1
    with pytest.warns(UserWarning, match="a second backward pass"):
        errors = run(worker, 2, False, return_errors=True)
    reported = [str(error) for error in errors if isinstance(error, ValueError)]
    assert any("did not answer" in line and "as many backward passes" in line for line in reported), errors


def test_any_wrapping_loads_a_state_into_the_inner_optimizer() -> None:
    """One that says nothing of loading: torch's own `load_state_dict` would write past its properties."""
    model = Net()
    inner, again = adamw(model), adamw(model)
    loss_of(model, 0, 1).backward()
    inner.step()
    wrapping = Wrapping(again, list(model.parameters()))
    wrapping.load_state_dict(Wrapping(inner, list(model.parameters())).state_dict())
    for parameter in model.parameters():
        assert torch.equal(again.state[parameter]["exp_avg"], inner.state[parameter]["exp_avg"])
    assert wrapping.state is again.state


@pytest.mark.parametrize("kind", ["sparse", "expanded"])
def test_a_tensor_whose_entries_cannot_be_written_is_named(kind: str) -> None:
    """At wrapping, buffers too."""
    model = torch.nn.Linear(3, 2)
    model.register_buffer("mask", torch.eye(4).to_sparse() if kind == "sparse" else torch.zeros(1).expand(5))
    with pytest.raises(ValueError, match=f"mask is {kind}"):
        isles.LocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.1), isles.init().outer, sync_every=2)
    model.mask = model.mask.to_dense() if kind == "sparse" else model.mask.contiguous()
    isles.LocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.1), isles.init().outer, sync_every=2)
