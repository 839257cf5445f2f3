"""How processes that somebody else has started meet: which world their environment describes, within which deadline,
and who is named that does not come.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.data

import isles
from isles.comm.errors import RendezvousFailed
from isles.comm.gloo.transport import meet, world_variables
from isles.comm.mesh import Mesh
from tests.comm.own_groups import work
from tests.forked import Process
from tests.gloo import run_gloo
from tests.membership.sessions import free_port
from tests.slurm import slurm

ROOT = Path(__file__).resolve().parents[2]
SRUN = {
    "SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "2", "SLURM_JOB_ID": "41",
    "SLURM_STEP_NODELIST": "gpu[03-05,9],login",
}  # fmt: skip
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "8", "PMIX_NAMESPACE": "prterun-1",
}  # fmt: skip
WORLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.mark.parametrize(
    ("reported", "world"),
    [
        ({}, None),
        ({"WORLD_SIZE": "1"}, None),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "5"}, ["1", "2", None, "a", "5"]),
        (SRUN, ["3", "8", "1", "gpu03", "26513"]),
        (SRUN | {"SLURM_STEP_NODELIST": "gpu7,gpu8"}, ["3", "8", "1", "gpu7", "26513"]),
        (SRUN | {"SLURM_STEP_NUM_NODES": "1"}, ["3", "8", "1", "127.0.0.1", "26513"]),
        (SRUN | {"MASTER_ADDR": "b", "MASTER_PORT": "6"}, ["3", "8", "1", "b", "6"]),
        (SRUN | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, None),
        ({name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"}, None),  # a batch script
        (SRUN | {"RANK": "0", "WORLD_SIZE": "1"}, None),
        (MPIRUN, ["3", "8", "3", "127.0.0.1", "27673"]),
        (
            MPIRUN | SRUN | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
            ["3", "8", "3", "127.0.0.1", "27673"],
        ),  # in one task
        (SRUN | {"WORLD_SIZE": "1"}, ["3", "8", "1", "gpu03", "26513"]),  # of a shell's start-up file
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "5"}, ["1", "2", None, "a", "5"]),
    ],
)
def test_the_world_of_an_environment(reported: dict[str, str], world: list[str | None] | None) -> None:
    found = world_variables(reported)
    assert found == world or (found is not None and [found.get(name) for name in WORLD] == world)


@pytest.mark.parametrize(
    ("reported", "text"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE = two: set a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "tcp"}, "MASTER_PORT = tcp: set a whole"),
        ({"WORLD_SIZE": "8"}, "WORLD_SIZE = 8, but RANK is not set"),
        ({"RANK": "3"}, "RANK = 3, but WORLD_SIZE is not set"),
        ({"RANK": "8", "WORLD_SIZE": "8"}, "RANK = 8 of WORLD_SIZE = 8"),
        ({"RANK": "1", "WORLD_SIZE": "8"}, "set MASTER_ADDR and MASTER_PORT"),
        ({"RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "a"}, "set MASTER_PORT"),
        (SRUN | {"SLURM_STEP_NODELIST": ""}, "rank 3 of 8 does not know where rank 0 listens: set MASTER_ADDR to"),
        (MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, "set MASTER_ADDR"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "set MASTER_ADDR and MASTER_PORT"),
    ],
)
def test_half_a_description_is_refused(reported: dict[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        world_variables(reported)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """`isles.init` under an environment, in a thread of its own; nobody else comes."""
    with ThreadPoolExecutor(1) as pool:

        def init(join: float = 0.3, **variables: object) -> Any:
            for name, value in variables.items():
                monkeypatch.setenv(name, str(value))
            return pool.submit(isles.init, deadlines=isles.Deadlines(join=join)).result(60)

        yield init


def test_who_does_not_come_is_named(alone: Callable[..., Any]) -> None:
    """Within the deadline, on rank 0 and on one that does not find it."""
    began, port = time.monotonic(), free_port()
    with pytest.raises(RendezvousFailed, match=r"worker 1, 2 of 3 did not come to isles.init\(\) within 0.3 s"):
        alone(RANK=0, WORLD_SIZE=3, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    port = free_port()
    with pytest.raises(RendezvousFailed, match=f"rank 1: nobody answers at 127.0.0.1:{port} .*where rank 0 should"):
        alone(RANK=1, WORLD_SIZE=3, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    assert time.monotonic() - began < 20


def test_a_task_of_srun_that_does_not_come_is_named(alone: Callable[..., Any]) -> None:
    reported = SRUN | {"SLURM_PROCID": 0, "SLURM_NTASKS": 2, "SLURM_STEP_NUM_NODES": 1, "MASTER_PORT": free_port()}
    with pytest.raises(RendezvousFailed, match=r"worker 1 of 2 did not come to isles.init\(\) within 0.3 s"):
        alone(**reported)


@pytest.mark.parametrize("kind", ["tcp", "file", "hash"])
def test_at_any_store_who_does_not_come_is_named(kind: str, tmp_path: Path) -> None:
    """Of a process group that the user has made, by whatever `init_method`; workers 0 and 2 of an island came."""
    store = {
        "tcp": lambda: dist.TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False),
        "file": lambda: dist.FileStore(str(tmp_path / "store"), 3),
        "hash": dist.HashStore,
    }[kind]()
    own = dist.PrefixStore("isles/0", store)
    meet(own, 2, (2,), 5.0)
    with pytest.raises(RendezvousFailed, match=r"worker 1 of 3 did not come to isles.init\(\) within 0.9 s"):
        meet(own, 0, (0, 1, 2), 0.9)


def test_a_store_that_goes_while_workers_wait_is_reported() -> None:
    port = free_port()
    host = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(meet, dist.TCPStore("127.0.0.1", port, is_master=False), 1, (0, 1), 30.0)
        host.wait(["here/1"])
        del host
        with pytest.raises(RendezvousFailed, match="rank 1: the store where the workers meet is gone"):
            waits.result(20)


def test_an_unknown_interface_is_named(alone: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"GLOO_SOCKET_IFNAME = \^lo,docker0: .*choose from .*lo"):
        alone(RANK=0, WORLD_SIZE=1, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port(), GLOO_SOCKET_IFNAME="^lo,docker0")


def init_in_a_thread(world: Mesh) -> Any:
    """What another thread of this worker finds: its world, or an error."""
    found: list[Any] = []

    def work() -> None:
        try:
            found.append((isles.init().size, isles.init().transport is world.transport))
        except ValueError as error:
            found.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return found[0]


def test_a_thread_finds_the_world_of_its_process() -> None:
    """Virtual workers share a process: a thread that one of them starts is told to take its `world`."""
    assert run_gloo(init_in_a_thread) == [(2, True)] * 2
    assert all("pass it `world`" in reported for reported in isles.run_virtual(init_in_a_thread, 2))
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(isles.init).result().size == 1, "and after it there is none"


class Asks(torch.utils.data.Dataset[Any]):
    """Which worker reads it, as a data set may want to know."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, number: int) -> Any:
        try:
            return isles.init().size
        except ValueError as error:
            return str(error)


def asked(world: Mesh | None = None) -> Any:
    return next(iter(torch.utils.data.DataLoader(Asks(), num_workers=1, batch_size=None)))


def test_a_process_of_a_dataloader_is_no_world_of_one() -> None:
    """It has the environment of its worker, and where it is forked what Isles knows there."""
    reported = "this process is a DataLoader's, and no worker: give its dataset the rank and size of `world`"
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(asked).result() == reported
    assert isles.run_virtual(asked, 1) == [reported]


def test_own_process_groups(tmp_path: Path) -> None:
    """Before `isles.init()` and beside it, and `isles.init()` again; a native group to which nobody comes."""
    port = free_port()
    both = [Process(work, rank, port, f"{tmp_path}/store", folder=tmp_path) for rank in range(2)]
    ends = [one.end() for one in both]
    assert [end[:2] for end in ends] == [(0, "told\n"), (0, "")], ends  # torch warns of the time-out


TRAIN = """
import sys, torch, isles
world = isles.init(deadlines=isles.Deadlines(join=60.0))
ranks = [int(one) for one in world.outer.all_gather(torch.tensor([world.rank]))]
sys.stdout.write(f"all {world.rank} {world.local_rank} {ranks}\\n")  # in one piece
"""


RESTARTED = """
import os, sys, torch, isles
world = isles.init()
ranks = [int(one) for one in world.outer.all_gather(torch.tensor([world.rank]))]
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and world.rank == 1:
    os._exit(3)
world.outer.barrier()
sys.stdout.write(f"all {world.rank} {world.local_rank} {ranks}\\n")
"""


@pytest.mark.long
def test_processes_that_torchrun_has_restarted_meet_anew(tmp_path: Path) -> None:
    """Its store still has what those before them wrote."""
    (tmp_path / "train.py").write_text(RESTARTED)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--local-addr", "127.0.0.1", "--max-restarts", "1"]
    _all(2, [*torchrun, "--nproc-per-node", "2", str(tmp_path / "train.py")], tmp_path)


@pytest.mark.long
def test_mpirun(tmp_path: Path) -> None:
    """`mpirun -n 3 python train.py`, with nothing else set."""
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun here")
    (tmp_path / "train.py").write_text(TRAIN)
    options = ["--allow-run-as-root", "--oversubscribe", "-n", "3"]
    _all(3, ["mpirun", *options, sys.executable, str(tmp_path / "train.py")], tmp_path)


@pytest.mark.long
def test_srun(tmp_path: Path) -> None:
    """`srun -n 3 python train.py` on a cluster of this machine alone."""
    (tmp_path / "train.py").write_text(TRAIN)
    with slurm(tmp_path) as environment:
        _all(3, ["srun", "-n", "3", "--overcommit", sys.executable, str(tmp_path / "train.py")], tmp_path, environment)


def _all(size: int, command: list[str], folder: Path, environment: dict[str, str] | None = None) -> None:
    reported = {**(environment or os.environ), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=reported, cwd=folder, capture_output=True, text=True, timeout=180)
    logs = {path.name: path.read_text()[-2000:] for path in folder.glob("*.log")}
    assert done.returncode == 0, (done.stderr, logs)
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("all"))
    assert lines == [f"all {rank} {rank} {[*range(size)]}" for rank in range(size)], done.stdout
