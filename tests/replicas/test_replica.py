"""A replica of several workers that is no island: stages by hand against the model in one piece."""

from __future__ import annotations

import io
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import isles
from isles.comm.errors import Diverged
from isles.comm.mesh import Mesh
from isles.comm.tags import Channel
from isles.replicas.replica import Plain
from isles.replicas.sync import ReplicaSync
from tests.gloo import run_gloo
from tests.replicas.workers import LINKS, Net, adamw, batch, bits, loss_of, weights, wrap

STEPS = 8
MAX_NORM = 0.2  # below every gradient's

# Without rounding on the wire, so that cutting the model changes nothing but the order of sums.
OPTIONS: dict[str, dict[str, Any]] = {
    "diloco": {"sync_every": 3, "outer_momentum": 0.5},
    "noloco": {"sync_every": 3},
    "localsgd": {"sync_every": 3},
    "streaming-diloco": {"sync_every": 3, "overlap_steps": 1, "codec": "none"},
    "ddp": {},
    "demo": {"compression_topk": 4096, "compression_chunk": 64},
    "sparta": {"sync_every": 3, "fraction": 1.0},
}


class Chain(nn.Module):
    """Two halves, one after the other."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.halves = nn.ModuleList([nn.Sequential(nn.Linear(5, 9), nn.Tanh()), nn.Linear(9, 7)])

    def forward(self, x: Tensor) -> Tensor:
        return self.halves[1](self.halves[0](x))


def piped(mesh: Mesh, half: nn.Module, x: Tensor, y: Tensor, channel: Channel = "pipeline") -> float:
    """Forward and, where gradients are wanted, backward through both stages; the loss, on both."""
    stage, training = mesh.stage, torch.is_grad_enabled()
    hidden = half(x) if stage.rank == 0 else torch.empty(len(x), 9)
    received = hidden.detach().clone()
    stage.broadcast(received, 0, channel)
    gradient, loss = torch.empty_like(received), torch.zeros(1)
    if stage.rank == 1:
        received.requires_grad_(training)
        own = F.mse_loss(half(received), y)
        loss = own.detach().reshape(1).clone()
        if training:
            own.backward()
            assert received.grad is not None
            gradient = received.grad
    if training:
        stage.broadcast(gradient, 1, channel)
        if stage.rank == 0:
            hidden.backward(gradient)
    stage.broadcast(loss, 1, channel)
    return float(loss)


def options_of(name: str, model: nn.Module) -> dict[str, Any]:
    one_fragment = {"fragments": (tuple(name for name, _ in model.named_parameters()),)}
    return OPTIONS[name] | (one_fragment if name == "streaming-diloco" else {})


def inner_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    return adamw(model) if isles.method(name).usual_inner == "adamw" else torch.optim.SGD(model.parameters(), lr=0.02)


def staged_optimizer(
    mesh: Mesh, name: str, half: nn.Module, clip_over: Literal["peers", "own"] = "peers"
) -> tuple[ReplicaSync, ReplicaSync]:
    """The method over this stage, and whoever clips."""
    held = Plain(half, inner_of(name, half), peers=mesh.stage, clip_over=clip_over, charged=True)
    kind, options = isles.method(name), options_of(name, half)
    if mesh.inner.size == 1:
        optimizer = kind(half, held, mesh.outer, max_norm=MAX_NORM, **options)  # type: ignore[arg-type]
        return optimizer, optimizer
    inside = isles.DDP(half, held, mesh.inner, max_norm=MAX_NORM)  # type: ignore[arg-type]
    return kind(half, inside, mesh.outer, **options), inside


def staged(world: Mesh, name: str, inner: int = 1, clip_over: Literal["peers", "own"] = "peers") -> dict[str, Any]:
    """A worker of 2 replicas x 2 stages x `inner`, which computes for 0.05 s a step."""
    mesh = isles.mesh(outer=2, stage=2, inner=inner)
    half = Chain(mesh.outer.rank).halves[mesh.stage.rank]
    optimizer, clipping = staged_optimizer(mesh, name, half, clip_over)
    losses = []
    for step in range(1, STEPS + 1):
        losses.append(piped(mesh, half, *batch(mesh.outer.rank * inner + mesh.inner.rank, step)))
        world.transport.compute(0.05)
        optimizer.step()
        optimizer.zero_grad()
    spread = optimizer.replica_std()
    with optimizer.evaluation_weights(), torch.no_grad():
        for_evaluation = piped(mesh, half, *batch(99, 0, 64), channel="eval")
    optimizer.land_all()  # as `isles train` does, whose bytes are planned
    sent = sum(world.world.traffic[channel].bytes_sent for channel in ("outer", "inner", "control"))
    planned = optimizer.outline(STEPS)
    optimizer.consolidate()
    return {
        "weights": {f"halves.{mesh.stage.rank}.{key}": own.detach().clone() for key, own in half.named_parameters()},
        "losses": losses,
        "numbers": [for_evaluation, spread, float(clipping.gradient_norm)],  # type: ignore[arg-type]
        "computed": getattr(world.transport, "compute_seconds", 0.0),
        "sent": sent,
        "planned": planned.opening[mesh.outer.rank] + planned.sent[mesh.outer.rank],
    }


def unsplit(world: Mesh, name: str, inner: int = 1) -> dict[str, Any]:
    """A worker of 2 replicas with the whole model, on the batches of `inner` workers."""
    model = Chain(world.rank)
    method, options = isles.method(name), options_of(name, model)
    optimizer = method(model, inner_of(name, model), world.outer, max_norm=MAX_NORM, **options)
    losses = []
    for step in range(1, STEPS + 1):
        batches = [batch(world.rank * inner + i, step) for i in range(inner)]
        x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
        loss = F.mse_loss(model(x), y)
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    spread = optimizer.replica_std()
    with optimizer.evaluation_weights() as judging, torch.no_grad():
        x, y = batch(99, 0, 64)
        for_evaluation = float(F.mse_loss(judging(x), y))
    optimizer.consolidate()
    return {
        "weights": {key: own.detach().clone() for key, own in model.named_parameters()},
        "losses": losses,
        "numbers": [for_evaluation, spread, float(optimizer.gradient_norm)],  # type: ignore[arg-type]
    }


@pytest.mark.parametrize(
    "name, inner",
    [(name, 1) for name in OPTIONS]
    + [("noloco", 2)]
    + [pytest.param(name, 2, marks=pytest.mark.long) for name in ("diloco", "localsgd", "streaming-diloco", "sparta")],
)
def test_stages_train_like_the_model_in_one_piece(name: str, inner: int) -> None:
    """Clipping, the spread and judging go over the whole replica; bytes are as planned; nobody else is charged."""
    whole = isles.run_virtual(unsplit, 2, links=LINKS, args=(name, inner))
    for rank, own in enumerate(isles.run_virtual(staged, 4 * inner, links=LINKS, args=(name, inner))):
        replica = whole[rank // (2 * inner)]
        for key, tensor in own["weights"].items():
            torch.testing.assert_close(tensor, replica["weights"][key], rtol=0, atol=1e-6)
        assert own["numbers"] == pytest.approx(replica["numbers"], rel=1e-5, abs=1e-6)
        if inner == 1:
            assert own["losses"] == pytest.approx(replica["losses"], abs=1e-6)
        assert own["computed"] == pytest.approx(STEPS * 0.05)
        assert own["sent"] == own["planned"]


def test_a_stage_may_be_clipped_by_its_own_norm() -> None:
    first = isles.run_virtual(staged, 4, links=LINKS, args=("diloco", 1, "own"))[0]
    whole = isles.run_virtual(unsplit, 2, links=LINKS, args=("diloco",))[0]["numbers"][-1]
    assert 0 < first["numbers"][-1] < whole
    assert first["losses"] != isles.run_virtual(staged, 4, links=LINKS, args=("diloco",))[0]["losses"]
    assert first["sent"] == first["planned"]  # of which no norm is a part


@pytest.mark.long
def test_stages_are_the_same_bits_on_gloo() -> None:
    virtual = isles.run_virtual(staged, 4, links=LINKS, args=("noloco",))
    for mine, theirs in zip(virtual, run_gloo(staged, 4, args=("noloco",)), strict=True):
        assert all(mine[key] == theirs[key] for key in ("losses", "sent", "numbers"))
        assert all(torch.equal(mine["weights"][key], theirs["weights"][key]) for key in mine["weights"])


def not_finite(world: Mesh, scaled: bool) -> dict[str, Any]:
    """DDP with error feedback between stages; one of the four gradients of step 3 is no number."""
    mesh = isles.mesh(outer=2, stage=2)
    half = Chain(mesh.outer.rank).halves[mesh.stage.rank]
    held = Plain(half, adamw(half), peers=mesh.stage, charged=True)
    options: dict[str, Any] = {"codec": "powersgd:1", "error_feedback": "local", "max_norm": MAX_NORM}
    optimizer = isles.DDP(half, held, mesh.outer, **options)  # type: ignore[arg-type]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if scaled else None
    if scaler is not None:
        scaler.scale(torch.zeros(()))  # a stage without the loss never asks for it, and it has no scale before
    traffic = world.world.traffic
    before = sum(traffic[channel].bytes_sent for channel in ("outer", "inner", "control"))
    stood, scales = [], []
    for step in range(1, 6):
        hook = next(half.parameters()).register_hook(
            lambda gradient, spoilt=step == 3 and world.rank == 0: gradient * torch.nan if spoilt else gradient
        )
        piped(mesh, half, *batch(mesh.outer.rank, step))
        hook.remove()
        was = weights(half)
        optimizer.step(scaler=scaler)
        optimizer.zero_grad()
        stood.append(torch.equal(was, weights(half)))
        scales.append(None if scaler is None else scaler.get_scale())
    sent = sum(traffic[channel].bytes_sent for channel in ("outer", "inner", "control")) - before
    unplanned = sent - optimizer.outline(5).sent[mesh.outer.rank]
    return {"stood": stood, "scales": scales, "skipped": optimizer.skipped, "unplanned": unplanned}


@pytest.mark.parametrize("scaled", [False, True])
def test_all_stages_of_all_replicas_leave_out_a_step_together(scaled: bool) -> None:
    for rank, own in enumerate(isles.run_virtual(not_finite, 4, links=LINKS, args=(scaled,))):
        assert own["stood"] == [False, False, True, False, False]
        assert own["skipped"] == 1
        if scaled:
            assert own["scales"] == [8.0, 8.0, 4.0, 4.0, 4.0]
        if rank % 2:  # stage 0 sends less in the step that is left out
            assert own["unplanned"] == (5 * 8 if scaled else 0)  # a scaler is the user's, and in no plan


def adapting(world: Mesh) -> list[dict[str, float]]:
    """DiLoCoX over stages of which one learns one direction and the other all."""
    mesh = isles.mesh(outer=2, stage=2)
    model = nn.Linear(24, 64, bias=False)
    held = Plain(model, torch.optim.SGD(model.parameters(), lr=0.05), peers=mesh.stage, charged=True)
    settings: dict[str, Any] = {"sync_every": 4, "rank": 4, "start_compress": 1, "window": 1}
    optimizer = isles.DiLoCoX(model, held, mesh.outer, **settings)  # type: ignore[arg-type]
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


def test_stages_agree_on_h_and_on_ranks() -> None:
    first, *others = isles.run_virtual(adapting, 4, links=LINKS)
    for own in others:
        assert [gauges["rank"] for gauges in own] == [gauges["rank"] for gauges in first]
        assert [gauges["sync_every"] for gauges in own] == [gauges["sync_every"] for gauges in first]


def restored(world: Mesh, files: list[bytes] | None) -> tuple[bytes, float, str]:
    """Islands in stages: saved after step 4, or gone on from there."""
    mesh = isles.mesh(outer=2, stage=2, inner=2)
    half = Chain(5 if files else mesh.outer.rank).halves[mesh.stage.rank]
    optimizer, _ = staged_optimizer(mesh, "noloco", half)
    if files:
        state = torch.load(io.BytesIO(files[world.rank]), weights_only=True)
        optimizer.load_weights(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    file, loss = io.BytesIO(), 0.0
    while optimizer.steps < STEPS:
        loss = piped(mesh, half, *batch(mesh.outer.rank * 2 + mesh.inner.rank, optimizer.steps + 1))
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.steps == 4:
            torch.save({"optimizer": optimizer.state_dict(), "model": optimizer.weights()}, file)
    optimizer.consolidate()
    return file.getvalue(), loss, bits(weights(half))


def test_stages_go_on_from_a_checkpoint_with_the_same_bits() -> None:
    whole = isles.run_virtual(restored, 8, links=LINKS, args=(None,))
    again = isles.run_virtual(restored, 8, links=LINKS, args=([file for file, _, _ in whole],))
    assert [own[1:] for own in whole] == [own[1:] for own in again]


def refusals(world: Mesh) -> list[str]:
    mesh = isles.mesh(outer=2, stage=2)
    half, other = nn.Linear(3, 3), nn.Linear(3, 3)
    decoder = isles.models.Decoder(
        isles.models.Shape(d_model=8, layers=1, heads=2, ffn=16, vocab=11, context=4, tie_embeddings=False)
    )

    def plain(model: nn.Module = half) -> Any:
        return Plain(model, adamw(model), peers=mesh.stage)

    reported = []
    for attempt in [
        lambda: isles.DiLoCo(half, plain(), mesh.world),
        lambda: isles.DiLoCo(other, plain(), mesh.outer),
        lambda: isles.NoLoCo(half, plain(), mesh.outer, on_peer_failure="solo"),
        lambda: isles.IST(decoder, plain(decoder), mesh.outer),
        lambda: Plain(half.requires_grad_(False), adamw(other)),
    ]:
        with pytest.raises(ValueError) as caught:
            attempt()
        reported.append(str(caught.value))
    return reported


def test_what_cannot_be_is_refused_with_the_hint() -> None:
    mends = ["mesh.stage and mesh.outer", "another module", '"raise"', "without stages", "requires_grad"]
    for reported in isles.run_virtual(refusals, 4, links=LINKS):
        for line, hint in zip(reported, mends, strict=True):
            assert hint in line


def at_odds(world: Mesh) -> None:
    mesh = isles.mesh(outer=2, stage=2)
    half = nn.Linear(3, 3)
    held: Any = Plain(half, adamw(half), peers=mesh.stage)
    isles.DiLoCo(half, held, mesh.outer, max_norm=1.0 if mesh.stage.rank else None)


def test_stages_of_other_settings_are_reported_before_they_wait_for_each_other() -> None:
    with pytest.raises(Diverged, match="settings"):
        isles.run_virtual(at_odds, 4, links=LINKS)


def accumulating(world: Mesh, name: str, batches: int) -> float:
    model = Net(seed=world.rank)
    optimizer = wrap(world, name, model)
    optimizer.batches = batches
    for step in range(4):
        for _ in range(batches - 1):
            with optimizer.no_sync():
                loss_of(model, world.rank, step).backward()
        loss_of(model, world.rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(world.transport.compute_seconds)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name, batches", [("ddp, small buckets", 1), ("ddp, small buckets", 5), ("diloco", 5)])
def test_a_step_of_several_batches_is_charged_once(name: str, batches: int) -> None:
    computed = isles.run_virtual(accumulating, 2, links=LINKS, args=(name, batches), step_seconds=0.1)
    assert computed == pytest.approx([0.4, 0.4])
