"""What one worker holds of its replica: an inner optimizer that is late, and stages without a pipeline."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import isles
from isles.comm.errors import Diverged
from isles.comm.mesh import Mesh
from isles.replicas.replica import Plain
from isles.replicas.sync import ReplicaSync
from isles.wrapping import Wrapping
from tests.replicas.workers import LINKS, RUNS, Net, adamw, batch, bits, held_out, usual_inner, weights, wrap

METHODS = [name for name in RUNS if not name.startswith("ist")]
STEPS = 8


class Late(Wrapping):
    """An inner optimizer that applies its updates in `catch_up` alone, which it calls before the next forward pass."""

    def __init__(self, model: nn.Module, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner, [parameter for parameter in model.parameters() if parameter.requires_grad])
        self.due: list[Any] = []
        self.calls = Counter[str]()
        model.register_forward_pre_hook(lambda *_: None if getattr(model, "away", False) else self.catch_up())

    def step(self, closure: Any = None) -> None:
        settings = [{k: v for k, v in group.items() if k != "params"} for group in self.inner.param_groups]
        self.due.append(([None if p.grad is None else p.grad.clone() for p in self.parameters], settings))

    def gradients(self) -> None:
        self.calls["gradients"] += 1

    def catch_up(self) -> None:
        due, self.due = self.due, []
        if not due:
            return
        self.calls["caught up"] += 1
        held = [p.grad for p in self.parameters]
        now = [dict(group) for group in self.inner.param_groups]
        for gradients, settings in due:
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter.grad = gradient
            for group, then in zip(self.inner.param_groups, settings, strict=True):
                group.update(then)
            self.inner.step()
        for group, kept in zip(self.inner.param_groups, now, strict=True):
            group.update(kept)
        for parameter, gradient in zip(self.parameters, held, strict=True):
            parameter.grad = gradient


class Far(Net):
    """Computed with copies of its parameters, whose gradients stay with the copies until they are asked for."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.copies: list[dict[str, Tensor]] = []
        self.away = False

    def forward(self, x: Tensor) -> Tensor:
        if self.away or not torch.is_grad_enabled():
            return super().forward(x)
        copies = {name: p.detach().clone().requires_grad_() for name, p in self.named_parameters()}
        self.copies.append(copies)
        self.away = True
        try:
            return functional_call(self, copies, x)
        finally:
            self.away = False


class FarLate(Late):
    """Late, and gradients come only when they are asked for, through autograd, as those of swapped weights do."""

    def __init__(self, model: Far, inner: torch.optim.Optimizer) -> None:
        super().__init__(model, inner)
        self.far = model

    def gradients(self) -> None:
        super().gradients()
        ready, self.far.copies = self.far.copies, []
        hosts = dict(self.far.named_parameters())
        for copies in ready:
            found = {name: copy.grad for name, copy in copies.items() if copy.grad is not None}
            torch.autograd.backward([hosts[name] for name in found], list(found.values()))


def loss_on(model: nn.Module, worker: int, step: int) -> Tensor:
    x, y = batch(worker, step)
    return F.mse_loss(model(x), y)


def trained(world: Mesh, name: str, batches: int, max_norm: float | None, kind: str) -> dict[str, Any]:
    """A run that is looked at, saved and restored in its middle, with a schedule."""
    model = (Far if kind == "far" else Net)(seed=world.rank)
    make = usual_inner(name)
    late: Late | None = None
    inner = make(model)
    if kind != "plain":
        late = (FarLate if kind == "far" else Late)(model, inner)  # type: ignore[arg-type]
    optimizer = wrap(world, name, model, (lambda _: late or inner), max_norm=max_norm)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 1.0 / (1 + done))
    seen: list[Any] = []
    for step in range(1, STEPS + 1):
        for index in range(batches):
            if index + 1 < batches:
                with optimizer.no_sync():
                    loss = loss_on(model, world.rank, 10 * step + index) / batches
                    loss.backward()
            else:
                loss = loss_on(model, world.rank, 10 * step + index) / batches
                loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        schedule.step()
        seen.append((float(loss.detach()), None if max_norm is None else float(optimizer.gradient_norm)))
        if step == 3:
            seen.append(optimizer.replica_std())
        if step == 5:
            with optimizer.evaluation_weights() as judged:
                seen.append((bits(weights(judged)), held_out(judged)))
        if step == 6:
            seen.append({key: bits(tensor) for key, tensor in sorted(optimizer.weights().items())}.values())
            seen[-1] = list(seen[-1])
            held = {key: tensor.clone() for key, tensor in optimizer.weights().items()}
            inner_state = copy.deepcopy(optimizer.inner_state())
        if step == 7:
            optimizer.load_weights(held)  # an update is due, and must not come on top
            optimizer.load_inner_state(inner_state)
            state = optimizer.state_dict()
            steps = [s["step"] for s in state["inner"]["state"].values() if "step" in s]
            seen.append([float(value) for value in steps])
    optimizer.finish()
    seen.append(bits(weights(model)))
    seen.append(optimizer.gauges())
    seen.append(bits(weights(optimizer.consolidate())))
    if late is not None:
        assert late.calls["gradients"] >= STEPS * batches and late.calls["caught up"] and not late.due
    return {"seen": seen, "clock": world.transport.now()}


@pytest.mark.parametrize("batches, max_norm", [(1, None), (2, 0.3)])
@pytest.mark.parametrize("kind", ["late", "far"])
@pytest.mark.parametrize("name", METHODS)
def test_a_late_inner_optimizer_changes_no_bit(name: str, kind: str, batches: int, max_norm: float | None) -> None:
    arguments = (name, batches, max_norm)
    plain = isles.run_virtual(trained, 2, links=LINKS, args=(*arguments, "plain"))
    late = isles.run_virtual(trained, 2, links=LINKS, args=(*arguments, kind))
    assert plain == late


class Chain(nn.Module):
    """Two halves, one after the other."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.halves = nn.ModuleList([nn.Sequential(nn.Linear(5, 9), nn.Tanh()), nn.Linear(9, 7)])

    def forward(self, x: Tensor) -> Tensor:
        return self.halves[1](self.halves[0](x))


def pipelined(mesh: Mesh, half: nn.Module, x: Tensor, y: Tensor, channel: Any = "pipeline") -> float:
    """Forward and backward through two stages by hand; the loss, on both."""
    stage = mesh.stage
    hidden = half(x) if stage.rank == 0 else torch.empty(len(x), 9)
    sent = hidden.detach().clone()
    stage.broadcast(sent, 0, channel)
    back, loss = torch.empty_like(sent), torch.zeros(1)
    if stage.rank == 1:
        leaf = sent.requires_grad_(torch.is_grad_enabled())
        own = F.mse_loss(half(leaf), y)
        if torch.is_grad_enabled():
            own.backward()
            back = leaf.grad.clone()
        loss = own.detach().reshape(1)
    if torch.is_grad_enabled():
        stage.broadcast(back, 1, channel)
        if stage.rank == 0:
            hidden.backward(back)
    stage.broadcast(loss, 1, channel)
    return float(loss)


OPTIONS: dict[str, dict[str, Any]] = {
    "diloco": {"sync_every": 3, "outer_momentum": 0.5},
    "noloco": {"sync_every": 3},
    "localsgd": {"sync_every": 3},
    "streaming-diloco": {"sync_every": 3, "overlap_steps": 1, "codec": "none"},
    "ddp": {},
    "demo": {"compression_topk": 4096, "compression_chunk": 64},
    "sparta": {"sync_every": 3, "fraction": 1.0},
}


def own_inner(name: str, model: nn.Module) -> torch.optim.Optimizer:
    return adamw(model) if isles.method(name).usual_inner == "adamw" else torch.optim.SGD(model.parameters(), lr=0.02)


def staged(world: Mesh, name: str, inner: int, charge: float, clip_over: str = "peers") -> dict[str, Any]:
    """A worker of replicas x 2 stages x `inner`."""
    mesh = isles.mesh(outer=2, stage=2, inner=inner)
    half = Chain(mesh.outer.rank).halves[mesh.stage.rank]
    held: Any = Plain(half, own_inner(name, half), peers=mesh.stage, clip_over=clip_over, charged=True)  # type: ignore[arg-type]
    options = dict(OPTIONS[name])
    if name == "streaming-diloco":
        options["fragments"] = (tuple(n for n, _ in half.named_parameters()),)
    if inner > 1:
        optimizer: ReplicaSync = isles.method(name)(
            half, isles.DDP(half, held, mesh.inner, max_norm=0.2), mesh.outer, **options
        )
    else:
        optimizer = isles.method(name)(half, held, mesh.outer, max_norm=0.2, **options)
    losses = []
    for step in range(1, STEPS + 1):
        x, y = batch(mesh.outer.rank * inner + mesh.inner.rank, step)
        losses.append(pipelined(mesh, half, x, y))
        if charge:
            world.transport.compute(charge)
        optimizer.step()
        optimizer.zero_grad()
    sent = {c: world.world.traffic[c].bytes_sent for c in ("outer", "inner", "control", "pipeline")}
    spread = optimizer.replica_std()
    with optimizer.evaluation_weights(), torch.no_grad():
        judged = pipelined(mesh, half, *batch(99, 0, 64), channel="eval")
    optimizer.finish()
    sent = {c: world.world.traffic[c].bytes_sent for c in ("outer", "inner", "control", "pipeline")}
    planned = optimizer.outline(STEPS)
    optimizer.consolidate()
    clipper = optimizer if inner == 1 else optimizer.replica.inside
    return {
        "stage": mesh.stage.rank,
        "weights": {n: p.detach().clone() for n, p in half.named_parameters()},
        "losses": losses,
        "judged": judged,
        "std": spread,
        "norm": float(clipper.gradient_norm),
        "computed": getattr(world.transport, "compute_seconds", 0.0),
        "sent": sent,
        "planned": planned.opening[mesh.outer.rank] + planned.sent[mesh.outer.rank],
    }


def unsplit(world: Mesh, name: str, inner: int) -> dict[str, Any]:
    model = Chain(world.rank)
    options = dict(OPTIONS[name])
    if name == "streaming-diloco":
        options["fragments"] = (tuple(n for n, _ in model.named_parameters()),)
    optimizer = isles.method(name)(model, own_inner(name, model), world.outer, max_norm=0.2, **options)
    losses = []
    for step in range(1, STEPS + 1):
        pairs = [batch(world.rank * inner + i, step) for i in range(inner)]
        x, y = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        loss = F.mse_loss(model(x), y)
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    spread = optimizer.replica_std()
    with optimizer.evaluation_weights() as judged, torch.no_grad():
        x, y = batch(99, 0, 64)
        loss = float(F.mse_loss(judged(x), y))
    optimizer.consolidate()
    return {
        "weights": {n: p.detach().clone() for n, p in model.named_parameters()},
        "losses": losses,
        "judged": loss,
        "std": spread,
        "norm": float(optimizer.gradient_norm),
    }


@pytest.mark.parametrize("inner", [1, 2])
@pytest.mark.parametrize("name", list(OPTIONS))
def test_stages_train_like_the_unsplit_model(name: str, inner: int) -> None:
    """Clipping, judging and the spread go over the whole replica; bytes are planned; nobody is charged."""
    if inner > 1 and not isles.method(name).spans_islands:
        pytest.skip("not across islands")
    whole = isles.run_virtual(unsplit, 2, links=LINKS, args=(name, inner))
    split = isles.run_virtual(staged, 4 * inner, links=LINKS, args=(name, inner, 0.0))
    for rank, own in enumerate(split):
        replica = whole[rank // (2 * inner)]
        for key, tensor in own["weights"].items():
            theirs = replica["weights"][f"halves.{own['stage']}.{key}"]
            torch.testing.assert_close(tensor, theirs, rtol=0, atol=1e-6)
        assert own["std"] == pytest.approx(replica["std"], abs=1e-6)
        assert own["judged"] == pytest.approx(replica["judged"], abs=1e-6)
        assert own["norm"] == pytest.approx(replica["norm"], rel=1e-5)
        if inner == 1:
            assert own["losses"] == pytest.approx(replica["losses"], abs=1e-6)
        assert own["computed"] == 0.0
        counted = {**own["sent"], "pipeline": 0}
        assert own["planned"] == sum(counted.values()), (own["planned"], counted)


def test_clipping_a_stage_by_its_own_norm_is_something_else() -> None:
    own = isles.run_virtual(staged, 4, links=LINKS, args=("diloco", 1, 0.0, "own"))
    whole = isles.run_virtual(unsplit, 2, links=LINKS, args=("diloco", 1))
    assert abs(own[0]["norm"] ** 2 + own[1]["norm"] ** 2 - whole[0]["norm"] ** 2) < 0.1
    assert own[0]["norm"] < 0.999 * whole[0]["norm"]


def test_only_who_runs_the_stages_charges() -> None:
    for inner in (1, 2):
        for own in isles.run_virtual(staged, 4 * inner, links=LINKS, args=("diloco", inner, 0.05)):
            assert own["computed"] == pytest.approx(STEPS * 0.05)


def refusals(world: Mesh) -> list[str]:
    mesh = isles.mesh(outer=2, stage=2)
    half, other = nn.Linear(3, 3), nn.Linear(3, 3)

    def plain(**options: Any) -> Plain:
        return Plain(half, adamw(half), peers=mesh.stage, **options)

    tries = [
        lambda: isles.DiLoCo(half, plain(), mesh.world),
        lambda: isles.DiLoCo(other, plain(), mesh.outer),
        lambda: isles.NoLoCo(half, plain(), mesh.outer, on_peer_failure="solo"),
        lambda: Plain(half.requires_grad_(False), adamw(other)),
    ]
    found = []
    for attempt in tries:
        with pytest.raises(ValueError) as caught:
            attempt()
        found.append(str(caught.value))
    return found


def test_what_cannot_be_is_refused_with_the_mend() -> None:
    for told in isles.run_virtual(refusals, 4, links=LINKS):
        wanted = ["mesh.stage and mesh.outer", "another module", '"raise"', "trainable"]
        for line, part in zip(told, wanted, strict=True):
            assert part in line


def broken(world: Mesh, scaled: bool) -> list[Any]:
    """Stage 0 of replica 0 has a gradient that is no number in step 3: all parts of both replicas leave it out."""
    mesh = isles.mesh(outer=2, stage=2)
    half = Chain(mesh.outer.rank).halves[mesh.stage.rank]
    held = Plain(half, adamw(half), peers=mesh.stage, charged=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if scaled else None
    options = {"codec": "powersgd:1", "error_feedback": "local"}
    optimizer = isles.DDP(half, held, mesh.outer, max_norm=0.2, **options)
    if scaler is not None:
        scaler.scale(torch.zeros(()))  # a stage without the loss never asks it, and it has no scale before
    seen: list[Any] = []
    before = {c: world.world.traffic[c].bytes_sent for c in ("outer", "inner", "control")}
    for step in range(1, 6):
        for parameter in half.parameters():
            parameter.grad = None
        x, y = batch(mesh.outer.rank, step)
        if step == 3 and world.rank == 0:
            half[0].weight.register_hook(lambda gradient: gradient * torch.nan)
        pipelined(mesh, half, x, y)
        if step == 3 and world.rank == 0:
            half[0].weight._backward_hooks.clear()
        was = weights(half)
        optimizer.step(scaler=scaler)
        seen.append((torch.equal(was, weights(half)), None if scaler is None else scaler.get_scale()))
    sent = sum(world.world.traffic[c].bytes_sent - before[c] for c in before)
    return [seen, optimizer.skipped, sent - optimizer.outline(5).sent[mesh.outer.rank]]


@pytest.mark.parametrize("scaled", [False, True])
def test_all_parts_of_a_replica_leave_out_a_step_together(scaled: bool) -> None:
    for rank, (seen, skipped, unknown) in enumerate(isles.run_virtual(broken, 4, links=LINKS, args=(scaled,))):
        assert skipped == 1
        assert [stood for stood, _ in seen] == [False, False, True, False, False]
        if rank % 2:  # the others sent less in the step that was left out
            assert unknown == (5 * 8 if scaled else 0)  # nobody plans with a scaler
        if scaled:
            assert [scale for _, scale in seen] == [8.0, 8.0, 4.0, 4.0, 4.0]


def accumulated(world: Mesh, name: str, batches: int) -> tuple[float, float]:
    model = Net(seed=world.rank)
    optimizer = wrap(world, name, model)
    optimizer.batches = batches
    for step in range(4):
        for index in range(batches):
            if index + 1 < batches:
                with optimizer.no_sync():
                    loss_on(model, world.rank, step).backward()
            else:
                loss_on(model, world.rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return world.transport.compute_seconds, world.transport.now()


@pytest.mark.parametrize("batches", [1, 2, 5])
@pytest.mark.parametrize("name", ["ddp", "ddp, small buckets", "diloco"])
def test_accumulated_batches_are_charged_one_step(name: str, batches: int) -> None:
    for computed, _ in isles.run_virtual(accumulated, 2, links=LINKS, args=(name, batches), step_seconds=0.1):
        assert computed == pytest.approx(0.4)


def test_stages_are_the_same_bits_on_gloo() -> None:
    virtual = isles.run_virtual(staged, 4, links=LINKS, args=("noloco", 1, 0.0))
    real = isles.run_local(staged, 4, args=("noloco", 1, 0.0))
    for mine, theirs in zip(virtual, real, strict=True):
        assert mine["losses"] == theirs["losses"] and mine["sent"] == theirs["sent"] and mine["norm"] == theirs["norm"]
        assert all(torch.equal(mine["weights"][key], theirs["weights"][key]) for key in mine["weights"])


def adapting(world: Mesh) -> list[dict[str, float]]:
    """DiLoCoX over stages of which one learns one direction, the other all."""
    mesh = isles.mesh(outer=2, stage=2)
    model = nn.Linear(24, 64, bias=False)
    held = Plain(model, torch.optim.SGD(model.parameters(), lr=0.05), peers=mesh.stage, charged=True)
    settings = {"sync_every": 4, "rank": 4, "start_compress": 1, "window": 1}
    optimizer = isles.DiLoCoX(model, held, mesh.outer, **settings)
    seen = []
    for step in range(1, 25):
        draw = torch.Generator().manual_seed(1000 * mesh.outer.rank + step)
        x = torch.randn(16, 24, generator=draw)
        target = x[:, :1].expand(16, 64) if mesh.stage.rank == 0 else torch.randn(16, 64, generator=draw)
        F.mse_loss(model(x), target, reduction="sum").div(16).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(optimizer.gauges())
    return seen


def test_stages_agree_on_h_and_not_on_ranks() -> None:
    results = isles.run_virtual(adapting, 4, links=LINKS)
    assert any(a["rank"] != b["rank"] for a, b in zip(*results[:2], strict=True))
    for own in results:
        assert [gauges["sync_every"] for gauges in own] == [gauges["sync_every"] for gauges in results[0]]


def at_odds(world: Mesh) -> None:
    mesh = isles.mesh(outer=2, stage=2)
    half = nn.Linear(3, 3)
    held = Plain(half, adamw(half), peers=mesh.stage)
    isles.DiLoCo(half, held, mesh.outer, max_norm=1.0 if mesh.stage.rank else None)


def test_stages_of_other_settings_are_told_before_they_wait_for_each_other() -> None:
    with pytest.raises(Diverged, match="settings"):
        isles.run_virtual(at_odds, 4, links=LINKS)


def needing(world: Mesh) -> list[str]:
    mesh = isles.mesh(outer=2, stage=2)
    found = []
    for late in (False, True):
        model = isles.models.Decoder(
            isles.models.Shape(d_model=8, layers=1, heads=2, ffn=16, vocab=11, context=4, tie_embeddings=False)
        )
        inner = adamw(model)
        held = Plain(model, Late(model, inner) if late else inner, peers=None if late else mesh.stage)
        with pytest.raises(ValueError) as caught:
            isles.IST(model, held, mesh.outer)
        found.append(str(caught.value))
    return found


def test_ist_takes_whole_models_and_optimizers_that_are_never_late() -> None:
    for told in isles.run_virtual(needing, 4, links=LINKS):
        assert all("without stages" in line for line in told)


def restored(world: Mesh, files: list[bytes] | None) -> Any:
    """Islands of data parallel workers inside stages; saved after step 4, or gone on from there."""
    import io

    mesh = isles.mesh(outer=2, stage=2, inner=2)
    half = Chain(5 if files else mesh.outer.rank).halves[mesh.stage.rank]
    held = Plain(half, adamw(half), peers=mesh.stage, charged=True)
    inside = isles.DDP(half, held, mesh.inner, max_norm=0.2, codec="powersgd:1", error_feedback="local")
    optimizer = isles.NoLoCo(half, inside, mesh.outer, sync_every=3)
    if files:
        state = torch.load(io.BytesIO(files[world.rank]), weights_only=True)
        optimizer.load_weights(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    file = None
    while optimizer.steps < STEPS:
        x, y = batch(mesh.outer.rank * 2 + mesh.inner.rank, optimizer.steps + 1)
        loss = pipelined(mesh, half, x, y)
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.steps == 4:
            held_file = io.BytesIO()
            torch.save({"optimizer": optimizer.state_dict(), "model": optimizer.weights()}, held_file)
            file = held_file.getvalue()
    optimizer.consolidate()
    return file, loss, bits(weights(half))


def test_stages_go_on_from_a_checkpoint_with_the_same_bits() -> None:
    whole = isles.run_virtual(restored, 8, links=LINKS, args=(None,))
    again = isles.run_virtual(restored, 8, links=LINKS, args=([file for file, _, _ in whole],))
    assert [own[1:] for own in whole] == [own[1:] for own in again]


def in_the_air(world: Mesh, late: bool, steps: int) -> list[str]:
    """The run ends with an answer on its way and an update that is due."""
    model = Net(seed=world.rank)
    inner = adamw(model)
    options = {"sync_every": 5, "overlap_steps": 3, "fragments": "whole"}
    optimizer = isles.StreamingDiLoCo(model, Late(model, inner) if late else inner, world.outer, **options)
    for step in range(1, steps + 1):
        loss_on(model, world.rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.finish()
    return [bits(weights(model)), *(bits(fragment.anchor) for fragment in optimizer.fragments)]


@pytest.mark.parametrize("steps", [5, 6, 7, 8])
def test_finish_lands_on_weights_that_have_caught_up(steps: int) -> None:
    plain, late = (isles.run_virtual(in_the_air, 2, links=LINKS, args=(late, steps)) for late in (False, True))
    assert plain == late
