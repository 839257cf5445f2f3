"""[world] of a virtual run: stragglers, jittery steps and pauses change its clock, never its bits and bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from isles.training.config.reading import read_config
from isles.training.config.world import VirtualConfig, WorldConfig
from isles.training.worker import deadlines
from tests.training.runs import lines_of, metrics, run, tiny, write_text

PAUSED = [
    "world.virtual.pause_every=0.4",
    "world.virtual.pause_seconds=200.0",
]  # away most of the time, longer than all deadlines
UNEVEN = [*PAUSED, "world.virtual.step_factors=[1.0, 2.0]", "world.virtual.step_jitter=0.5"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


def learned(out: Path) -> list[tuple[int, int, float]]:
    """What the workers have learned, in no order of time."""
    return sorted((line["step"], line["worker"], line["loss"]) for line in metrics(out))


@pytest.mark.parametrize("method", ["ddp", "noloco", "eager"])
def test_others_wait_and_nothing_is_lost(text: Path, tmp_path: Path, method: str) -> None:
    """A state is kept through a pause: the same weights and bytes as without, only later."""
    plain, uneven = tmp_path / "plain", tmp_path / "uneven"
    calm = run(tiny(text, method=method, workers=3), plain)
    late = run(tiny(text, *UNEVEN, method=method, workers=3), uneven)
    assert (uneven / "model.safetensors").read_bytes() == (plain / "model.safetensors").read_bytes()
    assert learned(uneven) == learned(plain)
    assert late["bytes_sent_per_worker"] == calm["bytes_sent_per_worker"]
    assert late["virtual_seconds"] > calm["virtual_seconds"] + 200
    assert late["compute_seconds"] < 6 * 0.1 * 2 * 3  # pauses are no computing
    for worker in range(3):
        clocks = [line["clock_seconds"] for line in metrics(uneven) if line["worker"] == worker]
        assert clocks == sorted(clocks)
    away = [span["end"] - span["start"] for span in lines_of(uneven / "timeline.jsonl") if span["kind"] == "away"]
    assert sum(away) > 200


def test_noloco_goes_on_without_who_is_away(text: Path, tmp_path: Path) -> None:
    """solo: a partner that pauses costs a round's deadline, not the whole pause, and is met again."""
    settings = [
        "world.virtual.pause_every=20",
        "world.virtual.pause_seconds=500.0",
        "world.outer_deadline=1",
        "run.seed=32",
    ]
    ends = {}  # with this seed only worker 2 pauses within eight seconds
    for how in ("raise", "solo"):
        config = tiny(text, *settings, f"replicas.on_peer_failure={how}", workers=4, steps=9)
        assert (deadlines(config).outer == 1) == (how == "solo") and deadlines(config).eval >= 500_000
        run(config, tmp_path / how)
        lines = [line for line in metrics(tmp_path / how) if line["step"] == 9]
        ends[how] = sorted(line["clock_seconds"] for line in lines)
    assert ends["raise"][-2] > 300 and ends["solo"][-2] < 8 < ends["solo"][-1]


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("step_factors=[1.0, 0.0]", "world.virtual.step_factors: 0.0: choose positive"),
        ("step_jitter=5", "world.virtual.step_jitter = 5.0: choose 0 to 3"),
        ("pause_every=-1", "world.virtual.pause_every = -1.0: choose 0 or more seconds"),
        ("pause_seconds=0", "world.virtual.pause_seconds = 0.0: choose how long"),
    ],
)
def test_no_such_world(setting: str, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        read_config(None, {}, ["world.backend=virtual", "world.virtual.pause_every=9", f"world.virtual.{setting}"])
    assert str(caught.value).startswith(said)


def test_a_pause_that_nobody_makes() -> None:
    with pytest.raises(
        ValueError, match=r"world\.virtual\.pause_seconds = 5\.0 acts with pause_every: choose that, such as 600"
    ):
        read_config(None, {}, ["world.backend=virtual", "world.virtual.pause_seconds=5"])


@pytest.mark.parametrize("setting", ["step_factors=[2.0]", "step_jitter=0.1", "pause_every=5"])
def test_real_workers_are_as_they_are(setting: str) -> None:
    with pytest.raises(ValueError, match=r"virtual clock; .*take it out, or set world\.backend"):
        read_config(None, {}, [f"world.virtual.{setting}"])


def test_factors_go_round() -> None:
    uneven = VirtualConfig(step_factors=(1.0, 3.0))
    assert WorldConfig(workers=5, backend="virtual", virtual=uneven).factors == (1.0, 3.0, 1.0, 3.0, 1.0)
    assert WorldConfig(workers=2).factors == (1.0, 1.0) and VirtualConfig().pauses is None
