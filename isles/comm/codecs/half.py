"""16-bit floating point with a scale."""

from __future__ import annotations

import torch
from torch import Tensor

from isles.comm.codecs.base import as_bytes
from isles.comm.codecs.scaled import ScaledBlocks, largest


class Float16(ScaledBlocks):
    """Round x / max|block| to float16, one float32 scale per 4096 entries: 16.008 bits an entry.

    Unscaled float16 would flush a quarter of the entries of a small outer gradient (~1e-7) to zero.
    """

    name = "fp16"
    block = 4096
    bits = 16

    def scale(self, x_KB: Tensor) -> Tensor:
        """See ScaledBlocks.scale."""
        return largest(x_KB)

    def pack(self, y_KB: Tensor) -> Tensor:
        """See ScaledBlocks.pack."""
        return as_bytes(y_KB.to(torch.float16))

    def unpack(self, codes: Tensor) -> Tensor:
        """See ScaledBlocks.unpack."""
        return codes.view(torch.float16).to(torch.float32)
