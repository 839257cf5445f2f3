"""What a user of IST should know about a division: whether it is too fine, and what to compare it with."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from isles.models.decoder import Decoder
from isles.models.sizes import like_size
from isles.replicas.methods.ist.partition import Division

_FEW = 64  # units of an MLP: below it subnets are poor; one head each will do


def advice(model: nn.Module, division: Division) -> list[str]:
    """Notices, a line each."""
    workers = division.workers
    if workers == 1:
        return ["one worker holds all units: nothing is divided"]
    notices = []
    thin = {layer.rpartition(".")[2]: units // workers for layer, units in division.layers.items()}
    thin = {kind: least for kind, least in thin.items() if kind != "heads" and least < _FEW}
    for kind, least in thin.items():
        notices.append(
            f"a subnet has {least} {kind} units a layer: {_FEW} or more learn better; widen it or divide less"
        )
    twice = any(sum(axis is not None for axis in axes) > 1 for axes in division.axes.values())
    if twice and division.sampler == "rolling":
        notices.append('sampler = "rolling": units far from each other in two layers never meet; "random" mixes all')
    if isinstance(model, Decoder):
        notices.append(_baseline(model, division))
    return notices


def _baseline(model: Decoder, division: Division) -> str:
    """The dense model that IST has to beat."""
    kinds = {layer.rpartition(".")[2] for layer in division.layers}
    if kinds == {"ffn"}:
        dense, how = replace(model.shape, ffn=model.shape.ffn // division.workers), "is a subnet's shape"
    else:
        rest = sum(p.numel() for name, p in model.named_parameters() if name not in division.axes)
        count = rest + sum(division.held_numel(name, worker=0) for name in division.axes)
        dense, how = like_size(model.shape, count), "has a subnet's size"
    changed = [key for key in ("d_model", "heads", "ffn") if getattr(dense, key) != getattr(model.shape, key)]
    settings = " ".join(f"--set model.{key}={getattr(dense, key)}" for key in changed)
    return f"compare with a small dense model: --method ddp {settings} {how}, and may do as well"
