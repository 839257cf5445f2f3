"""Data parallel training: the gradient of every step is averaged over the workers before the inner step.

    every inner step:    grad <- mean_i grad_i

Gradients travel in buckets, in the reverse order of the parameters, each as soon as the last gradient in it is ready,
while the backward pass goes on (Li et al., 2020, PyTorch Distributed). Clipping comes after the reduction. Memory: one
bucket-sized buffer for every bucket, 4 bytes a parameter.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from isles.comm.codecs import codec
from isles.comm.mean import Stamp, mean, native_bytes, native_mean, sent_bytes, working_bytes
from isles.comm.tags import MAX_FRAGMENTS
from isles.comm.transport import Transfer
from isles.replicas.checks import one_of
from isles.replicas.flat import FlatParameters
from isles.replicas.planned import Held, Outline, Planned, outline
from isles.replicas.sync import MethodConfig, ReplicaSync

_FORWARD_SHARE = 1 / 3  # of a step's computation: a backward pass costs twice a forward pass


@dataclass(frozen=True, kw_only=True)
class DDPConfig(MethodConfig):
    """bucket_megabytes: size of a bucket in 2**20 bytes of gradient. codec: form of the gradients on the wire (none,
    fp16, bf16, int8). reduction: two_shot (over gloo, the same bits on every backend), or native: torch's own
    all_reduce, over NCCL where gradients are on GPUs (one for each worker), without codecs.
    """

    bucket_megabytes: float = 25.0
    codec: str = "none"
    reduction: Literal["two_shot", "native"] = "two_shot"

    def __post_init__(self) -> None:
        if not self.bucket_megabytes > 0:
            raise ValueError(f"bucket_megabytes = {self.bucket_megabytes}: choose a positive size, such as 25")
        if self.codec.startswith("powersgd"):
            raise ValueError(
                f"codec = {self.codec!r}: low rank is for outer methods, such as diloco; choose bf16 or int8"
            )
        codec(self.codec)  # refuses an unknown one
        one_of("reduction", self.reduction, ("two_shot", "native"))
        if self.reduction == "native" and self.codec != "none":
            raise ValueError('reduction = "native" sends gradients as they are: use "two_shot" with a codec')


class Bucket:
    """Parameters whose gradients travel together."""

    def __init__(self, index: int, parameters: list[nn.Parameter], device: torch.device) -> None:
        self.index, self.parameters = index, parameters
        self.layout = FlatParameters(parameters)
        self.flat = self.layout.new() if self.layout.device.type == "meta" else self.layout.new().to(device)
        self.views = [
            part.view(parameter.shape)
            for part, parameter in zip(self.flat.split([p.numel() for p in parameters]), parameters, strict=True)
        ]
        self.waiting = len(parameters)
        """Gradients not ready yet in this backward pass."""
        self.transfer: Transfer[None] | None = None
        self.stale = False
        """True if a backward pass changed a gradient after the bucket had left."""
        self._loaded: list[tuple[Tensor | None, int]] = []

    def load(self) -> None:
        """Copy the gradients in; one that was not computed counts as zero."""
        self.flat.zero_() if any(p.grad is None for p in self.parameters) else None
        pairs = [(view, p.grad) for view, p in zip(self.views, self.parameters, strict=True) if p.grad is not None]
        if pairs:
            torch._foreach_copy_([view for view, _ in pairs], [grad for _, grad in pairs])
        self._loaded = self._gradients()

    def is_changed(self) -> bool:
        """Whether somebody else wrote to a gradient since `load`: what travels does not know of it."""
        return any(
            old is not new or before != now
            for (old, before), (new, now) in zip(self._loaded, self._gradients(), strict=True)
        )

    def _gradients(self) -> list[tuple[Tensor | None, int]]:
        return [(p.grad, -1 if p.grad is None else p.grad._version) for p in self.parameters]

    def unload(self) -> None:
        """Copy the means back into the gradients."""
        self._loaded = []  # holds gradients that the user may want freed
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        torch._foreach_copy_([p.grad for p in self.parameters], self.views)  # type: ignore[misc]


class DDP(ReplicaSync):
    """See the module. All workers hold equal weights after every step.

    With gradient accumulation, wrap all backward passes of a step but the last in `no_sync()`, or buckets travel twice.
    """

    Config = DDPConfig
    config: DDPConfig
    level = "gradient"
    agrees = True

    def _begin(self) -> None:
        super()._begin()
        self.codec = codec(self.config.codec)
        self.native = self.config.reduction == "native"
        if self.native and not self.group.transport.native:
            raise ValueError('reduction = "native" needs a real backend: use "two_shot" on the virtual one')
        device = self.parameters[0].device if self.native else torch.device("cpu")
        if self.native and not self.is_sketch:  # opens the backend's connections now, not in the first backward pass
            self.group.start(native_mean(self.group.call("control"), torch.zeros(1, device=device)), "control").wait()
        self.buckets = _buckets(self.parameters, self.config.bucket_megabytes * 2**20, device)
        self._elements = sum(bucket.layout.numel for bucket in self.buckets)
        self._launched = 0  # buckets leave in order on every worker, whatever the order of the gradients
        self._quiet = False
        self._told = False
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(lambda _, bucket=bucket: self._ready(bucket))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate."""
        self._quiet = True
        try:
            yield
        finally:
            self._quiet = False

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """See ReplicaSync.reduce_gradients."""
        self._launch(len(self.buckets))
        for bucket in self.buckets:
            if bucket.stale:
                self._wait(bucket)
                bucket.load()
                self._start(bucket, round=2 * self.steps + 1)
        if any(bucket.is_changed() for bucket in self.buckets):
            raise ValueError(
                "gradients were changed between backward() and step(), but they travel during backward() already: "
                "clip with max_norm=, unscale with step(scaler=)"
            )
        for bucket in self.buckets:
            self._wait(bucket)
            bucket.unload()
            bucket.waiting, bucket.transfer, bucket.stale = len(bucket.parameters), None, False
        self._launched = 0

    def schedule(self, steps: int) -> list[Planned]:
        """See ReplicaSync.schedule."""
        everyone = (tuple(range(self.group.size)),)
        bytes_sent = [tuple(self._bytes(bucket, position) for position in everyone[0]) for bucket in self.buckets]
        return [
            Planned(step, step, bucket.index, "gradient", everyone, bytes_sent[bucket.index])
            for step in range(1, steps + 1)
            for bucket in self.buckets
        ]

    def outline(self, steps: int) -> Outline:
        """See ReplicaSync.outline: every step is like the first, and steps times buckets may be millions."""
        return outline(self.schedule(min(steps, 2)), steps, self.opening(), per_step=True)

    def opening(self) -> tuple[int, ...]:
        """See ReplicaSync.opening."""
        probe = native_bytes(1, torch.float32, self.group.size) if self.native else 0
        return tuple(nbytes + probe for nbytes in super().opening())

    def memory(self) -> list[Held]:
        """See ReplicaSync.memory. With reduction = "native" the buckets lie where the gradients do."""
        flats = [bucket.flat for bucket in self.buckets]
        size = 1 if self.native else self.group.size
        under_way = sum(working_bytes(flat.numel(), flat.dtype, self.codec, size) for flat in flats)
        return [
            *super().memory(),
            Held("gradient buckets", sum(flat.nbytes for flat in flats), "always"),
            Held("messages under way", under_way, "exchange"),
        ]

    def _bytes(self, bucket: Bucket, position: int) -> int:
        elements, dtype, size = bucket.layout.numel, bucket.flat.dtype, self.group.size
        return (
            native_bytes(elements, dtype, size)
            if self.native
            else sent_bytes(elements, dtype, self.codec, size, position)
        )

    def outer_state(self) -> dict[str, Any]:
        """See ReplicaSync.outer_state: nothing is under way between steps."""
        if self._launched:
            raise ValueError("gradients are under way: call state_dict() after step(), before the next backward pass")
        return {}

    def _ready(self, bucket: Bucket) -> None:
        if self._quiet:
            return
        bucket.waiting -= 1
        if bucket.waiting < 0 and bucket.transfer is not None:
            bucket.stale = True
            if not self._told:
                self._told = True
                warnings.warn(
                    "a second backward pass before step(): its buckets travel twice; use `with optimizer.no_sync():`",
                    stacklevel=2,
                )
        ready = self._launched
        while ready < len(self.buckets) and self.buckets[ready].waiting <= 0:
            ready += 1
        with torch.no_grad():
            self._launch(ready)

    def _launch(self, stop: int) -> None:
        """Start the buckets up to `stop`; the computation that made their gradients is charged before."""
        for bucket in self.buckets[self._launched : stop]:
            share = (1 - _FORWARD_SHARE) * bucket.layout.numel / self._elements
            self.charge(share + (_FORWARD_SHARE if bucket.index == 0 else 0.0))
            bucket.load()
            self._start(bucket, round=2 * self.steps)
        self._launched = max(self._launched, stop)

    def _start(self, bucket: Bucket, round: int) -> None:
        call = self.group.call(round=round, fragment=bucket.index)
        if self.native:
            steps = native_mean(call, bucket.flat)
        else:
            steps = mean(call, bucket.flat, self.codec, Stamp(self.steps))
        bucket.transfer = self.group.start(steps, nbytes=self._bytes(bucket, self.group.rank))

    def _wait(self, bucket: Bucket) -> None:
        assert bucket.transfer is not None
        bucket.transfer.wait()


def _buckets(parameters: list[nn.Parameter], limit: float, device: torch.device) -> list[Bucket]:
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
    if len(runs) > MAX_FRAGMENTS:
        raise ValueError(f"{len(runs)} buckets are too many (at most {MAX_FRAGMENTS}): raise bucket_megabytes")
    return [Bucket(index, run, device) for index, run in enumerate(runs)]
