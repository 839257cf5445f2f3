"""The sheet of `isles plan explain noloco-fleet`: fleets of up to 1,024 workers, event by event, with pauses."""

from __future__ import annotations

from isles.network.pauses import Pauses
from isles.network.theory.barrier import StepLaw
from isles.network.theory.fleet import Fleet, run
from isles.report.panels import Table
from isles.report.sheet import Sheet

_WORKERS, _ROUNDS, _STEPS = (16, 64, 256, 1024), 20, 50
_PAUSES = {"none": None, "every 20,000 s, 600 s": Pauses(every=20_000, seconds=600)}


def fleet() -> Sheet:
    """Seconds a round of pairs and of a mean over everybody, and how many times longer the mean takes."""
    rows, data = [], []
    for words, pauses in _PAUSES.items():
        for workers in _WORKERS:
            one = Fleet(workers=workers, steps=StepLaw(count=_STEPS), message=10.0, message_variance=0.5, pauses=pauses)
            pairs, everybody = (run(one, mixing, _ROUNDS).seconds / _ROUNDS for mixing in ("pairs", "all"))
            rows.append([str(workers), words, f"{pairs:.1f}", f"{everybody:.1f}", f"{everybody / pairs:.2f}"])
            data.append({"workers": workers, "pauses": words, "pairs_seconds": pairs, "all_seconds": everybody})
    return Sheet(
        name="noloco-fleet",
        title="Pairs against a mean over everybody, event by event",
        subtitle="Random step and message times, after section 5 of arXiv 2506.10911, and pauses; only clocks move",
        table=Table(
            heads=["workers", "pauses", "pairs, s a round", "all, s a round", "all / pairs"], rows=rows, names=2
        ),
        what=f"{_ROUNDS} rounds of {_STEPS} steps; messages of 10 s on average, log-normal with variance 0.5",
        data={"rounds": _ROUNDS, "steps": _STEPS, "rows": data},
        notes=("One draw of each (seed 0): a few percent of noise. Larger fleets: docs/simulating.md.",),
    )
