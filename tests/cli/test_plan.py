"""`isles plan`: what it prints and writes, what it refuses, and that it needs no torch."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from isles import cli
from isles.cli.plans.methods import model_of
from isles.models.sizes import SIZES
from isles.papers import eager
from isles.papers import noloco as noloco_sheets
from isles.papers.calculations import presets, sheet
from tests.report.sample import write_sample

GPU = ["methods", "1e9, 24 layers", "--workers", "2", "--links", "lan", "--step-tokens", "250k"]
RUN = ["methods", "100M, 12 layers", "--gpu", "1s", "--sites", "8"]


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """plan(*arguments): (exit code, stdout, stderr) of the command, in this process."""

    def ask(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["isles", "plan", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return int(caught.value.code or 0), *capsys.readouterr()

    return ask


def test_table_5_as_json(plan):
    code, out, _ = plan("explain", "eager-table5", "--json")
    rows = json.loads(out)["rows"]
    assert code == 0 and len(rows) == 24
    needs = {"50": 86.8, "80": 152.6, "90": 184.2, "95": 222.3, "99": 569.0}
    assert rows[0] == {"size": "1B", "method": "Data-Parallel", "bandwidth_gbps": needs}
    assert rows[-1]["size"] == "100B" and rows[-1]["method"] == "1-outer FP4 H100"
    assert list(rows[-1]["bandwidth_gbps"].values()) == [0.2, 0.3, 0.3, 0.3, 0.4]
    assert {row["method"] for row in rows} >= {"DiLoCo H100", "1-inner FP4 H30", "Streaming overlapped bf16"}


@pytest.mark.long
def test_table_5_as_people_read_it(plan, tmp_path: Path):
    code, out, _ = plan("explain", "eager-table5", "--out", str(tmp_path / "new" / "folder"))
    assert code == 0 and "569.0" in out and "note: As printed" in out
    written = {path.suffix: path for path in (tmp_path / "new" / "folder").iterdir()}
    assert set(written) == {".csv", ".json", ".png", ".html"}
    rows = list(csv.reader(io.StringIO(written[".csv"].read_text())))
    assert rows[0] == ["size", "method", "50 %", "80 %", "90 %", "95 %", "99 %"] and len(rows) == 25
    assert rows[1] == ["1B", "Data-Parallel", "86.8", "152.6", "184.2", "222.3", "569.0"]
    page = written[".html"].read_text()
    assert page.count("<svg") == 3 and page.count("<polyline") == 24 and "http" not in page.replace("http-equiv", "")
    assert Image.open(written[".png"]).size[0] == 1610  # two of the page's 760 and 30 around each
    assert all(str(path) in out for path in written.values())


@pytest.mark.long
def test_a_plan_for_ones_own_run(plan, tmp_path: Path):
    """The first line is the one to try; table, JSON and page hold the same."""
    network = ["--links", "home-cable", "--tokens", "2B", "--step-tokens", "500k"]
    code, out, _ = plan(*RUN, *network, "--out", str(tmp_path))
    assert code == 0 and "First is noloco (codec = int8, anchor_codec = int8) with H = 200: it computes 90.4 %" in out
    rows = json.loads((tmp_path / "plan.json").read_text())["rows"]
    assert rows[0]["method"] == "noloco" and rows[0]["sync_every"] == 200 and rows[0]["reaches"]
    assert list(rows[0]["bandwidth_mbps"]) == ["90"] and rows[0]["hours"] == pytest.approx(
        4000 / 3600 / 0.9035, rel=1e-3
    )
    head, first, *_ = csv.reader(io.StringIO((tmp_path / "plan.csv").read_text()))
    assert dict(zip(head, first, strict=True))["computing %"] == "90.4"
    assert (tmp_path / "plan.html").read_text().count("<polyline") == 8  # as many as there are colours
    code, out, _ = plan(*RUN, "--links", "999Tbit/s, 0ms", "--json")
    assert code == 0 and json.loads(out)["rows"][0]["method"] == "ddp"


def test_a_step_from_a_gpus_name(plan):
    """6 x 1e9 x 125,000 operations at 40 % of 312e12 a second."""
    code, out, _ = plan("methods", "1e9, 2 layers", *GPU[2:], "--gpu", "a100", "--method", "ddp")
    assert code == 0 and f"{6 * 1e9 * 125e3 / (0.4 * 312e12):.4g} s of computing a step" in out


@pytest.mark.long
def test_what_does_not_fit_is_marked(plan):
    """16 bytes a parameter where it computes, beside activations: 5.2B parameters are 83 GB."""
    large = ["methods", "5.2B, 4 layers", "--workers", "2", "--links", "lan", "--step-tokens", "1M"]
    every = ["--gpu", "H100", "--method", ", sync_every = 500"]
    code, out, _ = plan(*large, *every, "--json")
    rows = {row["method"]: row for row in json.loads(out)["rows"]}
    diloco = rows["diloco"]
    assert code == 0 and not diloco["fits"]
    assert diloco["device_bytes"] - diloco["activations"] == pytest.approx(16 * 5.2e9, rel=1e-3)
    assert rows["ist"]["fits"]  # a part of it
    parts = diloco["memory"]
    assert {"weights", "gradients", "inner", "held"} == set(parts) and parts["held"][1]["what"] == "anchor"


@pytest.mark.long
def test_splits_that_do_not_fit_are_marked(plan):
    """Weights, gradients and AdamW are 16 bytes a parameter: 83 GB of 5.2 billion, 42 of half; beside: activations."""
    job = ["--workers", "4", "--links", "lan", "--step-tokens", "16k", "--gpu", "H100", "--stages", "1,2"]
    every = ["--tokens", "1B", "--method", "diloco, sync_every = 500"]
    _, out, _ = plan("splits", "5.2B, 4 layers", *job, *every, "--json")
    rows = json.loads(out)["rows"]
    assert [row["fits"] for row in rows] == [row["stages"] == 2 for row in rows]
    assert [row["stages"] for row in rows] == sorted((row["stages"] for row in rows), reverse=True)
    for row in rows:
        assert 16 * 5.2e9 / row["stages"] < row["device_bytes"] < 16 * 5.2e9 / row["stages"] + 40e9
    _, out, _ = plan("splits", "5.2B, 4 layers", *job, *every)
    assert " > 80" in out and "What does not fit into H100 is last" in out
    _, out, _ = plan("splits", "3B, 4 layers", *job, *every)
    assert " > " not in out and "All fit into H100." in out


def test_a_plan_like_a_run(plan, tmp_path: Path):
    run = tmp_path / "run"
    summary = write_sample(run, workers=4, steps=40)
    seconds, tokens = summary["compute_seconds"] / 40, summary["tokens"] / 40
    code, out, _ = plan("methods", str(run), "--workers", "8", "--links", "lan", "--tokens", "1M", "--method", "ddp")
    assert code == 0 and f"{seconds:.4g} s of computing a step" in out and "1.24 million parameters, 8 workers" in out
    hours = float(out.splitlines()[5].split()[-2])
    share = float(re.search(r"computes ([0-9.]+) %", out)[1]) / 100
    assert hours == pytest.approx(1e6 / (2 * tokens) * seconds / share / 3600, rel=5e-3)
    (run / "summary.json").write_text(json.dumps({**summary, "compute_seconds": None}))
    code, _, err = plan("methods", str(run), "--links", "lan")
    assert code == 2 and "has no compute_seconds" in err
    (run / "summary.json").unlink()
    code, _, err = plan("methods", str(run), "--links", "lan")
    assert code == 2 and "has not ended" in err


def test_a_run_knows_its_decoder(tmp_path: Path):
    """Its own; not where another number of parameters was counted."""
    summary = {"parameters": 123_200, "workers": 4, "steps": 10, "tokens": 1e4, "compute_seconds": 1.0}
    (tmp_path / "config.toml").write_text('[model]\nsize = "0.12M"\n')
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert model_of(str(tmp_path)).shape() == SIZES["0.12M"] == model_of("0.12M").shape()
    assert model_of(str(tmp_path / "config.toml")).shape() == SIZES["0.12M"]
    (tmp_path / "summary.json").write_text(json.dumps({**summary, "parameters": 1e6}))
    assert model_of(str(tmp_path)) == model_of("1e6")


def test_a_plan_as_a_configuration(plan, tmp_path: Path):
    """What --out writes as run.toml, `isles train` takes."""
    from isles.training.config.reading import read_config

    code, out, _ = plan(*RUN, "--links", "home-cable", "--workers", "4", "--method", "noloco", "--out", str(tmp_path))
    path = tmp_path / "run.toml"
    assert code == 0 and str(path) in out
    made = read_config(str(path), {}, ["run.steps=1000"])
    assert (made.method, made.replicas.sync_every, made.replicas.codec) == ("noloco", 200, "int8")
    assert made.replicas.anchor_codec == "int8" and made.world.workers == 4 and made.world.slowest_link == 40e6


def test_json_with_out_keeps_stdout_clean(plan, tmp_path: Path):
    code, out, err = plan("explain", "eager-table2", "--json", "--out", str(tmp_path))
    assert code == 0 and json.loads(out) == json.loads((tmp_path / "eager-table2.json").read_text())
    assert str(tmp_path / "eager-table2.csv") in err


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long)
        if number % 3 or name in ("ist-quadratic", "karma-hybrid", "noloco-table2")
        else name
        for number, name in enumerate(presets())
    ],
)
def test_every_preset_gives_a_whole_sheet(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(eager, "JOBS", {"1B": eager.JOBS["1B"]})  # their size is tested in tests/network
    monkeypatch.setattr(noloco_sheets, "_TREES", 20)
    monkeypatch.setattr(noloco_sheets, "_SHOTS", 20)
    monkeypatch.setattr(noloco_sheets, "_CROWDS", (2, 16, 64))
    made = sheet(name)
    assert made.name == name and made.table.rows and json.loads(json.dumps(made.data, allow_nan=False))["rows"]
    assert {len(row) for row in made.table.rows} == {len(made.table.heads)}


PARALLEL = ["parallel", "1.3B, 24 layers", "--workers", "8", "--machine", "RTX 3060", "--step-tokens", "16384"]


@pytest.mark.long
def test_ways_out_of_core_and_cut(plan):
    code, out, err = plan(*PARALLEL, "--links", "10Gbit/s, 0ms", "--per-host", "2", "--json")
    assert code == 0, err
    rows = json.loads(out)["rows"]
    names = {row["way"] for row in rows}
    assert names >= {"out of core, states shared", "fsdp", "pipeline x data", "tensor x pipeline x data"}
    fits = [row for row in rows if row["step_seconds"] is not None]
    assert fits == sorted(fits, key=lambda row: row["step_seconds"])
    assert all(row["device_bytes"] <= 12e9 for row in fits)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([*PARALLEL, "--links", "lan", "--sequence", "1000"], "no whole number of sequences"),
        ([*PARALLEL, "--links", "lan", "--per-host", "3"], "choose 2 or more that fill"),
        ([*PARALLEL, "--links", "lan", "--per-host", "0"], "choose 1 or more"),
    ],
)
def test_ways_that_cannot_be_compared_are_one_line(plan, arguments: list[str], told: str):
    code, out, err = plan(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert told in err


def test_list_of_presets(plan):
    code, out, _ = plan("explain")
    assert code == 0 and all(name in out for name in presets())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["methods", "1e8", "--links", "lan"], "missing: --sites, --gpu"),
        ([*RUN, "--links", "-3Mbps, 1ms"], "links = -3Mbps: a rate must be above 0"),
        ([*RUN, "--links", "62.5MB/s, 1ms"], "that is 500Mbit/s"),
        ([*RUN, "--links", "500, 1ms"], "links = 500: has no unit: write 500Mbit/s or 500bit/s"),
        ([*RUN, "--links", "500Mbit/s, 60"], "links = 60: has no unit: write 60ms or 60s"),
        ([*RUN, "--links", "lam"], "did you mean 'lan'"),
        ([*RUN, "--links", "none.toml"], "links = none.toml: cannot be read"),
        ([*RUN, "--links", "lan", "--workers", "0"], "--sites 0: choose 2"),
        ([*RUN, "--links", "lan", "--devices", "0"], "--devices 0: choose 1"),
        ([*RUN, "--links", "lan", "--inner-bandwidth", "1Gbit/s"], "give those too"),
        ([*RUN, "--links", "lan", "--best", "money"], "give --price-gb or --price-hour"),
        ([*RUN, "--links", "lan", "--best", "hours"], "give --tokens of the run and --step-tokens too"),
        ([*RUN, "--links", "lan", "--best", "time"], "'hours', 'bytes', 'money'"),
        ([*RUN, "--links", "lan", "--method", "diloco, rank = 4"], "only sync_every is taken here"),
        ([*RUN, "--links", "lan", "--tokens", "3B"], "missing: --step-tokens"),
        ([*RUN, "--links", "lan", "--step-tokens", "1M"], "give --tokens too"),
        ([*RUN, "--links", "lan", "--gpu", "0"], "--gpu 0: choose a time above 0"),
        ([*GPU, "--gpu", "H1000"], "did you mean 'H100'"),
        ([*GPU, "--gpu", "H100, 400%"], "mfu = 4.0"),
        ([*GPU, "--gpu", "H100, much"], "write a share of its peak"),
        ([*GPU[:-2], "--gpu", "H100"], "missing: --step-tokens"),
        (["methods", "./absent", "--links", "lan"], "no run directory at absent"),
        (["methods", "1B, deep", "--links", "lan"], "write a number of layers behind the comma"),
        (["methods", "100M, 1000 layers", *RUN[2:], "--links", "lan"], "layers = 1000: choose 1 to 750"),
        (["explain", "eager-table6"], "did you mean 'eager-table5'"),
        (["explain", "--json"], "missing: NAME"),
        (["explain", "eager-table2", "--out", "/proc/none"], "--out"),
        ([*RUN], "Missing option '--links'"),
    ],
)
def test_a_slip_is_one_line_with_the_mend(plan, arguments, words):
    code, _, err = plan(*arguments)
    assert code == 2 and words in err
    assert err.startswith("isles: ") and err.count("\n") == 1


@pytest.mark.long
def test_no_torch():
    code = (
        "import sys; from isles import cli; sys.argv = ['isles', 'plan', 'explain', 'noloco-quadratic', '--json']\n"
        "try: cli.main()\nexcept SystemExit: pass\nprint('torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr == "False\n" and json.loads(done.stdout)["rows"]


def test_what_churn_costs(plan):
    job = ("methods", "1e8, 12 layers", "--gpu", "1s", "--workers", "64", "--links", "home-fibre")
    code, out, _ = plan(*job, "--churn", "10%/h", "--method", "noloco", "--json")
    rows = json.loads(out)["rows"]
    assert code == 0 and {row["method"] for row in rows if "churn" in row} == {"noloco"}
    costs = next(row["churn"] for row in rows if row["method"] == "noloco")
    assert 0 < costs["alone"] < 0.1 and costs["state_bytes"] == pytest.approx(2 * 6.4 * 20e8, rel=1e-3)
    code, out, _ = plan(*job, "--churn", "10%/h", "--method", "diloco")
    assert "of the rounds alone" in out and "joiners wait" in out and "Mbit/s through it" in out
    for wrong in ("constant", "10%", "10%/h, soon"):
        code, _, told = plan(*job, "--churn", wrong)
        assert code == 2 and wrong in told and told.count("\n") == 1
