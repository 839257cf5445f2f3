"""16-bit floating point with a scale."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from isles.comm.codecs.scaled import ScaledBlocks


class Float16(ScaledBlocks):
    """Round x / max|block| to float16, one float32 scale per 4096 entries: 16.008 bits an entry.

    Unscaled float16 would flush a quarter of the entries of a small outer gradient (~1e-7) to zero.
    """

    name = "fp16"
    lossless, biased, shared_mask = False, False, False
    block = 4096
    bits = 16

    @override
    def pack(self, y: Tensor, out: Tensor) -> None:
        out.view(torch.float16).copy_(y[: len(out) // 2])

    @override
    def unpack(self, codes: Tensor, out: Tensor) -> None:
        out.copy_(codes.view(torch.float16))
