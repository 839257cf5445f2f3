"""Host states that ddp's workers share: the bits of ddp, and 1/R of the states on each host."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import isles
from isles.comm.virtual.cluster import VirtualTransport
from isles.memory.costs import Placement
from isles.memory.engines.base import Inline, ThreadEngine
from isles.memory.optimizer import Managed
from isles.memory.parameters import runs
from isles.models.decoder import Decoder
from isles.network.machines import MACHINES
from isles.plan.run_plan import plan_run
from isles.running.run import launch
from isles.training.config.reading import read_config
from tests.gloo import run_gloo
from tests.memory.loops import DECODER, SHAPE, UNITS, adamw, plan_of, profiled
from tests.training.test_memory import PLANS

PLANS.setdefault("all on the host", (Placement("host", "keep"),) * UNITS)
STEPS = 4
MOMENTS = ("exp_avg", "exp_avg_sq")


def _worker(world: Any, plan: str | None, shared: bool, update: str = "exact", pause: int | None = None) -> Any:
    """What a worker is left with: losses, weights, moments of every parameter, bytes sent."""
    group, losses, saved = world.outer, [], None
    for first, last in [(0, STEPS)] if pause is None else [(0, pause), (pause, STEPS)]:
        model = Decoder(SHAPE)
        inner, managed = adamw(model), None
        if plan is not None:
            made = profiled(DECODER, "none")
            chosen = plan_of(made, PLANS[plan], update=update, shared=group.size if shared else 1, accumulation=2)
            engine = Inline() if isinstance(world.world.transport, VirtualTransport) else ThreadEngine()
            managed = Managed(chosen, model, inner, profile=made, machine=MACHINES["H100"], engine=engine)
        max_norm = 1.0 if update == "exact" else None
        optimizer = isles.DDP(model, managed or inner, group, max_norm=max_norm, bucket_megabytes=0.1)
        if saved is not None:
            optimizer.load_weights(saved[1])
            optimizer.load_state_dict(saved[0])
        for step in range(first, last):
            for index in range(2):
                loss = model(DECODER.batch(1000 * world.rank + 2 * step + index)).loss / 2
                if index == 0:
                    with optimizer.no_sync():
                        loss.backward()
                else:
                    loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                with optimizer.evaluation_weights() as judged, torch.no_grad():
                    losses.append(judged(DECODER.batch(99)).loss.item())
        optimizer.catch_up()
        weights = {name: tensor.clone() for name, tensor in optimizer.weights().items()}
        saved = [optimizer.state_dict(), weights]
        states = [[_of(inner, parameter, key) for parameter in model.parameters()] for key in MOMENTS]
        if managed is not None:
            managed.close()
    return losses, list(weights.values()), states, world.world.traffic.total("bytes_sent", "inner")


def _of(inner: torch.optim.Optimizer, parameter: Tensor, key: str) -> Tensor:
    return inner.state[parameter].get(key, torch.empty(0))


def _is_same(got: list[Any], wanted: list[Any]) -> None:
    """The workers' shares put together are what each of the others has."""
    for one, plain in zip(got, wanted, strict=True):
        assert one[0] == plain[0]
        assert all(map(torch.equal, one[1], plain[1]))
        for moment, whole in enumerate(plain[2]):
            for number, own in enumerate(whole):
                parts = [worker[2][moment][number] for worker in got]
                is_shared = parts[0].numel() < own.numel() or parts[1].numel() == 0
                assert torch.equal(torch.cat(parts).view_as(own) if is_shared else parts[0], own)


def _virtual(workers: int, *args: Any) -> list[Any]:
    return isles.run_virtual(_worker, workers, args=args)


@pytest.mark.parametrize(
    ("plan", "workers", "update"),
    [
        ("mixed", 2, "exact"),
        *(
            pytest.param(plan, workers, update, marks=pytest.mark.long)
            for plan in ("mixed", "host", "optimizer", "all on the host")
            for workers in (2, 4)
            for update in ("exact", "early")
        ),
    ],
)
def test_shares_keep_the_bits_of_ddp(plan: str, workers: int, update: str) -> None:
    wanted, got = (_virtual(workers, one, one is not None, update) for one in (None, plan))
    _is_same(got, wanted)
    if plan != "mixed":
        blocks = [sum(p.numel() for p in block.parameters()) for block in Decoder(SHAPE).blocks]
        for worker in got:
            own = sum(
                value.numel() for moment in worker[2] for value in moment if value.ndim == 1 and value.numel() > 64
            )
            assert own == pytest.approx(2 * sum(blocks) / workers, rel=0.02)


@pytest.mark.long
@pytest.mark.parametrize("plan", ["mixed", "host", "optimizer"])
def test_shares_between_processes(plan: str) -> None:
    wanted, got = (run_gloo(_worker, args=(one, one is not None)) for one in (None, plan))
    _is_same(got, wanted)


@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.long)])
def test_a_run_of_shares_goes_on(workers: int) -> None:
    _is_same(_virtual(workers, "host", True, "exact", 2), _virtual(workers, None, False))


def test_shares_of_others_are_refused() -> None:
    def worker(world: Any, shared: bool) -> None:
        model = Decoder(SHAPE)
        inner, made = adamw(model), profiled(DECODER, "none")
        for parameter in model.parameters():
            inner.state[parameter] = {"exp_avg": torch.zeros(7), "step": torch.zeros(())}
        saved = inner.state_dict()
        inner.state.clear()
        chosen = plan_of(made, PLANS["host"], shared=2 if shared else 1)
        with Managed(chosen, model, inner, profile=made, machine=MACHINES["H100"], engine=Inline()) as managed:
            isles.DDP(model, managed, world.outer)
            managed.load_state_dict(saved)

    with pytest.raises(ValueError, match="shares among another number of workers"):
        isles.run_virtual(worker, 2, args=(True,))
    with pytest.raises(ValueError, match=r"the states are a share of the whole: resume with memory\.shard = true"):
        isles.run_virtual(worker, 2, args=(False,))
    with pytest.raises(ValueError, match="shares states among 2 workers, and there are 3"):
        isles.run_virtual(worker, 3, args=(True,))


@pytest.mark.parametrize("entries", [1, 64, 65, 1000, 4096])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_runs_are_all_of_it(entries: int, size: int) -> None:
    tensor = torch.arange(float(entries))
    parts = runs(tensor, size)
    assert len(parts) == size
    assert torch.equal(torch.cat(parts), tensor)
    assert all(part.storage_offset() % 64 == 0 for part in parts if part.numel())


# ---------------------------------------------------------------------------------------------------------------------
# Whole runs


def _config(*words: str, method: str = "ddp") -> Any:
    small = [
        "model.d_model=64",
        "model.layers=4",
        "model.context=32",
        "data.batch_size=4",
        "data.validation_sequences=4",
        "world.backend=virtual",
        "run.steps=3",
        "memory.machine=RTX 3060",
        "memory.device_budget=2MB",
    ]
    return read_config(None, {"replicas.method": method, "memory.method": "auto"}, [*small, *words])


@pytest.mark.parametrize(
    ("method", "words"),
    [
        pytest.param("ddp", ["world.workers=2"], marks=pytest.mark.long),
        pytest.param("diloco", ["world.workers=4", "world.inner=2", "replicas.sync_every=2"], marks=pytest.mark.long),
    ],
)
def test_a_run_with_shares(method: str, words: list[str], tmp_path: Path) -> None:
    told = []
    for shard in ("false", "true"):
        config, out = _config(*words, f"memory.shard={shard}", method=method), tmp_path / shard
        planned = plan_run(config)
        launch(config, out, lambda line: None, lambda notice: None)
        summary = json.loads((out / "summary.json").read_text())
        told.append((summary, planned, (out / "model.safetensors").read_bytes()))
    (plain, alone, weights), (shared, sharing, others) = told
    assert others == weights
    assert shared["val_loss"] == plain["val_loss"]
    assert sharing.placed is not None
    assert sharing.placed.shared == 2
    more = [after - before for before, after in zip(alone.outline.sent, sharing.outline.sent, strict=True)]
    measured = shared["bytes_sent_per_worker"] - plain["bytes_sent_per_worker"]
    assert 0 < measured == (sum(more) / len(more) if method == "ddp" else pytest.approx(more[0], rel=0.01))


@pytest.mark.parametrize(
    ("method", "words", "told"),
    [
        (
            "diloco",
            ["world.workers=2"],
            r"memory\.shard = true does not go with a plan of memory: workers have weights of their own",
        ),
        ("ddp", ["world.workers=2", "memory.method=none"], "of a plan: set memory.method"),
    ],
)
def test_what_cannot_be_shared_is_one_line(method: str, words: list[str], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        plan_run(_config(*words, "memory.shard=true", method=method))
