"""Parameters whose gradients travel together, in the reverse order of the model's."""

from __future__ import annotations

from zlib import crc32

import torch
from torch import Tensor, nn

from isles.comm.tags import MAX_FRAGMENTS
from isles.comm.transport import Transfer
from isles.replicas.flat import FlatParameters
from isles.replicas.gradient.reduction import Reduction
from isles.staging import HostCopies, arena, is_away, pinned_bytes

_NOBODYS = -0.0
"""First entry of what has no gradient here. -0.0 is the sum of nothing but such ones, and a gradient's own is made 0.0:
so the mean tells what nobody has a gradient of, without a byte more.
"""


class Bucket:
    """Parameters whose gradients travel together."""

    def __init__(self, index: int, parameters: list[nn.Parameter], device: torch.device) -> None:
        self.index, self.parameters = index, parameters
        self.layout = FlatParameters(parameters)
        self._away = device.type == "cpu" and is_away(parameters)  # gradients are on GPUs, and travel from the host
        if self._away and self.layout.exact:
            (self.flat,) = arena([torch.empty(self.layout.numel, dtype=self.layout.dtype, device="meta")])
        else:
            self.flat = self.layout.new() if self.layout.device.type == "meta" else self.layout.new().to(device)
        self.views = [
            part.view(parameter.shape) for part, parameter in zip(self.split(self.flat), parameters, strict=True)
        ]
        self._staging = HostCopies(self.views if self.layout.exact else arena(parameters) if self._away else ())
        self.waiting = len(parameters)
        """Gradients not ready yet in this backward pass."""
        self.reduction: Reduction
        self.transfer: Transfer[tuple[int, ...]] | None = None
        self.stale = False
        """True if a backward pass changed a gradient after the bucket had left."""
        self._loaded: list[tuple[Tensor | None, int]] = []
        self._given = False
        self.means: list[Tensor] = []
        """The gradients, while they are means that no step has used."""
        self._filled = [place for place, parameter in enumerate(parameters) if parameter.numel()]
        self._firsts = [self.views[place].view(-1)[:1] for place in self._filled]

    def split(self, flat: Tensor) -> tuple[Tensor, ...]:
        """A flat vector of the bucket as one view (p,) a parameter."""
        return flat.split([parameter.numel() for parameter in self.parameters])

    @property
    def pinned_bytes(self) -> int:
        """What it pins for gradients on GPUs beside its buffer: of that the rest of the block, where it is pinned."""
        exact = self.layout.exact
        return pinned_bytes([self.flat]) - self.flat.nbytes if exact else pinned_bytes(self.parameters)

    def load(self) -> None:
        """Copy the gradients in, with those of earlier passes of the step unless they were thrown away. One that was
        not computed counts as zero. ValueError for a sparse one.
        """
        if any(p.grad is not None and p.grad.layout != torch.strided for p in self.parameters):
            raise ValueError("a gradient is sparse, buckets hold dense ones: make its layer with sparse=False")
        for parameter in self.parameters:
            if parameter.grad is not None and 0 in parameter.grad.stride():  # expanded: nobody could write to it
                parameter.grad = parameter.grad.contiguous()
        if self.means and {id(mean) for mean in self.means} & {id(p.grad) for p in self.parameters}:
            self.keep()  # this pass adds to what was told of the earlier ones
        self.means = []
        self._staging.settle()
        self.flat.zero_() if any(p.grad is None for p in self.parameters) else None
        if self._away:
            self._staging.down([p.grad for p in self.parameters])
        pairs = self._pairs()
        if pairs:
            torch._foreach_copy_([view for view, _ in pairs], [own for _, own in pairs])
        if self.reduction.keeps_signs:
            self._mark()
        self._loaded = self._gradients()

    def _mark(self) -> None:
        if self._firsts:
            torch._foreach_add_(self._firsts, 0.0)  # which makes -0.0 positive
        for place, first in zip(self._filled, self._firsts, strict=True):
            if self.parameters[place].grad is None:
                first.fill_(_NOBODYS)

    @property
    def frozen_digest(self) -> int:
        """Hash of which parameters are frozen; 0: none is."""
        frozen = [place for place, parameter in enumerate(self.parameters) if not parameter.requires_grad]
        return crc32(repr(frozen).encode()) if frozen else 0

    def handed_on(self) -> None:
        """Its means were given to the inner optimizer, which may take the gradients when it will."""
        self._loaded, self._given = self._gradients(), True

    def is_changed(self, *, in_pass: bool) -> bool:
        """Whether somebody else wrote to a gradient since `load`: what travels does not know of it. What the inner
        optimizer was given it takes away, and has on the parameter for a moment while it updates, in another thread.
        in_pass: at the end of a backward pass, which writes to all that are views of one buffer by turns.
        """
        return any(
            (old is not new or (before != now and not (in_pass and new is not None and new._is_view())))
            and not (self._given and (old is None or new is None))
            for (old, before), (new, now) in zip(self._loaded, self._gradients(), strict=True)
        )

    def _gradients(self) -> list[tuple[Tensor | None, int]]:
        return [(p.grad, -1 if p.grad is None else p.grad._version) for p in self.parameters]

    def unload(self) -> None:
        """Copy the means back into the gradients. What is frozen, and where zeros keep their signs what nobody has a
        gradient of, has none, so that the inner optimizer leaves it alone.
        """
        missing = [place for place, parameter in enumerate(self.parameters) if parameter.grad is None]
        left = {place for place in missing if not self.parameters[place].requires_grad}
        if missing and self.reduction.keeps_signs:
            firsts = torch.cat(self._firsts)
            nobodys = (firsts == 0).logical_and_(firsts.signbit()).tolist()
            left |= {place for place, own in zip(self._filled, nobodys, strict=True) if own} & set(missing)
        for place in missing:
            if place not in left:
                self.parameters[place].grad = torch.zeros_like(self.parameters[place])
        pairs = self._pairs()
        if pairs:
            torch._foreach_copy_([own for _, own in pairs], [view for view, _ in pairs])
        if self._away:
            self._staging.up([p.grad for p in self.parameters])
        self.means = [p.grad for p in self.parameters if p.grad is not None]

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """(view, gradient or what stands for it on the host) of what has a gradient; none where the views stand for
        them.
        """
        if self._away and self.layout.exact:
            return []
        own = self._staging.hosts if self._away else [p.grad for p in self.parameters]
        pairs = zip(self.views, own, self.parameters, strict=True)
        return [(view, one) for view, one, p in pairs if one is not None and p.grad is not None]

    def keep(self) -> None:
        """The means are used, if there are any."""
        if self.means:
            self.reduction.keep(self.flat)
        self.means = []

    def rest(self) -> None:
        """Ready for the next backward pass."""
        self._loaded = []  # holds gradients that the user may want freed
        self.waiting, self.transfer, self.stale, self._given = len(self.parameters), None, False, False


def cut_buckets(parameters: list[nn.Parameter], limit: float, device: torch.device) -> list[Bucket]:
    """Runs of parameters in reverse order, each of about `limit` bytes: backward passes make the last gradients
    first.
    """
    runs: list[list[nn.Parameter]] = [[]]
    size = 0
    for parameter in reversed(parameters):
        bytes_here = parameter.numel() * parameter.itemsize
        if runs[-1] and size + bytes_here > limit:
            runs.append([])
            size = 0
        runs[-1].append(parameter)
        size += bytes_here
    most = MAX_FRAGMENTS - 1  # the last is for what an island spreads
    if len(runs) > most:
        raise ValueError(f"{len(runs)} buckets are too many (at most {most}): raise bucket_megabytes")
    return [Bucket(index, run, device) for index, run in enumerate(runs)]
