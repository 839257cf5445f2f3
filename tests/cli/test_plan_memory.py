"""`isles plan memory`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from isles import cli
from isles.memory.plan import from_json

CUT = ["--stages", "2", "--set", "model.tie_embeddings=false"]
SMALL = ["--machine", "RTX 3060", "--device-budget", "3MB", "--set", "data.batch_size=2"]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """memory(*arguments): (exit code, stdout, stderr) of `isles plan memory`, in this process."""

    def ask(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["isles", "plan", "memory", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return int(caught.value.code or 0), *capfd.readouterr()

    return ask


def test_a_person_reads_a_table(memory, tmp_path: Path) -> None:
    code, out, err = memory(*SMALL, "--compare", "--trace", str(tmp_path / "lanes.json"))
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0].startswith("model    0.12M: 123,200 parameters, 2 blocks; batch 2 x 128 tokens")
    assert "machine  RTX 3060: 12.0 GB on the device" in out
    assert any(line.startswith("blocks.0") for line in lines)
    assert "lanes busy in a step: device" in out
    for name in ("auto", "autohete", "karma", "checkpoint", "recompute all", "optimizer on the host"):
        assert any(line.startswith(name) for line in lines)
    assert json.loads((tmp_path / "lanes.json").read_text())["traceEvents"]


@pytest.mark.long
def test_a_person_reads_which_stage_fits(memory) -> None:
    words = ["data.batch_size=8", "model.layers=7", "model.tie_embeddings=false"]
    staged = ["--stages", "3", "--machine", "RTX 3060", *(word for one in words for word in ("--set", one))]
    code, out, err = memory(*staged, "--method", "checkpoint", "--device-budget", "6MB")
    assert code == 0, err
    assert "can host stages: 2\n" in out
    assert out.count("does not fit") == 2
    code, out, _ = memory(*staged, "--json")
    assert code == 0
    assert [plan["stage"] for plan in json.loads(out)] == [0, 1, 2]
    code, _, err = memory("--stages", "3", "--set", "model.tie_embeddings=true")
    assert (code, err.count("\n")) == (2, 1)
    assert "model.tie_embeddings = false" in err


def test_a_person_reads_what_fsdp_takes(memory) -> None:
    """Its weights are its own: what would move them is no choice."""
    words = ["--set", "replicas.method=fsdp", "--set", "world.backend=distributed", "--machine", "RTX 3060"]
    code, out, err = memory(*words, "--method", "checkpoint", "--compare")
    assert code == 0, err
    told = [line.split()[0] for line in out[out.index("method  ") :].split("\n\n")[0].splitlines()[1:]]
    assert told == ["checkpoint"]
    assert "what fsdp's messages take" in out
    code, _, err = memory(*words)
    assert (code, err.count("\n")) == (2, 1)
    assert 'set it to "checkpoint"' in err


def test_a_program_reads_json(memory, tmp_path: Path) -> None:
    code, out, err = memory(*SMALL, "--json")
    assert code == 0, err
    plan = from_json(out)
    assert plan.peak <= plan.budget == 3_000_000
    path = tmp_path / "plan.json"
    path.write_text(out, encoding="utf-8")
    code, out, err = memory(*SMALL, "--set", f"memory.plan={path}", "--json")
    assert from_json(out) == plan
    code, _, err = memory(*SMALL, "--set", f"memory.plan={path}", "--set", "model.layers=3")
    assert code == 2
    assert "was made for another model" in err
    code, _, err = memory(*SMALL, "--set", f"memory.plan={path}", "--machine", "RTX 4090")
    assert code == 2
    assert "was made for another machine" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--machine", "RTX 3060", "--device-budget", "100kB"], "the least that works"),
        (["--machine", "RTX 3061"], "did you mean 'RTX 3060'?"),
        (["--machine", "RTX 3060", "--device-budget", "13GB"], "is more than the 11.2GiB of RTX 3060"),
        (["--machine", "RTX 3060", "--device-budget", "12"], "write its unit too"),
        (["--machine", "RTX 3060", "--update", "early"], "set it to 0"),
        (["--machine", "none.toml"], "none.toml: cannot be read"),
        (["--stages", "0"], "--stages 0: choose 1 or more"),
        ([*CUT, "--compare"], "--compare is of a whole model's plan"),
        ([*CUT, "--trace", "lanes.json"], "--trace is of a whole model's plan"),
        (["--json", "--compare"], "leave one out"),
    ],
)
def test_what_cannot_be_is_one_line(memory, arguments: list[str], words: str) -> None:
    code, out, err = memory(*arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert len(err.strip().splitlines()) == 1
