"""`srun -n 2 isles train`: one run, a task a worker. Here with a task's variables; `test_slurm.py` has a Slurm."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from isles.comm.environment import world_variables
from tests import forked
from tests.training.runs import metrics, run, tiny, write_folder

TASKS = {
    "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_NODEID": "0",
}  # fmt: skip


def be_task(number: int, job: int) -> None:
    """Have the environment of a task of srun."""
    os.environ.update(TASKS, SLURM_PROCID=str(number), SLURM_LOCALID=str(number), SLURM_JOB_ID=str(job))


def tasks(folder: Path, *words: str) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of `srun -n 2 isles WORDS`, by task."""
    both = [forked.Forked(*words, folder=folder, first=partial(be_task, number, os.getpid())) for number in range(2)]
    return [one.end() for one in both]


def test_the_tasks_are_one_run(tmp_path: Path) -> None:
    """The first one talks; the model is that of any other start of the run."""
    folder = write_folder(tmp_path)
    with (folder / "tiny.toml").open("a") as file:
        file.write("[world]\nworkers = 3\n")
    (code, out, error), other = tasks(folder, "train", "tiny.toml", "--steps", "6", "--out", "run")
    assert code == 0 and other == (0, "", ""), (error, other)
    assert "noloco: 2 workers, 6 steps" in out
    assert "note: world.workers = 3 in tiny.toml: 2 processes were started, so 2\n" in error
    assert {line["worker"] for line in metrics(folder / "run")} == {0, 1}
    run(tiny(folder / "text.txt"), folder / "alone")
    assert (folder / "run/model.safetensors").read_bytes() == (folder / "alone/model.safetensors").read_bytes()
    (code, _, error), other = tasks(folder, "resume", "run", "--steps", "9")
    assert code == 0 and other == (0, "", "") and "resuming run after step 6" in error, (error, other)
    (code, out, error), other = tasks(folder, "train", "tiny.toml", "--workers", "3")
    mistake = "isles: world.workers = 3, but 2 were started together: start 3 (srun -n, mpirun -n)\n"
    assert (code, out, error) == (2, "", mistake) and other == (2, "", "")


def test_how_many_tasks_are_on_a_machine() -> None:
    step = TASKS | {"SLURM_PROCID": "6", "SLURM_NTASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "3(x2),2"}
    for node, here in {"0": "3", "1": "3", "2": "2"}.items():
        found = world_variables(step | {"SLURM_NODEID": node})
        assert found is not None and found["LOCAL_WORLD_SIZE"] == here
