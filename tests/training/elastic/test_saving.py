"""States that a lighthouse saves by default: when, how large, and what is said when a run begins again."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from isles.training.config.sections import RunConfig
from isles.training.lighthouse import schedule
from isles.training.lighthouse.schedule import StateSchedule
from isles.training.loop import checkpoint_steps
from tests.training.elastic.runs import Run
from tests.training.elastic.test_runs import events, leisurely, small

__all__ = ["leisurely"]


@pytest.mark.parametrize(
    ("every", "steps", "pace", "seconds"),
    [
        ("auto", 10_000, 1.0, 500),  # 5 % of 10,000 s
        ("auto", 100_000, 1.0, 600),  # ten minutes
        ("auto", 600, 1.0, 60),  # a minute
        (50, 10_000, 2.0, 100),
    ],
)
def test_how_often(every: int | str, steps: int, pace: float, seconds: int) -> None:
    """A step each `pace` seconds, from second 40 on, when the workers are there; looked at each second."""
    due, made = [], StateSchedule(RunConfig(steps=steps, checkpoint_every=every), 0, 0.0)  # type: ignore[arg-type]
    for now in range(3000):
        step = max(int((now - 40) / pace), 0)
        if made.is_due(step, now):
            made.saved(step, now)
            due.append(now)
    gaps = [after - before for before, after in itertools.pairwise(due)]
    assert gaps and set(gaps[1:]) <= {seconds - 1, seconds, seconds + 1}
    if every == "auto":
        assert due[0] <= seconds + 60 and made.ahead(100) in (104, 105)


def test_a_zero_saves_nothing_and_other_words_are_refused() -> None:
    never = StateSchedule(RunConfig(checkpoint_every=0), 0, 0.0)
    assert not any(never.is_due(step, 100.0 * step) for step in range(800))
    assert RunConfig().checkpoint_every == "auto" and checkpoint_steps(RunConfig()) == 0
    with pytest.raises(ValueError, match='checkpoint_every = -1: choose 0 or more steps, or "auto"'):
        RunConfig(checkpoint_every=-1)


@pytest.mark.long
@pytest.mark.usefixtures("leisurely")
@pytest.mark.parametrize("method", ["diloco", "noloco"])
def test_replicas_begin_again_from_what_is_saved_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """All are lost; the next one begins with the saved state, and the lighthouse says how many steps that costs."""
    monkeypatch.setattr(schedule, "LEAST", 0.3)
    monkeypatch.setattr(schedule, "MOST", 0.3)
    config = small(tmp_path, 60_000, 2, f"replicas.method={method}")
    assert config.run.checkpoint_every == "auto"
    world = Run(config, tmp_path / "run")
    pair = [world.join() for _ in range(2)]
    world.until(lambda: list((world.out / "states").glob("step-*/manifest.json")))
    sizes = [sum(file.stat().st_size for file in one.iterdir()) for one in (world.out / "states").glob("step-*")]
    assert 0.9 < world.keeper.disk / sizes[-1] < 1.5, "a tied matrix is counted twice"
    for number in pair:
        world.vanish(number)
    world.until(lambda: not world.keeper.members())
    last = world.join()
    world.until(lambda: world.step(last) > 0)
    world.until(lambda: any("begins again" in line for line in world.notices))
    (notice,) = [line for line in world.notices if "begins again" in line]
    assert notice.startswith("all workers were lost at step "), notice
    world.workers[last].leaving.set()
    world.until(lambda: last in world.end_reasons)
    world.stop()
    world.rest()
    assert events(world.out, "view")
