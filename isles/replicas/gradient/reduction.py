"""How the gradients of one bucket become their mean over the group: what travels, and what stays for the next step.

    begin      the bucket's gradients are in place: look at them, encode what is to travel
    exchange   a protocol behind the computation
    land       all gradients are usable: the mean is in place
    commit     the mean is used: what stays behind becomes final

Between `begin` and `commit` no state changes: a bucket may begin again (its gradients changed after it had left, or
were thrown away), and a step in which somebody's gradients are not finite ends as if it had not been.

    Native       the backend's own all-reduce
    Averaged     the mean through a codec or as low-rank factors, with error feedback

`isles.replicas.methods.dct_dp` has one of its own: entries of at least a threshold.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from typing_extensions import override

from isles.comm.call import Call
from isles.comm.collectives.averaging import Averaging
from isles.comm.collectives.basic import Stamp
from isles.comm.collectives.mean import native_bytes, native_mean
from isles.comm.transport import Steps
from isles.network.exchange_plan import MemoryItem, MessagePattern, Ring
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
    it is given.
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
        # Swapped, not copied: `begin` overwrites the other vector in the next step.
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
