"""A Slurm of this machine alone, below a temporary folder."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.membership.sessions import free_port


@contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Context with its daemons: the environment of its commands. Skips where this user can start none."""
    if os.geteuid() != 0 or any(shutil.which(name) is None for name in ("srun", "slurmd", "slurmctld", "munged")):
        pytest.skip("no Slurm here that this user may start")
    folder = folder / "slurm"
    folder.mkdir()
    host, cores = socket.gethostname().split(".")[0], os.cpu_count()
    (folder / "slurm.conf").write_text(
        f"ClusterName=one\nSlurmctldHost={host}(127.0.0.1)\nSlurmUser=root\nAuthType=auth/munge\n"
        f"AuthInfo=socket={folder}/munge.socket\nCryptoType=crypto/munge\nSlurmctldPort={free_port()}\n"
        f"SlurmdPort={free_port()}\nStateSaveLocation={folder}/state\nSlurmdSpoolDir={folder}/spool\n"
        f"SlurmctldPidFile={folder}/control.pid\nSlurmdPidFile={folder}/daemon.pid\nProctrackType=proctrack/linuxproc\n"
        "TaskPlugin=task/none\nMpiDefault=none\nReturnToService=2\nSelectType=select/cons_tres\n"
        "SelectTypeParameters=CR_Core\nSwitchType=switch/none\nJobAcctGatherType=jobacct_gather/none\n"
        f"NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} State=UNKNOWN\n"
        f"PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES\n"
    )
    (folder / "key").write_bytes(os.urandom(128))
    (folder / "key").chmod(0o400)
    environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
    daemons = [
        ["munged", "-F", "--force", f"--socket={folder}/munge.socket", f"--key-file={folder}/key",
         f"--pid-file={folder}/munge.pid", f"--log-file={folder}/munge.log", f"--seed-file={folder}/seed"],
        ["slurmctld", "-D", "-f", str(folder / "slurm.conf"), "-L", str(folder / "control.log")],
        ["slurmd", "-D", "-N", host, "-f", str(folder / "slurm.conf"), "-L", str(folder / "daemon.log")],
    ]  # fmt: skip
    running = []
    try:
        for command in daemons:
            running.append(
                subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            )
            time.sleep(1.0)
        yield environment
    finally:
        for process in reversed(running):
            process.terminate()
            process.wait(20)
