"""What comes apart in the middle of a run of one's own: states of other runs or steps that some workers load, and
settings of inner optimizers that some workers change. Told in the header of the next exchange, without a byte more.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from schedulefree import AdamWScheduleFree
from torch import Tensor, nn

import isles
from isles.comm.errors import CommError
from isles.comm.mesh import Mesh
from tests.covers import cover, share
from tests.gloo import run_gloo
from tests.replicas.test_parameters import two
from tests.replicas.workers import RUNS, Net, Whole, bits, load, loss_of, save, sgd, train_step, weights, wrap

STATE = "it goes on from another state than this worker: load the states of one run and step on all, or none"
SETTINGS = (
    "its inner optimizer has other settings (learning rate, weight decay, scale of the loss, ...): set them alike on"
)
SILENT = ("none",)


def run(worker: Any, workers: int = 2, *args: Any, **options: Any) -> list[Any]:
    return isles.run_virtual(worker, workers, args=args, **options)


def made(world: Mesh, name: str, seed: int = 0) -> isles.ReplicaSync:
    if name != "islands":
        return wrap(world, name, (Whole if name.startswith("ist") else Net)(seed))
    mesh, model = isles.mesh(outer=1, inner=world.size), Net(seed)
    return isles.DiLoCo(model, isles.DDP(model, sgd(model), mesh.inner), mesh.outer, sync_every=3)


def saved(world: Mesh, name: str, steps: int, seed: int) -> bytes:
    optimizer = made(world, name, seed)
    for step in range(1, steps + 1):
        train_step(optimizer, world.rank, step)
    return save(optimizer)


def resumed(world: Mesh, name: str, files: list[bytes | None]) -> str:
    """What a worker hears in the next steps after it has loaded its file, if it has one."""
    optimizer = made(world, name)
    file = files[world.rank]
    if file is not None:
        load(optimizer, file)
    try:
        for step in range(8):
            train_step(optimizer, world.rank, step)
        optimizer.consolidate()
    except CommError as error:
        return str(error)
    return ""


def apart(name: str, steps: int = 4, runs: Callable[..., list[Any]] = run) -> list[str]:
    """Of two workers, of which the second has the state of a run with another seed."""
    files = [run(saved, 2, name, steps, seed)[seed] for seed in (0, 1)]
    return runs(resumed, 2, name, files)


ALL = [*(name for name in RUNS if name not in SILENT), "islands"]
MAIN = ["ddp", "dct-dp", "demo", "noloco", "diloco", "ist", "islands"]
OTHERS = [name for name in ALL if name not in MAIN]


@pytest.mark.parametrize(("name", "steps"), [*cover(MAIN, [4, 2], each=1), *cover(OTHERS, [4, 2], each=1, of=9)])
def test_states_of_two_runs_are_reported(name: str, steps: int) -> None:
    """By the first exchange after loading: amid a round, and before there was any."""
    message = apart(name, steps)
    reported = [text for text in message if " diverged at step " in text]
    assert reported and all(text.startswith("worker ") for text in reported)
    assert any("states of other runs were loaded" in text or STATE in text for text in reported), message


@pytest.mark.parametrize("name", ["ddp", "demo", "noloco", "diloco", "sparta"])
def test_a_worker_that_loads_nothing_is_reported(name: str) -> None:
    """And states of another step of the same run."""
    files = run(saved, 2, name, 0, 0)
    own = run(saved, 2, name, 0, 1)
    assert any("diverged" in text for text in run(resumed, 2, name, [own[0], None]))
    assert run(resumed, 2, name, files) == ["", ""]
    early, late = run(saved, 2, name, 3, 0)[0], run(saved, 2, name, 7, 0)[1]
    assert any(
        "it is at step" in text or "is at another step, give all workers the same number" in text
        for text in run(resumed, 2, name, [early, late])
    )


FORGOTTEN = r"does not have the weights of that moment: load the model's state_dict\(\) of the same checkpoint too"


def forgetful(world: Mesh, name: str, states: list[Any], ends: bool) -> None:
    """Loads the state of a run of four steps, and leaves the weights as they were drawn."""
    optimizer = made(world, name, 1)
    optimizer.load_state_dict(states[world.rank])
    loss_of(optimizer.model, world.rank, 5).backward()
    with pytest.raises(ValueError, match=FORGOTTEN):
        optimizer.finish() if ends else optimizer.step()


def states_of(world: Mesh, name: str, steps: int) -> Any:
    optimizer = made(world, name)
    for step in range(1, steps + 1):
        train_step(optimizer, world.rank, step)
    return optimizer.state_dict()


@pytest.mark.parametrize("name", share(ALL, 2, 9, ["ddp", "noloco", "ist", "islands"]))
def test_weights_that_all_forget_to_load_are_reported(name: str) -> None:
    """By each worker's own next step: all agree on the wrong weights, so no message shows them."""
    run(forgetful, 2, name, run(states_of, 2, name, 4), False)


@pytest.mark.parametrize("name", ["localsgd", "noloco"])
def test_weights_that_all_forget_to_load_are_reported_at_the_end(name: str) -> None:
    """Of a run that goes on from its last checkpoint to its end."""
    run(forgetful, 2, name, run(states_of, 2, name, 4), True)


ORDERS = ["before", "after", "in place", "fresh", "rolled back"]


@pytest.mark.parametrize(("where", "name"), cover(ORDERS, ["ddp", "diloco", "noloco"], each=1))
def test_weights_and_states_come_in_any_order(where: str, name: str) -> None:
    """And a state of no step may be had with any weights, to forget the moments."""

    def worker(world: Mesh) -> tuple[str, str]:
        def made_by(seed: int) -> isles.ReplicaSync:
            return wrap(world, name, Net(seed), two)

        def four_steps(optimizer: isles.ReplicaSync) -> str:
            for step in range(5, 9):
                train_step(optimizer, world.rank, step)
            return bits(weights(optimizer.model))

        first, second = made_by(0), made_by(0 if where == "fresh" else 1)
        if where == "fresh":
            second.load_state_dict(made_by(1).state_dict() if name == "ddp" else made_by(0).state_dict())
            return four_steps(first), four_steps(second)
        for step in range(1, 5):
            train_step(first, world.rank, step)
        state, held = copy.deepcopy((first.state_dict(), dict(first.model.state_dict())))
        ended = four_steps(first)
        if where == "rolled back":
            second = first
        if where == "before":
            second.model.load_state_dict(held)
        second.load_state_dict(state)
        if where == "in place":
            with torch.no_grad():
                for key, own in second.model.named_parameters():
                    own.copy_(held[key])
        elif where != "before":
            second.model.load_state_dict(held)
        return ended, four_steps(second)

    for ended, again in run(worker):
        assert ended == again


@pytest.mark.parametrize("name", ["ddp", "diloco", "noloco"])
def test_other_weights_on_top_of_a_checkpoint_are_reported(name: str) -> None:
    """Weights and state of one moment, and then another file's weights."""

    def worker(world: Mesh) -> None:
        first = wrap(world, name, Net())
        for step in range(1, 5):
            train_step(first, world.rank, step)
        second = wrap(world, name, Net(1))
        second.model.load_state_dict(first.model.state_dict())
        second.load_state_dict(first.state_dict())
        second.model.load_state_dict(Net(7).state_dict())
        loss_of(second.model, world.rank, 5).backward()
        with pytest.raises(ValueError, match="weights were loaded into the model after its optimizer was made"):
            second.step()

    run(worker)


class Boxed(nn.Module):
    """A model inside a container that calls it `module`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)  # type: ignore[no-any-return]


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


AROUND: dict[str, Callable[[nn.Module], Any]] = {
    "nothing": lambda model: model,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "in place": compiled_in_place,
    "boxed": Boxed,
}
CHANGES = [("compiled", "boxed"), ("boxed", "in place"), ("nothing", "compiled")]


@pytest.mark.parametrize(
    ("saves", "loads"),
    [
        pytest.param(saves, loads, marks=() if (saves, loads) in CHANGES else pytest.mark.long)
        for saves in AROUND
        for loads in AROUND
    ],
)
def test_what_is_around_a_model_does_not_change_its_hash(saves: str, loads: str) -> None:
    """The state of a compiled model, or of one inside a container, goes on in any other; forgotten weights are told
    there too, and then may be loaded.
    """

    def worker(world: Mesh) -> None:
        def four_steps(optimizer: isles.ReplicaSync) -> str:
            for step in range(5, 9):
                train_step(optimizer, world.rank, step)
            return bits(weights(optimizer.model))

        first = wrap(world, "diloco", AROUND[saves](Net()), two)
        for step in range(1, 5):
            train_step(first, world.rank, step)
        state, held = copy.deepcopy((first.state_dict(), list(first.model.state_dict().values())))
        ended = four_steps(first)
        second = wrap(world, "diloco", AROUND[loads](Net(1)), two)
        second.load_state_dict(state)
        loss_of(second.model, world.rank, 5).backward()
        with pytest.raises(ValueError, match=FORGOTTEN):
            second.step()
        second.zero_grad()
        second.model.load_state_dict(dict(zip(second.model.state_dict(), held, strict=True)))
        assert four_steps(second) == ended

    run(worker)


@pytest.mark.parametrize("saves", ["train", "eval"])
def test_schedule_free_goes_on_in_either_mode(saves: str) -> None:
    """`train()` after loading moves the weights: they are not forgotten."""

    def worker(world: Mesh) -> tuple[str, str]:
        def made_by(seed: int) -> Any:
            optimizer: Any = wrap(world, "localsgd", Net(seed), lambda model: AdamWScheduleFree(model.parameters()))
            optimizer.train()
            return optimizer

        def four_steps(optimizer: Any) -> str:
            optimizer.train()
            for step in range(5, 9):
                train_step(optimizer, world.rank, step)
            return bits(weights(optimizer.model))

        first, second = made_by(0), made_by(1)
        for step in range(1, 5):
            train_step(first, world.rank, step)
        getattr(first, saves)()
        file = save(first)
        load(second, file)
        return four_steps(first), four_steps(second)

    for ended, again in run(worker):
        assert ended == again


def gloo(worker: Any, workers: int, *args: Any) -> list[Any]:
    return run_gloo(worker, workers, args=args)


def test_states_of_two_runs_are_reported_over_gloo() -> None:
    assert any(STATE in text for text in apart("ddp", runs=gloo))


# Settings.


def changed(world: Mesh, name: str, what: str) -> str:
    """Worker 1 does `what` after step 2."""
    rate: Any = torch.tensor(0.02) if what == "tensor" else 0.02

    def inner(model: torch.nn.Module) -> torch.optim.Optimizer:
        if name == "demo":
            return torch.optim.SGD(model.parameters(), lr=rate, weight_decay=0.01)
        return torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)

    model = Net()
    if name == "fsdp":
        model = isles.shard(model, world.outer)  # type: ignore[assignment]
    if name == "islands":
        mesh = isles.mesh(outer=1, inner=world.size)
        optimizer: Any = isles.DiLoCo(model, isles.DDP(model, inner(model), mesh.inner), mesh.outer, sync_every=3)
    else:
        optimizer = wrap(world, name, model, inner)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    try:
        for step in range(1, 6):
            train_step(optimizer, world.rank, step)
            group = optimizer.param_groups[0]
            if what == "plateau":
                plateau.step(step if world.rank else -step)
            elif step == 2 and what in ("numpy", "list"):
                group["lr" if what == "numpy" else "own"] = np.float32(world.rank) if what == "numpy" else [world.rank]
            elif (step, world.rank) == (2, 1):
                match what:
                    case "groups":
                        optimizer.add_param_group({"params": [group["params"].pop()]})
                    case "lr":
                        group["lr"] = 0.01
                    case "tensor":
                        group["lr"].mul_(0.5)
                    case "decay":
                        group["weight_decay"] = 0.0
                    case "betas":
                        group["betas"] = (0.9, 0.95)
        optimizer.finish()
    except CommError as error:
        return str(error)
    return ""


EQUAL = ["ddp", "ddp, int4", "dct-dp", "demo", "islands"]
WHAT = ["lr", "decay", "tensor", "plateau", "betas", "numpy", "list", "groups"]


@pytest.mark.parametrize(("what", "name"), cover(WHAT, EQUAL, each=1))
def test_settings_that_come_apart_are_reported(what: str, name: str) -> None:
    """By the next step of methods whose workers take equal steps, which demo counts when it is over; not by the end."""
    if (name, what) == ("demo", "betas"):
        pytest.skip("SGD has none")
    message = run(changed, 2, name, what)
    assert any(SETTINGS in text and re.match(r"worker \d diverged at step [23]: ", text) for text in message), message


@pytest.mark.parametrize("name", ["localsgd", "diloco", "noloco"])
def test_workers_that_step_by_themselves_may_have_their_own_settings(name: str) -> None:
    assert run(changed, 2, name, "lr") == ["", ""]


def test_settings_that_come_apart_are_reported_over_gloo() -> None:
    assert any(SETTINGS in text for text in gloo(changed, 2, "ddp", "lr"))


@pytest.mark.parametrize("name", ["fsdp", "ddp, native"])
def test_where_steps_do_not_compare_settings_the_end_does(name: str) -> None:
    for text in gloo(changed, 2, name, "lr"):
        assert text.startswith("worker 1 diverged at step 5: ") and SETTINGS in text


def test_other_groups_are_reported_at_wrapping() -> None:
    """The same settings, of other parameters: a list of what decays that differs by worker."""

    def worker(world: Mesh) -> None:
        first, *rest = Net().parameters()
        own, others = ([first], rest) if world.rank else ([first, rest.pop()], rest)
        groups = [{"params": own, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        wrap(world, "ddp", holder(first, *rest, *own[1:]), lambda _: torch.optim.AdamW(groups))

    def holder(*parameters: torch.nn.Parameter) -> torch.nn.Module:
        return torch.nn.ParameterList(sorted(parameters, key=lambda one: one.numel()))

    for error in run(worker, 2, return_errors=True):
        assert isinstance(error, isles.Diverged) and "its method, settings or model shapes differ" in str(error)


@pytest.mark.parametrize(("name", "enabled"), cover(["ddp", "dct-dp", "islands"], [True, False], each=1))
def test_scales_that_come_apart_are_reported(name: str, enabled: bool) -> None:
    """A scaler whose state only one worker has loaded, or one that only one worker has."""

    def worker(world: Mesh) -> str:
        optimizer = made(world, name)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**world.rank, enabled=enabled or world.rank == 1)
        try:
            for step in range(1, 4):
                scaler.scale(loss_of(optimizer.model, world.rank, step)).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        except CommError as error:
            return str(error)
        return ""

    assert any(SETTINGS in text and "at step 2" in text for text in run(worker))


def test_several_causes_are_reported_together() -> None:
    def worker(world: Mesh) -> str:
        model = Net()
        optimizer = wrap(world, "ddp", model)
        if world.rank:
            model.first.requires_grad_(False)
            optimizer.param_groups[0]["lr"] = 1.0
        with pytest.raises(isles.Diverged) as reported:
            loss_of(model, world.rank, 1).backward()
            optimizer.step()
        return str(reported.value)

    assert f"other parameters are frozen and {SETTINGS}" in run(worker)[0]
