"""Settings of the methods that average gradients; symbols as in `methods.ddp` and `methods.dct_dp`. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from typing_extensions import override

from isles.base.errors import demand
from isles.base.parts import one_of_or_code
from isles.comm.codecs.kinds import read_form
from isles.replicas.config import Dimension, Feedback, MethodConfig, PartsConfig, at_least, check_feedback, one_of

VALUES = ("none", "bf16", "fp16", "int8", "int4")
IndexForm = Literal["auto", "blocks", "indices", "bitmap"]


@dataclass(frozen=True, kw_only=True)
class BucketsConfig(MethodConfig):
    """Settings of all methods that send gradients bucket by bucket."""

    bucket_megabytes: float = 25.0
    """Size of a bucket in 2**20 bytes of gradient."""

    def __post_init__(self) -> None:
        demand(self, "bucket_megabytes", lambda x: x > 0, "choose a positive size, such as 25")


@dataclass(frozen=True, kw_only=True)
class DDPConfig(PartsConfig, BucketsConfig):
    """Settings of `ddp`."""

    codec: str = "none"
    """Form of the gradients on the wire: none, bf16, fp16, int8, powersgd:4, ..., or package.module:Class."""
    reduction: Literal["two_shot", "native"] = "two_shot"
    """How means are taken: two_shot (over gloo, the same bits on every backend), or native: torch's own all_reduce,
    over NCCL where gradients are on GPUs (one for each worker), without codecs.
    """
    error_feedback: Feedback = "none"
    """What the codec loses goes into the next step's gradient: none, local (own loss), global (against the mean)."""
    feedback_decay: float = 1.0
    """Share of it that is kept."""

    def __post_init__(self) -> None:
        super().__post_init__()
        read_form(self.codec)  # refuses an unknown one
        self.check_own()
        one_of("reduction", self.reduction, ("two_shot", "native"))
        check_feedback(self.error_feedback, self.feedback_decay)
        if self.reduction == "native" and (self.codec, self.error_feedback) != ("none", "none"):
            raise ValueError(
                'reduction = "native" sends gradients as they are: use "two_shot" with a codec or error feedback'
            )


@dataclass(frozen=True, kw_only=True)
class DCTDPConfig(PartsConfig, BucketsConfig):
    """Settings of `dct-dp`."""

    sparsity: float = 0.99
    """Share of a tensor's entries that is not sent (eta), 0 to below 1; 0: as ddp."""
    threshold_interval: int = 1000
    """Steps after which thresholds are renewed (L)."""
    error_feedback: Literal["none", "local"] = "local"
    """What is not sent: local, it is added to the next step's gradient; none, it is lost."""
    density_guard: float = 4.0
    """A threshold that sends this many times more or fewer entries than it should is renewed at once."""
    codec: str = "none"
    """Form of the values on the wire: none, bf16, fp16, int8, int4, or package.module:Class."""
    indices: IndexForm = "auto"
    """Form of their indices: blocks (2 bytes each), indices (4), bitmap (1 bit an entry of all), auto (smallest)."""
    exclude_below: int = 4096
    """Tensors of fewer entries are sent whole."""
    warmup_dense_steps: int = 0
    """Steps at the start whose gradients are sent whole."""
    warmup_steps: int = 0
    """After them, steps whose thresholds are all new."""

    def __post_init__(self) -> None:
        super().__post_init__()
        demand(self, "sparsity", lambda x: 0 <= x < 1, "choose 0 <= sparsity < 1, such as 0.99")
        demand(self, "density_guard", lambda x: x > 1, "choose a number above 1, such as 4")
        at_least("threshold_interval", self.threshold_interval, 1)
        for key in ("exclude_below", "warmup_dense_steps", "warmup_steps"):
            at_least(key, getattr(self, key), 0)
        one_of("error_feedback", self.error_feedback, ("none", "local"))
        one_of_or_code("codec", self.codec, VALUES)
        self.check_own()
        one_of("indices", self.indices, get_args(IndexForm))
        if self.sparsity == 0 and self.codec != "none":
            raise ValueError(f'sparsity = 0 sends all entries as they are: use method = "ddp" with codec {self.codec}')

    @override
    def space(self, steps: int, *, timed: bool) -> list[Dimension]:
        feedback = Dimension(name="replicas.error_feedback", start=self.error_feedback, choices=("local", "none"))
        return [feedback, *([Dimension.below_1("replicas.sparsity", self.sparsity, 4)] if timed else [])]


@dataclass(frozen=True, kw_only=True)
class FSDPConfig(MethodConfig):
    """Settings of `fsdp`."""

    reshard_after_forward: bool = True
    """Gather a block's weights for its forward and again for its backward pass; false keeps them in between, which
    sends a third less and holds the whole model meanwhile.
    """
