"""The great comparison: runs are made once, the page says what they say, claims are judged seed by seed."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

import pytest

from benchmarks.comparison.__main__ import main
from benchmarks.comparison.cases import SWEPT, method_cases
from benchmarks.comparison.claims import Claim, Judged
from isles.models.sizes import SIZES as SHAPES
from isles.models.sizes import parameters

QUICK = ("--quick", "--parts", "methods", "--methods", "none,ddp")


def summaries(out: Path) -> dict[str, dict[str, float]]:
    return {path.parent.name: json.loads(path.read_text()) for path in out.glob("*/*/summary.json")}


def stamps(out: Path) -> dict[str, int]:
    return {path.parent.name: path.stat().st_mtime_ns for path in out.glob("*/*/summary.json")}


def row(page: str, begins: str) -> list[str]:
    line = next(line for line in page.splitlines() if line.startswith(f"| {begins} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("comparison")
    assert main([*QUICK, "--out", str(folder)]) == 0
    return folder


@pytest.mark.long
def test_the_page_says_what_the_runs_say(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Losses, bytes and clocks of the table are those of the summaries; `none` is judged by its workers' own."""
    assert main([*QUICK, "--out", str(out), "--page-only"]) == 0
    page, found = (out / "comparison.md").read_text(), summaries(out)
    assert set(found) == {"none-0", "none-1", "ddp-0", "ddp-1"}
    losses = [found[f"ddp-{seed}"]["val_loss"] for seed in (0, 1)]
    cells = row(page, "`ddp`")
    assert cells[1].startswith(f"{mean(losses):.4f} ± ")
    assert cells[5] == f"{100 * found['ddp-0']['bytes_sent_per_worker'] / found['ddp-0']['ddp_bytes_per_worker']:.1f} %"
    assert cells[6] == f"{found['ddp-0']['virtual_seconds']:.2f} s"  # seed 0: two data centres; seed 1: home fibre
    assert cells[7] == f"{found['ddp-1']['virtual_seconds']:.2f} s"
    apart = [found[f"none-{seed}"]["val_loss_replicas"] - losses[seed] for seed in (0, 1)]
    assert row(page, "`none`")[3].startswith(f"{mean(apart):+.4f} ± ")
    picture = "pictures/comparison-bytes.png"
    assert f"]({picture})" in page and (out / picture).read_bytes().startswith(b"\x89PNG")
    assert "page  " in capsys.readouterr().out


@pytest.mark.long
def test_a_finished_run_is_not_made_again(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Unless its settings changed, or it was cut off; and then it gives the same again."""
    page, before, losses = (out / "comparison.md").read_bytes(), stamps(out), summaries(out)
    (out / "methods" / "none-1" / "summary.json").unlink()  # as a machine that went down leaves it
    older = out / "methods" / "ddp-1" / "config.toml"
    older.write_text(older.read_text().replace("threads = 1\n", ""))  # of a version that did not have the setting yet
    assert main([*QUICK, "--out", str(out)]) == 0
    assert "4 runs, 1 of them to be made" in capsys.readouterr().err
    after = stamps(out)
    assert {name for name in after if after[name] != before[name]} == {"none-1"}
    assert summaries(out)["none-1"]["val_loss"] == losses["none-1"]["val_loss"]
    assert row((out / "comparison.md").read_text(), "`none`")[1] in page.decode()
    assert main([*QUICK, "--out", str(out), "--seeds", "0", "--methods", "ddp", "--steps", "9"]) == 0
    assert summaries(out)["ddp-0"]["steps"] == 9
    assert main([*QUICK, "--out", str(out), "--page-only"]) == 0  # its settings are others now: it is not shown
    assert "`ddp` (1 of 2 seeds)" in (out / "comparison.md").read_text()


@pytest.mark.long
def test_the_sweep_runs_every_size_with_every_method(tmp_path: Path) -> None:
    words = ["--quick", "--parts", "scaling", "--sizes", "0.12M,0.53M", "--seeds", "0", "--scaling-steps", "4"]
    assert main([*words, "--out", str(tmp_path / "runs"), "--page", str(tmp_path / "swept.md")]) == 0
    found, page = summaries(tmp_path / "runs"), (tmp_path / "swept.md").read_text()
    assert set(found) == {f"{name}-{size}-0" for name in SWEPT for size in ("0.12M", "0.53M")}
    gap = found["eager-0.53M-0"]["val_loss"] - found["ddp-0.53M-0"]["val_loss"]
    assert row(page, "0.53M")[-1] == f"{gap:+.4f}"
    change = gap - (found["eager-0.12M-0"]["val_loss"] - found["ddp-0.12M-0"]["val_loss"])
    assert f"changes by {change:+.3f} in the mean" in page
    assert (tmp_path / "pictures" / "swept-gap.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_large_sizes_are_planned_for_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without one: the dry run says what it will be and writes nothing."""
    words = [
        "--parts",
        "scaling",
        "--sizes",
        "eager-35M,eager-100M",
        "--device",
        "cuda",
        "--dry-run",
        "--out",
        str(tmp_path),
    ]
    assert main([*words, "--set", "model.context=256"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for size in ("eager-35M", "eager-100M"):
        for name in SWEPT:
            line = next(line for line in lines if line.startswith(f"{name} {size} "))
            assert " cuda " in line and f"{parameters(SHAPES[size]):,}" in line
    assert "24 runs, 3 seeds of each line; dry run: nothing was started or written" in lines
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--methods", "ddp,nolocco"], "did you mean"),
        (["--parts", "everything"], "--parts everything"),
        (["--sizes", "3M"], "model.size = '3M'"),
        (["--at-once", "0"], "--at-once 0"),
        (["--seeds", "x"], "--seeds"),
        (["--set", "world.wrkers=2"], "world.wrkers"),
    ],
)
def test_slips_are_answered_before_a_run(words: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--out", "/nowhere/at/all"]) == 2
    said = capsys.readouterr().err
    assert error in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("margin", "found", "verdict"),
    [
        (0.05, (0.06, 0.05), "holds"),
        (0.05, (0.06, 0.04), "in some seeds"),
        (0.05, (0.04, 0.01), "does not hold"),
        (-0.03, (-0.02, 0.5), "holds"),  # behind, by no more than allowed
        (0.05, (), "not run"),
    ],
)
def test_a_claim_holds_in_every_seed_or_not(margin: float, found: tuple[float, ...], verdict: str) -> None:
    assert Judged(Claim("a", "b", margin, "nobody"), found).verdict == verdict


def test_rows_differ_in_nothing_but_what_they_say() -> None:
    """Within a seed all rows have one model, one text, one number of tokens; seeds have topologies of their own."""
    cases = method_cases(["ddp", "noloco", "diloco-islands", "fsdp"], [0, 1, 2, 3], 50, {})
    first = cases[0].config
    for case in cases:
        config = case.config
        assert (config.model, config.data, config.run.steps) == (first.model, first.data, 50)
        assert config.world.workers == first.world.workers and config.run.seed == case.seed
    links = [case.config.world.links for case in cases if case.key == ("ddp",)]
    assert links == ["datacentres", "home-fibre", "worldwide", "datacentres"]
    assert len({case.folder for case in cases}) == len(cases)
