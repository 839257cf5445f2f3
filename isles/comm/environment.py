"""The world of a process that another program has started: torchrun, srun or mpirun. Loads no torch."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping

_ALONE = "for a process that trains alone set RANK=0 and WORLD_SIZE=1"
_WORLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def world_variables(environment: Mapping[str, str]) -> dict[str, str] | None:
    """RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun sets them; None: a world
    of one. ValueError for an incomplete description of several processes.
    """
    if "RANK" in environment or _whole(environment, "WORLD_SIZE") > 1:
        world = dict(environment)
        missing = "WORLD_SIZE" if not world.get("WORLD_SIZE") else "RANK" if not world.get("RANK") else None
        if missing is not None:
            one = "RANK" if missing == "WORLD_SIZE" else "WORLD_SIZE"
            raise ValueError(
                f"{one} = {world[one]}, but {missing} is not set: start the processes with torchrun, or set RANK, "
                f"WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each; {_ALONE}"
            )
    elif (several := _slurm(environment) or _open_mpi(environment) or _pmi(environment)) is not None:
        world = {**environment, **several}
    else:
        return None
    rank, size = _whole(world, "RANK"), _whole(world, "WORLD_SIZE")
    if not 0 <= rank < size:
        raise ValueError(f"RANK = {rank} of WORLD_SIZE = {size}: ranks are 0 to {size - 1}")
    absent = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not world.get(name)]
    if absent and size > 1:
        raise ValueError(
            f"rank {rank} of {size} does not know where rank 0 listens: set {' and '.join(absent)} to the address of "
            f"its machine and a free port, the same in all processes; {_ALONE}"
        )
    if absent:
        return None
    _whole(world, "MASTER_PORT")
    return world


def _whole(variables: Mapping[str, str], name: str) -> int:
    text = variables.get(name) or "1"
    if not text.isdecimal():
        raise ValueError(f"{name} = {text}: set a whole number; {_ALONE}")
    return int(text)


def _slurm(environment: Mapping[str, str]) -> dict[str, str] | None:
    """A task of an srun step with several tasks; not the batch script around it."""
    if "SLURM_PROCID" not in environment or not (environment.keys() & {"SLURM_STEP_ID", "SLURM_STEPID"}):
        return None
    size = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS") or "1"
    step = environment.get("SLURM_STEP_ID") or environment.get("SLURM_STEPID")
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST") or ""
    first = "127.0.0.1" if environment.get("SLURM_STEP_NUM_NODES") == "1" else _first_host(nodes)
    port = str(_port(f"{environment.get('SLURM_JOB_ID')}.{step}"))
    local = environment.get("SLURM_LOCALID"), _tasks_here(environment)
    return _several(environment, environment["SLURM_PROCID"], size, *local, first, port)


def _tasks_here(environment: Mapping[str, str]) -> str | None:
    """This node's number of tasks: of `2(x3),1` three nodes have two, and the last has one."""
    listed = re.findall(r"(\d+)(?:\(x(\d+)\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    counts = [count for count, nodes in listed for _ in range(int(nodes or 1))]
    node = environment.get("SLURM_NODEID", "")
    return counts[int(node)] if node.isdecimal() and int(node) < len(counts) else None


def _open_mpi(environment: Mapping[str, str]) -> dict[str, str] | None:
    mpi = {name: environment.get(f"OMPI_COMM_WORLD_{name}") for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")}
    job = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid")
    first, port = "127.0.0.1" if job and mpi["LOCAL_SIZE"] == mpi["SIZE"] else None, str(_port(job)) if job else None
    return _several(environment, *mpi.values(), first, port)


def _pmi(environment: Mapping[str, str]) -> dict[str, str] | None:
    """Variables of MPICH's and Intel's mpirun."""
    local = environment.get("MPI_LOCALRANKID")
    return _several(environment, environment.get("PMI_RANK"), environment.get("PMI_SIZE"), local, None, None, None)


def _several(environment: Mapping[str, str], *values: str | None) -> dict[str, str] | None:
    """The variables of one of several processes from `values`, in the order of _WORLD; None for a single process. The
    user's own address and port take precedence.
    """
    world = dict(zip(_WORLD, values, strict=True))
    if world["RANK"] is None or int(world["WORLD_SIZE"] or 1) < 2:
        return None
    world |= {name: environment[name] for name in _WORLD[4:] if environment.get(name)}
    return {name: value for name, value in world.items() if value is not None}


def _first_host(nodes: str) -> str | None:
    """The first host of a Slurm list: gpu03 of `gpu[03-05,9],login`."""
    first = re.match(r"([^\[,]+)(?:\[(\w+))?", nodes)
    return None if first is None else first[1] + (first[2] or "")


def _port(job: str) -> int:
    """A port that is equal for all processes of a job, below the range of ephemeral ports."""
    return 20_000 + zlib.crc32(job.encode()) % 10_000
