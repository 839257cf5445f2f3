"""What the methods claim, on the default domains: the built-in runs in their small form, and HDEE's bounds in full."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import Command

TRAINED = ("tables", "english", "code")


@pytest.mark.long(cases=1)  # three seeds: minutes
@pytest.mark.parametrize("form", [["--quick"], ["--at-once", "2"]], ids=["quick", "three seeds"])
def test_hdee_on_the_default_domains(form: list[str], tmp_path: Path) -> None:
    command = Command("experts", "hdee", *form, "--out", "run", folder=tmp_path)
    code, out, error = command.end(patience=3600)
    assert code == 0, error
    assert "Perplexity by domain and variant" in out
    mean = json.loads((tmp_path / "run" / "results.json").read_text())["mean"]
    same, steps, sizes = (mean[variant]["r1"] for variant in ("m-ho-i-ho", "m-ho-i-he", "m-he-i-ho"))
    for place, domain in enumerate(TRAINED):
        for told in (same[domain], steps[domain], sizes[domain]):
            assert min(range(3), key=told["alone"].__getitem__) == place
            assert told["perplexity"]["arithmetic"] > 1.03 * told["perplexity"]["posterior"]
            assert told["perplexity"]["cached"] <= told["perplexity"]["posterior"]
    code_of = [told["code"]["perplexity"]["posterior"] for told in (same, steps, sizes)]
    assert code_of[1] < 0.99 * code_of[0] and code_of[2] < 0.997 * code_of[0]
    assert same["english"]["alone"][1] == steps["english"]["alone"][1] == sizes["english"]["alone"][1]
    # Random splits are worth little more than one of them, domains far more.
    assert _gain(mean["random"]) < 1.06 and _gain(same) > 1.2


def _gain(told: dict[str, Any]) -> float:
    """Perplexity of the best expert over that of all joined, geometric mean over the trained domains."""
    alone = min(sum(math.log(told[domain]["alone"][expert]) for domain in TRAINED) for expert in range(3))
    return math.exp((alone - sum(math.log(told[d]["perplexity"]["posterior"]) for d in TRAINED)) / len(TRAINED))


@pytest.mark.long
def test_smalltalk_on_the_default_domains(tmp_path: Path) -> None:
    words = ["smalltalk.steps=200", "smalltalk.rounds=12", "smalltalk.round_sequences=256"]
    sets = [part for word in words for part in ("--set", word)]
    command = Command("experts", "smalltalk", "--quick", *sets, "--out", "run", folder=tmp_path)
    code, out, error = command.end(patience=1200)
    assert code == 0, error
    assert "Loads" in out
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    told = results["mean"]["trained"]["all"]
    assert told["mixture"] < 0.99 * told["batch"]
    assert told["random"] > 1.3 * told["mixture"]
    assert told["prefix-4"] > told["prefix-8"] > told["prefix-32"] >= told["oracle"]
    assert results["mean"]["routing"]["purity_training"] > 0.55
    lines = [json.loads(line) for line in (tmp_path / "run/seed-0/routers/rounds.jsonl").read_text().splitlines()]
    first, last = (next(line["purity"] for line in lines if line["round"] == number) for number in (1, 12))
    assert last > first + 0.1
