"""The calculations that `isles plan explain` knows: name -> (what it is, how to make its sheet)."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from isles.errors import unknown_name
from isles.report.sheet import Sheet

_PRESETS: dict[str, tuple[str, str]] = {
    "eager-table5": ("isles.report.sheets.eager:table5", "bandwidth for a utilisation, as the Eager paper prints it"),
    "eager-long-run": ("isles.report.sheets.eager:long_run", "the same need, when what is sent must also arrive"),
    "eager-table1": ("isles.report.sheets.eager:table1", "hours and terabytes of the Eager paper's 1B model"),
    "eager-table2": ("isles.report.sheets.eager:table2", "latency that each overlap tolerates"),
    "noloco-latency": ("isles.report.sheets.noloco:latency", "a tree against a pair when messages take random times"),
    "noloco-barrier": ("isles.report.sheets.noloco:barrier", "waiting for all against waiting for a partner"),
    "noloco-fleet": ("isles.report.sheets.fleet:fleet", "pairs against a mean over all, with pauses, event by event"),
    "noloco-table2": ("isles.report.sheets.stages:table2", "replicas x stages of NoLoCo's Table 2: held, sent, waited"),
    "swarm-square-cube": ("isles.report.sheets.stages:square_cube", "why wide models bear slow lines between stages"),
    "protocol-80mbit": ("isles.report.sheets.stages:eighty_mbit", "stages on home lines, a hundredth of the bytes"),
    "dilocox-speedup": ("isles.report.sheets.stages:speedup", "DiLoCoX against AllReduce over 1 Gbit/s, and its parts"),
    "karma-hybrid": (
        "isles.report.sheets.parallel:karma_hybrid",
        "data parallel out of core against models that are cut",
    ),
    "ist-quadratic": ("isles.report.sheets.ist:quadratic", "where independent subnets settle, off the optimum"),
    "noloco-quadratic": ("isles.report.sheets.noloco:quadratic", "NoLoCo's theory: mean, variance, stability region"),
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
