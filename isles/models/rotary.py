"""Rotary position embedding (RoFormer, arXiv 2104.09864): position t turns pair i of a head by the angle t
base^(-2i/C).

The product of a turned query and a turned key then depends on their distance alone. Pairs are neighbours, (2i, 2i+1),
as in the paper and in Meta's Llama, so that a pair can be read as one complex number and turned by one multiplication;
Hugging Face's Llama pairs (i, i + C/2) and needs the rows of its query and key matrices reordered.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

BASE = 10_000.0


class Rotary(nn.Module):
    """Turns queries and keys by their positions; holds the table of angles, no weights.

    The table (context, 1, C/2, 2), cosine and sine, is a non-persistent buffer. It is made in float32 or wider, also
    for bf16 weights, and the turning is done so too: bf16 would blur neighbouring positions.
    """

    table: Tensor

    def __init__(
        self,
        head_dim: int,
        context: int,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        wide = _at_least_float32(dtype or torch.get_default_dtype())
        speeds = BASE ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        angles = torch.outer(torch.arange(context, dtype=torch.float64), speeds)[:, None, :]
        table = torch.stack((angles.cos(), angles.sin()), dim=-1).to(device=device, dtype=wide)
        self.register_buffer("table", table, persistent=False)

    def forward(self, x_BTNC: Tensor) -> Tensor:
        """(B, T, N, C) to the same shape and dtype; N heads of queries, keys or both, the first token at position 0."""
        wide = _at_least_float32(x_BTNC.dtype)
        table = self.table[: x_BTNC.shape[1]].to(wide)  # a copy only where someone cast the whole module down
        pairs = x_BTNC.to(wide).unflatten(-1, (-1, 2))
        if torch.compiler.is_compiling():  # the compiler fuses real arithmetic and cannot generate complex code
            (a, b), (cos, sin) = pairs.unbind(-1), table.unbind(-1)
            turned = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1)
        else:  # one kernel instead of seven, and as few in the backward pass
            turned = torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(table))
        return turned.flatten(-2).to(x_BTNC.dtype)


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
