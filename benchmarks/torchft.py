"""DiLoCo against torchft's, on the CPU: the same parameters, and how long an outer round takes.

    python -m benchmarks.torchft [--json]            needs: pip install '.[bench]'

Two processes on this machine, gloo over loopback; each holds two copies of a 9.7M-parameter model, one trained by
`isles.DiLoCo`, one by `torchft.local_sgd.DiLoCo`, from the same weights on the same data: AdamW, H = 3, outer SGD 0.7
with Nesterov momentum 0.9. They take turns, round by round.

    parameters    largest |ours - theirs| after 10 outer rounds
    round         wall seconds of the step that ends a round (AdamW's step and the outer round) of the slower worker,
                  ours / theirs, median of 15 turns; the inner step alone stands beside

torchft runs as its examples do: a lighthouse, a manager for each replica, an all-reduce for each tensor; then once more
with all tensors in one bucket, its faster form. Its lighthouse looks every 10 ms, not every 100, whether all are there:
what it does is compared, not what it waits for. Exit code 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import isles
from benchmarks._measure import Row, report
from benchmarks._models import byte_model
from isles.comm.mesh import Mesh

H = 3
TURNS = 15
WARM_UP = 2
EQUAL_AFTER = 10  # rounds
TOKENS = 64  # a step
LR, MOMENTUM = 0.7, 0.9
PATIENCE = timedelta(seconds=60)


class Copy:
    """A model and its inner optimizer, both new; `step` is AdamW's, or the method's that wraps it."""

    def __init__(self) -> None:
        self.model = byte_model()
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.step: Any = self.inner.step

    def round(self, data: Tensor) -> tuple[float, float]:
        """H steps on `data` (H, 2, TOKENS): seconds of the last call of `step`, and of the one before."""
        seconds = [0.0]
        for inputs, targets in data:
            nn.functional.cross_entropy(self.model(inputs), targets).backward()
            start = time.perf_counter()
            self.step()
            seconds.append(time.perf_counter() - start)
            self.inner.zero_grad()
        return seconds[-1], seconds[-2]


@contextmanager
def under_torchft(
    model: nn.Module, inner: torch.optim.Optimizer, address: str, rank: int, *, workers: int, every: int, bucket: bool
) -> Iterator[None]:
    """`model` under torchft's DiLoCo, this process being one replica group of one worker."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["inner"])

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=PATIENCE),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "inner": inner.state_dict()},
        min_replica_size=workers,
        use_async_quorum=False,
        timeout=PATIENCE,
        quorum_timeout=PATIENCE,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=address,
        replica_id=f"replica-{rank}",
        hostname="127.0.0.1",
        init_sync=False,  # the weights are equal
    )
    outer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, nesterov=True)
    try:
        with DiLoCo(manager, [model], inner, outer, sync_every=every, use_bucketization=bucket):
            yield
    finally:
        manager.shutdown(wait=False)


def worker(world: Mesh, address: str, bucket: bool) -> dict[str, Any]:
    """By turn: seconds of a round of ours and of theirs, and of an inner step; and how far the parameters are apart."""
    logging.getLogger("torchft").setLevel(logging.ERROR)
    mine, other = Copy(), Copy()
    options = {"sync_every": H, "outer_lr": LR, "outer_momentum": MOMENTUM}
    mine.step = isles.DiLoCo(mine.model, mine.inner, world.outer, **options).step
    parties = [("ours", mine), ("theirs", other)]
    generator = torch.Generator().manual_seed(world.rank)
    told: dict[str, Any] = {"ours": [], "theirs": [], "inner": []}
    with under_torchft(other.model, other.inner, address, world.rank, workers=world.size, every=H, bucket=bucket):
        for turn in range(WARM_UP + TURNS):
            data = torch.randint(256, (H, 2, TOKENS), generator=generator)
            for name, copy in parties[:: 1 if turn % 2 else -1]:
                world.world.barrier()
                seconds, inner = copy.round(data)
                if turn >= WARM_UP:
                    told[name].append(seconds)
                    told["inner"].append(inner)
            if turn + 1 == EQUAL_AFTER:
                told["apart"] = apart(mine.model, other.model)
                told["moved"] = apart(mine.model, byte_model())
    return told


@torch.no_grad()
def apart(one: nn.Module, other: nn.Module) -> float:
    """The largest difference between their parameters."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((mine - theirs).abs().max()) for mine, theirs in pairs)


def table() -> list[Row]:
    """Both forms of torchft's all-reduce."""
    from torchft.coordination import LighthouseServer

    rows = []
    for name, bucket in (("a tensor at a time", False), ("one bucket", True)):
        lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, quorum_tick_ms=10)
        address = f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}"
        try:
            ranks = isles.run_local(worker, workers=2, args=(address, bucket))
        finally:
            lighthouse.shutdown()
        ours, others = (
            [max(turn) for turn in zip(*(rank[key] for rank in ranks), strict=True)] for key in ("ours", "theirs")
        )
        ratio = median(mine / their for mine, their in zip(ours, others, strict=True))
        inner = median(ranks[0]["inner"])
        note = f"{median(ours):.3f} s against {median(others):.3f} s, {inner:.3f} s of it AdamW's"
        rows.append(Row(f"round, {name}", ratio, "wall ratio", None if bucket else ("<=", 0.8), note))
        off, moved = (max(rank[key] for rank in ranks) for key in ("apart", "moved"))
        note = f"{off:.1e} after {EQUAL_AFTER} rounds that moved them by up to {moved:.2f}"
        rows.append(Row(f"parameters, {name}", off, "apart", ("<=", 1e-5), note))
    return rows


def main() -> int:
    """Run both."""
    parser = argparse.ArgumentParser(description="DiLoCo against torchft's on the CPU.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    os.environ.setdefault("RUST_LOG", "warn")  # of its lighthouse and managers, here and in the workers
    try:
        importlib.import_module("torchft")
    except ImportError as error:
        print(f"torchft: skipped, torchft does not load ({error}); pip install '.[bench]'", file=sys.stderr)
        return 0
    return report(table(), options.json)


if __name__ == "__main__":
    sys.exit(main())
