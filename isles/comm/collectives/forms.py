"""Which way of averaging serves a form on the wire."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from isles.comm.codecs import Form
from isles.comm.codecs.lowrank import LowRank
from isles.comm.collectives.averaging import Averaging, Coded
from isles.comm.collectives.factors import Factors


def averaging(form: Form, shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device) -> Averaging:
    """The means of vectors that hold tensors of `shapes` after each other; device: the CPU, or meta for what is only
    planned.
    """
    if isinstance(form, LowRank):
        return Factors(form, shapes, dtype, device)
    return Coded(form, sum(map(prod, shapes)), dtype)
