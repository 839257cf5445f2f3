"""The drawing of a step through stages."""

from __future__ import annotations

from pathlib import Path

from isles.report.charts import step_panel
from isles.report.draw.svg import draw
from isles.report.panels import Lanes
from isles.report.rundir import RunFiles, TaskSpan


def drawn(second: int) -> tuple[Lanes, str, str]:
    """Two replicas of two stages and a microbatch each, the second one's `second` by number, begun 10 s later."""
    tasks = {}
    for replica, (microbatch, at) in enumerate(((0, 5.0), (second, 15.0))):
        tasks[2 * replica] = [
            TaskSpan("forward", microbatch, at, at + 1.0),
            TaskSpan("backward", microbatch, at + 6.0, at + 8.0),
        ]
        tasks[2 * replica + 1] = [TaskSpan("forward", microbatch, at + 1.0, at + 6.0)]
    panel = step_panel(RunFiles(Path("run"), summary={"stages": 2}, tasks=tasks, task_step=7))
    assert panel is not None and isinstance(panel.picture, Lanes)
    assert [name for _, name in panel.keys] == ["forward", "backward"]  # of what is there
    return panel.picture, " ".join(panel.notes), draw(panel.picture)


def test_pipelines_apart_begin_together() -> None:
    """They do not wait for each other: the second one is drawn from its own begin, and waits for 1 - (3 + 5) / 16."""
    picture, words, svg = drawn(1)
    assert picture.end == 8.0 and [lane.segments[0].start for lane in picture.lanes] == [0.0, 1.0] * 2
    assert "waited for 50" in words and "its own 0" in words and "Inner step 7" in words
    assert [lane.label for lane in picture.lanes] == ["0: stage 0", "1: stage 1", "2: stage 0", "3: stage 1"]
    assert svg.count('<text class="mark"') == 6


def test_pipelines_that_share_a_microbatch_have_one_clock() -> None:
    picture, words, _ = drawn(0)
    assert picture.end == 18.0 and [lane.segments[0].start for lane in picture.lanes] == [0.0, 1.0, 10.0, 11.0]
    assert "its own 0" not in words
