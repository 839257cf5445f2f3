"""Methods that reduce gradients, bucket by bucket, while the backward pass goes on.

Gradients travel in buckets, in the reverse order of the parameters, each as soon as the last gradient in it is ready
(Li et al., 2020, PyTorch Distributed). What travels of a bucket is its `Reduction`'s. When `backward()` returns, the
means are the gradients: what a user does to them before `step` is done to means, as with torch's own data parallel.
For parts of a pipeline, and an inner optimizer that works late, they are in `step`. An inner optimizer that updates
early (a plan of memory) is told of each bucket whose mean has come, and updates what is in it while later buckets
travel, as KARMA does (arXiv 2008.11421): then nothing may need all means at once, neither clipping nor a step that is
skipped. Memory: one bucket-sized buffer for every bucket, 4 bytes a parameter.
"""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from isles.comm.collectives.headers import packed
from isles.comm.errors import DeadlinePassed, WorkerFailed
from isles.comm.trust import JUMPS
from isles.modes import own_modes
from isles.replicas import start
from isles.replicas.checks import workers
from isles.replicas.gradient.buckets import Bucket, cut_buckets
from isles.replicas.gradient.foretold import FORWARD_SHARE, BucketsForetold
from isles.replicas.gradient.reduction import Reduction
from isles.replicas.island.island import Copies
from isles.replicas.island.spreading import SpreadRows, spread_fragment
from isles.replicas.replica import Replica
from isles.replicas.scaled import Scaled
from isles.replicas.start import among_even
from isles.wrapping import Deferred, Phased, Sharing, host_work, is_within_function


class BucketedSync(BucketsForetold):
    """All workers hold equal weights after every step."""

    level = "gradient"
    agrees = True

    @abstractmethod
    def reduction(self, bucket: Bucket) -> Reduction:
        """How that bucket's gradients become their mean."""

    @override
    def as_replica(self) -> Replica:
        return Copies(self)

    def _begin(self) -> None:
        super()._begin()
        self.buckets = cut_buckets(self.parameters, self.config.bucket_megabytes * 2**20, self.device())
        for bucket in self.buckets:
            bucket.reduction = self.reduction(bucket)
        self.skipped = 0
        """Steps that all skipped, because some worker's gradients were not finite."""
        self._careful = any(bucket.reduction.careful for bucket in self.buckets)
        self._scaled: Scaled | None = None  # of the last step
        self._unit = 0.0  # what gradients that are kept are multiplied by; 0: before the first step
        self._is_scaled = False  # whether a gradient scaler takes part in this step
        self._settings_now = start.SettingsHash()
        self._proof = 0  # after a state was loaded: a hash of the weights that this step begins with
        self._phased = self._early_inner()
        inner = self.replica.inner
        self._portions = inner.portions(self.group.size) if isinstance(inner, Sharing) else []
        if self._portions and isinstance(inner, Sharing) and not self.is_sketch:
            if len(self.buckets) > spread_fragment(len(self._portions)):
                raise ValueError(f"{len(self.buckets)} buckets are too many with shared blocks: raise bucket_megabytes")
            inner.share(self.group.rank, self.group.size, self._spread)
        self._landed = 0  # buckets whose means the inner optimizer has been given, where it updates early
        self._elements = sum(bucket.layout.numel for bucket in self.buckets)
        self._launched = 0  # buckets leave in order on every worker, whatever the order of the gradients
        self._in_step = isinstance(inner, Deferred) or self.replica.is_part
        """Whether means become gradients in `step`, and not yet at the end of a backward pass."""
        self._passes = 0  # of this step, whose means are the gradients
        self._reduced = False  # and no other backward pass has changed them since
        self._unusable: list[int] | None = None  # whose gradients are not finite, once all have come
        self._pass: int | None = None  # the backward pass at whose end `_end_of_pass` is called
        self._quiet = self._told = False
        self._worker_thread = get_ident()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(lambda one, bucket=bucket: self._ready(bucket, one))
            for bucket in self.buckets
            for parameter in bucket.parameters
        ]

    @override
    def replace(self, by: str) -> None:
        """It sends nothing any more."""
        super().replace(by)
        for hook in self._hooks:
            hook.remove()

    def _early_inner(self) -> Phased | None:
        """The inner optimizer, where it updates before `step`. ValueError where it cannot here."""
        inner = self.replica.inner
        if not (isinstance(inner, Phased) and inner.early):
            return None
        if self.max_norm is not None or self._careful:
            what = "max_norm" if self.max_norm is not None else "error feedback"
            raise ValueError(
                f"the inner optimizer updates by each bucket as its mean comes, and {what} needs all of them first: "
                f"leave {what} out, or update exactly"
            )
        inner.hold()
        return inner

    def _spread(self, number: int, round: int, rows: Sequence[Sequence[Tensor]]) -> SpreadRows:
        """Weights that the inner optimizer has updated in shares go to all."""
        return SpreadRows(self.group, rows, self.group.channel, round=round, fragment=spread_fragment(number))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate."""
        self._quiet = True
        try:
            with super().no_sync():
                yield
        finally:
            self._quiet = False
        if self.batches > 1:
            self.charge(1 / self.batches)  # the buckets of the last one share what is left

    @override
    def take_step(self, scaled: Scaled | None) -> None:
        if self._phased is not None and scaled is not None:
            raise ValueError(
                "a gradient scaler may skip a step after the inner optimizer has updated by its first buckets: use "
                "bfloat16, or update exactly"
            )
        scale = 1.0 if scaled is None else scaled.scale
        if self._careful:
            self._follow_scale()  # where nothing has been sent yet
        if self._unit not in (0.0, scale) and any(bucket.reduction.residual is not None for bucket in self.buckets):
            raise ValueError(
                f"the loss is scaled by {scale:g}, error feedback by {self._unit:g}: keep one, load its state too"
            )
        self._is_scaled = scaled is not None
        super().take_step(scaled)
        self._scaled, self._unit = scaled, scale

    @override
    def reduce_gradients(self) -> None:
        if not self._reduced:
            self._reduce()
        if self._unusable is not None:
            self._skip(self._unusable)
        for bucket in self.buckets:
            bucket.keep()
        self._passes, self._reduced, self._unusable, self._proof = 0, False, None, 0

    def _reduce(self, *, in_pass: bool = False) -> None:
        """The gradients of this step become their means, or NaN everywhere where one of them is not finite."""
        self._unusable = None
        self._launch(len(self.buckets))
        for bucket in self.buckets:
            if bucket.stale:
                self._wait(bucket)
                bucket.load()
                self._start(bucket, again=True)
        if any(bucket.is_changed(in_pass=in_pass) for bucket in self.buckets):
            raise ValueError(
                "gradients were changed between backward() and step(), but here they travel until step(): clip with "
                "max_norm=, unscale with step(scaler=)"
            )
        if self._phased is not None:
            self._hand_on(self._phased, wait=True)
        else:
            self._land_together()
        for bucket in self.buckets:
            bucket.rest()
        self._launched, self._landed = 0, 0
        self._passes, self._reduced = self._passes + 1, True

    def _end_of_pass(self) -> None:
        """Autograd calls it when a backward pass has made all gradients."""
        self._pass = None
        with own_modes(), host_work():
            self._reduce(in_pass=True)

    def _land_together(self) -> None:
        """Once all buckets have come: their means become the gradients, or NaN, which a gradient scaler looks for."""
        broken = self._broken()
        is_usable = not broken
        if self._careful:
            is_usable = not self.replica.largest(int(not is_usable))  # its other parts would step without this one
        if is_usable:
            for bucket in self.buckets:
                bucket.reduction.land(bucket.flat)
                bucket.unload()
        else:
            self._unusable = broken
            for parameter in self.parameters:
                parameter.grad = torch.full_like(parameter, math.nan)

    def _hand_on(self, inner: Phased, *, wait: bool) -> None:
        """In their order, give the means of the buckets that have left to `inner`; without `wait`, of those that have
        come. WorkerFailed as `_skip`, if waited for.
        """
        for bucket in self.buckets[self._landed : self._launched]:
            if not wait and (bucket.stale or not (bucket.transfer is not None and bucket.transfer.done())):
                return
            if broken := self._without(self._wait(bucket)):
                return self._skip(broken) if wait else None
            bucket.reduction.land(bucket.flat)
            bucket.unload()
            bucket.keep()
            self._landed += 1
            inner.ready(bucket.parameters)
            bucket.handed_on()
        return None

    def _without(self, usable: Sequence[int]) -> list[int]:
        """The workers at other positions than these."""
        return [seat for position, seat in enumerate(self.group.ranks) if position not in usable]

    def _broken(self) -> list[int]:
        """Wait for all buckets; the workers whose gradients are not finite in one of them."""
        usable = [self._wait(bucket) for bucket in self.buckets]
        return self._without([seat for seat in range(self.group.size) if all(seat in own for own in usable)])

    def _skip(self, broken: Sequence[int]) -> None:
        """Have all workers skip the inner step: optimizers leave parameters without a gradient alone, and scalers look
        for gradients that are not finite. WorkerFailed, naming the worker, where nothing is kept that a step could do
        harm to, and no scaler expects such steps.
        """
        if broken and not self._careful and not self._is_scaled:
            raise WorkerFailed(
                broken[0],
                f"its gradient is not finite at inner step {self.steps + 1}: lower the learning rate, or set max_norm",
            )
        self.skipped += 1
        if self._is_scaled:
            return
        if broken:
            warnings.warn(
                f"the gradient of {workers(broken)} is not finite at inner step {self.steps + 1}: all skip this step",
                stacklevel=2,
            )
        for parameter in self.parameters:
            parameter.grad = None

    @override
    def gauges(self) -> dict[str, float]:
        """The 2-norm of what error feedback holds back."""
        if not self._careful:
            return {}
        kept = [bucket.reduction.residual for bucket in self.buckets]
        square = sum(float(own.dot(own)) for own in kept if own is not None)
        return {"residual_norm": math.sqrt(square), "skipped_steps": self.skipped}

    @override
    def outer_state(self) -> dict[str, Any]:
        """Nothing is under way between steps."""
        if self._launched or self._reduced:
            raise ValueError("gradients are under way: call state_dict() after step(), before the next backward pass")
        if not self._careful:
            return {}
        self._follow_scale()
        kept = [{"residual": bucket.reduction.residual, **bucket.reduction.state_dict()} for bucket in self.buckets]
        return {"buckets": kept, "skipped": self.skipped, "unit": self._unit}

    @override
    def load_outer_state(self, state: dict[str, Any]) -> None:
        if not self._careful:
            return
        for bucket, saved in zip(self.buckets, state["buckets"], strict=True):
            own = dict(saved)
            residual = own.pop("residual")
            if bucket.reduction.residual is not None:
                bucket.reduction.residual.copy_(residual)
            bucket.reduction.load_state_dict(own)
        self.skipped, self._unit, self._scaled = state["skipped"], state["unit"], None

    @classmethod
    @override
    def regrouped(cls, outer: dict[str, Any]) -> dict[str, Any]:
        """The mean of the old workers' residuals, held by every new one, adds as much to the means to come."""
        return outer

    def _ready(self, bucket: Bucket, parameter: Tensor) -> None:
        if self._quiet:
            self._forget_thrown_away(parameter)
            self._reduced = False
            return
        if get_ident() != self._worker_thread and not self.group.transport.native:
            bucket.waiting -= 1
            return  # autograd's thread of a GPU serves all virtual workers, and none may wait in it: `step` sends
        if not self._in_step:
            self._await_end(parameter)
            self._launch_ready()  # one gradient later: hooks of the user's on the last one have run
        bucket.waiting -= 1
        if bucket.waiting < 0 and bucket.transfer is not None:
            if bucket.index < self._landed:
                raise ValueError(
                    "a second backward pass before step(), but what the first one made has been updated by: wrap all "
                    "but the last in `with optimizer.no_sync():`"
                )
            bucket.stale = True
            self._tell_twice()
        if self._in_step:
            self._launch_ready()

    def _await_end(self, first: Tensor) -> None:
        """Have autograd call `_end_of_pass`. Not in a pass within a pass (torch.utils.checkpoint, use_reentrant=True),
        of whose end nothing follows; if all gradients are made in such ones, `step` reduces them.
        """
        number = torch._C._current_graph_task_id()
        if self._pass == number or is_within_function():
            return
        self._pass = number
        if self._passes:
            self._tell_twice()
            self._forget_thrown_away(first)
        self._reduced = False
        torch.autograd.Variable._execution_engine.queue_callback(self._end_of_pass)  # type: ignore[attr-defined]

    def _forget_thrown_away(self, first: Tensor) -> None:
        """After zero_grad(set_to_none=False) nothing is kept of what was told of that batch. first: whose gradient of
        the next pass is there already.
        """
        if not self._careful or not any(bucket.means for bucket in self.buckets):
            return
        before = [own.grad for own in self.parameters if own is not first and own.grad is not None]
        if before and not any(bool(gradient.any()) for gradient in before):
            for bucket in self.buckets:
                bucket.means = []

    def _tell_twice(self) -> None:
        if not self._told:
            self._told = True
            warnings.warn(
                "a second backward pass before step(): its gradients travel again; use `with optimizer.no_sync():`",
                stacklevel=2,
            )

    def _launch_ready(self) -> None:
        """Start the buckets that are full, up to the first that is not."""
        ready = next((one.index for one in self.buckets[self._launched :] if one.waiting > 0), len(self.buckets))
        if ready > self._launched or self._phased is not None:
            with own_modes(), host_work():
                self._launch(ready)
                if self._phased is not None:
                    self._hand_on(self._phased, wait=False)

    def _launch(self, stop: int) -> None:
        """Start the buckets up to `stop`; the computation that made their gradients is charged before."""
        if stop > 0 == self._launched and self._careful:
            self._follow_scale()
        for bucket in self.buckets[self._launched : stop]:
            share = (1 - FORWARD_SHARE) * bucket.layout.numel / self._elements
            self.charge((share + (FORWARD_SHARE if bucket.index == 0 else 0.0)) / self.batches)
            bucket.load()
            self._start(bucket)
        self._launched = max(self._launched, stop)

    def _follow_scale(self) -> None:
        """What is kept of gradients is multiplied as the loss is since the last step."""
        if self._scaled is not None and (scale := self._scaled.scaler.get_scale()) != self._unit:
            for bucket in self.buckets:
                bucket.reduction.rescale(scale / self._unit)
            self._unit = scale

    def _start(self, bucket: Bucket, again: bool = False) -> None:
        step, group = self.steps + 1, self.group
        if self.is_loaded and not self._proof:
            self._proof = start.hash_of(self.shares)
        bucket.reduction.digest = packed(
            bucket.frozen_digest, self._settings_now.of(self.param_groups, self._unit), self._proof
        )
        bucket.reduction.begin(bucket.flat, step)
        call = group.call(round=2 * step + (again or self._passes > 0), fragment=bucket.index, leeway=JUMPS)
        nbytes = bucket.reduction.begun_bytes(step, group.size, group.rank)
        bucket.transfer = group.start(bucket.reduction.exchange(call, bucket.flat, step), nbytes=nbytes)

    def _wait(self, bucket: Bucket) -> tuple[int, ...]:
        assert bucket.transfer is not None
        try:
            with among_even():
                return bucket.transfer.wait()
        except DeadlinePassed as error:
            if not (bucket.stale or self._passes):
                raise
            raise ValueError(
                f"{error}, where gradients travel again: without no_sync() all workers do as many backward passes a "
                "step; wrap all but the last in `with optimizer.no_sync():`, then each may do its own number"
            ) from error
