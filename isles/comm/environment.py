"""Which world the environment of a process describes: torchrun's variables, or those of srun and mpirun, from which
they are made.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping

_ALONE = "for a process that trains alone set RANK=0 and WORLD_SIZE=1"
_WORLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def world_variables(environment: Mapping[str, str]) -> dict[str, str] | None:
    """RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun sets them; None: a world
    of one. ValueError for a description of several processes in which something is missing.
    """
    if "RANK" in environment or _whole(environment, "WORLD_SIZE") > 1:
        made = dict(environment)
        missing = "WORLD_SIZE" if not made.get("WORLD_SIZE") else "RANK" if not made.get("RANK") else None
        if missing is not None:
            one = "RANK" if missing == "WORLD_SIZE" else "WORLD_SIZE"
            raise ValueError(
                f"{one} = {made[one]}, but {missing} is not set: start the processes with torchrun, or set RANK, "
                f"WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each; {_ALONE}"
            )
    elif (several := _slurm(environment) or _open_mpi(environment) or _pmi(environment)) is not None:
        made = {**environment, **several}
    else:
        return None
    rank, size = _whole(made, "RANK"), _whole(made, "WORLD_SIZE")
    if not 0 <= rank < size:
        raise ValueError(f"RANK = {rank} of WORLD_SIZE = {size}: ranks are 0 to {size - 1}")
    absent = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not made.get(name)]
    if absent and size > 1:
        raise ValueError(
            f"rank {rank} of {size} does not know where rank 0 listens: set {' and '.join(absent)} to the address of "
            f"its machine and a free port, the same in all processes; {_ALONE}"
        )
    if absent:
        return None
    _whole(made, "MASTER_PORT")
    return made


def _whole(variables: Mapping[str, str], name: str) -> int:
    text = variables.get(name) or "1"
    if not text.isdecimal():
        raise ValueError(f"{name} = {text}: set a whole number; {_ALONE}")
    return int(text)


def _slurm(environment: Mapping[str, str]) -> dict[str, str] | None:
    """A task of a step of several (srun); not the batch script around it."""
    if "SLURM_PROCID" not in environment or not (environment.keys() & {"SLURM_STEP_ID", "SLURM_STEPID"}):
        return None
    size = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS") or "1"
    step = environment.get("SLURM_STEP_ID") or environment.get("SLURM_STEPID")
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST") or ""
    first = "127.0.0.1" if environment.get("SLURM_STEP_NUM_NODES") == "1" else _first_host(nodes)
    port = str(_port(f"{environment.get('SLURM_JOB_ID')}.{step}"))
    return _several(environment, environment["SLURM_PROCID"], size, environment.get("SLURM_LOCALID"), first, port)


def _open_mpi(environment: Mapping[str, str]) -> dict[str, str] | None:
    own = {name: environment.get(f"OMPI_COMM_WORLD_{name}") for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")}
    job = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid")
    first = "127.0.0.1" if job and own["LOCAL_SIZE"] == own["SIZE"] else None
    return _several(environment, own["RANK"], own["SIZE"], own["LOCAL_RANK"], first, str(_port(job)) if job else None)


def _pmi(environment: Mapping[str, str]) -> dict[str, str] | None:
    """MPICH's and Intel's mpirun."""
    local = environment.get("MPI_LOCALRANKID")
    return _several(environment, environment.get("PMI_RANK"), environment.get("PMI_SIZE"), local, None, None)


def _several(environment: Mapping[str, str], *values: str | None) -> dict[str, str] | None:
    """What is `values` of one of several processes, in the order of _WORLD; None where they are not several. The
    user's own address and port count, if set.
    """
    made = dict(zip(_WORLD, values, strict=True))
    if made["RANK"] is None or int(made["WORLD_SIZE"] or 1) < 2:
        return None
    made |= {name: environment[name] for name in _WORLD[3:] if environment.get(name)}
    return {name: value for name, value in made.items() if value is not None}


def _first_host(nodes: str) -> str | None:
    """Of Slurm's `gpu[03-05,9],login`: gpu03."""
    found = re.match(r"([^\[,]+)(?:\[(\w+))?", nodes)
    return None if found is None else found[1] + (found[2] or "")


def _port(job: str) -> int:
    """The same for all processes of a job; below those that systems give out by themselves."""
    return 20_000 + zlib.crc32(job.encode()) % 10_000
