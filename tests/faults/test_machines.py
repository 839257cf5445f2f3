"""Slow and cut lines between machines, with the defaults that a user has; hours of them, mostly waiting: all long.

LARGE is 4.3 MB: at 0.5 Mbit/s a broadcast takes longer than any deadline. SMALL, 2.5 MB, is for what needs less.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from benchmarks._machines import Machine, machines, unavailable
from isles.running.run import launch
from isles.training.config.reading import read_config
from tests.cli.command import Command, gone, isles
from tests.training.runs import write_folder

pytestmark = pytest.mark.long
ROOT = Path(__file__).resolve().parents[2]
PORT, TOKEN, PATIENCE = 29400, "token.txt", 3000.0
LARGE = ("model.d_model=128", "model.layers=4", "model.heads=4", "model.ffn=512", "run.checkpoint_every=3")
SMALL = ("model.d_model=96", "model.layers=4", "model.heads=4", "model.ffn=384", "run.checkpoint_every=3")
STEPS = 6
IDLE = """
import os, time
import isles

class Idle(isles.NoLoCo):
    def after_inner_step(self):
        time.sleep(float(os.environ["IDLE"]))
        super().after_inner_step()
"""
OWN_MODULE = "import isles.comm.tcp; isles.comm.tcp._RTO_MAX = 9999\n"  # an option that no kernel has


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder."""
    if reason := unavailable():
        pytest.skip(reason)
    folder = write_folder(tmp_path_factory.mktemp("user"))
    (folder / "idle.py").write_text(IDLE)
    code, _, error = isles("token", TOKEN, folder=folder)
    assert code == 0, error
    return folder


def whole(folder: Path, workers: int, settings: Sequence[str]) -> bytes:
    """The model of so many workers of one machine."""
    out = folder / f"alone-{workers}-{abs(hash(tuple(settings)))}"
    if not out.exists():
        flags = {"world.workers": workers, "run.steps": STEPS, "replicas.method": "noloco"}
        own = [f"data.path={folder / 'text.txt'}", "world.backend=virtual", *settings]
        alone = read_config(str(folder / "tiny.toml"), flags, own)
        launch(alone, out, lambda line: None, lambda notice: None)
    return (out / "model.safetensors").read_bytes()


class Nodes:
    """A run on machines of their own, a worker each."""

    def __init__(
        self, folder: Path, name: str, own: Sequence[Machine], settings: Sequence[str], method: str = "noloco"
    ) -> None:
        self.folder, self.name, self.machines, self.settings = folder, name, own, settings
        self.commands = [self._start(node, method) for node in range(len(own))]
        self.notes = ""  # of node 0, once it has ended

    def _start(self, node: int, method: str) -> Command:
        flags = ["--nodes", str(len(self.machines)), "--node", str(node), "--rendezvous"]
        flags += [f"{self.machines[0].address}:{PORT}", "--token", f"@{TOKEN}", "--out", f"{self.name}{node}"]
        flags += ["--workers", str(len(self.machines)), "--steps", str(STEPS), "--method", method]
        more = [word for setting in self.settings for word in ("--set", setting)]
        program = (sys.executable, "-m", "isles")
        return Command("train", "tiny.toml", *flags, *more, folder=self.folder, machine=self.machines[node],
                       program=program)  # fmt: skip

    def moved(self) -> int:
        """Bytes that have come to node 1, while all go on."""
        assert all(command.process.poll() is None for command in self.commands), self.end()
        return self.machines[1].wire().bytes_received

    def until_in_transfer(self) -> None:
        """Return in the midst of the first broadcast."""
        before = self.moved()
        while self.moved() < before + 1_000_000:
            time.sleep(0.1)

    def until_idle(self) -> None:
        """Return when the line has been still for two seconds after the first broadcast, but for signs of life."""
        self.until_in_transfer()
        before = 0
        while self.moved() > before + 20_000:
            before = self.moved()
            time.sleep(2.0)

    def worker(self, node: int) -> psutil.Process:
        """The process of that machine's worker: the youngest child of the fork server."""
        found = [p for p in self.commands[node].left() if any("forkserver" in word for word in p.cmdline())]
        return max(found, key=lambda process: process.create_time())

    def end(self) -> tuple[list[int], list[str]]:
        """Exit codes and last lines; no process is left."""
        ends = [command.end(PATIENCE) for command in self.commands]
        assert all(gone(command.mark) for command in self.commands)
        self.notes = ends[0][2]
        return [code for code, *_ in ends], [error.splitlines()[-1] for _, _, error in ends]

    def finishes_with_the_bits(self) -> None:
        """Of the run on one machine."""
        codes, last = self.end()
        assert codes == [0] * len(self.machines), "\n".join(last)
        model = self.folder / f"{self.name}0" / "model.safetensors"
        assert model.read_bytes() == whole(self.folder, len(self.machines), self.settings)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def slow(stack: ExitStack, number: int, megabits: float) -> tuple[Machine, ...]:
    own = stack.enter_context(machines(number))
    for machine in own:
        machine.limit(megabits * 1e6)
    return own


@pytest.mark.parametrize("megabits", [2.0, 1.0, 0.5])
def test_a_slow_line_from_the_first_broadcast_to_the_summary(folder: Path, stack: ExitStack, megabits: float) -> None:
    """Node 0 says beforehand what a round takes, by the rate that it has measured."""
    run = Nodes(folder, f"slow{megabits}-", slow(stack, 2, megabits), LARGE)
    run.finishes_with_the_bits()
    said = re.search(
        r"about (\S+) s at (\S+) Mbit/s \(the slowest link of worker 0 so far\); a worker silent", run.notes
    )
    assert said is not None, run.notes
    assert 0.7 * megabits < float(said[2]) <= megabits
    print(said[0])


def test_five_workers_on_slow_lines(folder: Path, stack: ExitStack) -> None:
    Nodes(folder, "five-", slow(stack, 5, 0.5), SMALL).finishes_with_the_bits()


def test_who_waits_in_a_chain_of_machines_waits(folder: Path, stack: ExitStack) -> None:
    """In the second round worker 0 waits for worker 1, which still exchanges the first with worker 2, over a slow line
    and for longer than a deadline.
    """
    own = stack.enter_context(machines(3))
    own[2].limit(0.5e6)
    Nodes(folder, "chain-", own, (*LARGE, "run.seed=7")).finishes_with_the_bits()


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
    run = Nodes(folder, f"cut-{how}-{seconds}-{options}-", own, SMALL)
    run.until_in_transfer()
    cut(own[1], how, seconds)
    start, before = time.monotonic(), run.moved()
    while run.moved() < before + 100_000:
        time.sleep(0.1)
    print(f"traffic is back {time.monotonic() - start:.1f} s after the mend")
    run.finishes_with_the_bits()
    assert ("or 120 s while a link is cut" in run.notes) == (not options), run.notes


@pytest.mark.parametrize("seconds", [5, 20, 50])
def test_a_cut_while_the_line_is_idle_is_ridden_out(
    folder: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch, seconds: int
) -> None:
    """All compute meanwhile, longer than the cut lasts."""
    monkeypatch.setenv("IDLE", str(seconds / 3 + 5))
    own = slow(stack, 2, 2.0)
    run = Nodes(folder, f"idle-{seconds}-", own, SMALL, method="idle:Idle")
    run.until_idle()
    cut(own[1], "switch", seconds)
    run.finishes_with_the_bits()


def cut(machine: Machine, how: str, seconds: float) -> None:
    """Its line, for so long."""
    machine.detach() if how == "switch" else machine.interface("down")
    time.sleep(seconds)
    machine.attach() if how == "switch" else machine.interface("up")


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
    run = Nodes(folder, f"good-{options}-", own, (*SMALL, "world.silence=30"))
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
    run = Nodes(folder, f"stop-{what}-", own, (*SMALL, "world.silence=30"))
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
