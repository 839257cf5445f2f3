"""What the settings of all methods have in common. No file of settings loads torch: a run's configuration is read, and
checked, without the code of its method. `isles.replicas.METHODS` names the settings of each.

    gradient/config.py, loop/config.py      what methods of a kind share; the former also all of ddp, fsdp, dct-dp
    methods/config.py                       methods of one file that take over one another's settings
    methods/*/config.py, *_config.py        others
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from isles.replicas.checks import one_of
from isles.replicas.space import Dimension, usual_space

OnBroken = Literal["skip", "leave out"]
Feedback = Literal["none", "local", "global"]


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """What every method takes; a method's own config adds its hyper-parameters."""

    @property
    def survives(self) -> bool:
        """True if the workers that are left go on to the end of the run when others fail."""
        return False

    def space(self, steps: int, *, timed: bool) -> list[Dimension]:
        """What `isles tune` tries of a method beside the inner optimizer's; arguments as of `usual_space`."""
        return usual_space(self, steps, timed=timed)


def check_feedback(form: str, decay: float) -> None:
    """ValueError for what is no error feedback."""
    one_of("error_feedback", form, get_args(Feedback))
    if not 0 <= decay <= 1:
        raise ValueError(f"feedback_decay = {decay}: choose 0 to 1, such as 0.95")
    if form == "none" and decay != 1:
        raise ValueError(
            f'feedback_decay = {decay} has no error feedback to act on: set error_feedback = "local", or this to 1'
        )
