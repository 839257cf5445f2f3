"""Several at once: the same bits as one after another, in an order that holds; failures and stops harm no other."""

from __future__ import annotations

import os
import re
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from isles.comm.errors import CommError, PeerLost
from isles.experts.jobs import ExpertTask, JobProgress, run_tasks, weights_sha256
from isles.training.interrupts import first_interrupt
from isles.training.records.checkpoint import Checkpoints
from tests.cli.command import Command, eventually, gone
from tests.experts.small import HDEE, made, write_domains

FEW = ["hdee.variants=['m-ho-i-ho']", "hdee.baselines=[]"]


class Heard(JobProgress):
    def __init__(self) -> None:
        self.begun: list[str] = []
        self.notices: list[str] = []

    def begin(self, name: str, workers: int, steps: int) -> None:
        self.begun.append(name)

    def notice(self, text: str) -> None:
        self.notices.append(text)


def tell(folder: Path, name: str, waits: float, progress: JobProgress) -> None:
    progress.begin(name, 1, 1)
    time.sleep(waits)
    (folder / name).write_text(" ".join(sorted(path.name for path in folder.iterdir())))


def lose(progress: JobProgress) -> None:
    error = PeerLost(3, "its line was cut")
    error.add_note("go on so")
    raise error


def die(progress: JobProgress) -> None:
    os._exit(7)


@pytest.mark.long
def test_what_is_needed_comes_before_and_failures_harm_no_other(tmp_path: Path) -> None:
    seen_tokens = Heard()
    wait = partial(tell, tmp_path)
    tasks = [
        ExpertTask(name="a", work=partial(wait, "a", 3.0)),
        ExpertTask(name="b", work=partial(wait, "b", 0.0)),
        ExpertTask(name="c", work=partial(wait, "c", 0.0), needs=("a", "b", "elsewhere")),
    ]
    run_tasks(tasks, 2, seen_tokens)
    assert (tmp_path / "b").read_text() == ""  # beside the slow one
    assert (tmp_path / "c").read_text() == "a b"
    assert sorted(seen_tokens.begun) == ["a", "b", "c"]

    tasks = [ExpertTask(name="lost", work=lose), ExpertTask(name="d", work=partial(wait, "d", 1.0)), *tasks[2:]]
    (tmp_path / "c").unlink()
    with pytest.raises(PeerLost, match="worker 3 is lost") as caught:
        run_tasks([*tasks, ExpertTask(name="e", work=partial(wait, "e", 0.0), needs=("lost",))], 2, seen_tokens)
    assert caught.value.__notes__ == ["go on so"]
    assert (tmp_path / "d").exists() and not (tmp_path / "e").exists()
    assert seen_tokens.notices == [
        "lost failed (worker 3 is lost (its line was cut)); the others that are under way go on to their end"
    ]
    with pytest.raises(CommError, match="ended with exit code 7"):
        run_tasks([ExpertTask(name="dead", work=die)], 2, seen_tokens)


@pytest.mark.long
def test_experts_at_once_have_the_weights_of_one_after_another(tmp_path: Path) -> None:
    config = write_domains(tmp_path)
    one, two = (made("hdee", config, tmp_path / str(n), *FEW, at_once=n) for n in (1, 2))
    assert len(one.jobs()) == 4
    for name in one.jobs():
        assert weights_sha256(one.out / name) == weights_sha256(two.out / name)


@pytest.mark.long
@pytest.mark.parametrize("ended_by", [signal.SIGINT, signal.SIGKILL])
def test_a_stop_reaches_all_and_the_same_command_goes_on(ended_by: signal.Signals, tmp_path: Path) -> None:
    write_domains(tmp_path)
    long = [*HDEE, *FEW, "hdee.steps=[4000, 4000, 4000]", "run.checkpoint_every=5", "run.log_every=1"]
    sets = [part for word in long for part in ("--set", word)]
    words = ["experts", "hdee", "domains.toml", *sets, "--at-once", "2", "--out", "out"]
    command = Command(*words, folder=tmp_path)

    def under_way() -> list[Path]:
        found = [path for path in (tmp_path / "out" / "seed-0").glob("*-r1") if Checkpoints(path).steps()]
        return found if len(found) == 2 or command.process.poll() is not None else []

    assert eventually(under_way)
    command.process.send_signal(ended_by)
    code, _, error = command.end()
    if ended_by == signal.SIGINT:
        assert code == 130, error
        assert re.search(r"isles: stopped; go on with: isles experts hdee domains.toml .*--at-once 2 --out out", error)
        assert len({len(list((path / "checkpoints").glob("step-*"))) for path in under_way()}) == 1
    assert gone(command.mark)
    assert len(under_way()) == 2 and not list(tmp_path.rglob("*-r1/summary.json"))


def interrupted_too_late(folder: Path, progress: JobProgress) -> None:
    with first_interrupt(lambda: None):  # as a run does that has taken its last step
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
    (folder / "first").touch()


def test_a_stop_that_comes_too_late_for_one_stops_the_others(tmp_path: Path) -> None:
    tasks = [ExpertTask(name="first", work=partial(interrupted_too_late, tmp_path))]
    before = signal.getsignal(signal.SIGINT)
    for more in ([], [ExpertTask(name="second", work=partial(tell, tmp_path, "second", 0.0))]):
        with pytest.raises(KeyboardInterrupt):
            run_tasks([*tasks, *more], 1, JobProgress())
    assert [path.name for path in tmp_path.iterdir()] == ["first"] and signal.getsignal(signal.SIGINT) is before
