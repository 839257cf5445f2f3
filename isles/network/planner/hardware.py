"""How long a step computes on a GPU of a known name, from the operations of a decoder and a share of the peak.

    seconds = 6 x parameters x tokens of the step of one worker / (peak x mfu)

6: a multiplication and an addition for each parameter and token, once forward and twice backward. Attention's own
products, which grow with the sequence, are left out; mfu (model FLOP utilisation) is what such runs reach of the peak,
0.3 to 0.5 with good code on one large GPU, less on consumer cards. One GPU a worker.
"""

from __future__ import annotations

from isles.errors import unknown_name

# Dense bfloat16 (float16 where there is no bfloat16) with float32 sums, TFLOP/s, as the makers' data sheets state it.
# Beside them the GB of memory, of the largest of that name.
_GPUS = {
    "T4": (65, 16),
    "V100": (125, 32),
    "A10": (125, 24),
    "A100": (312, 80),
    "L4": (121, 24),
    "L40S": (362, 48),
    "H100": (989, 80),
    "H200": (989, 141),
    "B200": (2250, 180),
    "MI250X": (383, 128),
    "MI300X": (1307, 192),
    "RTX 3090": (71, 24),
    "RTX 4090": (165, 24),
}


def gpus() -> list[str]:
    """Every name."""
    return list(_GPUS)


def step_seconds(gpu: str, mfu: float, parameters: float, tokens: float) -> float:
    """Seconds of a step of `tokens` (one worker's). ValueError for an unknown name or an impossible share."""
    peak, _ = _numbers(gpu)
    if not 0 < mfu <= 1:
        raise ValueError(f"mfu = {mfu}: choose a share of the GPU's peak, above 0 and up to 1, such as 0.4")
    return 6 * parameters * tokens / (peak * 1e12 * mfu)


def gpu_bytes(gpu: str) -> float:
    """Of its memory. ValueError for an unknown name."""
    return _numbers(gpu)[1] * 1e9


def _numbers(gpu: str) -> tuple[float, float]:
    known = {name.casefold(): numbers for name, numbers in _GPUS.items()}
    if gpu.casefold() not in known:
        raise ValueError(unknown_name("gpu", gpu, _GPUS) + "; or give the time of a step, such as 800ms")
    return known[gpu.casefold()]
