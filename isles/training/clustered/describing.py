"""What this machine offers to clusters: memory, and how fast it is, measured."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_FOR = 0.5  # seconds of measuring
_SEQUENCES = 8


def memory(device: torch.device) -> float:
    """Bytes that a run on `device` can have: of that GPU, or of the RAM that nobody uses."""
    import torch

    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    told = Path("/proc/meminfo")
    if told.exists():
        words = dict(line.split(":") for line in told.read_text(encoding="ascii").splitlines())
        return 1024.0 * int(words["MemAvailable"].split()[0])
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def forward_speed(device: torch.device) -> float:
    """FLOP/s that forward passes of a small decoder reach on `device`: the median of half a second's."""
    import torch

    from isles.models import Decoder, Shape, flops_per_token

    shape = Shape(d_model=256, layers=2, heads=4, ffn=768, vocab=256, context=128, tie_embeddings=False)
    model, times = Decoder(shape).to(device), []
    tokens = torch.zeros(_SEQUENCES, shape.context, dtype=torch.int64, device=device)
    with torch.no_grad():
        ends = time.perf_counter() + _FOR
        while len(times) < 3 or time.perf_counter() < ends:
            began = time.perf_counter()
            model.logits(tokens)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - began)
    return flops_per_token(shape) / 3 * tokens.numel() / statistics.median(times[1:])
