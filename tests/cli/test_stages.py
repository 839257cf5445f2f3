"""`isles compare` and `isles simulate` of replicas in stages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from isles.cli import app
from isles.training.config.reading import read_config
from tests.training.runs import TINY, run, write_text

STAGES = ["model.layers=2", "pipeline.stages=2", "pipeline.microbatches=2", "pipeline.routing=random"]


def words(folder: Path, *settings: str) -> list[str]:
    """The settings of a small run in stages, as arguments."""
    text = write_text(folder / "text.txt")
    return [word for setting in (*TINY, *STAGES, f"data.path={text}", *settings) for word in ("--set", setting)]


@pytest.mark.long
def test_methods_in_stages_are_compared(tmp_path: Path) -> None:
    """At equal tokens, with what went between stages apart; a table and a page."""
    out = tmp_path / "out"
    flags = ["compare", "--methods", "ddp,noloco", "--workers", "4", "--steps", "6", "--out", str(out)]
    done = CliRunner().invoke(app, [*flags, *words(tmp_path, "replicas.sync_every=3")])
    assert done.exit_code == 0, done.output
    summaries = {name: group[0] for name, group in json.loads((out / "compare.json").read_text()).items()}
    assert list(summaries) == ["ddp", "noloco", "none", "one-worker"]
    assert all(summaries.pop(name)["tokens"] == 6 * 2 * 2 * 16 for name in ("none", "one-worker"))  # not in stages
    for summary in summaries.values():
        assert (summary["stages"], summary["replicas"], summary["tokens"]) == (2, 2, 6 * 2 * 2 * 16)
        assert 0 < summary["pipeline_bubble"] < 1
        sent = {name: counts["bytes_sent"] for name, counts in summary["channels"].items()}
        assert sum(sent.values()) == summary["bytes_sent_per_worker"] and sent["pipeline"] > 0
    ddp, noloco = (summary["channels"]["outer"]["bytes_sent"] for summary in summaries.values())
    assert ddp > noloco > 0
    assert "by channel" in (out / "ddp-0" / "report.html").read_text()
    assert (out / "report.html").exists()


def test_stages_on_a_simulated_network(tmp_path: Path) -> None:
    """Stragglers, jitter and pauses of stages are events like others: the same every time."""
    once, twice = tmp_path / "once", tmp_path / "twice"
    uneven = [
        "world.virtual.step_factors=[1.0, 2.0]",
        "world.virtual.step_jitter=0.3",
        "world.virtual.pause_every=1",
        "world.virtual.pause_seconds=2",
    ]
    flags = ["simulate", "--methods", "eager", "--workers", "4", "--steps", "4", "--links", "home-cable"]
    own = words(tmp_path, "replicas.sync_every=2", *uneven)
    done = CliRunner().invoke(app, [*flags, *own, "--json", "--out", str(once)])
    assert done.exit_code == 0, done.output
    (summary,) = json.loads(done.stdout)["runs"]["eager"]
    assert summary["stages"] == 2 and summary["virtual_seconds"] > 4 * 0.1 * 2 / 2
    run(read_config(str(once / "eager-0" / "config.toml"), {}, []), twice)
    for file in ("metrics.jsonl", "timeline.jsonl", "model.safetensors"):
        assert (once / "eager-0" / file).read_bytes() == (twice / file).read_bytes()
    assert "One step through the stages" in (once / "eager-0" / "report.html").read_text()
    judged = CliRunner().invoke(app, ["eval", str(once / "eager-0")])  # of one model, as ever
    assert f"{summary['val_loss']:.4f} nats/token" in judged.stdout, judged.output
    made = CliRunner().invoke(
        app, ["export", str(once / "eager-0"), "--format", "safetensors", "--out", str(tmp_path / "one")]
    )
    assert made.exit_code == 0, made.output


@pytest.mark.parametrize(
    ("command", "more", "said"),
    [
        ("compare", ["--methods", "noloco,ist", "--set", "replicas.sync_every=2"], "without stages"),
        ("simulate", ["--methods", "diloco", "--set", "pipeline.stages=3"], "the model has 2 blocks"),
        ("simulate", ["--methods", "diloco", "--workers", "5"], "choose a multiple of 2 as world.workers"),
    ],
)
def test_a_slip_costs_nothing(tmp_path: Path, command: str, more: list[str], said: str) -> None:
    """Nothing is run, and nothing is made."""
    out = tmp_path / "out"
    flags = [command, "--workers", "6", "--steps", "4", *words(tmp_path), *more, "--out", str(out)]
    done = CliRunner().invoke(app, flags)
    assert isinstance(done.exception, ValueError) and said in str(done.exception), done.exception
    assert "\n" not in str(done.exception) and not out.exists()
