"""How the gradients of one bucket become their mean over the group: what travels, and what stays for the next step.

    begin      the bucket's gradients are in place: look at them, encode what is to travel
    exchange   a protocol behind the computation
    land       all gradients are usable: the mean is in place
    commit     the mean is used: what stays behind becomes final

Between `begin` and `commit` no state changes: a bucket may begin again (its gradients changed after it had left, or
were thrown away), and a step in which somebody's gradients are not finite ends as if it had not been.

    Native       the backend's own all-reduce
    Averaged     the mean through a codec or as low-rank factors, with error feedback
    Thresholds   entries of at least a threshold, for `isles.replicas.methods.dct_dp`
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from isles.comm.call import Call
from isles.comm.codecs.base import Codec
from isles.comm.codecs.scaled import Identity
from isles.comm.codecs.sparse import FORMS, indices_bytes, pack, smallest, unpack
from isles.comm.collectives.averaging import Averaging, Coded
from isles.comm.collectives.basic import HEADER_BYTES, NOTE_BYTES, Stamp, gather_ragged, ragged_bytes
from isles.comm.collectives.mean import native_bytes, native_mean
from isles.comm.errors import Malformed, sent_by
from isles.comm.transport import Steps
from isles.comm.trust import mean_square
from isles.network.exchange_plan import MemoryItem, MessagePattern, Ragged, Ring
from isles.replicas.flat import FlatParameters
from isles.replicas.parts.interfaces import ErrorFeedback
from isles.replicas.start import OTHER_SETTINGS, OTHER_STATE

DIGESTED = ("other parameters are frozen", OTHER_SETTINGS, OTHER_STATE)


class Reduction(ABC):
    """Of one bucket, whose gradients lie flat in the order of `layout`."""

    residual: Tensor | None = None
    """What was not sent yet, flat (n,), in the gradients' units: error feedback."""
    careful = False
    """True if all workers skip a step in which somebody's gradients are not finite, as saved state would suffer."""
    preserves_signs = False
    """True if the mean of zeros has the sign that all of them had: -0.0 marks what nobody has a gradient of."""

    def __init__(self, layout: FlatParameters) -> None:
        self.layout = layout
        self.digest = 0
        """Hash of what must be the same on all members in the next exchange, `packed` as `DIGESTED` says."""

    def begin(self, flat: Tensor, step: int) -> None:
        """Look at the gradients (n,) of inner step `step` (1, 2, ...), which may be changed."""
        del flat, step

    @abstractmethod
    def exchange(self, call: Call, flat: Tensor, step: int) -> Steps[tuple[int, ...]]:
        """Exchange what `begin` made. The positions of the members whose gradients are finite, as far as it looks."""

    def land(self, flat: Tensor) -> None:
        """Leave the mean in `flat`, if it is not there."""
        del flat

    def commit(self, flat: Tensor) -> None:
        """The mean, which is in `flat`, is taken: what stays behind of this step is final."""
        del flat

    @abstractmethod
    def pattern(self, step: int, size: int) -> MessagePattern:
        """What that step is planned to put on the wire in a group of `size`."""

    def sent_bytes(self, step: int, size: int, position: int) -> int:
        """Bytes that `position` of a group of `size` is planned to send in that step, headers included."""
        return int(self.pattern(step, size).sent(position, size))

    def begun_bytes(self, step: int, size: int, position: int) -> int:
        """The same of what `begin` has made."""
        return self.sent_bytes(step, size, position)

    def memory(self, size: int) -> list[MemoryItem]:
        vector = 0 if self.residual is None else self.residual.nbytes
        return [MemoryItem(what, vector, "always") for what in ("error feedback", "error feedback of the step")]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert not state

    def rescale(self, factor: float) -> None:
        """The loss is multiplied by `factor` more from now on: so is what is saved of gradients."""
        if self.residual is not None:
            self.residual.mul_(factor)


class Native(Reduction):
    """The backend's own all-reduce, where the gradients lie; nobody looks at them."""

    preserves_signs = True

    @override
    def exchange(self, call: Call, flat: Tensor, step: int) -> Steps[tuple[int, ...]]:
        yield from native_mean(call, flat)
        return tuple(range(call.group.size))

    @override
    def pattern(self, step: int, size: int) -> MessagePattern:
        return Ring(native_bytes(self.layout.numel, self.layout.dtype, size))


class Averaged(Reduction):
    """The mean through a codec or as low-rank factors (`isles.comm.collectives.averaging`), with error feedback where
    it is given: a = g + E is sent, and then

        local    E <- decay (a - what the others decoded of it)
        global   E <- decay (a - the mean that came back)
    """

    def __init__(self, layout: FlatParameters, averaging: Averaging, feedback: ErrorFeedback | None = None) -> None:
        super().__init__(layout)
        self.averaging, self.feedback = averaging, feedback
        self.careful = feedback is not None or averaging.held_bytes > 0
        self.preserves_signs = feedback is None and averaging.preserves_signs
        self.usable = True
        self._before: dict[str, Any] | None = None  # the state of `averaging`, while a step has not landed
        if feedback is not None:
            self.residual, self._left = layout.new().zero_(), layout.new()

    @override
    def begin(self, flat: Tensor, step: int) -> None:
        if self._before is not None:
            self.averaging.load_state_dict(self._before)
        self._before = self.averaging.state_dict()
        self.usable = is_finite(flat)
        if not self.usable:
            flat.zero_()
        elif self.residual is not None:
            self._left.copy_(flat.add_(self.residual))

    @override
    def exchange(self, call: Call, flat: Tensor, step: int) -> Steps[tuple[int, ...]]:
        left = self._left if self.feedback is not None and self.feedback.form == "local" else None
        stamp = Stamp(step, self.digest, not self.usable, DIGESTED)
        return (yield from self.averaging.mean(call, flat, stamp, None, left, 0))

    @override
    def commit(self, flat: Tensor) -> None:
        self._before = None
        if self.residual is None or self.feedback is None:
            return
        if self.feedback.form == "global":
            self._left.sub_(flat)
        self.residual, self._left = self._left.mul_(self.feedback.decay), self.residual

    @override
    def pattern(self, step: int, size: int) -> MessagePattern:
        return self.averaging.pattern(step, size)

    @override
    def memory(self, size: int) -> list[MemoryItem]:
        return [
            *super().memory(size),
            MemoryItem("bases of the factors", self.averaging.held_bytes, "always"),
            MemoryItem("messages under way", self.averaging.working_bytes(size), "exchange"),
        ]

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.averaging.state_dict() if self._before is None else self._before

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.averaging.load_state_dict(state)


def is_finite(vector: Tensor) -> bool:
    """Whether all entries are finite, and their sum is: an overflow of the sum counts as not finite."""
    return bool(vector.sum().isfinite())


def together(items: Sequence[MemoryItem]) -> list[MemoryItem]:
    """One entry for all that share a name and a time, with the sum of their bytes; those of no bytes are left out."""
    sums: dict[tuple[str, Any], int] = {}
    for one in items:
        sums[one.what, one.when] = sums.get((one.what, one.when), 0) + one.nbytes
    return [MemoryItem(what, nbytes, when) for (what, when), nbytes in sums.items() if nbytes]


_PIECE = 1 << 17  # entries looked at in one go: they and what is made of them stay in the second-level cache
_SPARSE = 1  # a kind of payloads beside those of `exact`, whose number is even
_PREFIX = 8  # bytes before a message's values: its form and how many indices it has


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The settings of `DCTDPConfig`, read. indices: their form (`codecs.sparse`), or "auto". exact: so many steps at
    the start travel whole. every_step: in so many steps after them thresholds are renewed each time.
    """

    sparsity: float
    interval: int
    feedback: bool
    guard: float
    codec: Codec
    indices: str
    exclude_below: int
    exact: int
    every_step: int


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
    """Per tensor, h = g + E: the entries |h| >= tau are sent, what they lose and all others stay in E.

    tau is the K-th largest |h| when it is renewed: in the first step, every `interval` steps after it, and whenever it
    lets through more than guard K entries, or fewer than K / guard though there are more. Tensors of fewer than
    `exclude_below` entries are sent whole.
    """

    careful = True

    def __init__(self, layout: FlatParameters, rule: Rule) -> None:
        super().__init__(layout)
        self.rule = rule
        self.exact = Coded(Identity(), layout.numel, layout.dtype)
        if rule.feedback:
            self.residual, self._left = layout.new().zero_(), layout.new()
        self.tensors: list[_Tensor] = []
        whole: list[Tensor] = []
        start = 0
        for parameter in layout.parameters:
            stop = start + parameter.numel()
            if parameter.numel() >= rule.exclude_below and parameter.numel():
                wanted = max(1, ceil((1 - rule.sparsity) * parameter.numel() - 1e-9))
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
        self.usable, self._whole = is_finite(flat), step <= self.rule.exact
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
        if step <= self.rule.exact:
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
        exact = self.exact.working_bytes(size) if self.rule.exact else 0
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
        rule, since = self.rule, step - self.rule.exact - 1
        due = since < rule.every_step or since % rule.interval == 0
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
        guard = self.rule.guard
        return count > guard * wanted or (count < wanted / guard and threshold > self.floor)

    def _encode(self, flat: Tensor, picked: Tensor) -> Tensor:
        """The message: form and count, values, indices; nothing where there is nothing to say."""
        if not len(self._indices):
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        elements, count = self.layout.numel, len(picked)
        form = smallest(count, elements) if self.rule.indices == "auto" else self.rule.indices
        prefix = torch.tensor([count * len(FORMS) + FORMS.index(form)], dtype=torch.int64, device="cpu").view(
            torch.uint8
        )
        values = self.rule.codec.encode(flat.index_select(0, self._indices))
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
        values_end = _PREFIX + self.rule.codec.wire_bytes(total, dtype)
        values = self.rule.codec.decode(wire[_PREFIX:values_end], total, dtype)
        indices = unpack(FORMS[form], wire[values_end:], elements)
        if len(indices) != count:
            raise Malformed(-1, f"{count} indices announced, {len(indices)} marked")
        return torch.cat((self.whole, indices)), values

    def _message_bytes(self, count: int) -> int:
        elements, total = self.layout.numel, len(self.whole) + count
        if not total:
            return 0
        form = smallest(count, elements) if self.rule.indices == "auto" else self.rule.indices
        return self._length(form, count)

    def _length(self, form: str, count: int) -> int:
        values = self.rule.codec.wire_bytes(len(self.whole) + count, self.layout.dtype)
        return _PREFIX + values + indices_bytes(form, count, self.layout.numel)
