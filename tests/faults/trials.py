"""What is tried: method x fault x moment x worker x launcher, and the trial of a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.faults.striking import KINDS, MOMENTS, SIGNALS

METHODS = ("none", "ddp", "diloco", "noloco", "solo", "streaming-diloco", "sparta", "ist", "dilocox", "demo")
LAUNCHERS = {"one machine": 5, "two nodes": 5, "run_local": 3, "torchrun": 1}
"""How often each is drawn: torchrun starts a Python for each worker, which takes most of a trial."""
WORKERS, STEPS = 3, 12
SILENCE, DEADLINE, JOIN, GRACE = 8.0, 3.0, 20.0, 10.0
_NAMED = {"KILL": 5.0, "SEGV": 5.0, "thread": 5.0, "NaN": 5.0, "disk": 5.0, "TERM": GRACE}
ENDS = {**_NAMED, **dict.fromkeys(("STOP", "length", "round"), max(SILENCE, DEADLINE) + 5.0)}
"""Seconds from the fault to the end of the run's trouble: until it has failed or stopped, by kind."""
TORCHRUN = 35.0
"""More of them under torchrun: it waits 30 s for processes that it has asked to end, and looks now and then."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One of them."""

    method: str
    kind: str
    moment: str
    worker: int = 1
    launcher: str = "one machine"

    def __str__(self) -> str:
        return f"{self.method}, {self.kind}, {self.moment}, worker {self.worker}, {self.launcher}"

    @property
    def limit(self) -> float:
        """Seconds within which its end is known."""
        limit = JOIN + 5.0 if self.moment == "join" else ENDS[self.kind]
        return limit + TORCHRUN if self.launcher == "torchrun" else limit

    @property
    def returns_errors(self) -> bool:
        """Of `run_local`: whether failures are put in the list of results; the others go on to their own end."""
        return self.method == "solo" or self.worker == 0

    @property
    def fits(self) -> bool:
        """Whether there is such a thing: before it has joined a worker can only get signals, it writes no checkpoint of
        weights that are broken, and `none` sends nothing that could be spoilt.
        """
        if self.moment == "join":
            return self.kind in SIGNALS and self.launcher in ("one machine", "run_local")
        if self.kind == "disk":
            return self.moment in ("first round", "round", "checkpoint") or (self.moment, self.worker) == ("end", 0)
        if self.kind == "NaN":
            return self.moment != "checkpoint"  # between the look at what is saved and the saving
        if self.kind in ("length", "round"):
            return self.moment in ("first round", "round") and self.method != "none"
        return True


def drawn(seed: int) -> Trial:
    """The trial of a seed."""
    draw = random.Random(seed)
    while True:
        trial = Trial(
            method=draw.choice(METHODS),
            kind=draw.choice(KINDS),
            moment=draw.choice(MOMENTS),
            worker=draw.randrange(WORKERS),
            launcher=draw.choices([*LAUNCHERS], [*LAUNCHERS.values()])[0],
        )
        if trial.fits:
            return trial
