"""The calculations that `isles plan --preset` knows: name -> (what it is, how to make its sheet)."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from isles.errors import unknown_name
from isles.report.sheet import Sheet

_PRESETS: dict[str, tuple[str, str]] = {
    "eager-table5": ("isles.report.eager_sheets:table5", "bandwidth for a utilisation, as the Eager paper prints it"),
    "eager-long-run": ("isles.report.eager_sheets:long_run", "the same need, when what is sent must also arrive"),
    "eager-table1": ("isles.report.eager_sheets:table1", "hours and terabytes of the Eager paper's 1B model"),
    "eager-table2": ("isles.report.eager_sheets:table2", "latency that each overlap tolerates"),
    "noloco-latency": ("isles.report.noloco_sheets:latency", "a tree against a pair when messages take random times"),
    "noloco-barrier": ("isles.report.noloco_sheets:barrier", "waiting for all against waiting for a partner"),
    "ist-quadratic": ("isles.report.ist_sheets:quadratic", "where independent subnets settle, off the optimum"),
    "noloco-quadratic": ("isles.report.noloco_sheets:quadratic", "NoLoCo's theory: mean, variance, stability region"),
}


def presets() -> dict[str, str]:
    """Every name with what it is."""
    return {name: what for name, (_, what) in _PRESETS.items()}


def sheet(name: str) -> Sheet:
    """Make the sheet called `name`. ValueError with the list where there is none."""
    if name not in _PRESETS:
        raise ValueError(unknown_name("preset", name, _PRESETS))
    module, _, function = _PRESETS[name][0].partition(":")
    make: Callable[[], Sheet] = getattr(import_module(module), function)
    return make()
