"""The examples run as their docstrings say, and show what they claim."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from isles import cli

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = ["-m", "torch.distributed.run", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]


def output(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Warning" not in done.stderr and "Traceback" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("arguments", "workers"),
    [
        pytest.param(["examples/bare_loop.py"], 1, marks=pytest.mark.long),
        pytest.param([*TORCHRUN, "examples/bare_loop.py"], 2, marks=pytest.mark.long),
        pytest.param(["examples/bare_loop.py", "--workers", "3"], 3, marks=pytest.mark.long),
    ],
    ids=["alone", "torchrun", "run_local"],
)
def test_bare_loop(arguments: list[str], workers: int) -> None:
    """The same file alone, under torchrun, and in processes that it starts; more workers, lower loss."""
    text = output(*arguments)
    found = re.search(r"(\d) worker\(s\): loss of the one model (\d\.\d+)", text)
    assert found and int(found[1]) == workers
    assert float(found[2]) < {1: 3.0, 2: 2.9, 3: 2.8}[workers]


def test_bare_loop_is_plain_but_for_three_lines() -> None:
    """Without the three marked lines and the world's rank it is a script that knows nothing of Isles."""
    source = (ROOT / "examples" / "bare_loop.py").read_text()
    body = source[source.index("def train()") : source.index("def worker(")]
    lines = [line for line in body.splitlines() if "isles." in line or "consolidate" in line]
    assert [line.rstrip()[-3:] for line in lines] == ["# 1", "# 2", "# 3"]


@pytest.mark.long
def test_add_a_method() -> None:
    """Gossip in under 40 lines beats working alone, on every worker; so does the outer rule in under 25."""
    source = (ROOT / "examples" / "add_a_method.py").read_text()
    method = source[source.index("# The method") : source.index("# To here")]
    rule = source[source.index("# An outer rule") : source.index("# To here, again")]
    assert len([line for line in method.splitlines() if line.strip()]) < 40
    assert len([line for line in rule.splitlines() if line.strip()]) < 25
    rows = {
        line.split()[0]: list(map(float, line.split()[1:]))
        for line in output("examples/add_a_method.py").splitlines()[1:]
    }
    assert rows["gossip"][0] < 0.5 * rows["none"][0]
    assert rows["gossip"][1] < 0.5 * rows["none"][1]
    assert rows["settled"][0] < 0.5 * rows["none"][0] and rows["settled"][1] == 0


@pytest.mark.long
def test_recommender() -> None:
    """Sparse gradients and streams: less than 0.01 of log-loss, a tenth of the bytes, less time; both have learned."""
    lines = output("examples/recommender.py").splitlines()[1:]
    exact, sparse = ([float(word) for word in re.findall(r"\d+\.\d+", line)] for line in lines)
    assert abs(sparse[0] - exact[0]) < 0.01 and max(sparse[0], exact[0]) < 0.55  # 0.654: the share of clicks alone
    assert sparse[1] < exact[1]
    assert all(few < dense / 10 for few, dense in zip(sparse[2:], exact[2:], strict=True))


@pytest.mark.long
def test_pipeline_loop() -> None:
    """Every worker of two replicas of two stages sees its loss fall."""
    seen = re.findall(r"worker (\d): (\d\.\d+) -> (\d\.\d+) nats", output("examples/pipeline_loop.py"))
    assert [worker for worker, _, _ in seen] == ["0", "1", "2", "3"]
    assert all(float(last) < 0.1 < float(first) for _, first, last in seen)


def test_own_model_is_that_of_the_documents() -> None:
    """docs/own-model.md and examples/own_model.py hold the same code."""
    told = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "own-model.md").read_text(), re.DOTALL)[0]
    assert (ROOT / "examples" / "own_model.py").read_text().endswith(told)


@pytest.mark.parametrize("dry", [True, pytest.param(False, marks=pytest.mark.long)], ids=["dry", "for real"])
def test_the_next_commands_of_the_readme(
    dry: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As printed there, into another directory; dry: what is to be trained is planned only, in this process. Compared
    at equal tokens, data parallel is best and those that exchange beat those that do not, as the field reports.
    """
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    readme = (ROOT / "README.md").read_text()
    block = readme[readme.index("Next, on a text of your own") :].split("```")[1]
    commands = [line.split()[1:] for line in block.replace("\\\n", " ").splitlines() if line.startswith("isles ")]
    assert [command[0] for command in commands] == ["train", "train", "compare"]
    for number, command in enumerate(commands):
        command[command.index("--out") + 1] = str(tmp_path / str(number))
        if not dry:
            output("-m", "isles", *command)
            assert (tmp_path / str(number) / "report.html").is_file()
        elif command[0] == "train":
            monkeypatch.setattr(sys, "argv", ["isles", *command, "--dry-run"])
            with pytest.raises(SystemExit) as ended:
                cli.main()
            assert not ended.value.code
            assert "a worker in the whole run" in capsys.readouterr().out
    if not dry:
        compared = json.loads((tmp_path / "2" / "compare.json").read_text())
        assert len({one["tokens"] for (one,) in compared.values()}) == 1
        loss = {name: one["val_loss_replicas"] for name, (one,) in compared.items() if name != "one-worker"}
        assert loss["ddp"] == min(loss.values()), loss
        assert loss["diloco"] <= loss["none"] - 0.05 and loss["noloco"] <= loss["none"] - 0.03, loss
