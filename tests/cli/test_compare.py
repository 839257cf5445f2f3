"""`isles compare`: rows at equal terms, one table, one page, slips told before anything is run."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from isles.cli import app
from isles.cli.several import (
    ComparisonRow,
    SharedSettings,
    of_runs,
    one_worker,
    read_all,
    read_beside,
    rows_of,
    swept,
)
from isles.cli.terminal import Progress
from isles.replicas.methods.diloco import DiLoCo
from isles.training.config.reading import read_config
from tests.training.runs import TINY, write_text

METHODS = ["none", "ddp", "noloco"]
ROWS = [*METHODS, "one-worker"]
NOTHING = SharedSettings(None, {}, [])


def arguments(folder: Path, *more: str) -> list[str]:
    text = write_text(folder / "text.txt")
    settings = [*TINY, f"data.path={text}", "run.log_every=1", "run.validate_every=0"]
    flags = ["compare", "--methods", ",".join(METHODS), "--seeds", "0,1", "--workers", "2", "--steps", "4"]
    return [*flags, *(word for setting in settings for word in ("--set", setting)), *more]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder of a comparison, and what its command said."""
    folder = tmp_path_factory.mktemp("compared")
    # A setting that only NoLoCo has is left to NoLoCo.
    more = ["--set", "replicas.sync_every=2", "--out", str(folder / "out")]
    done = CliRunner().invoke(app, arguments(folder, *more))
    assert done.exit_code == 0, done.output
    return folder / "out", done


def test_all_methods_and_seeds_at_equal_tokens(compared: tuple[Path, Any]) -> None:
    """A run directory for each, and one worker with all tokens; a table with the spread over seeds; a page that loads
    nothing, with intervals.
    """
    out, done = compared
    summaries = json.loads((out / "compare.json").read_text())
    assert list(summaries) == ROWS
    assert {summary["tokens"] for group in summaries.values() for summary in group} == {4 * 2 * 2 * 16}
    assert [[summary["seed"] for summary in group] for group in summaries.values()] == [[0, 1]] * 4
    assert [summary["steps"] for summary in summaries["one-worker"]] == [8, 8]
    assert all((out / f"{name}-{seed}" / "report.html").exists() for name in ROWS for seed in (0, 1))
    table = [line.split() for line in done.stdout.splitlines() if line.split()[:1] and line.split()[0] in ROWS]
    assert [row[0] for row in table] == ["none", *ROWS] and all("±" in row for row in table)
    own = [re.findall(r"(\d\.\d{4}) ±", " ".join(row)) for row in table[:2]]
    assert own[0] == [own[1][1]] * 2 and own[1][0] != own[1][1]  # each worker, and the mean of their weights
    page = (out / "report.html").read_text()
    assert "://" not in page.replace("http://www.w3.org/2000/svg", "") and page.count("<svg") == 3 + len(
        ROWS
    )  # and a timeline each
    assert "Who is ahead" in page and page.count('<td class="name">') >= 2 * 6
    assert not (out / "report.png").exists()
    # The page can be written again from the folder alone, and the picture where it is asked for.
    (out / "report.html").unlink()
    assert CliRunner().invoke(app, ["report", "--png", str(out)]).exit_code == 0
    assert (out / "report.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "report.html").read_text() == page
    assert "noloco (3 of 4), seed 0, " in done.stderr and " left: step" in done.stderr


def test_finished_runs(compared: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs that lie anywhere, on one page: those that differ in the seed alone are a row; other terms are told."""
    out, _ = compared
    runs = [str(out / name) for name in ("none-0", "none-1", "noloco-0", "one-worker-0")]
    done = CliRunner().invoke(app, ["compare", *runs, "--out", str(tmp_path / "page")])
    assert done.exit_code == 0, done.output
    index = json.loads((tmp_path / "page" / "compare.json").read_text())
    alone = [label for label in index if "world.workers=1" in label]
    assert len(index) == 3 and len(alone) == 1 and "noloco" in index
    assert CliRunner().invoke(app, ["report", str(tmp_path / "page")]).exit_code == 0
    with pytest.raises(ValueError, match="same settings and seed"):
        of_runs([out / "ddp-0", out / "ddp-0"], tmp_path, None, None)
    summary = json.loads((out / "ddp-0" / "summary.json").read_text())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.toml").write_text((out / "ddp-0" / "config.toml").read_text())
    (tmp_path / "other" / "summary.json").write_text(json.dumps({**summary, "seed": 5, "tokens": 7}))
    of_runs([out / "ddp-0", tmp_path / "other"], tmp_path, None, None)
    assert "tokens differs" in capsys.readouterr().err


class Own(DiLoCo):
    """A method of one's own."""


OWN = "tests.cli.test_compare:Own"


def test_rows(tmp_path: Path) -> None:
    """One method several times, tables of CONFIG.toml, a class from outside: each starts from the same terms."""
    rows = rows_of(f"diloco, diloco@replicas.outer_lr=0.4@inner.betas=[0.9, 0.99],{OWN}")
    assert [row.label for row in rows][1] == "diloco@replicas.outer_lr=0.4@inner.betas=[0.9, 0.99]"
    read = read_all(SharedSettings(None, {}, ["replicas.outer_momentum=0.3"]), rows, [0, 1])
    rates = {label: config.replicas.outer_lr for (label, _), config in read.items()}  # type: ignore[attr-defined]
    assert list(rates.values()) == [0.7, 0.4, 0.7]
    assert read[rows[1].label, 0].inner.betas == (0.9, 0.99)
    assert read[OWN, 1].replicas == read["diloco", 1].replicas  # the embedded table of what it derives from
    path = tmp_path / "run.toml"
    path.write_text(
        '[replicas]\nsync_every = 5\n[run]\nsteps = 20\n[methods.fast]\nmethod = "diloco"\nouter_lr = 0.9\n'
        "[methods.fast.inner]\nlr = 0.02\n[methods.noloco]\nsync_every = 4\n"
    )
    read = read_all(SharedSettings(str(path), {}, ["replicas.outer_momentum=0.3"]), rows_of("fast,noloco,ddp"), [0])
    fast, noloco, ddp = read.values()
    assert (fast.method, fast.inner.lr, noloco.inner.lr, ddp.method) == ("diloco", 0.02, ddp.inner.lr, "ddp")
    assert (fast.replicas.sync_every, noloco.replicas.sync_every) == (5, 4)  # type: ignore[attr-defined]
    assert read_config(str(path), {}, []).replicas.sync_every == 4  # type: ignore[attr-defined]  # of isles train too
    path.write_text("[methods.dilco]\nouter_lr = 0.9\n")
    with pytest.raises(ValueError, match="did you mean 'diloco'"):
        read_all(SharedSettings(str(path), {}, []), rows_of("ddp"), [0])


def test_sweeps() -> None:
    """Each row that has the key, once for every value."""
    rows = swept(NOTHING, rows_of("none,ddp,diloco"), "replicas.outer_lr=0.4,0.7")
    assert [row.label for row in rows] == [
        "none",
        "ddp",
        "diloco@replicas.outer_lr=0.4",
        "diloco@replicas.outer_lr=0.7",
    ]
    assert len(swept(NOTHING, rows, "inner.lr=0.01,0.02")) == 8
    with pytest.raises(ValueError, match="no method of --methods"):
        swept(NOTHING, [ComparisonRow("ddp")], "replicas.outer_lr=0.4,0.7")


def test_one_worker_has_the_tokens_of_all() -> None:
    """Whatever says how many they are: batches of a worker or of all, steps or tokens; nothing is cut or dropped."""
    for words in (
        [],
        ["data.batch_mode=global", "data.batch_size=8"],
        ["world.inner=2"],
        ["run.tokens=100_000", "world.virtual.step_factors=[1.0, 2.0]"],
        ["world.drop_outer=0.5"],
    ):
        flags = {"world.backend": "virtual"}
        configs = read_beside(SharedSettings(None, flags, words), rows_of("diloco"), [3])
        never, alone = configs["none", 3], configs["one-worker", 3]
        assert (never.world.drop_outer, alone.world.workers, alone.run.seed) == (0, 1, 3)
        sequences = [
            one.run.steps * one.world.workers * one.data.batch_size_per_worker(one.world.workers)
            for one in (never, alone)
        ]
        assert sequences[0] <= sequences[1] + 3 * 8 and sequences[1] <= sequences[0], words
    assert one_worker(never).run.validate_every == 4 * never.run.validate_every


def test_a_dry_run_says_what_and_how_long(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, arguments(tmp_path, "--dry-run", "--out", str(tmp_path / "out")))
    assert done.exit_code == 0, done.output
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines()}
    assert rows["noloco"][1:5] == ["2", "2", "4", "256"] and rows["one-worker"][1:5] == ["2", "1", "8", "256"]
    assert rows["in"][2] == "8" and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--methods", "ddp"], "leave all options but --as, --over and --out away"),
        (["--quick"], "leave all options but --as, --over and --out away"),
        (["my.toml"], "but not both"),
    ],
)
def test_finished_runs_are_as_they_are(compared: tuple[Path, Any], more: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["compare", str(compared[0] / "ddp-0"), *more])
    assert isinstance(done.exception, ValueError) and said in str(done.exception)


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
