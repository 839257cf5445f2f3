"""The model that is trained: a Llama-style decoder, its named sizes, and how to build one."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import ModelConfig
    from .decoder import Decoder, Output
    from .factory import autocast, build, device_of
    from .sizes import SIZES, Shape, flops_per_token, parameters, shape_of

_HOMES = {
    "Decoder": "decoder",
    "ModelConfig": "config",
    "Output": "decoder",
    "SIZES": "sizes",
    "Shape": "sizes",
    "autocast": "factory",
    "build": "factory",
    "device_of": "factory",
    "flops_per_token": "sizes",
    "parameters": "sizes",
    "shape_of": "sizes",
}

__all__ = [
    "SIZES",
    "Decoder",
    "ModelConfig",
    "Output",
    "Shape",
    "autocast",
    "build",
    "device_of",
    "flops_per_token",
    "parameters",
    "shape_of",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
