"""The calculations that `isles plan explain` knows: name -> (what it is, how to make its sheet)."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from isles.base.errors import unknown_name
from isles.report.sheet import Sheet

_PRESETS: dict[str, tuple[str, str]] = {
    "eager-table5": ("isles.papers.eager:table5_sheet", "bandwidth for a utilisation, as the Eager paper prints it"),
    "eager-long-run": ("isles.papers.eager:long_run_sheet", "the same need, when what is sent must also arrive"),
    "eager-table1": ("isles.papers.eager:table1_sheet", "hours and terabytes of the Eager paper's 1B model"),
    "eager-table2": ("isles.papers.eager:table2_sheet", "latency that each overlap tolerates"),
    "noloco-latency": ("isles.papers.noloco:latency", "a tree against a pair when messages take random times"),
    "noloco-barrier": ("isles.papers.noloco:barrier", "waiting for all against waiting for a partner"),
    "noloco-fleet": ("isles.papers.fleet:fleet", "pairs against a mean over all, with pauses, event by event"),
    "noloco-table2": ("isles.papers.pipelines:table2", "replicas x stages of NoLoCo's Table 2: held, sent, waited"),
    "swarm-square-cube": ("isles.papers.pipelines:square_cube", "why wide models bear slow lines between stages"),
    "protocol-80mbit": ("isles.papers.pipelines:eighty_mbit", "stages on home lines, a hundredth of the bytes"),
    "dilocox-speedup": ("isles.papers.pipelines:speedup", "DiLoCoX against AllReduce over 1 Gbit/s, and its parts"),
    "karma-hybrid": (
        "isles.papers.memory_parallel_sheet:karma_hybrid",
        "data parallel out of core against models that are cut",
    ),
    "ist-quadratic": ("isles.papers.ist:quadratic", "where independent subnets settle, off the optimum"),
    "noloco-quadratic": ("isles.papers.noloco:quadratic", "NoLoCo's theory: mean, variance, stability region"),
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
