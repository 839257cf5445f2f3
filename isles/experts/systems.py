"""The expert systems by name: what their section holds, and the program behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from isles.errors import unknown_name
from isles.experts.hdee.hdee import HdeeConfig
from isles.experts.hdee.run import Hdee
from isles.experts.reading import ExperimentConfig
from isles.experts.smalltalk.run import Smalltalk
from isles.experts.smalltalk.smalltalk import SmalltalkConfig
from isles.experts.system import System

SYSTEMS: dict[str, tuple[type, type[System[Any]]]] = {
    "hdee": (HdeeConfig, Hdee),
    "smalltalk": (SmalltalkConfig, Smalltalk),
}


def settings(name: str) -> type:
    """The class of the section [name]. ValueError for a system that is not known."""
    if name not in SYSTEMS:
        raise ValueError(unknown_name("system", name, SYSTEMS))
    return SYSTEMS[name][0]


def opened(asked: ExperimentConfig[Any], out: Path) -> System[Any]:
    """The program for a request, in its directory."""
    return SYSTEMS[asked.system][1](asked, out)
