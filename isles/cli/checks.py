"""What `isles doctor` says: one line a check."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from isles.base.parsing import parse_json

_SECONDS = 300.0  # for torch to be loaded from a slow disk
_LOOK = """
import json, torch, torch.distributed as dist
there = dist.is_available()
names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
print(json.dumps([torch.__version__, there and dist.is_gloo_available(), there and dist.is_nccl_available(), names]))
"""


@dataclass(frozen=True)
class Check:
    """One line of the doctor's."""

    name: str
    good: bool
    found: str


def of_torch() -> Iterator[Check]:
    """Whether torch can be used here. Asked in a process of its own, which a broken library may end."""
    try:
        done = subprocess.run([sys.executable, "-c", _LOOK], capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        yield Check("torch", False, f"was not loaded within {_SECONDS:g} s: look at the disk that it is on")
        return
    try:
        version, gloo, nccl, names = parse_json(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        message = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        yield Check("torch", False, f"cannot be imported ({message[:200]}); install it: pip install torch")
        return
    yield Check("torch", True, version)
    yield Check("gloo", gloo, "workers talk over it" if gloo else "missing: install a build of torch that has it")
    yield Check("nccl", True, "there" if nccl else "not in this build (only islands of several GPUs want it)")
    yield Check("gpu", True, ", ".join(names) or "none that torch sees: workers compute on the CPU")
