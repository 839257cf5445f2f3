"""Data parallel training: the gradient of every step is averaged over the workers before the inner step.

    every inner step:    grad <- mean_i grad_i

The mean may travel in the form of a codec, or as low-rank factors (PowerSGD, Vogels et al. 2019, arXiv 1905.13727),
with error feedback E where the form loses much:

    a_i = grad_i + E_i;    grad <- mean_i C(a_i);    E_i <- decay (a_i - C(a_i))

(global: E_i <- decay (a_i - grad), the form of torch's PowerSGD hook.) Then a step in which a gradient is not finite is
skipped by all; without, it ends the run and names the worker. A parameter that nobody has a gradient of in a step has
none after it; with a codec or error feedback no gradient counts as zero, so weight decay and momentum go on. Buckets,
hooks and overlap: `isles.replicas.gradient.bucketed`. Memory: 4 bytes a parameter for the buckets; with error feedback
8 more, for the residuals of this step become final only when all workers' gradients have come.
"""

from __future__ import annotations

import torch
from typing_extensions import override

from isles.comm.codecs import form
from isles.comm.collectives.averaging import averaging
from isles.comm.collectives.mean import native_bytes, native_mean
from isles.replicas.exchange_schedule import idle_low_rank
from isles.replicas.gradient.bucketed import Bucket, BucketedSync
from isles.replicas.gradient.config import DDPConfig
from isles.replicas.gradient.reduction import Averaged, Native, Reduction
from isles.replicas.parts.interfaces import feedback


class DDP(BucketedSync):
    """All workers hold equal weights after every step."""

    Config = DDPConfig
    is_linear = True
    config: DDPConfig

    def _begin(self) -> None:
        self.native = self.config.reduction == "native"
        self.form = form(self.config.codec, self.config.options_of("codec"))
        super()._begin()
        if not self.native:
            return
        if not self.group.transport.native:
            raise ValueError('reduction = "native" needs a real backend: use "two_shot" on the virtual one')
        if not self.is_sketch:  # opens the backend's connections now, not in the first backward pass
            probe = torch.zeros(1, device=self.device(), dtype=torch.float32)
            self.group.start(native_mean(self.group.call("control"), probe), "control").wait()

    @override
    def device(self) -> torch.device:
        return self.parameters[0].device if self.native else super().device()

    @override
    def reduction(self, bucket: Bucket) -> Reduction:
        if self.native:
            return Native(bucket.layout)
        means = averaging(self.form, *bucket.layout.layout)
        return Averaged(bucket.layout, means, feedback(self.config.error_feedback, self.config.feedback_decay))

    @override
    def opening(self) -> tuple[int, ...]:
        probe = native_bytes(1, torch.float32, self.group.size) if self.native else 0
        return tuple(nbytes + probe for nbytes in super().opening())

    @override
    def advise(self, steps: int) -> list[str]:
        config, notices = self.config, super().advise(steps)
        if config.error_feedback == "none" and self.form.biased:
            notices.append(
                f"codec = {config.codec}: it takes a part of every gradient that never comes back; choose "
                'error_feedback = "local"'
            )
        if config.error_feedback != "none" and self.form.lossless:
            notices.append(
                f"error_feedback = {config.error_feedback}: codec none loses nothing on the wire, so 8 bytes a "
                'parameter are held for nothing; choose error_feedback = "none"'
            )
        return notices + idle_low_rank(self.form, self.parameters)
