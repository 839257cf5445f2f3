"""One bit an entry: the sign, times the block's mean magnitude (Karimireddy et al., 2019, arXiv 1901.09847).

    s = mean|x| over the block;  decoded = +s where x >= 0, else -s

Biased: train with error feedback. Bits are packed from the lowest up; 1.125 bits an entry.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from isles.comm.codecs.base import Codec
from isles.comm.codecs.casts import BFloat16
from isles.comm.codecs.scaled import ScaledBlocks

_EIGHTS = 1.0 - 2.0 * (np.arange(256)[:, None] >> np.arange(8) & 1).astype(np.float32)


class Sign(ScaledBlocks):
    """The mean of several goes back as bfloat16."""

    name = "sign"
    block = 256
    bits = 1

    @property
    @override
    def back(self) -> Codec:
        return BFloat16()

    @override
    def scale(self, sizes_KB: Tensor, out: Tensor) -> None:
        torch.mean(sizes_KB, dim=1, keepdim=True, out=out)  # 0 for zeros: 0 / 0 counts as x >= 0

    @override
    def pack(self, y: Tensor, out: Tensor) -> None:
        out.copy_(torch.from_numpy(np.packbits((y < 0).numpy(), bitorder="little"))[: len(out)])

    @override
    def unpack(self, codes: Tensor, out: Tensor) -> None:
        np.take(_EIGHTS, codes.numpy(), axis=0, out=out.numpy().reshape(-1, 8), mode="clip")
