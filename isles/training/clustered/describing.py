"""What this machine offers to clusters: memory, and how fast it is, measured."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path

_FOR = 0.5  # seconds of measuring
_SEQUENCES = 8


def memory() -> float:
    """Bytes that a run can have: of the GPU where there is one, else of the RAM that nobody uses."""
    import torch

    if torch.cuda.is_available():
        return float(torch.cuda.mem_get_info()[0])
    told = Path("/proc/meminfo")
    if told.exists():
        words = dict(line.split(":") for line in told.read_text(encoding="ascii").splitlines())
        return 1024.0 * int(words["MemAvailable"].split()[0])
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def forward_speed() -> float:
    """FLOP/s that forward passes of a small decoder reach here: the median of half a second's."""
    import torch

    from isles.models import Decoder, Shape, flops_per_token

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
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
