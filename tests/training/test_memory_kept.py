"""Activations alone, kept or made again: with fsdp, which has the weights, and with gradient scalers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import isles
from isles.memory.activations import Remade
from isles.memory.costs import Placement, Profile, least_peak
from isles.memory.meter import MemoryMeter
from isles.memory.profile import adamw_bytes, fully_sharded
from isles.models.decoder import Decoder
from isles.plan.run_plan import plan_run
from isles.replicas.island.fsdp import own_rows
from isles.running.run import launch
from isles.training.config.reading import read_config
from tests.gloo import run_gloo
from tests.memory.loops import DECODER, SHAPE, UNITS, adamw, plan_of, profiled

PLANS = {"keep": "KKKK", "recompute": "RRRR", "mixed": "KRRK"}
CODES = {"K": Placement("device", "keep"), "R": Placement("device", "recompute")}


@contextmanager
def _seen(meter: MemoryMeter) -> Iterator[None]:
    """torch's own storages of gathered weights, which no operation makes."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param as one
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as many

    alloc, free = one.alloc_storage, one.free_storage

    def made(tensor: Tensor) -> None:
        alloc(tensor)
        meter.track(tensor)

    def gone(tensor: Tensor) -> None:
        meter.forget(tensor)
        free(tensor)

    one.alloc_storage = many.alloc_storage = made
    one.free_storage = gone
    try:
        yield
    finally:
        one.alloc_storage = many.alloc_storage = alloc
        one.free_storage = free


def _worker(world: Any, made: Profile, plan: str | None, accumulation: int, keeps: bool) -> Any:
    """What a worker of fsdp is left with, and the peak of its bytes beside the plan's."""
    meter, planned = MemoryMeter(), 0
    sketch = Decoder(SHAPE)
    settings = {"keeps_gathered": keeps, "batches": accumulation, "state_bytes": adamw_bytes}
    sharded = fully_sharded(made, sketch, world.outer.size, **settings)  # type: ignore[arg-type]
    model = isles.shard(Decoder(SHAPE), world.outer, reshard_after_forward=not keeps)
    inner, remade = adamw(model), None
    if plan is not None:
        placements = tuple(CODES[one] for one in PLANS[plan])
        planned = least_peak(sharded, placements, accumulation)
        remade = Remade(plan_of(sharded, placements), model)
    optimizer = isles.FSDP(model, inner, world.outer, max_norm=1.0, reshard_after_forward=not keeps)
    optimizer.batches = accumulation
    meter.track(*(own_rows(one) for one in model.parameters()), *model.buffers())
    losses = []
    for step in range(3):
        with meter, _seen(meter):
            for index in range(accumulation):
                with optimizer.no_sync() if index + 1 < accumulation else nullcontext():
                    loss = model(DECODER.batch(100 * world.rank + step * accumulation + index)).loss / accumulation
                    loss.backward()
                    losses.append(loss.item())
                    del loss
        optimizer.step()
        meter.track(*(own_rows(v) for state in inner.state.values() for v in state.values() if isinstance(v, Tensor)))
        optimizer.zero_grad()
    weights = [own_rows(one).clone() for one in model.parameters()]
    states = [own_rows(v).clone() for state in inner.state.values() for v in state.values() if isinstance(v, Tensor)]
    if remade is not None:
        remade.close()
    return losses, weights, states, world.world.traffic.total("bytes_sent"), meter.peak, planned


@pytest.mark.parametrize("keeps", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("accumulation", [1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "plan", ["mixed", *(pytest.param(one, marks=pytest.mark.long) for one in ("keep", "recompute"))]
)
def test_fsdp_keeps_its_bits(plan: str, accumulation: int, keeps: bool) -> None:
    made = profiled(DECODER, "none")
    wanted, got = (run_gloo(_worker, args=(made, one, accumulation, keeps)) for one in (None, plan))
    for one, plain in zip(got, wanted, strict=True):
        assert one[0] == plain[0]
        assert one[3] == plain[3]
        for mine, theirs in ((one[1], plain[1]), (one[2], plain[2])):
            assert all(map(torch.equal, mine, theirs))
        print(f"{one[4]} of {one[5]}: {one[4] / one[5]:.3f}, without a plan {plain[4]}")
        assert 0.8 * one[5] <= one[4] <= one[5]
    if plan == "recompute":
        assert got[0][4] < wanted[0][4]


@pytest.mark.parametrize("plan", ["mixed", pytest.param("recompute", marks=pytest.mark.long)])
def test_a_scaler_may_skip_steps(plan: str) -> None:
    def trained(remade: bool) -> tuple[list[float], list[Tensor], float]:
        model = Decoder(SHAPE)
        optimizer, scaler = adamw(model), torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=2)
        under = Remade(plan_of(profiled(DECODER, "none"), tuple(CODES[one] for one in PLANS[plan])), model)
        if not remade:
            under.close()
        losses = []
        for step in range(12):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(DECODER.batch(step)).loss
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, [parameter.detach().clone() for parameter in model.parameters()], scaler.get_scale()

    wanted, got = trained(False), trained(True)
    assert 1 < got[2] < 2.0**22  # steps were skipped
    assert (got[0], got[2]) == (wanted[0], wanted[2])
    assert len(set(got[0])) > 3  # and others were not
    assert all(map(torch.equal, got[1], wanted[1]))


def _config(*words: str, method: str = "fsdp", backend: str = "distributed") -> Any:
    small = [
        "model.d_model=64",
        f"model.layers={UNITS}",
        "model.context=32",
        "data.batch_size=4",
        "data.validation_sequences=2",
        f"world.backend={backend}",
        "world.workers=2",
        "run.steps=3",
    ]
    return read_config(None, {"replicas.method": method}, [*small, *words])


def _left(config: Any, out: Path) -> tuple[bytes, dict[str, Any], list[Any]]:
    launch(config, out, lambda line: None, lambda notice: None)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = sorted((line["step"], line["loss"]) for line in lines if "loss" in line)
    return (out / "model.safetensors").read_bytes(), json.loads((out / "summary.json").read_text()), losses


@pytest.mark.parametrize(
    ("method", "backend", "words"),
    [
        pytest.param("ddp", "virtual", [], marks=pytest.mark.long),
        pytest.param("fsdp", "distributed", [], marks=pytest.mark.long),
        pytest.param(
            "diloco",
            "distributed",
            ["world.workers=4", "world.inner=2", "world.inside=fsdp", "replicas.sync_every=2"],
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_run_keeps_its_bits(method: str, backend: str, words: list[str], tmp_path: Path) -> None:
    plain = _config(*words, method=method, backend=backend)
    budget = plan_run(_config(*words, "memory.method=checkpoint", method=method, backend=backend)).placed
    assert budget is not None
    less = f"memory.device_budget={int(0.9 * budget.peak)}B"  # so that some blocks must be made again
    planned = _config(*words, "memory.method=checkpoint", less, method=method, backend=backend)
    wanted, got = _left(plain, tmp_path / "plain"), _left(planned, tmp_path / "planned")
    assert got[0] == wanted[0]
    assert got[2] == wanted[2]
    assert got[1]["val_loss"] == wanted[1]["val_loss"]
    assert got[1]["bytes_sent_per_worker"] == wanted[1]["bytes_sent_per_worker"]
    told = got[1]["memory"]
    assert "DR" in told["plan"]
    if method == "ddp":
        assert 0.9 * told["planned_peak_bytes"] <= told["measured_peak_bytes"] <= told["planned_peak_bytes"]
    else:
        assert told["measured_peak_bytes"] is None  # torch's own storages are not seen


@pytest.mark.parametrize(
    ("method", "words", "told"),
    [
        ("ist", ["memory.method=checkpoint"], "it changes the widths of blocks in place"),
        ("fsdp", ["memory.method=auto"], 'fsdp keeps the storages of the parameters itself.*"checkpoint"'),
        ("fsdp", ["memory.method=karma"], "fsdp keeps the storages"),
        (
            "diloco",
            ["world.workers=4", "world.inner=2", "world.inside=fsdp", "memory.method=auto"],
            "fsdp keeps the storages",
        ),
        ("fsdp", ["memory.method=checkpoint", "memory.emulate=true"], "without memory.emulate"),
        (
            "ddp",
            ["memory.method=autohete", "model.autocast=fp16", "model.device=cuda"],
            "a gradient scaler may skip a step after its updates",
        ),
        (
            "ddp",
            ["memory.method=checkpoint", "model.compile=true"],
            "a compiler decides itself",
        ),
    ],
)
def test_what_moves_is_refused_in_one_line(method: str, words: list[str], told: str) -> None:
    with pytest.raises(ValueError, match=rf"^[^\n]* does not go with a plan of memory[^\n]*{told}[^\n]*$"):
        plan_run(_config("memory.machine=H100", *words, method=method))


def test_a_plan_that_moves_is_refused_where_nothing_may(tmp_path: Path) -> None:
    words = ["memory.machine=RTX 3060", "memory.device_budget=2MB"]
    path = tmp_path / "plan.json"
    moving = plan_run(_config("memory.method=auto", *words, method="ddp", backend="virtual")).placed
    assert moving is not None
    path.write_text(moving.to_json(), encoding="utf-8")
    with pytest.raises(ValueError, match=r'which memory\.method = "checkpoint" leaves out: set it to "auto"'):
        plan_run(_config("memory.method=checkpoint", *words, f"memory.plan={path}", method="ddp", backend="virtual"))
