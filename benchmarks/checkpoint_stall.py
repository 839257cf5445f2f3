"""How long a checkpoint of 0.9 GB stops training: the weights of 75M parameters and their two moments, float32.

    copy            the same bytes copied in memory, into a buffer that was used before
    isles           `StateSaver.save`: returns when it has its copy; a thread checks and writes it
    torch.save      into a file, flushed to the disk
    DCP async       `torch.distributed.checkpoint.async_save`, which copies and then writes in a thread

"stops" is until the call returns, "written" until the file is whole. Seven rounds after one that is not counted, in
turns; the median and the range.

    python -m benchmarks.checkpoint_stall [FOLDER]
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp

from isles.training.records.checkpoint import Checkpoints
from isles.training.records.saver import StateSaver
from isles.training.records.shard import first_nan

TENSORS, ELEMENTS, ROUNDS = 75, 1_000_000, 7


def main() -> None:
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as folder:
        measure(Path(folder))


def measure(folder: Path) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    state = {
        name: {str(number): torch.rand(ELEMENTS) for number in range(TENSORS)}
        for name in ("model", "exp_avg", "exp_avg_sq")
    }
    size = 3 * TENSORS * ELEMENTS * 4
    buffer, saver = torch.zeros(size // 4), StateSaver(lambda: 2.0 * size)

    def copy(step: int) -> Callable[[], Any]:
        flat = iter(buffer.split(ELEMENTS))
        for part in state.values():
            for tensor in part.values():
                next(flat).copy_(tensor)
        return lambda: None

    def isles(step: int) -> Callable[[], Any]:
        def write(copied: dict[str, Any]) -> None:
            assert first_nan(copied) is None
            Checkpoints(folder).write_shard(step, 0, copied, "run")
            Checkpoints(folder).commit(step, [0], {"run": "run"}, keep=1)

        saver.save(state, write)
        return lambda: saver.__exit__(None)

    def torch_save(step: int) -> Callable[[], Any]:
        with (folder / "torch.pt").open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        return lambda: None

    def dcp_async(step: int) -> Callable[[], Any]:
        future: Any = dcp.async_save(state, checkpoint_id=folder / "dcp")
        return future.result

    rows = {"copy": copy, "isles": isles, "torch.save": torch_save, "DCP async": dcp_async}
    stops, written = {name: list[float]() for name in rows}, {name: list[float]() for name in rows}
    for turn in range(ROUNDS + 1):
        for name, save in rows.items():
            began = time.perf_counter()
            finish = save(turn)
            stopped = time.perf_counter() - began
            finish()
            if turn:
                stops[name].append(stopped)
                written[name].append(time.perf_counter() - began)
    usual = statistics.median(stops["copy"])
    print(f"{size / 1e9:.2f} GB, {torch.get_num_threads()} threads of torch, torch {torch.__version__}")
    for name in rows:
        middle = statistics.median(stops[name])
        print(
            f"{name:<12} stops {middle:6.3f} s ({min(stops[name]):.3f} to {max(stops[name]):.3f}), "
            f"{middle / usual:5.2f} of a copy; written after {statistics.median(written[name]):6.3f} s"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
