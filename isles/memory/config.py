"""The `[memory]` section: whether what does not fit the device goes to the host or the disk, and by which
plan. Importable without torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from isles.base.tables import refuse
from isles.network.units import parse_bytes

MemoryMethod = Literal["none", "auto", "autohete", "karma", "checkpoint"]
Update = Literal["exact", "early"]
VectorTier = Literal["memory", "disk"]


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """Whether a worker follows a memory plan, and which."""

    method: MemoryMethod = "none"
    """none: all of the model stays on the device. auto: whatever is fastest for every block: its weights and optimizer
    states on the device or on the host; its activations saved, swapped to the host, or recomputed in the backward pass.
    autohete: without swapping. karma: activations alone, saved, swapped or recomputed. checkpoint: activations alone,
    saved or recomputed.
    """
    device_budget: str = ""
    """Memory of the device that the run may take, such as "12GiB"; "": all that the machine has."""
    host_budget: str = ""
    """Memory of the host beside it; "": all that the machine has."""
    disk: str = ""
    """A folder for what neither memory holds: optimizer states of blocks; where the RAM is the device, their weights
    and gradients too. Nothing of it is left after the run. "": none.
    """
    machine: str = ""
    """A name of `isles.network.machines`, or the path of a .toml file of your own; its rates decide which plan is
    fastest. "": what is here. On the virtual backend the plan's step for a named machine is that of the clock.
    """
    update: Update = "exact"
    """exact: every update waits until all gradients are there, as clipping needs it. early: a block is updated as soon
    as its gradients are there, which needs inner.max_norm = 0.
    """
    vectors: VectorTier = "memory"
    """Where outer methods hold anchors, momenta and what they are about to send: memory, or disk, in the folder of
    `memory.disk`. They are touched once a round. It needs no plan.
    """
    shard: bool = False
    """Workers of one ddp replica share what is on the host: each holds the optimizer states of its part of every
    block, updates that part of the weights, and gets the others' before the next forward pass.
    """
    plan: str = ""
    """A plan that `isles plan memory --json` wrote, instead of a search."""
    emulate: bool = False
    """On a CPU: take a part of the RAM for the device, with copies between the two as on the machine; for trying out
    plans, it saves no memory.
    """

    def __post_init__(self) -> None:
        for key in ("device_budget", "host_budget"):
            value = getattr(self, key)
            if value and value.strip().replace(".", "").isdigit():
                raise ValueError(f'{key} = {value!r}: write its unit too, such as "{value.strip()}GiB"')
            if value and parse_bytes(key, value) <= 0:
                raise ValueError(f'{key} = {value!r}: choose memory above 0, such as "12GiB", or leave it out')
        if self.vectors == "disk" and not self.disk:
            raise ValueError('vectors = "disk": set memory.disk to the folder where they may lie')
        if self.method == "none":
            used = ("disk",) if self.vectors == "disk" else ()
            keys = {"device_budget", "host_budget", "disk", "machine", "plan", "update", "emulate", "shard"} - {*used}
            refuse(self, 'is of a plan: set memory.method = "auto" too, or take it out', *keys)
