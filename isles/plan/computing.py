"""How much a model computes: the operations of a token, counted, and the seconds of a step, measured here."""

from __future__ import annotations

import statistics
import time
import warnings
from dataclasses import replace

import torch
from torch import nn

from isles.base.imports import describe
from isles.base.modes import torch_threads
from isles.models import autocast, build, flops_per_token
from isles.models import parameters as count_parameters
from isles.models.config import ModelConfig
from isles.replicas import method
from isles.training.config.sections import Config
from isles.training.optimizer import inner_optimizer

_PROBES = 3
_SMALL = 256e6  # bytes of weights that are made for counting


def counted_flops(config: ModelConfig, model: nn.Module, context: int) -> int | None:
    """FLOPs of a token, forward and backward: by formula for Isles' decoder; of another model, or of a worker's part of
    the decoder, what torch's counter finds (products, convolutions, attention) in one forward pass, times three.
    `model` is its sketch; where it cannot do without numbers and is small, it is built on the CPU. None where that does
    not work either.
    """
    if config.own is None and sum(map(torch.Tensor.numel, model.parameters())) == count_parameters(config.shape()):
        return flops_per_token(config.shape())
    try:
        forward = _forward_flops(model, context)
    except Exception as error:  # of the user's model, whatever it raises
        if sum(parameter.nbytes for parameter in model.parameters()) > _SMALL:
            warnings.warn(f"FLOPs are not counted: the model wants numbers ({describe(error)})", stacklevel=2)
            return None
        forward = _forward_flops(build(replace(config, device="cpu", autocast="none", compile=False), seed=0), context)
    return 3 * forward // context


@torch.no_grad()
def _forward_flops(model: nn.Module, context: int) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    device = next(model.parameters()).device
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, context + 1, dtype=torch.int64, device=device))
    return counter.get_total_flops()


def measured_step(config: Config, sequences: int, context: int) -> float:
    """Median seconds of an inner step (forward, backward, inner optimizer) of one worker that has this machine to
    itself.
    """
    with torch_threads(config.world.start_threads):
        model = build(config.model, seed=config.run.seed)
        device = next(model.parameters()).device
        optimizer = inner_optimizer(model, config.inner, method(config.method).usual_inner)
        tokens = torch.zeros(sequences // config.inner.accumulation, context + 1, dtype=torch.int64, device=device)
        times = []
        for _ in range(1 + _PROBES):
            started = time.perf_counter()
            for _ in range(config.inner.accumulation):
                with autocast(config.model, device):
                    loss = model(tokens).loss
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - started)
        return statistics.median(times[1:])
