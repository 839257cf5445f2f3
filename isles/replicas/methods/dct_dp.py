"""DCT-DP: data parallel training that sends the entries of the gradient above a threshold, which is renewed rarely
(Dynamic Communication Thresholding, Gupta et al., 2021, arXiv 2010.08899).

    every inner step, for each tensor of N entries, on worker i:

        h   = grad_i + E                                     error feedback
        tau = K-th largest |h|,  K = ceil((1 - eta) N)       in the first step and every L steps after it
        s_i = h where |h| >= tau (and is not 0), else 0      sent: as many as there are
        E   = h - s_i
        grad <- (1/M) sum_i s_i                              clipped and used as in ddp

eta: sparsity, the share that is not sent; L: threshold_interval; M: workers. tau and E are each worker's own. Every
worker sends its entries to all others: (M - 1) eta-th parts, so it pays where M (1 - eta) is well below 1.

Deviations: a stale tau lets more and more through while E grows (or starves where gradients grow small), so it is
renewed at once where it sends more than density_guard K entries, or fewer than K / density_guard. Tensors of fewer than
`exclude_below` entries are sent whole. A step in which somebody's gradient is not finite is skipped by all and leaves E
and tau alone. No gradient counts as zero, so weight decay and momentum go on, but for parameters that are frozen. The
paper sums at a parameter server; here every worker sums all contributions in the order of the workers. Values may
travel in a codec, E is what it loses. Buckets: `isles.replicas.gradient.bucketed`; one exchange a bucket, for all but
the last then travel behind the backward pass, and it is the last that is waited for either way.
Memory: 8 bytes a parameter (the buckets, E).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from isles.comm.call import Call
from isles.comm.codecs import codec
from isles.comm.codecs.base import Codec
from isles.comm.codecs.scaled import Identity
from isles.comm.codecs.sparse import FORMS, indices_bytes, pack, smallest, unpack
from isles.comm.collectives.averaging import Coded, averaging
from isles.comm.collectives.basic import HEADER_BYTES, NOTE_BYTES, Stamp, gather_ragged, ragged_bytes
from isles.comm.collectives.mean import sent_bytes
from isles.comm.errors import Malformed, sent_by
from isles.comm.transport import Steps
from isles.comm.trust import mean_square
from isles.network.exchange_plan import MemoryItem, MessagePattern, Ragged
from isles.replicas.exchange_schedule import Outline
from isles.replicas.flat import FlatParameters
from isles.replicas.gradient.bucketed import Bucket, BucketedSync
from isles.replicas.gradient.config import DCTDPConfig
from isles.replicas.gradient.reduction import DIGESTED, Averaged, Reduction, is_finite

_PIECE = 1 << 17  # entries looked at in one go: they and what is made of them stay in the second-level cache
_SPARSE = 1  # a kind of payloads beside those of `exact`, whose number is even
_PREFIX = 8  # bytes before a message's values: its form and how many indices it has


@dataclass(slots=True)
class _Tensor:
    """A tensor (of entries start to stop of the vector) that is sent in part. count: K, the entries wanted."""

    start: int
    stop: int
    count: int

    def entries(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.stop]

    def threshold(self, flat: Tensor) -> float:
        """The K-th largest magnitude."""
        sizes = self.entries(flat).abs().numpy()
        return float(np.partition(sizes, len(sizes) - self.count)[len(sizes) - self.count])

    def pick(self, flat: Tensor, threshold: float, room: Tensor) -> np.ndarray:
        """Places in the vector of the entries of at least the threshold, ascending."""
        found = []
        for first in range(self.start, self.stop, _PIECE):
            part = flat[first : min(first + _PIECE, self.stop)]
            sizes = torch.abs(part, out=room[: len(part)])
            found.append(np.flatnonzero(sizes.numpy() >= threshold) + first)
        return np.concatenate(found)


class Thresholds(Reduction):
    """Per tensor, the entries of at least tau; those of small tensors, and in the first steps, all of them."""

    careful = True

    def __init__(self, layout: FlatParameters, config: DCTDPConfig, values: Codec) -> None:
        """values: the form of the entries on the wire."""
        super().__init__(layout)
        self.config, self.codec = config, values
        self.exact = Coded(Identity(), layout.numel, layout.dtype)
        if config.error_feedback == "local":
            self.residual, self._left = layout.new().zero_(), layout.new()
        self.tensors: list[_Tensor] = []
        whole: list[Tensor] = []
        start = 0
        for parameter in layout.parameters:
            stop = start + parameter.numel()
            if parameter.numel() >= config.exclude_below and parameter.numel():
                wanted = max(1, ceil((1 - config.sparsity) * parameter.numel() - 1e-9))
                self.tensors.append(_Tensor(start, stop, wanted))
            else:
                whole.append(torch.arange(start, stop, device=layout.device, dtype=torch.int64))
            start = stop
        self.whole = torch.empty(sum(map(len, whole)), dtype=torch.int64, device=layout.device)
        if not self.whole.is_meta:  # a sketch has no numbers
            torch.cat(whole or [self.whole], out=self.whole)
        self.floor = torch.finfo(layout.dtype).smallest_normal  # what is smaller is nothing
        self.thresholds = torch.zeros(len(self.tensors), dtype=layout.dtype, device="cpu")
        self.renewed = 0
        """Thresholds computed so far, one a tensor."""
        self.density = 0.0
        """Share of the entries of tensors sent in part that the last step sent."""
        self._drop()

    @override
    def begin(self, flat: Tensor, step: int) -> None:
        self._drop()
        self.usable, self._whole = is_finite(flat), step <= self.config.warmup_dense_steps
        if self._whole or not self.usable:
            return
        if self.residual is not None:
            flat.add_(self.residual)
        picked = self._pick(flat, step)
        self._indices = torch.cat((self.whole, picked))
        self._wire = self._encode(flat, picked)

    @override
    def exchange(self, call: Call, flat: Tensor, step: int) -> Steps[tuple[int, ...]]:
        stamp = Stamp(step, self.digest, not self.usable, DIGESTED)
        if self._whole:
            return (yield from self.exact.mean(call, flat, stamp, None, None, 0))
        wires = yield from gather_ragged(call, self._wire, stamp, self._message_bytes(self.layout.numel))
        if len(wires) == call.group.size:  # else nobody takes this step
            self._theirs = []
            for position, wire in wires.items():
                with sent_by(call.group.ranks[position]):
                    self._theirs.append(self._decode(wire))
            self._own = self._theirs[call.group.rank][1]
            sizes = {position: mean_square(self._theirs[position][1]) for position in range(call.group.size)}
            call.accept(_SPARSE, sizes, sizes.pop(call.group.rank), len(self._own))
        return tuple(wires)

    @override
    def land(self, flat: Tensor) -> None:
        """Added in group order: the same bits on all members."""
        if self._whole:
            return
        if self.residual is not None:
            self._left.copy_(flat).index_add_(0, self._indices, self._own, alpha=-1)
        flat.zero_()
        for indices, values in self._theirs:
            flat.index_add_(0, indices, values)
        flat.div_(len(self._theirs))

    @override
    def commit(self, flat: Tensor) -> None:
        if self._whole:
            self.density = 1.0
            return
        if self.residual is not None:
            self.residual, self._left = self._left, self.residual
        partial = self.layout.numel - len(self.whole)
        self.density = (len(self._indices) - len(self.whole)) / partial if partial else 0.0
        self.thresholds, self.renewed = self._next, self.renewed + self._renewals
        self._drop()

    @override
    def rescale(self, factor: float) -> None:
        super().rescale(factor)
        self.thresholds.mul_(factor)

    @override
    def pattern(self, step: int, size: int) -> MessagePattern:
        """That of K entries a tensor."""
        if step <= self.config.warmup_dense_steps:
            return self.exact.pattern(step, size)
        return Ragged(self._message_bytes(sum(tensor.count for tensor in self.tensors)), HEADER_BYTES + NOTE_BYTES)

    @override
    def begun_bytes(self, step: int, size: int, position: int) -> int:
        if self._whole:
            return self.sent_bytes(step, size, position)
        return ragged_bytes(self._wire.numel(), size)

    @override
    def memory(self, size: int) -> list[MemoryItem]:
        """Messages of K entries a tensor, and what is made of them."""
        count = len(self.whole) + sum(tensor.count for tensor in self.tensors)
        decoded = size * count * (8 + self.layout.dtype.itemsize)
        message = self._message_bytes(count - len(self.whole))
        exact = self.exact.working_bytes(size) if self.config.warmup_dense_steps else 0
        return [
            *super().memory(size),
            MemoryItem("thresholds", self.thresholds.nbytes + self.whole.nbytes, "always"),
            MemoryItem("messages under way", max(size * message + decoded, exact), "exchange"),
        ]

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"thresholds": self.thresholds, "renewed": self.renewed, "density": self.density}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.thresholds = state["thresholds"].clone()
        self.renewed, self.density = state["renewed"], state["density"]

    def _drop(self) -> None:
        """Forget a step that does not count, or does already."""
        nothing = torch.empty(0, dtype=torch.float32, device="cpu")
        self.usable, self._whole = True, False
        self._wire, self._own = nothing.to(torch.uint8), nothing
        self._indices = nothing.to(torch.int64)
        self._theirs: list[tuple[Tensor, Tensor]] = []
        self._next, self._renewals = self.thresholds, 0

    def _pick(self, flat: Tensor, step: int) -> Tensor:
        """The indices to send, and the thresholds by which, int64 (c,)."""
        config, since = self.config, step - self.config.warmup_dense_steps - 1
        due = since < config.warmup_steps or since % config.threshold_interval == 0
        thresholds, found = self.thresholds.tolist(), []
        room = torch.empty(_PIECE, dtype=flat.dtype, device="cpu")
        for index, tensor in enumerate(self.tensors):
            picked = None if due else tensor.pick(flat, thresholds[index], room)
            if picked is None or self._is_off(len(picked), tensor.count, thresholds[index]):
                thresholds[index] = max(tensor.threshold(flat), self.floor)
                self._renewals += 1
                picked = tensor.pick(flat, thresholds[index], room)
            found.append(picked)
        self._next = torch.tensor(thresholds, dtype=self.layout.dtype, device="cpu")
        return torch.from_numpy(np.concatenate(found)) if found else torch.empty(0, dtype=torch.int64, device="cpu")

    def _is_off(self, count: int, wanted: int, threshold: float) -> bool:
        """Whether a threshold does not do its work any more; one at the floor lets through all that there is."""
        guard = self.config.density_guard
        return count > guard * wanted or (count < wanted / guard and threshold > self.floor)

    def _encode(self, flat: Tensor, picked: Tensor) -> Tensor:
        """The message: form and count, values, indices; nothing where there is nothing to say."""
        if not len(self._indices):
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        elements, count = self.layout.numel, len(picked)
        form = smallest(count, elements) if self.config.indices == "auto" else self.config.indices
        prefix = torch.tensor([count * len(FORMS) + FORMS.index(form)], dtype=torch.int64, device="cpu").view(
            torch.uint8
        )
        values = self.codec.encode(flat.index_select(0, self._indices))
        return torch.cat((prefix, values, pack(form, picked, elements)))

    def _decode(self, wire: Tensor) -> tuple[Tensor, Tensor]:
        """Places and values of a message. Malformed where its count is not that of what follows."""
        dtype = self.layout.dtype
        if not len(wire):
            return torch.empty(0, dtype=torch.int64, device="cpu"), torch.empty(0, dtype=dtype, device="cpu")
        if len(wire) < _PREFIX:
            raise Malformed(-1, f"a message of {len(wire)} bytes")
        count, form = divmod(int(wire[:_PREFIX].view(torch.int64)), len(FORMS))
        total, elements = len(self.whole) + count, self.layout.numel
        if not 0 <= count <= elements - len(self.whole) or len(wire) != self._length(FORMS[form], count):
            raise Malformed(-1, f"{count} indices of {elements} in a message of {len(wire)} bytes")
        values_end = _PREFIX + self.codec.wire_bytes(total, dtype)
        values = self.codec.decode(wire[_PREFIX:values_end], total, dtype)
        indices = unpack(FORMS[form], wire[values_end:], elements)
        if len(indices) != count:
            raise Malformed(-1, f"{count} indices announced, {len(indices)} marked")
        return torch.cat((self.whole, indices)), values

    def _message_bytes(self, count: int) -> int:
        elements, total = self.layout.numel, len(self.whole) + count
        if not total:
            return 0
        form = smallest(count, elements) if self.config.indices == "auto" else self.config.indices
        return self._length(form, count)

    def _length(self, form: str, count: int) -> int:
        values = self.codec.wire_bytes(len(self.whole) + count, self.layout.dtype)
        return _PREFIX + values + indices_bytes(form, count, self.layout.numel)


class DCTDP(BucketedSync):
    """All workers hold equal weights after every step."""

    Config = DCTDPConfig
    config: DCTDPConfig

    @override
    def reduction(self, bucket: Bucket) -> Reduction:
        config = self.config
        if config.sparsity == 0:
            return Averaged(bucket.layout, averaging(Identity(), *bucket.layout.layout))
        return Thresholds(bucket.layout, config, codec(config.codec, config.options_of("codec")))

    @override
    def phases(self, steps: int) -> list[tuple[int, int]]:
        """Later steps are planned with K entries a tensor; actual ones vary, up to density_guard times as much."""
        exact = min(self.config.warmup_dense_steps, steps)
        return [(first, count) for first, count in ((1, exact), (exact + 1, steps - exact)) if count]

    @override
    def own_outline(self, steps: int) -> Outline:
        return replace(super().own_outline(steps), about=self.config.sparsity > 0)

    @override
    def gauges(self) -> dict[str, float]:
        """Also the share of entries sent in the last step (of tensors sent in part), and thresholds per tensor."""
        parts = [bucket.reduction for bucket in self.buckets if isinstance(bucket.reduction, Thresholds)]
        tensors = sum(len(part.tensors) for part in parts)
        if not tensors:
            return super().gauges()
        entries = [part.layout.numel - len(part.whole) for part in parts]
        density = sum(part.density * count for part, count in zip(parts, entries, strict=True)) / sum(entries)
        renewals = sum(part.renewed for part in parts) / tensors
        return super().gauges() | {"density": density, "threshold_renewals": renewals}

    @override
    def advise(self, steps: int) -> list[str]:
        size, notices = self.group.size, super().advise(steps)
        if self.config.sparsity == 0:
            return notices
        if all(parameter.numel() < self.config.exclude_below for parameter in self.parameters):
            notices.append(
                f"exclude_below = {self.config.exclude_below} sends every tensor of the model whole: lower it"
            )
        sparse, dense = 0, 0
        for reduction in (bucket.reduction for bucket in self.buckets):
            sparse += reduction.sent_bytes(self.config.warmup_dense_steps + 1, size, 0)
            dense += sent_bytes(reduction.layout.numel, reduction.layout.dtype, Identity(), size, 0)
        if sparse >= dense and size > 1:
            notices.append(
                f"sparsity = {self.config.sparsity} among {size} workers sends {sparse / dense:.1f} times the bytes of "
                "ddp: raise sparsity, or lower exclude_below"
            )
        if self.config.error_feedback == "none":
            notices.append(
                'error_feedback = "none": what is below the threshold never comes back; choose error_feedback = "local"'
            )
        return notices
