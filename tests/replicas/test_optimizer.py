"""The face of an optimizer: torch's own habits, settings, advice, and what ends a run."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isles
from isles.comm.mesh import Mesh
from isles.replicas.methods.config import NoLoCoConfig
from tests.covers import cover, share
from tests.replicas.workers import (
    DIVIDED,
    LINKS,
    RUNS,
    Net,
    bits,
    counted,
    held_out,
    loss_of,
    sgd,
    train_step,
    usual_inner,
    weights,
    wrap,
)

METHODS = [name for name in isles.METHODS if name != "fsdp"]  # which test_islands.py tests
ROOTS = ("ddp", "demo", "diloco", "ist")  # one of each way to hold a replica and to exchange: in every test below


def run(worker: Any, workers: int = 1, *args: Any) -> list[Any]:
    return isles.run_virtual(worker, workers, links=LINKS, args=args)


# torch's habits.


@pytest.mark.parametrize("name", share(METHODS, 0, 10, ROOTS))
def test_learning_rate_schedulers_work_as_on_the_inner_optimizer(name: str) -> None:
    """LambdaLR and OneCycleLR (which turns betas too) on the wrapper or on the inner one: the same bits, no warning."""

    def worker(world: Mesh, kind: str, on: str) -> list[str]:
        model = Net()
        optimizer = wrap(world, name, model)
        target = optimizer if on == "wrapper" else optimizer.inner
        if kind == "lambda":
            schedule: Any = torch.optim.lr_scheduler.LambdaLR(target, lambda step: 1 / (1 + step))
        else:
            turns = "betas" in optimizer.defaults
            schedule = torch.optim.lr_scheduler.OneCycleLR(target, max_lr=0.1, total_steps=10, cycle_momentum=turns)
        log = []
        for step in range(1, 9):
            log.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0].get("betas")))
            train_step(optimizer, world.rank, step)
            schedule.step()
        assert len({lr for lr, _ in log}) == 8
        return [*log, bits(weights(model))]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind in ("lambda", "cycle"):
            assert run(worker, 2, kind, "wrapper") == run(worker, 2, kind, "inner")


@pytest.mark.parametrize("name", share(METHODS, 1, 10, ROOTS))
def test_it_is_an_optimizer_that_shares_groups_and_state(name: str) -> None:
    """param_groups and state are the inner optimizer's, in both directions; hooks, repr and zero_grad work."""

    def worker(world: Mesh) -> None:
        model = Net()
        inner = usual_inner(name)(model)
        groups = inner.param_groups
        optimizer = wrap(world, name, model, lambda _: inner)
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert optimizer.param_groups is inner.param_groups and optimizer.param_groups[0] is groups[0]
        optimizer.param_groups[0]["lr"] = 0.5
        assert inner.param_groups[0]["lr"] == 0.5
        inner.param_groups[0]["lr"] = 0.25
        assert optimizer.param_groups[0]["lr"] == 0.25
        assert optimizer.defaults["weight_decay"] == 0.01 and "lr: 0.25" in repr(optimizer)
        called: list[str] = []
        optimizer.register_step_pre_hook(lambda *_: called.append("before"))
        optimizer.register_step_post_hook(lambda *_: called.append("after"))
        loss_of(model, 0, 1).backward()
        optimizer.step()
        assert called == ["before", "after"]
        assert optimizer.state is inner.state
        assert set(optimizer.state) == (set(model.parameters()) if isinstance(inner, torch.optim.AdamW) else set())
        optimizer.zero_grad(set_to_none=False)
        assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
        optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())

    run(worker, 1)


@pytest.mark.parametrize("name", share(METHODS, 2, 10, ROOTS))
def test_closures(name: str) -> None:
    """step(closure) computes the loss with gradients, returns it, and gives the same bits as the usual loop."""

    def worker(world: Mesh, closed: bool) -> Any:
        model = Net()
        optimizer = wrap(world, name, model)
        losses = []
        for step in range(1, 7):

            def closure(step: int = step) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, world.rank, step)
                loss.backward()
                return loss

            if closed:
                with torch.no_grad():
                    losses.append(float(optimizer.step(closure).detach()))
            else:
                losses.append(float(closure().detach()))
                optimizer.step()
        return losses, bits(weights(model))

    assert run(worker, 2, True) == run(worker, 2, False)


@pytest.mark.parametrize("name", share(METHODS, 3, 10, ROOTS))
def test_grad_scaler(name: str) -> None:
    """step(scaler=) unscales what was reduced, before clipping: a power of two changes no bit. An overflow makes its
    worker skip the step; where all take equal steps, all skip: `test_amp.py`.
    """

    def worker(world: Mesh, scaled: bool, overflow: int) -> Any:
        model = Net()
        optimizer = wrap(world, name, model, max_norm=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
        log = []
        for step in range(1, 7):
            loss = loss_of(model, world.rank, step)
            (loss if scaler is None else scaler.scale(loss)).backward()
            if step == overflow and world.rank == 1:
                model.bias.grad[3] = torch.inf  # type: ignore[index]
            before = weights(model)
            optimizer.step(scaler=scaler)
            optimizer.zero_grad()
            log.append(torch.equal(before, weights(model)))
        return log, bits(weights(model)), scaler.get_scale() if scaler else None

    plain, scaled = run(worker, 2, False, 0), run(worker, 2, True, 0)
    assert [result[:2] for result in plain] == [result[:2] for result in scaled]
    if isles.method(name).level == "parameter":
        overflown = run(worker, 2, True, 5)
        assert [scale for _, _, scale in overflown] == [1024, 512]
        # LocalSGD and the like exchange at step 6; at step 5 worker 1 stood still
        assert [log[4] for log, _, _ in overflown] == [False, True]


def test_added_groups() -> None:
    """add_param_group takes parameters that are exchanged anyway, and refuses those that never would be."""

    def worker(world: Mesh) -> Tensor:
        model = Net()
        model.bias.requires_grad_(False)
        inner = torch.optim.SGD([model.first], lr=0.1)
        optimizer = isles.LocalSGD(model, inner, world.outer, sync_every=2)
        optimizer.add_param_group({"params": [model.second], "lr": 0.05})
        assert len(inner.param_groups) == 2 and inner.param_groups[1]["lr"] == 0.05
        model.bias.requires_grad_(True)
        for stranger in (model.bias, nn.Parameter(torch.ones(3))):
            with pytest.raises(ValueError, match="1 parameters of the inner optimizer are not trainable parameters"):
                optimizer.add_param_group({"params": [stranger]})
        assert len(inner.param_groups) == 2
        model.bias.requires_grad_(False)
        for step in range(1, 5):
            train_step(optimizer, world.rank, step)
        return weights(model)

    first, second = run(worker, 2)
    assert torch.equal(first, second)


# Settings.


@pytest.mark.parametrize("name", METHODS)
def test_help_shows_the_options(name: str) -> None:
    """inspect.signature: what all methods take, then the method's own fields with their defaults."""
    method = isles.method(name)
    parameters = inspect.signature(method).parameters
    assert list(parameters)[:6] == ["model", "inner", "group", "config", "max_norm", "vectors"]
    fields = {field.name: field.default for field in dataclasses.fields(method.Config)}
    assert {key: p.default for key, p in list(parameters.items())[6:]} == fields
    assert all(p.kind is p.KEYWORD_ONLY for key, p in parameters.items() if key in fields)


@pytest.mark.parametrize(
    ("method", "options", "says"),
    [
        ("noloco", {"sync_evry": 3}, "unknown option of NoLoCo 'sync_evry': did you mean 'sync_every'?"),
        ("diloco", {"gamma": 3}, "unknown option of DiLoCo 'gamma'"),
        ("ddp", {"max_nrom": 1.0}, "did you mean 'max_norm'?"),
        ("ddp", {"max_norm": 0.0}, "max_norm = 0.0: choose a positive norm"),
        ("ddp", {"codec": "int9"}, "unknown codec 'int9'"),
        ("diloco", {"sync_every": 0}, "sync_every = 0: choose 1 or more"),
        ("diloco", {"outer_lr": 0.0}, "outer_lr = 0.0: choose a positive rate"),
        ("diloco", {"outer_momentum": 1.0}, "outer_momentum = 1.0: choose 0 <= outer_momentum < 1"),
        ("localsgd", {"sync_every": -1}, "sync_every = -1"),
        ("noloco", {"gamma": -0.1}, "gamma = -0.1: choose 0 or more"),
        ("noloco", {"group_size": 1}, "group_size = 1: choose 2 or more"),
        ("noloco", {"exchange": "both"}, "unknown exchange 'both'"),
        ("noloco", {"exchange": "theta_only", "gamma": 0.3}, "needs gamma = outer_lr"),
        ("noloco", {"exchange": "single_vector", "codec": "int8"}, 'lossy codecs want "delta+phi"'),
        ("noloco", {"anchor_codec": "fp16"}, "unknown anchor_codec 'fp16'"),
        ("noloco", {"on_peer_failure": "retry"}, "unknown on_peer_failure 'retry'"),
        ("noloco", {"outer_lr": float("nan")}, "outer_lr = nan"),
    ],
)
def test_mistakes_are_one_line_with_the_hint(method: str, options: dict[str, Any], says: str) -> None:
    """ValueError names the key, the value and what to choose."""

    def worker(world: Mesh) -> None:
        wrap(world, method, Net(), **options)

    with pytest.raises(ValueError) as reported:
        run(worker)
    assert says in str(reported.value) and "\n" not in str(reported.value)


def test_wrong_objects_are_refused() -> None:
    """The mesh for the group, another method's config, config beside options, nothing to train, somebody else's
    parameters.
    """

    def worker(world: Mesh) -> None:
        model = Net()
        with pytest.raises(ValueError, match=r"group is a Mesh: pass a group of workers, such as world\.outer"):
            isles.DDP(model, sgd(model), world)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="DiLoCo takes a DiLoCoConfig, not a NoLoCoConfig"):
            isles.DiLoCo(model, sgd(model), world.outer, NoLoCoConfig())
        with pytest.raises(ValueError, match="a config or options"):
            isles.NoLoCo(model, sgd(model), world.outer, NoLoCoConfig(), gamma=0.3)
        with pytest.raises(ValueError, match="not trainable parameters of the model"):
            isles.DDP(model, sgd(Net()), world.outer)
        frozen = Net().requires_grad_(False)
        with pytest.raises(ValueError, match="no trainable parameter"):
            isles.DDP(frozen, sgd(frozen), world.outer)
        assert isles.NoLoCo(model, sgd(model), world.outer, NoLoCoConfig(gamma=0.3)).config.gamma == 0.3  # type: ignore[attr-defined]

    run(worker)


@pytest.mark.parametrize(
    ("what", "odd_one"),
    cover(["option", "max_norm", "method", "shape", "buffer", "frozen", "dtype"], (0, 1, 2), each=1),
)
def test_settings_that_differ_name_the_worker(odd_one: int, what: str) -> None:
    """Diverged on all three workers, naming the one that is alone with its settings."""

    def worker(world: Mesh) -> None:
        odd = world.rank == odd_one
        model = Net(dtype=torch.float64 if odd and what == "dtype" else torch.float32)
        if odd and what == "shape":
            model.second = nn.Parameter(torch.ones(7, 12))
        if odd and what == "buffer":
            model.register_buffer("extra", torch.ones(3))
        if odd and what == "frozen":
            model.bias.requires_grad_(False)
        options: dict[str, Any] = {"outer_lr": 0.6 if odd and what == "option" else 0.7}
        if odd and what == "max_norm":
            options["max_norm"] = 1.0
        method = isles.NoLoCo if odd and what == "method" else isles.DiLoCo
        method(model, sgd(model), world.outer, **options)

    errors = isles.run_virtual(worker, 3, links=LINKS, return_errors=True)
    assert all(isinstance(error, isles.Diverged) and error.peer == odd_one for error in errors)
    assert "method, settings or model shapes differ" in str(errors[0])


def test_inner_settings_may_differ_but_not_for_equal_steps() -> None:
    """Equal gradients with different learning rates would drift apart in silence: Diverged. Outer methods allow it."""

    def worker(world: Mesh, name: str) -> str:
        model = Net()
        optimizer = wrap(world, name, model, lambda m: sgd(m, 0.2 if world.rank == 1 else 0.1))
        for step in range(1, 4):
            train_step(optimizer, world.rank, step)
        return bits(weights(model))

    for name in ("ddp", "demo"):
        with pytest.raises(isles.Diverged, match="worker 1 diverged"):
            run(worker, 3, name)
    assert len(set(run(worker, 3, "diloco"))) == 1


def test_workers_at_different_steps_are_noticed() -> None:
    """A worker that skipped a step meets the others one round late: Diverged, not a mean of different times."""

    def worker(world: Mesh) -> None:
        optimizer = wrap(world, "diloco", Net())
        if world.rank == 1:
            optimizer.steps += 3
        for step in range(1, 7):
            train_step(optimizer, world.rank, step)

    errors = isles.run_virtual(worker, 3, links=LINKS, return_errors=True)
    assert any(isinstance(error, isles.Diverged) and error.peer == 1 for error in errors)


# Advice.


def test_advice() -> None:
    """Too few rounds for the momentum is warned of; a run without any exchange is refused; short and sane is silent."""

    def worker(world: Mesh) -> None:
        diloco = wrap(world, "diloco", Net(), sync_every=10, outer_momentum=0.9)
        assert diloco.advise(2000) == []
        (notice,) = diloco.advise(1990)
        assert "outer_momentum = 0.9 wants 200 rounds or more, this run has 199" in notice
        with pytest.raises(ValueError, match="no exchange falls into a run of 9 steps; choose sync_every <= 9"):
            diloco.advise(9)
        for name in ("localsgd", "noloco"):
            with pytest.raises(ValueError, match="choose sync_every <= 2"):
                wrap(world, name, Net()).advise(2)
        assert wrap(world, "localsgd", Net()).advise(3) == []  # no momentum, nothing to wait for
        assert wrap(world, "noloco", Net()).advise(3 * 40) == [] and wrap(world, "noloco", Net()).advise(3 * 39)
        for name in ("ddp", "none"):
            assert wrap(world, name, Net()).advise(1) == []

    def alone(world: Mesh) -> None:
        assert wrap(world, "diloco", Net(), sync_every=10).advise(9) == []  # there is nobody to exchange with

    run(worker, 2)
    run(alone)


def test_unstable_gamma_is_warned_of_at_construction() -> None:
    """gamma >= 2 (1 - alpha^2): the bound is in the text."""

    def worker(world: Mesh) -> None:
        wrap(world, "noloco", Net(), outer_momentum=0.9)

    with pytest.warns(UserWarning, match=r"gamma = 0\.7 with outer_momentum = 0\.9 .* choose 0 < gamma < 0\.38"):
        run(worker)


# Ends.


@pytest.mark.parametrize(("name", "steps", "workers"), cover(RUNS, (1, 6, 8), (1, 3, 4), each=1, of=7))
def test_finish_lands_the_last_partial_round_once(name: str, steps: int, workers: int) -> None:
    """Again and again `finish` and `consolidate`: one last round where steps were taken since, none where not."""

    def worker(world: Mesh) -> Any:
        model = Net()
        optimizer = wrap(world, name, model)
        for step in range(1, steps + 1):
            train_step(optimizer, world.rank, step)
        optimizer.finish()
        first = weights(model), counted(world)
        optimizer.finish()
        assert torch.equal(weights(model), first[0]) and counted(world) == first[1]
        if hasattr(optimizer, "fragments") and name != "postlocal-sgd":  # which has more rounds at the start
            assert optimizer.fragments[0].rounds == -(-steps // 3)
        optimizer.consolidate()
        one = weights(model)
        assert counted(world) == first[1]
        optimizer.consolidate()
        torch.testing.assert_close(weights(model), one, rtol=1e-6, atol=1e-7)
        assert counted(world) == first[1]
        return first[0], one

    results = isles.run_virtual(worker, workers, links=LINKS)
    if name in DIVIDED:  # no means: see test_ist.py for what the one model is
        assert len({bits(one) for _, one in results}) == 1
        return
    mean = torch.stack([finished.double() for finished, _ in results]).mean(0)
    for finished, one in results:
        assert torch.equal(one, results[0][1])
        torch.testing.assert_close(one.double(), mean, rtol=1e-6, atol=1e-7)
        if name != "none" and not name.startswith(("noloco", "eager", "streaming-noloco", "sparta")):
            assert torch.equal(finished, one)


@pytest.mark.parametrize(("name", "workers"), cover(RUNS, (1, 2, 3, 5), each=1, of=7, turn=1))
def test_schedule_is_what_happens(name: str, workers: int) -> None:
    """Bytes of `schedule(steps)` = bytes counted by the transport, worker by worker, for a whole and a partial last
    round (H = 3, fragments, delays, a warm-up); its groups are partitions of the world.
    """
    check_schedule(name, workers, 11 if workers in (1, 3) else 12)


@pytest.mark.long
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5])
def test_schedule_is_what_happens_at_every_length(name: str, workers: int) -> None:
    """The same for runs of 1 to 13 steps."""
    for steps in range(1, 14):
        check_schedule(name, workers, steps)


def check_schedule(name: str, workers: int, steps: int) -> None:
    def worker(world: Mesh) -> tuple[int, list[Any]]:
        optimizer = wrap(world, name, Net())
        plan = optimizer.schedule(steps)
        for step in range(1, steps + 1):
            train_step(optimizer, world.rank, step)
        optimizer.finish()
        return counted(world)["sent"], plan

    results = isles.run_virtual(worker, workers, links=LINKS)
    for rank, (sent, plan) in enumerate(results):
        assert sum(planned.bytes_sent[rank] for planned in plan) == sent
        assert plan == results[0][1]
    for planned in results[0][1]:
        assert sorted(position for group in planned.groups for position in group) == list(range(workers))
        assert 0 <= planned.sent <= planned.lands <= steps + 2  # what the end waits for


def test_schedule_asks_nothing_of_the_run() -> None:
    """It can be asked before, during and after a run; it changes nothing."""

    def worker(world: Mesh) -> Any:
        model = Net()
        optimizer = wrap(world, "noloco", model)
        before = optimizer.schedule(10)
        sent = counted(world)
        for step in range(1, 6):
            train_step(optimizer, world.rank, step)
        assert optimizer.schedule(10) == before and sent["sent"] == 0
        return bits(weights(model))

    def plain(world: Mesh) -> str:
        model = Net()
        optimizer = wrap(world, "noloco", model)
        for step in range(1, 6):
            train_step(optimizer, world.rank, step)
        return bits(weights(model))

    assert run(worker, 3) == run(plain, 3)


@pytest.mark.parametrize("name", share(RUNS, 4, 10))
def test_evaluation_weights_are_the_anchor_and_are_restored(name: str) -> None:
    """Inside: the anchors (where there are any). After, also after an error: the live bits. Training feels nothing."""

    def worker(world: Mesh, peek: bool) -> Any:
        model = Net()
        optimizer = wrap(world, name, model)
        log = []
        for step in range(1, 9):
            log.append(train_step(optimizer, world.rank, step))
            if not peek:
                continue
            live = weights(model)
            with pytest.raises(KeyError), optimizer.evaluation_weights() as judged:
                assert judged is model
                if hasattr(optimizer, "fragments"):
                    fragments: Any = optimizer.fragments
                    assert torch.equal(weights(judged), torch.cat([fragment.anchor for fragment in fragments]))
                    if len(fragments) == 1:
                        landed = optimizer.cadence.sends(step) and not optimizer.parts.landing.moves_reference  # type: ignore[attr-defined]
                        assert torch.equal(live, weights(judged)) == bool(landed)
                held_out(judged)
                raise KeyError
            assert torch.equal(weights(model), live)
        return log, bits(weights(model))

    assert run(worker, 3, True) == run(worker, 3, False)


@pytest.mark.parametrize("name", share([name for name in METHODS if name not in DIVIDED], 5, 10, ROOTS))
def test_spread_of_the_replicas(name: str) -> None:
    """replica_std = sqrt(sum (p - mean p)^2 / (N P)) over live weights, the same on all workers, weights untouched."""

    def worker(world: Mesh) -> Any:
        model = Net()
        optimizer = wrap(world, name, model)
        for step in range(1, 6):
            train_step(optimizer, world.rank, step)
        before = weights(model)
        spread = optimizer.replica_std()
        assert torch.equal(before, weights(model))
        return spread, before

    results = run(worker, 4)
    vectors = torch.stack([vector.double() for _, vector in results])
    expected = float(vectors.var(0, correction=0).mean().sqrt())
    assert [spread for spread, _ in results] == pytest.approx([expected] * 4, rel=1e-5, abs=1e-12)


def test_training_goes_on_after_finish() -> None:
    """`finish` in the middle of a run is one more, shorter round; the cadence stays where it was."""

    def worker(world: Mesh) -> list[int]:
        optimizer = wrap(world, "diloco", Net())
        rounds = []
        for step in range(1, 10):
            train_step(optimizer, world.rank, step)
            if step == 4:
                optimizer.finish()
            rounds.append(optimizer.fragments[0].rounds)  # type: ignore[attr-defined]
        return rounds

    assert run(worker, 3) == [[0, 0, 1, 2, 2, 3, 3, 3, 4]] * 3


@pytest.mark.parametrize("name", share(METHODS, 6, 10, ROOTS))
def test_consolidate_averages_floating_buffers(name: str) -> None:
    """Running statistics differ between workers: the one model has their mean; counters stay each worker's."""

    def worker(world: Mesh) -> tuple[Tensor, Tensor]:
        model = Net()
        model.register_buffer("average", torch.zeros(3))
        model.register_buffer("count", torch.zeros((), dtype=torch.int64))
        optimizer = wrap(world, name, model)
        for step in range(1, 4):
            train_step(optimizer, world.rank, step)
        model.average.fill_(float(world.rank))  # type: ignore[operator, union-attr]
        model.count.fill_(world.rank)  # type: ignore[operator, union-attr]
        optimizer.consolidate()
        return model.average, model.count  # type: ignore[return-value]

    for rank, (average, count) in enumerate(run(worker, 4)):
        assert average.tolist() == [1.5] * 3 and int(count) == rank


# Company.


@pytest.mark.parametrize("name", share(["ddp", "localsgd", "noloco", "diloco", "noloco, lossy"], 0, 2))
def test_replicas_of_a_stage_know_nothing_of_other_stages(name: str) -> None:
    """On a mesh of 3 x 2 each stage's replicas do what they do in a world of three: bits, bytes, spread, one model."""

    def worker(world: Mesh, on: str) -> Any:
        mesh = isles.mesh(outer=3, stage=2) if on == "mesh" else world
        stage, model = mesh.stage.rank if on == "mesh" else 0, Net(seed=mesh.outer.rank)
        optimizer = wrap(mesh, name, model)
        losses = [train_step(optimizer, mesh.outer.rank + 40 * stage, step) for step in range(1, 9)]
        optimizer.finish()
        sent, spread = counted(world)["sent"], optimizer.replica_std()
        optimizer.consolidate()
        return stage, (losses, bits(weights(model)), sent, spread)

    alone = isles.run_virtual(worker, 3, links=LINKS, args=("world",))
    staged = isles.run_virtual(worker, 6, links=LINKS, args=("mesh",))
    assert [result for stage, result in staged if stage == 0] == [result for _, result in alone]
    assert len({result[1] for _, result in staged}) == 2


@pytest.mark.parametrize("name", share(METHODS, 7, 10))
def test_two_optimizers_in_one_world(name: str) -> None:
    """Two models trained in turns, each with its own optimizer over the same group: the bits of two runs."""

    def worker(world: Mesh, seeds: tuple[int, ...]) -> list[str]:
        models = [Net(seed=seed) for seed in seeds]
        optimizers = [wrap(world, name, model) for model in models]
        for step in range(1, 9):
            for seed, optimizer in zip(seeds, optimizers, strict=True):
                train_step(optimizer, world.rank + 10 * seed, step)
        for optimizer in optimizers:
            optimizer.finish()
        return [bits(weights(model)) for model in models]

    both = run(worker, 4, (1, 2))
    first, second = run(worker, 4, (1,)), run(worker, 4, (2,))
    assert both == [one + two for one, two in zip(first, second, strict=True)]


@pytest.mark.parametrize("name", share(RUNS, 8, 10, ("diloco", "ist")))
def test_loading_its_own_state_changes_nothing(name: str) -> None:
    """What accelerate does in `prepare`: load_state_dict(state_dict()), at any step."""

    def worker(world: Mesh, reload: bool) -> Any:
        model = Net()
        optimizer = wrap(world, name, model)
        log = []
        for step in range(1, 9):
            if reload:
                optimizer.load_state_dict(optimizer.state_dict())
            log.append(train_step(optimizer, world.rank, step))
        optimizer.finish()
        return log, bits(weights(model)), counted(world)

    assert run(worker, 3, True) == run(worker, 3, False)
