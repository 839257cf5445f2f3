"""The optimizer of a run: the method that the configuration names, around the inner one."""

from __future__ import annotations

from dataclasses import fields

from torch import nn

from isles.comm.group import Group
from isles.errors import in_section
from isles.replicas import method
from isles.replicas.sync import ReplicaSync
from isles.training.config import Config
from isles.training.inner import inner_notices, inner_optimizer


def wrapped(config: Config, model: nn.Module, group: Group) -> tuple[ReplicaSync, list[str]]:
    """The optimizer, and what a user should know about these settings. ValueError, with the key, where the run cannot
    mean what they say.
    """
    try:
        kind = method(config.method)
        part = kind.local_part(model, group, config.replicas)
        if kind.level == "optimizer" and config.model.autocast == "fp16":
            raise ValueError(
                f'model.autocast = "fp16" wants a gradient scaler, which {config.method} has no use for: "bf16"'
            )
        inner = inner_optimizer(part, config.inner, kind.usual_inner)
        optimizer = kind(part, inner, group, config.replicas, max_norm=config.inner.max_norm or None)
        notices = inner_notices(config.inner, kind.usual_inner, config.run.steps)
        if config.data.validation_fraction == 0:
            notices.append("data.validation_fraction = 0: there will be no validation loss")
        return optimizer, notices + optimizer.advise(config.run.steps)
    except ValueError as error:
        keys = [field.name for field in fields(config.replicas)]
        raise ValueError(in_section("replicas", str(error), keys)) from error
