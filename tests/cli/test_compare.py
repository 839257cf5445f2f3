"""`isles compare`: every method and seed on the same tokens, one table, one page, slips told before anything is run."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from isles.cli import app
from isles.cli.progress import Progress
from tests.training.runs import TINY, write_text

METHODS = ["none", "ddp", "noloco"]


def arguments(folder: Path, *more: str) -> list[str]:
    text = write_text(folder / "text.txt")
    settings = [*TINY, f"data.path={text}", "run.log_every=1", "run.validate_every=0"]
    flags = ["compare", "--methods", ",".join(METHODS), "--seeds", "0,1", "--workers", "2", "--steps", "4"]
    return [*flags, *(word for setting in settings for word in ("--set", setting)), *more]


def test_all_methods_and_seeds_at_equal_tokens(tmp_path: Path) -> None:
    """A run directory for each, a table with the spread over seeds, and a page that loads nothing."""
    out = tmp_path / "out"
    # A setting that only NoLoCo has is left to NoLoCo.
    done = CliRunner().invoke(app, arguments(tmp_path, "--set", "replicas.sync_every=2", "--out", str(out)))
    assert done.exit_code == 0, done.output
    summaries = json.loads((out / "compare.json").read_text())
    assert list(summaries) == METHODS
    assert {summary["tokens"] for group in summaries.values() for summary in group} == {4 * 2 * 2 * 16}
    assert [[summary["seed"] for summary in group] for group in summaries.values()] == [[0, 1]] * 3
    assert all((out / f"{name}-{seed}" / "report.html").exists() for name in METHODS for seed in (0, 1))
    table = [line.split() for line in done.stdout.splitlines() if line.split()[:1] and line.split()[0] in METHODS]
    assert [row[0] for row in table] == METHODS and all("±" in row for row in table)
    page = (out / "report.html").read_text()
    assert "://" not in page.replace("http://www.w3.org/2000/svg", "") and page.count("<svg") == 3 + len(
        METHODS
    )  # and a timeline each
    assert (out / "report.png").read_bytes().startswith(b"\x89PNG")
    # The page can be written again from the folder alone.
    (out / "report.html").unlink()
    assert CliRunner().invoke(app, ["report", str(out)]).exit_code == 0
    assert (out / "report.html").read_text() == page


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--methods", "noloco,dilco"], "did you mean 'diloco'"),
        (["--methods", "ddp,ddp"], "name each one once"),
        (["--seeds", "0,x"], "'x' is no seed"),
        (["--set", "replicas.sinc_every=2"], "unknown key 'replicas.sinc_every'"),
    ],
)
def test_a_slip_costs_nothing(tmp_path: Path, more: list[str], said: str) -> None:
    """Also one in the last method: nothing is run, nothing is made."""
    out = tmp_path / "out"
    done = CliRunner().invoke(app, arguments(tmp_path, "--out", str(out), *more))
    assert isinstance(done.exception, ValueError) and said in str(done.exception)
    assert not out.exists()


def test_ctrl_c_at_the_end_of_a_run_stops_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the last inner step of the first run nothing of that is left to stop; those after it are not begun."""
    line = Progress.line

    def pressed(self: Progress, values: dict[str, Any]) -> None:
        line(self, values)
        if values["step"] == 4 and values["worker"] == 1:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Progress, "line", pressed)
    out = tmp_path / "out"
    done = CliRunner().invoke(app, arguments(tmp_path, "--set", "replicas.sync_every=2", "--out", str(out)))
    assert done.exit_code == 130, done.output
    assert "the runs after it were not begun" in done.stderr
    assert (out / "none-0" / "summary.json").exists() and not (out / "none-1").exists()
