"""What is refused before a run's processes start, and what is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import isles
from isles.plan.run_plan import plan_run, refuse
from tests.training.runs import tiny, write_text


class Weighed(isles.DiLoCo):
    """A method of a user's own that reads the weights it is made of."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.first = float(self.parameters[0].detach().sum())


def test_a_method_of_ones_own_that_reads_weights_is_not_refused(tmp_path: Path) -> None:
    """Before a run only what Isles knows is made of a model without weights."""
    text = write_text(tmp_path / "text.txt")
    own = tiny(text, method=f"{__name__}:{Weighed.__name__}")
    refuse(own)
    with pytest.raises(ValueError, match=r"Weighed' cannot be planned: .*meta tensors"):
        plan_run(own)
    with pytest.raises(ValueError, match="sync_every"):
        refuse(tiny(text, "replicas.sync_every=9", method="diloco"))
