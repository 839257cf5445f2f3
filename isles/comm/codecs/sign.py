"""One bit an entry: the sign, times the block's mean magnitude (Karimireddy et al., 2019, arXiv 1901.09847).

    s = mean|x| over the block;  decoded = +s where x >= 0, else -s

Biased: train with error feedback. Bits are packed from the lowest up; 1.125 bits an entry.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from isles.comm.codecs.base import Codec
from isles.comm.codecs.casts import BFloat16
from isles.comm.codecs.scaled import ScaledBlocks

_EIGHTS = 1.0 - 2.0 * (np.arange(256)[:, None] >> np.arange(8) & 1).astype(np.float32)


class Sign(ScaledBlocks):
    """See the module; the mean of several goes back as bfloat16."""

    name = "sign"
    block = 256
    bits = 1

    @property
    def back(self) -> Codec:
        """See Codec.back."""
        return BFloat16()

    def scale(self, x_KB: Tensor) -> Tensor:
        """See ScaledBlocks.scale."""
        return x_KB.abs().mean(dim=1)

    def pack(self, y_KB: Tensor) -> Tensor:
        """See ScaledBlocks.pack."""
        return torch.from_numpy(np.packbits((y_KB < 0).view(-1).numpy(), bitorder="little"))

    def unpack(self, codes: Tensor) -> Tensor:
        """See ScaledBlocks.unpack."""
        return torch.from_numpy(np.take(_EIGHTS, codes.numpy(), axis=0).reshape(-1))
