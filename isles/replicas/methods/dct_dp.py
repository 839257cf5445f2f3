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

from dataclasses import replace

from typing_extensions import override

from isles.comm.codecs import codec
from isles.comm.codecs.scaled import Identity
from isles.comm.collectives.averaging import averaging
from isles.comm.collectives.mean import sent_bytes
from isles.replicas.exchange_schedule import Outline
from isles.replicas.gradient.bucketed import Bucket, BucketedSync
from isles.replicas.gradient.config import DCTDPConfig
from isles.replicas.gradient.reduction import Averaged, Reduction, Rule, Thresholds


class DCTDP(BucketedSync):
    """All workers hold equal weights after every step."""

    Config = DCTDPConfig
    config: DCTDPConfig

    @override
    def reduction(self, bucket: Bucket) -> Reduction:
        config = self.config
        if config.sparsity == 0:
            return Averaged(bucket.layout, averaging(Identity(), *bucket.layout.layout))
        rule = Rule(
            sparsity=config.sparsity,
            interval=config.threshold_interval,
            feedback=config.error_feedback == "local",
            guard=config.density_guard,
            codec=codec(config.codec, config.options_of("codec")),
            indices=config.indices,
            exclude_below=config.exclude_below,
            exact=config.warmup_dense_steps,
            every_step=config.warmup_steps,
        )
        return Thresholds(bucket.layout, rule)

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
