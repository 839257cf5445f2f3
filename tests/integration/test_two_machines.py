"""The two-machine commands of docs/two-machines.md, on two network namespaces joined by a cable."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from isles.running.run import launch
from isles.training.config.reading import read_config
from tests.cli.command import Command, eventually
from tests.forked import Forked
from tests.integration.namespaces import Machine, two_machines
from tests.training.runs import metrics, without_clocks, write_folder

PORT = 29400
TOKEN = "token.txt"
# The command itself, where other machines' silence may be noticed sooner than after 30 s.
SOON = "from isles.training.config import world; world._LEAST_SILENCE = 1.0; from isles.cli import main; main()"
OTHER_VERSION = (
    "import isles.base.version; isles.base.version.__version__ = '9.9.9'; from isles.cli import main; main()"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_folder(tmp_path_factory.mktemp("user"))
    code, _, error = Forked("token", TOKEN, folder=folder).end()
    assert code == 0, error
    return folder


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine]]:
    with two_machines() as both:
        yield both


def words_of(machines: tuple[Machine, Machine], node: int, *more: str, verb: str = "train") -> list[str]:
    """What is typed on that node."""
    flags = ["--nodes", "2", "--node", str(node), "--rendezvous", f"{machines[0].address}:{PORT}"]
    train = ["tiny.toml", "--workers", "3", "--set", "world.join_deadline=120"]
    first = [*(train if verb == "train" else []), "--token", f"@{TOKEN}"]
    return [verb, *first, *more, *flags]


def start(
    folder: Path, machines: tuple[Machine, Machine], node: int, *more: str, code: str = "", verb: str = "train"
) -> Command:
    """The command of that node, with its own --out."""
    program = {"program": [sys.executable, "-c", code]} if code else {}
    words = words_of(machines, node, *more, verb=verb)
    return Command(*words, folder=folder, machine=machines[node], **program)  # type: ignore[arg-type]


def forked(folder: Path, machines: tuple[Machine, Machine], node: int, *more: str) -> Forked:
    """The same of a process that has torch already."""
    return Forked(*words_of(machines, node, *more), folder=folder, first=partial(Machine.go, machines[node]))


def ended(*commands: Command | Forked) -> tuple[list[int], list[str]]:
    """Exit codes and last lines of stderr, notes aside, once all have ended and left no process."""
    ends = [command.end() for command in commands]
    assert eventually(lambda: not any(command.left() for command in commands))
    assert not any("Traceback" in error for _, _, error in ends), ends
    return [code for code, _, _ in ends], [error.splitlines()[-1] for _, _, error in ends]


def lines(run: Path) -> list[str]:
    """Of metrics.jsonl, but for what clocks measured, in some order."""
    return sorted(str(without_clocks(line)) for line in metrics(run))


@pytest.mark.parametrize("begin", [forked, pytest.param(start, marks=pytest.mark.long)])
def test_they_train_together_to_the_same_bits(
    begin: Callable[..., Command | Forked], folder: Path, machines: tuple[Machine, Machine], tmp_path: Path
) -> None:
    """As three workers of one machine: metrics, model. Over 50 Mbit/s. Node 0 has the results, each its own shards."""
    machines[0].limit(50e6)
    more = ["--steps", "8", "--set", "run.checkpoint_every=4", "--out"]
    both = [begin(folder, machines, node, *more, str(tmp_path / f"node{node}")) for node in (0, 1)]
    alone = read_config(str(folder / "tiny.toml"), {"world.workers": 3, "run.steps": 8}, [
        f"data.path={folder / 'text.txt'}", "world.backend=virtual"])  # fmt: skip
    launch(alone, tmp_path / "alone", lambda line: None, lambda notice: None)
    codes, last = ended(*both)
    assert codes == [0, 0], last
    assert all("step 8/8" in text for text in last)
    assert lines(tmp_path / "node0") == lines(tmp_path / "alone")
    models = [(tmp_path / run / "model.safetensors").read_bytes() for run in ("node0", "alone")]
    assert models[0] == models[1]
    held = {path.relative_to(tmp_path / "node1").as_posix() for path in (tmp_path / "node1").rglob("*.*")}
    held -= {"logs/worker-2.log"}
    assert held == {"config.toml", *(f"checkpoints/step-{step}/{name}" for step in (4, 8) for name in (
        "worker-2.safetensors", "manifest.json"))}  # fmt: skip


@pytest.mark.long
def test_stages_of_two_machines_train_to_the_same_bits(folder: Path, machines: tuple[Machine, Machine]) -> None:
    """Random routes, so that every boundary is between machines as well; stopped, and gone on with on both."""
    machines[0].limit(50e6)
    settings = ["model.layers=2", "pipeline.stages=2", "pipeline.microbatches=2", "pipeline.routing=random"]
    more = [*(word for setting in settings for word in ("--set", setting)), "--workers", "4"]
    more += ["--steps", "8", "--set", "run.checkpoint_every=5", "--out"]
    both = [start(folder, machines, node, *more, f"stages{node}") for node in (0, 1)]
    alone = read_config(str(folder / "tiny.toml"), {"world.workers": 4, "run.steps": 8}, [
        f"data.path={folder / 'text.txt'}", "world.backend=virtual", *settings])  # fmt: skip
    launch(alone, folder / "stages-alone", lambda line: None, lambda notice: None)
    codes, last = ended(*both)
    assert codes == [0, 0], last
    assert lines(folder / "stages0") == lines(folder / "stages-alone")
    models = [(folder / run / "model.safetensors").read_bytes() for run in ("stages0", "stages-alone")]
    assert models[0] == models[1]
    for name in ("summary.json", "model.safetensors"):
        (folder / "stages0" / name).unlink()
    both = [start(folder, machines, node, f"stages{node}", verb="resume") for node in (0, 1)]
    codes, last = ended(*both)
    assert codes == [0, 0], last
    assert (folder / "stages0" / "model.safetensors").read_bytes() == models[0]


@pytest.mark.long
def test_ctrl_c_on_one_stops_both_and_both_resume(folder: Path, machines: tuple[Machine, Machine]) -> None:
    """After a common step, with a checkpoint; the commands that are printed go on from it to the end."""
    more = ["--method", "own:Slow", "--set", "run.log_every=1", "--steps", "60", "--out"]
    both = [start(folder, machines, node, *more, f"stop{node}") for node in (0, 1)]
    assert eventually(lambda: (folder / "stop0" / "metrics.jsonl").exists() and metrics(folder / "stop0"))
    os.killpg(both[1].process.pid, signal.SIGINT)
    codes, last = ended(*both)
    assert codes == [130, 130], last
    for node, text in enumerate(last):
        wanted = f"isles resume stop{node} --nodes 2 --node {node} --rendezvous {machines[0].address}:{PORT}"
        assert text.startswith("isles: stopped after step ") and text.endswith(wanted), text
    both = [start(folder, machines, node, f"stop{node}", verb="resume") for node in (0, 1)]
    codes, last = ended(*both)
    assert codes == [0, 0], last
    assert [line["step"] for line in metrics(folder / "stop0") if line["worker"] == 2] == list(range(1, 61))


@pytest.mark.long
def test_who_does_not_fit_is_told_and_the_right_one_awaited(folder: Path, machines: tuple[Machine, Machine]) -> None:
    """Another configuration, another version, the rendezvous of nobody: exit code and one line each."""
    host = start(folder, machines, 0, "--steps", "6", "--out", "host")
    assert host.process.stderr is not None
    assert host.process.stderr.readline().startswith("device: ")
    assert "waiting at" in host.process.stderr.readline()
    wrong = [
        start(folder, machines, 1, "--steps", "7", "--set", "inner.lr=0.5", "--out", "a"),
        start(folder, machines, 1, "--steps", "6", "--out", "b", code=OTHER_VERSION),
        Command("train", "tiny.toml", "--token", f"@{TOKEN}", "--set", "world.join_deadline=1",
                "--nodes", "2", "--node", "1", "--out", "c",
                "--rendezvous", f"{machines[0].address}:{PORT + 1}", folder=folder, machine=machines[1]),
    ]  # fmt: skip
    codes, last = ended(*wrong)
    assert codes == [2, 2, 1], last
    assert "node 1 has another configuration: inner.lr = 0.5 there, 0.01 on node 0; run.steps = 7 there, 6" in last[0]
    assert "node 1 runs isles 9.9.9, node 0 runs isles" in last[1]
    assert f"nobody answers at {machines[0].address}:{PORT + 1} since 1 s (connection refused)" in last[2]
    assert not any((folder / name).exists() for name in "abc")
    codes, last = ended(host, start(folder, machines, 1, "--steps", "6", "--out", "guest"))
    assert codes == [0, 0], last


@pytest.mark.long
@pytest.mark.parametrize("closed", [0, 1])
def test_a_firewalled_direction_is_one_line_on_both(
    folder: Path, machines: tuple[Machine, Machine], closed: int
) -> None:
    """Before any worker starts; it names the direction and what to open where. The rendezvous itself is open."""
    here, there = machines[closed], machines[1 - closed]
    here.firewall("ct state new ip saddr", there.address, "tcp dport 32768-60999")
    both = [start(folder, machines, node, "--steps", "6", "--out", f"wall{node}") for node in (0, 1)]
    codes, last = ended(*both)
    assert codes == [1, 1] and last[0] == last[1]
    for words in (
        f"node {1 - closed} ({there.address}) cannot reach node {closed} ({here.address})",
        f"no answer within 5 s): let TCP ports 32768-60999 in on node {closed}",
    ):
        assert words in last[0], last
    assert not any((folder / f"wall{node}").exists() for node in (0, 1))


@pytest.mark.long
def test_a_port_that_is_lost(folder: Path, machines: tuple[Machine, Machine]) -> None:
    """The launchers still hear each other, the workers do not: deadline, channel and worker are named on both."""
    more = ["--method", "own:Slow", "--steps", "1000000", "--set", "world.outer_deadline=2", "--out"]
    both = [start(folder, machines, node, *more, f"port{node}") for node in (0, 1)]
    assert eventually(lambda: (folder / "port0" / "metrics.jsonl").exists() and metrics(folder / "port0"))
    machines[1].firewall("tcp sport !=", str(PORT))
    codes, last = ended(*both)
    assert codes == [1, 1] and last[0].partition(";")[0] == last[1].partition(";")[0], last
    assert "did not answer on channel 'outer' within 2 s" in last[0], last


@pytest.mark.long
@pytest.mark.parametrize("how", ["killed", "cut"])
def test_a_machine_that_is_lost_is_named(folder: Path, machines: tuple[Machine, Machine], how: str) -> None:
    """Its launcher is killed, or the cable is pulled: the others say which one, and every process ends."""
    more = ["--method", "own:Slow", "--steps", "1000000", "--set", "run.checkpoint_every=3"]
    more += ["--set", "world.silence=3", "--out"]
    both = [start(folder, machines, node, *more, f"{how}{node}", code=SOON) for node in (0, 1)]
    assert eventually(lambda: list((folder / f"{how}1").glob("checkpoints/*/manifest.json")))
    if how == "killed":
        both[1].process.kill()
    else:
        machines[1].cut()
    codes, last = ended(*both)
    why = "it closed the connection" if how == "killed" else "no sign of life for 3 s"
    assert codes[0] == 1 and f"isles: node 1 ({machines[1].address}) is lost: {why}; go on after step " in last[0], last
    assert f"with: isles resume {how}0 --nodes 2 --node 0" in last[0]
    if how == "cut":
        assert codes[1] == 1 and f"isles: node 0 ({machines[0].address}) is lost: {why}" in last[1], last
