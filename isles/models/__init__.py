"""The models: a Llama-style decoder, its named sizes, and what one token of it costs.

`ModelConfig` and the counts of `sizes` are importable without torch; the names below load on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import ModelConfig
    from .decoder import Decoder, Output, next_token_loss
    from .factory import Limits, autocast, build, choose_device, limits, sketch
    from .sizes import (
        SIZES,
        Shape,
        embedding_parameters,
        flops_per_token,
        non_embedding_parameters,
        parameters,
        shape_of,
    )

_HOMES = {
    "ModelConfig": "config",
    "SIZES": "sizes",
    "Shape": "sizes",
    "embedding_parameters": "sizes",
    "flops_per_token": "sizes",
    "non_embedding_parameters": "sizes",
    "parameters": "sizes",
    "shape_of": "sizes",
    "Decoder": "decoder",
    "Output": "decoder",
    "next_token_loss": "decoder",
    "autocast": "factory",
    "build": "factory",
    "choose_device": "factory",
    "Limits": "factory",
    "limits": "factory",
    "sketch": "factory",
}

__all__ = [
    "SIZES",
    "Decoder",
    "Limits",
    "ModelConfig",
    "Output",
    "Shape",
    "autocast",
    "build",
    "choose_device",
    "embedding_parameters",
    "flops_per_token",
    "limits",
    "next_token_loss",
    "non_embedding_parameters",
    "parameters",
    "shape_of",
    "sketch",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value  # the next access no longer comes through here
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
