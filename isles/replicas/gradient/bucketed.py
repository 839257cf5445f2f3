"""Methods that reduce gradients, bucket by bucket, while the backward pass goes on.

Gradients travel in buckets, in the reverse order of the parameters, each as soon as the last gradient in it is ready
(Li et al., 2020, PyTorch Distributed). What travels of a bucket is its `Reduction`'s. When `backward()` returns, the
means are the gradients: what a user does to them before `step` is done to means, as with torch's own data parallel.
For parts of a pipeline, and an inner optimizer that works late, they are in `step`. An inner optimizer that updates
early (a plan of memory) gets each bucket whose mean has come, and updates what is in it while later buckets travel, as
KARMA does (arXiv 2008.11421): then nothing may need all means at once, neither clipping nor a step that is skipped.
Memory: one bucket-sized buffer for every bucket, 4 bytes a parameter.
"""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from threading import get_ident
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from typing_extensions import override

from isles.base.modes import HostCopies, arena, is_away, own_modes, pinned_bytes
from isles.base.wrapping import Deferred, Phased, Sharing, host_work, is_within_function
from isles.comm.collectives.basic import packed
from isles.comm.errors import DeadlinePassed, WorkerFailed
from isles.comm.tags import MAX_FRAGMENTS
from isles.comm.transport import Transfer
from isles.comm.trust import JUMPS
from isles.network.exchange_plan import PINNED, MemoryItem, PlannedExchange, Rhythm, by_size
from isles.replicas import start
from isles.replicas.config import workers
from isles.replicas.exchange_schedule import Outline, everyone, outline
from isles.replicas.flat import FlatParameters
from isles.replicas.gradient.config import BucketsConfig
from isles.replicas.gradient.reduction import Reduction, together
from isles.replicas.island.island import Copies, SpreadRows, planned_spreads, spread_fragment
from isles.replicas.replica import PeerQuestion, Replica
from isles.replicas.start import among_even
from isles.replicas.sync import ReplicaSync
from isles.replicas.watch import Scaled

_NOBODYS = -0.0
"""First entry of a gradient that this worker does not have. A sum is -0.0 only if all its terms are, and a first entry
that exists is made 0.0 where it is -0.0. So the mean shows what no worker has a gradient of, without an extra byte.
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
        self.pending = len(parameters)
        """Gradients not ready yet in this backward pass."""
        self.reduction: Reduction
        self.transfer: Transfer[tuple[int, ...]] | None = None
        self.stale = False
        """True if a backward pass changed a gradient after the bucket had left."""
        self._loaded: list[tuple[Tensor | None, int]] = []
        self._is_passed_on = False
        self.means: list[Tensor] = []
        """The gradients, while they are means that no step has used."""
        self._filled = [position for position, parameter in enumerate(parameters) if parameter.numel()]
        self._firsts = [self.views[position].view(-1)[:1] for position in self._filled]

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
            self.commit()  # this pass adds to what earlier ones have sent
        self.means = []
        self._staging.settle()
        self.flat.zero_() if any(p.grad is None for p in self.parameters) else None
        if self._away:
            self._staging.down([p.grad for p in self.parameters])
        pairs = self._pairs()
        if pairs:
            torch._foreach_copy_([view for view, _ in pairs], [own for _, own in pairs])
        if self.reduction.preserves_signs:
            self._mark()
        self._loaded = self._gradients()

    def _mark(self) -> None:
        if self._firsts:
            torch._foreach_add_(self._firsts, 0.0)  # which makes -0.0 positive
        for index, first in zip(self._filled, self._firsts, strict=True):
            if self.parameters[index].grad is None:
                first.fill_(_NOBODYS)

    @property
    def frozen_digest(self) -> int:
        """Hash of which parameters are frozen; 0: none is."""
        frozen = [index for index, parameter in enumerate(self.parameters) if not parameter.requires_grad]
        return crc32(repr(frozen).encode()) if frozen else 0

    def hand_over(self) -> None:
        """Its means were given to the inner optimizer, which may take the gradients when it will."""
        self._loaded, self._is_passed_on = self._gradients(), True

    def is_changed(self, *, in_pass: bool) -> bool:
        """Whether a gradient was changed since `load`, which copied what travels. The inner optimizer may remove the
        gradients that it was given, and put them back for a moment while it updates, in another thread. in_pass: at
        the end of a backward pass, which writes to views of one buffer one after the other.
        """
        return any(
            (old is not new or (before != now and not (in_pass and new is not None and new._is_view())))
            and not (self._is_passed_on and (old is None or new is None))
            for (old, before), (new, now) in zip(self._loaded, self._gradients(), strict=True)
        )

    def _gradients(self) -> list[tuple[Tensor | None, int]]:
        return [(p.grad, -1 if p.grad is None else p.grad._version) for p in self.parameters]

    def unload(self) -> None:
        """Copy the means back into the gradients. A frozen parameter gets none, nor does one of which no worker has a
        gradient (if the reduction preserves signs), so that the inner optimizer leaves it alone.
        """
        missing = [index for index, parameter in enumerate(self.parameters) if parameter.grad is None]
        left = {index for index in missing if not self.parameters[index].requires_grad}
        if missing and self.reduction.preserves_signs:
            firsts = torch.cat(self._firsts)
            nobodys = (firsts == 0).logical_and_(firsts.signbit()).tolist()
            left |= {index for index, own in zip(self._filled, nobodys, strict=True) if own} & set(missing)
        for index in missing:
            if index not in left:
                self.parameters[index].grad = torch.zeros_like(self.parameters[index])
        pairs = self._pairs()
        if pairs:
            torch._foreach_copy_([own for _, own in pairs], [view for view, _ in pairs])
        if self._away:
            self._staging.up([p.grad for p in self.parameters])
        self.means = [p.grad for p in self.parameters if p.grad is not None]

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """(view, gradient or its host copy) of each parameter with a gradient; none where views are the host copies."""
        if self._away and self.layout.exact:
            return []
        gradients = self._staging.hosts if self._away else [p.grad for p in self.parameters]
        pairs = zip(self.views, gradients, self.parameters, strict=True)
        return [(view, one) for view, one, p in pairs if one is not None and p.grad is not None]

    def commit(self) -> None:
        """The means are used, if there are any."""
        if self.means:
            self.reduction.commit(self.flat)
        self.means = []

    def rest(self) -> None:
        self._loaded = []  # holds gradients that the user may want freed
        self.pending, self.transfer, self.stale, self._is_passed_on = len(self.parameters), None, False, False


def cut_buckets(parameters: list[nn.Parameter], limit: float, device: torch.device) -> list[Bucket]:
    """Runs of parameters in reverse order, the order of backward passes, each of about `limit` bytes."""
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


FORWARD_SHARE = 1 / 3  # of a step's computation: a backward pass costs twice a forward pass


class BucketedSync(ReplicaSync):
    """All workers hold equal weights after every step."""

    Config = BucketsConfig
    config: BucketsConfig
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
        self._unit = 0.0  # what saved gradients are multiplied by; 0: before the first step
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
        self._quiet = self._has_warned = False
        self._worker_thread = get_ident()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(lambda one, bucket=bucket: self._ready(bucket, one))
            for bucket in self.buckets
            for parameter in bucket.parameters
        ]

    @override
    def replace(self, by: str) -> None:
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
            bucket.commit()
        self._passes, self._reduced, self._unusable, self._proof = 0, False, None, 0

    def _reduce(self, *, in_pass: bool = False) -> None:
        """The gradients of this step become their means, or NaN everywhere where one of them is not finite."""
        self._unusable = None
        self._launch(len(self.buckets))
        for bucket in self.buckets:
            if bucket.stale:
                # First the wait: the transfer under way still reads and writes the buffer.
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
            bucket.commit()
            self._landed += 1
            inner.ready(bucket.parameters)
            # After `ready`: the inner optimizer may have taken the gradients away by now.
            bucket.hand_over()
        return None

    def _without(self, usable: Sequence[int]) -> list[int]:
        return [member for position, member in enumerate(self.group.ranks) if position not in usable]

    def _broken(self) -> list[int]:
        """Wait for all buckets; the workers whose gradients are not finite in one of them."""
        usable = [self._wait(bucket) for bucket in self.buckets]
        return self._without([member for member in range(self.group.size) if all(member in own for own in usable)])

    def _skip(self, broken: Sequence[int]) -> None:
        """Have all workers skip the inner step: optimizers leave parameters without a gradient alone, and scalers look
        for gradients that are not finite. WorkerFailed, naming the worker, if there is no saved state to protect, and
        no scaler that expects such steps.
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
        states = [bucket.reduction.residual for bucket in self.buckets]
        square = sum(float(own.dot(own)) for own in states if own is not None)
        return {"residual_norm": math.sqrt(square), "skipped_steps": self.skipped}

    @override
    def outer_state(self) -> dict[str, Any]:
        """Nothing is under way between steps."""
        if self._launched or self._reduced:
            raise ValueError("gradients are under way: call state_dict() after step(), before the next backward pass")
        if not self._careful:
            return {}
        self._follow_scale()
        states = [{"residual": bucket.reduction.residual, **bucket.reduction.state_dict()} for bucket in self.buckets]
        return {"buckets": states, "skipped": self.skipped, "unit": self._unit}

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
            bucket.pending -= 1
            return  # autograd's thread of a GPU serves all virtual workers, and none may wait in it: `step` sends
        if not self._in_step:
            self._await_end(parameter)
            self._launch_ready()  # one gradient later: hooks of the user's on the last one have run
        bucket.pending -= 1
        if bucket.pending < 0 and bucket.transfer is not None:
            if bucket.index < self._landed:
                raise ValueError(
                    "a second backward pass before step(), but what the first one made has been updated by: wrap all "
                    "but the last in `with optimizer.no_sync():`"
                )
            bucket.stale = True
            self._warn_of_second_pass()
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
            self._warn_of_second_pass()
            self._forget_thrown_away(first)
        self._reduced = False
        torch.autograd.Variable._execution_engine.queue_callback(self._end_of_pass)  # type: ignore[attr-defined]

    def _forget_thrown_away(self, first: Tensor) -> None:
        """After zero_grad(set_to_none=False) nothing is saved of what was sent of that batch. first: whose gradient of
        the next pass is there already.
        """
        if not self._careful or not any(bucket.means for bucket in self.buckets):
            return
        before = [own.grad for own in self.parameters if own is not first and own.grad is not None]
        if before and not any(bool(gradient.any()) for gradient in before):
            for bucket in self.buckets:
                bucket.means = []

    def _warn_of_second_pass(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "a second backward pass before step(): its gradients travel again; use `with optimizer.no_sync():`",
                stacklevel=2,
            )

    def _launch_ready(self) -> None:
        """Start the buckets that are full, up to the first that is not."""
        ready = next((one.index for one in self.buckets[self._launched :] if one.pending > 0), len(self.buckets))
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
        """What is saved of gradients is multiplied as the loss is since the last step."""
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
        # Two rounds a step, so that gradients that travel again have addresses of their own.
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

    # What a plan asks before a run.

    def device(self) -> torch.device:
        return torch.device("cpu")

    def phases(self, steps: int) -> list[tuple[int, int]]:
        """The steps of a run that send differently: (the first, how many are like it), one behind the other."""
        return [(1, steps)] if steps else []

    @override
    def schedule(self, steps: int) -> list[PlannedExchange]:
        """A bucket leaves when the backward pass has filled it."""
        groups, left = everyone(self.group.size), self._left()
        plan = []
        for first, count in self.phases(steps):
            patterns = [by_size(groups, partial(bucket.reduction.pattern, first)) for bucket in self.buckets]
            plan += [
                one
                for step in range(first, first + count)
                for one in [
                    *(
                        PlannedExchange(step - behind, step, index, "gradient", groups, pattern, 2 * step)
                        for index, (behind, pattern) in enumerate(zip(left, patterns, strict=True))
                    ),
                    *planned_spreads(self._portions, step, groups, 2 * step + 1),
                ]
            ]
        return plan

    def _left(self) -> list[float]:
        """Of a step's computation, what is left when each bucket leaves."""
        behind, last = [bucket.layout.numel for bucket in self.buckets], (1 - FORWARD_SHARE) / self.batches
        return [last * sum(behind[index + 1 :]) / sum(behind) for index in range(len(behind))]

    @override
    def rhythm(self, steps: int) -> Rhythm:
        return Rhythm(self.phases(steps)[-1][0] - 1 if steps else 0, 1)

    @property
    @override
    def questions(self) -> list[PeerQuestion]:
        return [*super().questions, "largest"] if self._careful else super().questions

    @override
    def own_outline(self, steps: int) -> Outline:
        """Steps times buckets may be millions, and most steps are alike."""
        sent = [0] * self.group.size
        for first, count in self.phases(steps):
            for position in range(self.group.size):
                each = sum(bucket.reduction.sent_bytes(first, self.group.size, position) for bucket in self.buckets)
                shares = (self.group.size - 1) * sum(sizes[position] for sizes in self._portions)
                sent[position] += count * (each + shares)
        short = outline(self.schedule(min(steps, 2)), steps, self.opening(), per_step=True)
        return replace(short, sent=tuple(sent))

    @override
    def memory(self) -> list[MemoryItem]:
        """With reduction = "native" the buckets lie where the gradients do."""
        buffers = MemoryItem("gradient buckets", sum(bucket.flat.nbytes for bucket in self.buckets), "always")
        items = [one for bucket in self.buckets for one in bucket.reduction.memory(self.group.size)]
        if self.device().type == "cpu":
            items += [MemoryItem(PINNED, bucket.pinned_bytes, "pinned") for bucket in self.buckets]
        return [*super().memory(), *together([buffers, *items])]
