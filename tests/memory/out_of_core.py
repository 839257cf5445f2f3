"""Trains about 50M parameters for three steps, in memory or by a plan on a disk; prints what it took as JSON.

python -m tests.memory.out_of_core plain|recompute|FOLDER [SEQUENCES]

plain: in memory; recompute: in memory too, blocks made again in the backward pass; FOLDER: of the disk tier's file.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from contextlib import nullcontext

import torch

from isles.memory.costs import Placement, disk_bytes, least_peak
from isles.memory.optimizer import Managed
from isles.memory.plan import table
from isles.memory.profile import profile
from isles.models.decoder import Decoder
from isles.models.sizes import Shape
from isles.network.machines import MACHINES
from tests.memory.loops import adamw, plan_of

SHAPE = Shape(d_model=512, layers=16, heads=8, ffn=1376, vocab=256, context=128, tie_embeddings=False)
STEPS = 3


def _anonymous() -> int:
    """Bytes of this process that no file holds."""
    with open("/proc/self/status", encoding="utf-8") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


def main(how: str, sequences: int = 1) -> None:
    torch.set_num_threads(1)
    model = Decoder(SHAPE)
    optimizer = inner = adamw(model)
    managed, told = None, {}
    if how != "plain":
        made = profile(model, torch.zeros(sequences, SHAPE.context + 1, dtype=torch.int64))
        folder = "" if how == "recompute" else how
        placements = (Placement("file" if folder else "device", "recompute"),) * SHAPE.layers
        plan = plan_of(made, placements)
        managed = optimizer = Managed(plan, model, inner, profile=made, machine=MACHINES["laptop-16"], disk=folder)
        rows = table(plan, made)
        told = {
            "planned_peak": least_peak(made, placements),
            "disk": disk_bytes(made, placements),
            "states": sum(unit.states for unit in made.units),
            "formula_read": sum(row["read"] for row in rows),
            "formula_written": sum(row["written"] for row in rows),
        }
    losses, seconds, busy, most = [], [], [], 0
    with managed or nullcontext():
        for step in range(STEPS):
            began, worked = time.perf_counter(), time.process_time()
            batch = torch.randint(0, 256, (sequences, SHAPE.context + 1), generator=torch.Generator().manual_seed(step))
            loss = model(batch).loss
            loss.backward()
            losses.append(loss.item())
            del loss
            if managed is not None:
                managed.gradients()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if managed is not None:
                managed.catch_up()
            seconds.append(time.perf_counter() - began)
            busy.append(time.process_time() - worked)
            most = max(most, _anonymous())
        if managed is not None:
            told |= {"moved": managed.runner.moved}
        digest = hashlib.sha256()
        for parameter in model.parameters():
            digest.update(parameter.detach().numpy().data)
    told |= {"losses": losses, "seconds": seconds, "cpu": busy, "anonymous": most, "weights": digest.hexdigest()}
    print(json.dumps(told | {"parameters": sum(p.numel() for p in model.parameters()), "pid": os.getpid()}))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
