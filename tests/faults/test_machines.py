"""Slow and cut lines between machines, with the defaults that a user has; hours of them, mostly waiting: all long.

A model of 1.1M parameters is 4.3 MB: at 0.5 Mbit/s a broadcast takes longer than any deadline.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from benchmarks._machines import Machine, machines, unavailable
from isles.training.config.reading import read_config
from isles.training.running.run import launch
from tests.cli.command import Command, gone, isles
from tests.training.runs import write_folder

pytestmark = pytest.mark.long
ROOT = Path(__file__).resolve().parents[2]
PORT, TOKEN, PATIENCE = 29400, "token.txt", 3000.0
SIZE = ["model.d_model=128", "model.layers=4", "model.heads=4", "model.ffn=512", "run.checkpoint_every=3"]
STEPS = 6
OWN_MODULE = "import isles.comm.tcp; isles.comm.tcp._RTO_MAX = 9999\n"  # an option that no kernel has


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder."""
    if reason := unavailable():
        pytest.skip(reason)
    folder = write_folder(tmp_path_factory.mktemp("user"))
    code, _, error = isles("token", TOKEN, folder=folder)
    assert code == 0, error
    return folder


def whole(folder: Path, workers: int) -> bytes:
    """The model of so many workers of one machine."""
    out = folder / f"alone{workers}"
    if not out.exists():
        flags = {"world.workers": workers, "run.steps": STEPS, "replicas.method": "noloco"}
        settings = [f"data.path={folder / 'text.txt'}", "world.backend=virtual", *SIZE]
        alone = read_config(str(folder / "tiny.toml"), flags, settings)
        launch(alone, out, lambda line: None, lambda notice: None)
    return (out / "model.safetensors").read_bytes()


class Nodes:
    """A run on machines of their own, a worker each."""

    def __init__(self, folder: Path, name: str, own: Sequence[Machine], *settings: str) -> None:
        self.folder, self.name, self.machines = folder, name, own
        self.commands = [self._start(node, *settings) for node in range(len(own))]

    def _start(self, node: int, *settings: str) -> Command:
        flags = ["--nodes", str(len(self.machines)), "--node", str(node), "--rendezvous"]
        flags += [f"{self.machines[0].address}:{PORT}", "--token", f"@{TOKEN}", "--out", f"{self.name}{node}"]
        flags += ["--workers", str(len(self.machines)), "--steps", str(STEPS), "--method", "noloco"]
        more = [word for setting in (*SIZE, *settings) for word in ("--set", setting)]
        program = (sys.executable, "-m", "isles")
        return Command("train", "tiny.toml", *flags, *more, folder=self.folder, machine=self.machines[node],
                       program=program)  # fmt: skip

    def until_in_transfer(self) -> None:
        """Return in the midst of the first broadcast."""
        before = self.machines[1].wire().bytes_received
        while self.machines[1].wire().bytes_received < before + 1_000_000:
            assert all(command.process.poll() is None for command in self.commands), self.commands[0].end()
            time.sleep(0.1)

    def worker(self, node: int) -> psutil.Process:
        """The process of that machine's worker: the youngest child of the fork server."""
        found = [p for p in self.commands[node].left() if any("forkserver" in word for word in p.cmdline())]
        return max(found, key=lambda process: process.create_time())

    def end(self) -> tuple[list[int], list[str]]:
        """Exit codes and last lines; no process is left."""
        ends = [command.end(PATIENCE) for command in self.commands]
        assert all(gone(command.mark) for command in self.commands)
        return [code for code, *_ in ends], [error.splitlines()[-1] for _, _, error in ends]

    def finishes_with_the_bits(self) -> None:
        """Of the run on one machine."""
        codes, last = self.end()
        assert codes == [0] * len(self.machines), last
        model = self.folder / f"{self.name}0" / "model.safetensors"
        assert model.read_bytes() == whole(self.folder, len(self.machines))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def slow(stack: ExitStack, number: int, megabits: float) -> tuple[Machine, ...]:
    own = stack.enter_context(machines(number))
    for machine in own:
        machine.limit(megabits * 1e6)
    return own


@pytest.mark.parametrize("megabits", [0.5, 1.0, 2.0])
def test_a_slow_line_from_the_first_broadcast_to_the_summary(folder: Path, stack: ExitStack, megabits: float) -> None:
    Nodes(folder, f"slow{megabits}-", slow(stack, 2, megabits)).finishes_with_the_bits()


def test_five_workers_on_slow_lines(folder: Path, stack: ExitStack) -> None:
    Nodes(folder, "five-", slow(stack, 5, 0.5)).finishes_with_the_bits()


@pytest.mark.parametrize("how", ["switch", "interface"])
@pytest.mark.parametrize("seconds", [5, 20, 50])
@pytest.mark.parametrize("options", [True, pytest.param(False, id="older kernel")])
def test_a_cut_is_ridden_out(
    folder: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch, how: str, seconds: int, options: bool
) -> None:
    """In the middle of a transfer that fills the line."""
    if not options:
        if (how, seconds) != ("switch", 50):
            pytest.skip("the longest cut stands for the others")
        (folder / "older").mkdir(exist_ok=True)
        (folder / "older" / "sitecustomize.py").write_text(OWN_MODULE)
        monkeypatch.setenv("PYTHONPATH", f"{folder / 'older'}:{ROOT}")
    own = slow(stack, 2, 2.0)
    run = Nodes(folder, f"cut-{how}-{seconds}-{options}-", own)
    run.until_in_transfer()
    own[1].detach() if how == "switch" else own[1].interface("down")
    time.sleep(seconds)
    own[1].attach() if how == "switch" else own[1].interface("up")
    start, before = time.monotonic(), own[1].wire().bytes_received
    while own[1].wire().bytes_received < before + 100_000:
        assert all(command.process.poll() is None for command in run.commands), run.end()
        time.sleep(0.1)
    print(f"traffic is back {time.monotonic() - start:.1f} s after the mend")
    run.finishes_with_the_bits()


@pytest.mark.parametrize("options", [True, pytest.param(False, id="older kernel")])
def test_a_cut_for_good_is_named(
    folder: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch, options: bool
) -> None:
    """Within silence + 5 s, on older kernels twice that silence; both sides say which machine."""
    if not options:
        (folder / "older").mkdir(exist_ok=True)
        (folder / "older" / "sitecustomize.py").write_text(OWN_MODULE)
        monkeypatch.setenv("PYTHONPATH", f"{folder / 'older'}:{ROOT}")
    own = slow(stack, 2, 2.0)
    run = Nodes(folder, f"good-{options}-", own, "world.silence=30")
    run.until_in_transfer()
    own[1].detach()
    start = time.monotonic()
    codes, last = run.end()
    seconds = time.monotonic() - start
    print(f"named after {seconds:.1f} s: {last}")
    assert codes == [1, 1]
    assert f"node 1 ({own[1].address}) is lost" in last[0] and f"node 0 ({own[0].address}) is lost" in last[1], last
    assert seconds < (35.0 if options else 65.0)


@pytest.mark.parametrize("what", ["worker", "node"])
def test_what_is_stopped_in_a_transfer_is_named(folder: Path, stack: ExitStack, what: str) -> None:
    """SIGSTOP of a worker, or of a whole machine's processes, at 0.5 Mbit/s."""
    own = slow(stack, 2, 0.5)
    run = Nodes(folder, f"stop-{what}-", own, "world.silence=30")
    run.until_in_transfer()
    start = time.monotonic()
    if what == "worker":
        run.worker(1).send_signal(signal.SIGSTOP)
        codes, last = run.end()
        assert codes == [1, 1] and all("worker 1 failed: no sign of life for 30 s" in line for line in last), last
    else:
        os.killpg(run.commands[1].process.pid, signal.SIGSTOP)
        code, _, error = run.commands[0].end(PATIENCE)
        last = error.splitlines()
        assert code == 1 and f"node 1 ({own[1].address}) is lost: no sign of life for 30 s" in last[-1], last
        os.killpg(run.commands[1].process.pid, signal.SIGKILL)
    seconds = time.monotonic() - start
    print(f"named after {seconds:.1f} s: {last[-1]}")
    assert seconds < 35.0
