"""Runs on a Slurm of this machine alone: tasks, the script of `isles launch slurm`, signals, requeues, and hours."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from isles.training.records.checkpoint import Checkpoints
from tests.comm.test_meeting import ROOT
from tests.slurm import slurm
from tests.training.runs import metrics, run, tiny, write_folder

pytestmark = pytest.mark.long
ISLES = [sys.executable, "-m", "isles"]
STEPS = 400  # of 0.05 s and more
SLOW = ["train", "tiny.toml", "--method", "own:Slow", "--steps", str(STEPS), "--set", "replicas.sync_every=3"]
Call = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("user"))


@pytest.fixture(scope="module")
def call(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Call]:
    """call(*words): a command of the cluster's user, ended."""
    with slurm(tmp_path_factory.mktemp("cluster")) as environment:
        own = {**environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        yield lambda *words: subprocess.run(
            words, env=own, cwd=folder, capture_output=True, text=True, timeout=300, check=False
        )


def eventually(look: Callable[[], object], seconds: float = 120.0) -> bool:
    ends_at = time.monotonic() + seconds
    while not (found := look()) and time.monotonic() < ends_at:
        time.sleep(0.3)
    return bool(found)


def whole(folder: Path) -> bytes:
    """The model of the slow run, by a run that nobody stops."""
    if not (folder / "whole").exists():
        run(tiny(folder / "text.txt", steps=STEPS), folder / "whole")
    return (folder / "whole/model.safetensors").read_bytes()


def test_more_and_fewer_tasks_than_workers(call: Call, folder: Path) -> None:
    """The tasks say how many workers there are, unless --workers says something else."""
    (folder / "two.toml").write_text((folder / "tiny.toml").read_text() + "[world]\nworkers = 2\n")
    train = [*ISLES, "train", "two.toml", "--steps", "6"]
    for tasks in (1, 3):
        done = call("srun", "-n", str(tasks), "--overcommit", *train, "--out", f"tasks-{tasks}")
        workers = 2 if tasks == 1 else 3  # a single task starts the workers itself
        assert done.returncode == 0 and done.stdout.count("report  ") == 1, done.stderr
        assert {line["worker"] for line in metrics(folder / f"tasks-{tasks}")} == set(range(workers))
        assert ("3 processes were started, so 3" in done.stderr) == (tasks == 3)
    done = call("srun", "-n", "3", "--overcommit", *train, "--workers", "2", "--out", "refused")
    told = [line for line in done.stderr.splitlines() if line.startswith("isles: ")]
    assert told == ["isles: world.workers = 2, but 3 were started together: start 2 (srun -n, mpirun -n)"]
    assert done.returncode == 2 and not (folder / "refused").exists()


def test_hours_are_limited_and_the_same_command_goes_on(call: Call, folder: Path) -> None:
    command = ["srun", "-n", "2", "--overcommit", *ISLES, *SLOW, "--set", "run.max_hours=0.005", "--out", "limited"]
    codes, again = list[int](), list[str]()
    while not codes or codes[-1] == 130:
        done = call(*command, *again)
        codes.append(done.returncode)
        again = ["--resume", "auto"]
        assert len(codes) < 20 and "Traceback" not in done.stderr, done.stderr
    assert codes[0] == 130 and codes[-1] == 0, codes
    assert (folder / "limited/model.safetensors").read_bytes() == whole(folder)
    done = call(*command, *again)
    assert done.returncode == 0 and "limited: this run is complete\n" in done.stderr


def state(call: Call, job: str) -> str:
    return call("squeue", "-h", "-j", job, "-o", "%T").stdout.strip()


def test_a_job_saves_queues_again_and_goes_on(call: Call, folder: Path) -> None:
    """As its time ends. A job that is cancelled saves, and does not queue again."""
    config = (folder / "tiny.toml").read_text().replace("[replicas]", '[replicas]\nmethod = "own:Slow"')
    (folder / "job.toml").write_text(config + f"steps = {STEPS}\n[world]\nworkers = 2\n")
    script = call(
        *ISLES, "launch", "slurm", "job.toml", "--nodes", "1", "--sbatch", "overcommit", "--sbatch", "time=10"
    )
    (folder / "job.sh").write_text(script.stdout)
    job = call("sbatch", "--parsable", "job.sh").stdout.strip()
    begun, saved = folder / "runs/job/metrics.jsonl", Checkpoints(folder / "runs/job")
    log = lambda: (folder / f"job-{job}.log").read_text()  # noqa: E731
    assert eventually(lambda: begun.exists() and begun.stat().st_size), (script, log())
    call("scancel", "--signal=USR1", job)
    assert eventually(lambda: state(call, job) == "PENDING"), log()
    assert len(saved.steps()) == 1 and "checkpoint saved; go on with: isles resume runs/job" in log()
    call("scontrol", "update", f"JobId={job}", "StartTime=now")  # Slurm waits two minutes by itself
    assert eventually(lambda: (folder / "runs/job/summary.json").exists()), log()
    assert f"resuming runs/job after step {saved.steps()[0]}" in log()
    assert eventually(lambda: state(call, job) == "")
    assert (folder / "runs/job/model.safetensors").read_bytes() == whole(folder)

    other = call("sbatch", "--parsable", "--export=ALL", "job.sh").stdout.strip()
    assert eventually(lambda: state(call, other) == "")
    assert "runs/job: this run is complete" in (folder / f"job-{other}.log").read_text()
    (folder / "job.sh").write_text(script.stdout.replace("runs/job", "runs/cancelled"))
    job = call("sbatch", "--parsable", "job.sh").stdout.strip()
    begun = folder / "runs/cancelled/metrics.jsonl"
    assert eventually(lambda: begun.exists() and begun.stat().st_size), log()
    call("scancel", job)
    assert eventually(lambda: state(call, job) == "")
    assert len(Checkpoints(folder / "runs/cancelled").steps()) == 1, log()
