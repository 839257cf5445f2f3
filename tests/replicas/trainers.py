"""Loops of other people's trainers around a method of Isles; in a module of its own, for fresh processes to import."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import isles
from isles.comm.mesh import Mesh
from tests.replicas.workers import Net, batch, bits, loss_of, weights, wrap

STEPS = 6
Result = tuple[str, float]
"""The weights' bits and the scale at the end."""


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=1024.0)


def factor(world: Mesh, step: int) -> float:
    """Of the loss: worker 1's overflows in step 2."""
    return torch.inf if (step, world.rank) == (2, 1) else 1.0


def plain(world: Mesh, name: str) -> Result:
    """The loop that torch's documentation shows."""
    model, own = Net(), scaler()
    optimizer = wrap(world, name, model)
    for step in range(1, STEPS + 1):
        own.scale(loss_of(model, world.rank, step) * factor(world, step)).backward()
        own.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        own.step(optimizer)
        own.update()
        optimizer.zero_grad()
    return bits(weights(optimizer.consolidate())), own.get_scale()


def accelerated(world: Mesh, name: str) -> Result:
    from accelerate import Accelerator  # loaded here: it takes seconds
    from accelerate.optimizer import AcceleratedOptimizer

    model, own = Net(), scaler()
    method = wrap(world, name, model)
    accelerator = Accelerator(cpu=True)
    optimizer = AcceleratedOptimizer(method, scaler=own)  # as `prepare` makes it where it has a scaler
    accelerator._optimizers.append(optimizer)
    accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"  # refused by its name without a GPU
    accelerator.scaler = own
    for step in range(1, STEPS + 1):
        accelerator.backward(loss_of(model, world.rank, step) * factor(world, step))
        accelerator.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return bits(weights(method.consolidate())), own.get_scale()


def fabricated(world: Mesh, name: str) -> Result:
    from lightning.fabric import Fabric
    from lightning.fabric.plugins import MixedPrecision

    model, own = Net(), scaler()
    method = wrap(world, name, model)
    plugin = MixedPrecision("16-mixed", "cpu", scaler=own)
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    optimizer = fabric.setup_optimizers(method)
    for step in range(1, STEPS + 1):
        fabric.backward(loss_of(model, world.rank, step) * factor(world, step))
        fabric.clip_gradients(model, optimizer, max_norm=0.1, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()
    return bits(weights(method.consolidate())), own.get_scale()


def lightning(world: Mesh, name: str) -> Result:
    import lightning as L
    from lightning.pytorch.plugins import MixedPrecision

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, index: int) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return nn.functional.mse_loss(self.net(batch[0]), batch[1]) * factor(world, index + 1)

        def configure_optimizers(self) -> Any:
            self.method = wrap(world, name, self.net)
            return self.method

    module, own = Module(), scaler()
    data = DataLoader([batch(world.rank, step) for step in range(1, STEPS + 1)], batch_size=None)  # type: ignore[arg-type]
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=STEPS,
        plugins=[MixedPrecision("16-mixed", "cpu", scaler=own)],
        gradient_clip_val=0.1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data)
    return bits(weights(module.method.consolidate())), own.get_scale()


def transformed(world: Mesh, name: str) -> str:
    """transformers' Trainer, which is to find no other process: else it makes the model a DistributedDataParallel."""
    from transformers import Trainer, TrainingArguments

    class Judged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": nn.functional.mse_loss(self.net(x), labels)}

    model = Judged()
    method = wrap(world, name, model)
    rows = [dict(zip(("x", "labels"), batch(world.rank, step), strict=True)) for step in range(1, STEPS + 1)]
    with tempfile.TemporaryDirectory() as folder:
        options = {"max_steps": STEPS, "per_device_train_batch_size": 1, "max_grad_norm": 0.1, "use_cpu": True}
        quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "train_sampling_strategy": "sequential"}
        rate = torch.optim.lr_scheduler.ConstantLR(method, 1.0)
        trainer = Trainer(
            model,
            TrainingArguments(folder, **options, **quiet),
            data_collator=lambda one: one[0],
            train_dataset=rows,  # type: ignore[arg-type]
            optimizers=(method, rate),
        )
        trainer.train()
    assert trainer.model_wrapped is model
    return bits(weights(isles.unwrap(trainer.optimizer).consolidate()))


def bare(world: Mesh, name: str) -> str:
    """The same steps in a loop."""
    model = Net()
    method = wrap(world, name, model)
    for step in range(1, STEPS + 1):
        loss_of(model, world.rank, step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        method.step()
        method.zero_grad()
    return bits(weights(method.consolidate()))


TRAINERS: dict[str, Callable[[Mesh, str], Result]] = {
    "accelerate": accelerated,
    "fabric": fabricated,
    "lightning": lightning,
}
