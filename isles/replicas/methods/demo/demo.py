"""DeMo: decoupled momentum (Peng, Quesnelle, Kingma, 2024, arXiv 2411.19870; with Chen, Su and Liu, ICLR 2026).

Every worker keeps a momentum of its own gradients. At each step it sends the largest coefficients of it, block by block
after a discrete cosine transform; what is sent leaves the momentum, what is not stays for later steps. Every inner
step, on worker i:

    M_i <- beta M_i + lr g_i                           g_i: the worker's own gradient, clipped to max_norm
    q_i  = the k largest coefficients of each block of T(M_i)
    M_i <- M_i - alpha T^-1(q_i)                       q_i as the others decode it
    U    = T^-1(mean of q_i over the workers that sent the coefficient)
    X   <- X - lr (phi(U) + weight_decay X)            the inner optimizer: SGD without momentum

phi: sign, the identity ("sgd"), or orthogonalisation ("muon"). beta: compression_decay, k: compression_topk, alpha:
subtract. Without fold_lr the gradient enters as it is; with it, "sgd" applies U itself, not lr U. All workers take the
same step, so weights stay equal to the bit; momenta are each worker's own, and part of `state_dict`.

Choices where the authors' code says otherwise or nothing: a step is one message (`Packing`), with bfloat16 values by
default; awkward dimensions are filled up, and tensors of more than two dimensions are stacks of matrices (`Blocks`);
momentum, transform and means are float32 for any weights; a gradient that is None counts as zero (what the momentum
still holds goes on being sent, and the weight decay acts; what is frozen stays); sums are in the order of the ranks;
weight decay and update are one step (equal up to rounding to one after the other); entries below zero_tol stand still.
A run that goes on with another number of workers gives each the mean of the momenta: what would have been sent on
average is kept (Psyche sets them to zero).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from isles.base.modes import to_device, to_host
from isles.base.wrapping import each_of, innermost
from isles.comm.collectives.basic import Stamp, all_gather, packed
from isles.comm.errors import Diverged, WorkerFailed, sent_by
from isles.comm.trust import JUMPS, mean_square
from isles.network.exchange_plan import MemoryItem, PlannedExchange, by_size, gathered
from isles.replicas import start
from isles.replicas.exchange_schedule import everyone
from isles.replicas.methods.demo.config import DeMoConfig
from isles.replicas.methods.demo.momentum import Momentum, Sent, orthogonalised
from isles.replicas.start import OTHER_SETTINGS, OTHER_STATE, among_even
from isles.replicas.sync import StepsAlike

_DIGESTED = (
    OTHER_SETTINGS,
    f"its weights differ (machines or versions may round differently), or {OTHER_STATE}",
)


class DeMo(StepsAlike):
    """All workers hold equal weights after every step; hashes of them are compared now and then.

    inner: torch.optim.SGD without momentum. Gradients must be each worker's own: no DistributedDataParallel. One step
    costs one message to each other worker.
    """

    Config = DeMoConfig
    config: DeMoConfig
    level = "optimizer"
    agrees = True
    usual_inner = "sgd"

    def _begin(self) -> None:
        self._refuse()
        super()._begin()
        shapes = [parameter.shape for parameter in self.parameters]
        self.momentum = Momentum(shapes, self.config, self.parameters[0].device)
        self._number = {id(parameter): number for number, parameter in enumerate(self.parameters)}
        self._exchanged = False
        self._settings_now = start.SettingsHash()

    def _refuse(self) -> None:
        each = each_of(innermost(self.inner))
        if not all(isinstance(one, torch.optim.SGD) for one in each):
            name = " and ".join(type(one).__name__ for one in each)
            raise ValueError(
                f"DeMo has a momentum of its own, and its inner optimizer is torch.optim.SGD(lr, weight_decay), not "
                f'{name}: wrap that one (isles train: inner.optimizer = "sgd")'
            )
        self._refuse_momentum()
        if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in self.model.modules()):
            raise ValueError(
                "the model is a DistributedDataParallel, which averages the gradients that DeMo wants apart: give it "
                "the model itself, model.module"
            )
        if any(hasattr(parameter, "to_local") for parameter in self.parameters):
            raise ValueError("the model is sharded: DeMo wants whole parameters on every worker")
        devices = {parameter.device for parameter in self.parameters}
        if len(devices) > 1:
            raise ValueError(f"the model lies on {len(devices)} devices: DeMo wants it on one")

    def _refuse_momentum(self) -> None:
        """A scheduler may set one too."""
        if any(group["momentum"] for group in self.param_groups):
            raise ValueError(
                "DeMo has a momentum of its own: give its inner SGD momentum = 0, and a scheduler that turns it "
                "(OneCycleLR) cycle_momentum=False"
            )

    @property
    def payload_bytes(self) -> int:
        """Length of one worker's message of one step: what the paper's tables count."""
        return self.momentum.packing.nbytes

    @property
    def data_transmit(self) -> int:
        """Bytes that this worker handed to the transport in its last step: one message for each other worker."""
        return (self.group.size - 1) * self.payload_bytes if self._exchanged else 0

    @override
    def before_inner_step(self) -> None:
        """What the inner optimizer finds in `.grad` is phi(U)."""
        self._refuse_momentum()
        momentum, group = self.momentum, self.group
        self._accumulate()
        chosen = momentum.extract()
        values, indices = to_host(chosen)
        if not values.isfinite().all():
            reason = f"its momentum is not finite at inner step {self.steps + 1}: lower the learning rate"
            raise WorkerFailed(group.transport.rank, reason)
        wire = momentum.packing.pack(self.steps, self._digest(), values, indices)
        call = group.call(leeway=JUMPS)
        transfer = group.start(all_gather(call, wire), nbytes=(group.size - 1) * wire.numel())
        own = momentum.packing.unpack(wire)
        there = replace(own, values=to_device([own.values], momentum.device)[0], indices=chosen[1])
        momentum.subtract(chosen[0] if momentum.packing.exact else there.values, there.indices)
        everyone = []
        with among_even():
            arrived = transfer.wait()
        for rank, theirs in zip(group.ranks, arrived, strict=True):
            with sent_by(rank):
                everyone.append(own if rank == group.transport.rank else momentum.packing.unpack(theirs))
        self._exchanged = True
        sizes = {position: mean_square(sent.values) for position, sent in enumerate(everyone)}
        call.accept(0, sizes, sizes.pop(group.rank), own.values.numel())
        self._compare_headers(everyone)
        momentum.decode([there if sent is own else sent for sent in everyone])
        self._hand_over()

    def _accumulate(self) -> None:
        self.momentum.begin(self.steps)
        for group in self.param_groups:
            found = [(self._number[id(p)], p.grad) for p in self._trained(group) if p.grad is not None]
            if any(gradient.layout != torch.strided for _, gradient in found):
                raise ValueError("a gradient is sparse, DeMo transforms dense ones: make its layer with sparse=False")
            self.momentum.add(found, float(group["lr"]) if self.config.fold_lr else 1.0)

    def _trained(self, group: dict[str, Any]) -> list[nn.Parameter]:
        return [parameter for parameter in group["params"] if id(parameter) in self._number]

    def _hand_over(self) -> None:
        for parameter in self.parameters:
            if parameter.grad is None or 0 in parameter.grad.stride():  # expanded: it could not be written to
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        self.momentum.write(gradients)
        if self.config.base == "muon":
            orthogonalised(gradients)
        elif self.config.base == "sgd" and self.config.fold_lr:
            for group in self.param_groups:
                rate, own = float(group["lr"]), [p.grad for p in self._trained(group) if p.grad is not None]
                if own:
                    torch._foreach_mul_(own, 1 / rate if rate else 0.0)  # it is in U already
        for parameter in self.parameters:
            if not parameter.requires_grad:  # frozen since the start: its momentum must not move it
                parameter.grad = None

    def _digest(self) -> int:
        """Hash of the settings, and of the weights where they are compared: now and then, and after loading."""
        settings, every = self._settings_now.of(self.param_groups), self.config.check_every
        if not (self.is_loaded or (every and self.steps and self.steps % every == 0)):
            return packed(settings)
        self.catch_up()
        return packed(settings, start.hash_of(self.parameters))

    def _compare_headers(self, everyone: Sequence[Sent]) -> None:
        own = everyone[self.group.rank]
        for rank, sent in zip(self.group.ranks, everyone, strict=True):
            if sent.step != own.step:
                raise Diverged(rank, own.step, f"it is at step {sent.step}")
            if sent.digest != own.digest:
                raise Diverged(rank, own.step, Stamp(own.step, own.digest, parts=_DIGESTED).apart(sent.digest))

    # Before a run, and around it.

    @override
    def schedule(self, steps: int) -> list[PlannedExchange]:
        groups = everyone(self.group.size)
        pattern = by_size(groups, lambda size: gathered(self.payload_bytes, size))
        asked = by_size(groups, lambda size: gathered(8, size))
        plan = []
        for step in range(1, steps + 1):
            if self.scales_loss:
                plan.append(PlannedExchange(step, step, 0, "overflow", groups, asked, -step, "control"))
            plan.append(PlannedExchange(step, step, 0, "momentum", groups, pattern, step))
        return plan

    @override
    def memory(self) -> list[MemoryItem]:
        """Momentum and update lie where the weights do."""
        packing = self.momentum.packing
        under_way = self.group.size * (packing.nbytes + packing.pairs * (4 + 8))
        return [
            *super().memory(),
            MemoryItem("momentum", self.momentum.vector.nbytes, "always"),
            MemoryItem("bases of the transform", self.momentum.bases_bytes, "always"),
            MemoryItem("update", self.momentum.vector.nbytes, "exchange"),
            MemoryItem("messages under way", under_way, "exchange"),
        ]

    @override
    def advise(self, steps: int) -> list[str]:
        return [*super().advise(steps), *self._about_bytes(), *self._about_settings()]

    def _about_bytes(self) -> list[str]:
        sent, size = (self.group.size - 1) * self.payload_bytes, self.group.size
        dense = 2 * (size - 1) * 4 * sum(parameter.numel() for parameter in self.parameters) // size
        if sent <= dense:
            return []
        return [
            f"a worker sends {sent} bytes a step to {size - 1} others, data parallel {dense}: lower compression_topk "
            f"(now {self.config.compression_topk}), or train with fewer workers"
        ]

    def _about_settings(self) -> list[str]:
        config, blocks = self.config, self.momentum.blocks
        notices = []
        if not config.subtract:
            notices.append("subtract = 0: what was sent is sent again at the next steps; choose 0.2 to 1")
        thin = blocks.thin(config.compression_chunk)
        if thin:
            notices.append(
                f"padding = false: dimensions of {', '.join(map(str, thin))} are cut into thin blocks, of which a "
                "large share is sent; set padding = true"
            )
        if config.subtract == 1 and 2 * self.momentum.packing.sent_whole > blocks.entries:
            notices.append(
                f"compression_topk = {config.compression_topk} sends most blocks whole, so no momentum is left in "
                "them, and steps follow the mean gradient of each step alone; lower it"
            )
        return notices

    @override
    def outer_state(self) -> dict[str, Any]:
        """This worker's momentum, in the order of its blocks."""
        return {"local_momentum": self.momentum.vector}

    @override
    def load_outer_state(self, state: dict[str, Any]) -> None:
        self.momentum.vector.copy_(state["local_momentum"])

    @classmethod
    @override
    def regrouped(cls, outer: dict[str, Any]) -> dict[str, Any]:
        """Each goes on from the mean of the momenta."""
        return outer
