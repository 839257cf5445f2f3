"""`isles simulate`: several methods over one simulated network, the same every time, with their timelines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from isles.cli import app
from isles.training.config.reading import read_config
from tests.training.runs import TINY, metrics, run, write_text

METHODS = ["diloco", "eager"]
UNEVEN = ["step_factors=[1.0, 1.0, 2.0]", "step_jitter=0.3", "pause_every=1", "pause_seconds=3"]


def arguments(folder: Path, *more: str) -> list[str]:
    text = write_text(folder / "text.txt")
    tiny = [setting for setting in TINY if not setting.startswith("world.")]
    settings = [
        *tiny,
        f"data.path={text}",
        "replicas.sync_every=3",
        *(f"world.virtual.{setting}" for setting in UNEVEN),
    ]
    flags = ["simulate", "--methods", ",".join(METHODS), "--workers", "3", "--steps", "6", "--links", "home-cable"]
    return [*flags, *(word for setting in settings for word in ("--set", setting)), *more]


def test_methods_on_one_clock(tmp_path: Path) -> None:
    """JSON and a page with a lane for each worker of each method; and again the same events, bit for bit,
    from the configuration that was written.
    """
    once, twice = (tmp_path / name for name in ("once", "twice"))
    done = CliRunner().invoke(app, arguments(tmp_path, "--json", "--out", str(once)))
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["folder"] == str(once) and list(told["runs"]) == METHODS
    seconds = {name: group[0]["virtual_seconds"] for name, group in told["runs"].items()}
    assert all(ends > 6 * 0.1 * 2 for ends in seconds.values())
    page = (once / "report.html").read_text()
    assert all(f"Timeline of {name}" in page for name in METHODS) and page.count(">paused<") == len(METHODS)
    assert page.count("seconds of the virtual clock") == 1 + len(METHODS)  # loss against it, and the lanes
    for name in METHODS:
        run(read_config(str(once / f"{name}-0" / "config.toml"), {}, []), twice / name)
        for file in ("metrics.jsonl", "timeline.jsonl", "model.safetensors"):
            assert (once / f"{name}-0" / file).read_bytes() == (twice / name / file).read_bytes()
        for worker in range(3):
            clocks = [line["clock_seconds"] for line in metrics(once / f"{name}-0") if line["worker"] == worker]
            assert clocks == sorted(clocks)


def test_the_configuration_names_method_and_seed(tmp_path: Path) -> None:
    """Without --methods and --seeds they are the file's."""
    path, out = tmp_path / "run.toml", tmp_path / "out"
    path.write_text('[replicas]\nmethod = "none"\n[run]\nseed = 5\nsteps = 1\n[world]\nworkers = 2\n')
    more = [word for setting in TINY for word in ("--set", setting)]
    flags = [*more, "--set", f"data.path={write_text(tmp_path / 'text.txt')}", "--out", str(out)]
    done = CliRunner().invoke(app, ["simulate", str(path), *flags])
    assert done.exit_code == 0, done.output
    assert (out / "none-5" / "summary.json").exists()
    assert [row.split()[0] for row in done.stdout.splitlines()] == [
        "method",
        "none",
        "none",
        "report",
    ]  # each worker, their mean


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--links", "home-fiber"], "did you mean 'home-fibre'"),
        (["--set", "world.backend=distributed"], "take "),
        (["--set", "world.pause_each=3"], "unknown key 'world.pause_each'"),
    ],
)
def test_a_slip_costs_nothing(tmp_path: Path, more: list[str], said: str) -> None:
    out = tmp_path / "out"
    done = CliRunner().invoke(app, arguments(tmp_path, "--out", str(out), *more))
    assert isinstance(done.exception, ValueError) and said in str(done.exception)
    assert not out.exists()
