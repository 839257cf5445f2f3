"""The great comparison: settings first, judged runs once, in blocks; the page says what the runs say."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.comparison.__main__ import LEFT, main
from benchmarks.comparison.cases import PARTS, ROWS, cases_of
from benchmarks.comparison.claims import Claim, Judged, judge
from benchmarks.comparison.figures import Figures, front
from benchmarks.comparison.words import WHY
from isles.report.comparison import ALONE, Paired

QUICK = ("--quick", "--parts", "short", "--rows", "none,ddp,one-worker", "--trials", "2")


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def commit(folder: Path) -> None:
    name = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "settings.jsonl"], [*name, "commit", "-qm", "settings"]):
        subprocess.run(["git", *words], cwd=folder, check=True)


@pytest.mark.long
def test_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Searched, committed, judged: in this order, in blocks that end amid a run and go on; and nothing twice."""
    records = tmp_path / "records"
    records.mkdir()

    def block(what: str, *more: str) -> int:
        return main([*QUICK, "--records", str(records), "--out", str(tmp_path / "runs"), "--block", what, *more])

    assert block("run") == 2 and "not tuned yet: short none" in capsys.readouterr().err
    settings, rows = records / "settings.jsonl", records / "rows.jsonl"
    assert block("tune", "--minutes", "0.01") == LEFT and len(lines(settings)) < 3
    block("tune", "--minutes", "0.05")  # further, perhaps amid a run
    assert block("tune") == 0
    found = {tuple(one["key"]): one for one in lines(settings)}
    assert list(found) == [("short", label) for label in ("none", "ddp", "one-worker")]
    assert all("inner.lr" in one["settings"] and one["seed"] == 1000 for one in found.values())
    assert block("run") == 2 and "commit the settings" in capsys.readouterr().err and not rows.exists()
    commit(records)
    assert block("run", "--minutes", "0.03") == LEFT
    assert block("run") == 0
    judged, text = lines(rows), rows.read_text()
    assert len({(*one["key"], one["seed"]) for one in judged}) == len(judged) == 6
    assert block("run") == 0 and rows.read_text() == text
    assert "6 runs, 0 of them to be made" in capsys.readouterr().err
    whole = tmp_path / "whole"
    whole.mkdir()
    (whole / "settings.jsonl").write_text(settings.read_text())
    commit(whole)
    assert main([*QUICK, "--records", str(whole), "--out", str(tmp_path / "anew"), "--block", "run"]) == 0
    losses = [
        {(*one["key"], one["seed"]): one["validation"] for one in lines(f / "rows.jsonl")} for f in (records, whole)
    ]
    assert losses[0] == losses[1]  # as if no block had ended amid it
    tokens = {one["summary"]["tokens"] for one in judged if one["key"][1] != "one-worker"}
    assert max(tokens) - min(tokens) <= 2 * 2 * 4 * 32
    assert block("page", "--page", str(tmp_path / "page.md")) == 0
    page = (tmp_path / "page.md").read_text()
    mine = [one["summary"]["val_loss"] for one in judged if one["key"][1] == "ddp"]
    row = next(line.split("|") for line in page.splitlines() if line.startswith("| `ddp` |"))
    assert row[2].strip().startswith(f"{sum(mine) / 2:.4f} ± ") and row[4].strip() == "0"
    assert "loss after" in page and (tmp_path / "pictures" / "page-bytes-short.png").exists()
    changed = settings.read_text().replace('"inner.lr": ', '"inner.lr": 1')
    settings.write_text(changed)
    assert block("run") == 2 and "judged with other settings" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--rows", "ddp,nolocco"], "did you mean"),
        (["--parts", "everything"], "--parts everything"),
        (["--at-once", "0"], "--at-once 0"),
        (["--seeds", "x"], "--seeds"),
        (["--rows", "ddp", "--set", "world.wrkers=2"], "world.wrkers"),
        (["--quick"], "--records"),
    ],
)
def test_slips_are_answered_before_a_run(words: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--out", "/nowhere/at/all", "--block", "run"]) == 2
    said = capsys.readouterr().err
    assert error in said and said.count("\n") == 1


def figures(label: str, losses: list[float]) -> Figures:
    rows = {seed: {"summary": {"val_loss": loss}} for seed, loss in enumerate(losses)}
    return Figures(("long", label), {}, rows)


@pytest.mark.parametrize(
    ("found", "p", "verdict"),
    [
        (Paired(0.01, 0.005, 0.001), 0.01, "holds"),
        (Paired(-0.01, 0.005, 0.001), 0.01, "does not hold"),
        (Paired(0.01, 0.005, 0.001), 0.06, "open"),
        (None, 1.0, "open"),
    ],
)
def test_a_claim_holds_where_the_seeds_tell(found: Paired | None, p: float, verdict: str) -> None:
    assert Judged(Claim("a", "b", 0.05, "nobody"), found, p).verdict == verdict


def test_claims_are_judged_at_their_margins_and_together() -> None:
    """ddp is 0.1 ahead of localsgd with a margin of 0.05, and 0.02 +- 0.01 of diloco with one of 0.02: open. Alike in
    every seed is no difference.
    """
    rows = {
        "ddp": figures("ddp", [1.0, 1.1, 1.2, 1.3]),
        "localsgd": figures("localsgd", [1.11, 1.19, 1.3, 1.4]),
        "diloco": figures("diloco", [1.01, 1.13, 1.21, 1.33]),
    }
    found = judge({"long": rows, "short": {"ddp": rows["ddp"], "diloco": rows["diloco"]}})
    assert [part for part, _ in found] == ["long"] * 3 + ["short"]
    one, other, third = [judged for part, judged in found if part == "long"]
    assert (one.claim.worse, one.verdict, other.verdict, third.verdict) == ("localsgd", "holds", "open", "holds")
    assert one.found is not None and one.found.mean == pytest.approx(0.05)
    assert one.p == pytest.approx(min(1.0, 4 * one.found.p))  # the least of four claims, of all parts


def test_rows_differ_in_nothing_but_what_they_say() -> None:
    """Within a seed all rows have one model, one text, one number of tokens; tuned ones, too."""
    tuned = {("long", "ddp"): {"data.batch_size": 8, "inner.lr": 0.002}, ("long", "one-worker"): {"inner.lr": 0.001}}
    cases = cases_of(PARTS, ["ddp", "noloco", "one-worker"], [3], {}, (), tuned)
    assert len({case.folder for case in cases}) == len(cases) == 2 * 3 + 2 * 3
    for part in PARTS:
        same = [case.config for case in cases if case.key[0] == part and case.key[2:] in ((), ("0.03M",))]
        assert len({repr(one.model) for one in same}) == 1 and {one.run.seed for one in same} == {3}
        tokens = [one.run.steps * one.world.workers * one.data.batch_size for one in same]
        assert len(set(tokens)) == 1, part
    ddp, _, alone = [case.config for case in cases if case.key[0] == "long"]
    assert (ddp.inner.lr, ddp.data.batch_size, ddp.run.steps, alone.inner.lr) == (0.002, 8, 600, 0.001)
    ladder = {case.key[2]: case.config.run.steps for case in cases if case.key[:2] == ("ladder", "ddp")}
    assert ladder == {"0.03M": round(20 * 34976 / 4096), "0.12M": round(20 * 123200 / 4096)}


def test_a_tuned_batch_is_paid_for_and_methods_run_as_they_are_meant() -> None:
    """Twice the batch, half the steps: as many tokens, so as many seconds of computing as 1B. `sparta` sends at every
    step in every regime; rows at a paper's settings have them whatever was tuned.
    """
    tuned = {("long", "ddp"): {"data.batch_size": 8}, ("long", "noloco-50"): {"inner.lr": 0.001}}
    cases = cases_of(("long",), ["ddp", "sparta", "noloco-50", "one-worker"], [0], {}, (), tuned)
    by = {case.key[1]: case for case in cases}
    assert [by[name].priced_as for name in ("ddp", "one-worker")] == ["1B, H100, 262144", "1B, H100, 131072"]
    sparta, paper = by["sparta"].config.replicas, by["noloco-50"].config.replicas
    assert sparta.sync_every == 1  # type: ignore[attr-defined]
    assert (paper.sync_every, paper.outer_lr, paper.outer_momentum) == (50, 0.7, 0.5)  # type: ignore[attr-defined]
    assert not ROWS["noloco-50"].searched and by["noloco-50"].config.inner.lr == 0.001


def test_the_front() -> None:
    """Of loss, seconds and bytes: `b` is as good as `a` in two and worse in one; `c` and `d` have the least of one."""
    costs = {"a": (1.0, 10.0, 5.0), "b": (1.0, 10.0, 6.0), "c": (2.0, 4.0, 9.0), "d": (3.0, 30.0, 0.0)}
    rows = []
    for label, (loss, seconds, sent) in costs.items():
        price = {"lan": {"virtual_seconds": seconds, "priced_bytes_per_worker": sent}}
        rows.append(Figures(("long", label), {}, {0: {"summary": {"val_loss": loss}, "prices": price}}))
    assert front(rows, "lan") == ["a", "c", "d"]


def test_a_row_that_loses_is_told_why() -> None:
    assert set(ROWS) - set(WHY) == {"ddp", ALONE}  # to which all others are held
