"""Settings of methods that have one file each; symbols as there. They are together because most take over another one's
and change a default. Loads no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from isles.errors import demand
from isles.replicas.checks import at_least, momentum_in_range, positive_rate
from isles.replicas.config import Feedback, MethodConfig
from isles.replicas.loop.config import CompressedConfig, FirstSync, Fragments, WeightedConfig, check_fragments
from isles.replicas.space import Dimension


@dataclass(frozen=True, kw_only=True)
class NoneConfig(MethodConfig):
    """Nothing to set."""


@dataclass(frozen=True, kw_only=True)
class LocalSGDConfig(WeightedConfig):
    """Settings of `localsgd`."""

    sync_every: int = 50
    """Inner steps between two averages."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("sync_every", self.sync_every, 1)


@dataclass(frozen=True, kw_only=True)
class PostLocalSGDConfig(LocalSGDConfig):
    """Settings of `postlocal-sgd`."""

    every_step_until: int = 100
    """The last step of the first phase (T); a tenth of the run is a start."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("every_step_until", self.every_step_until, 0)


@dataclass(frozen=True, kw_only=True)
class SPARTAConfig(LocalSGDConfig):
    """Settings of `sparta`."""

    sync_every: int = 1
    """Inner steps between two exchanges (H)."""
    fraction: float = 0.005
    """Share of the entries that travels (f); published runs took 0.0005 to 0.005."""

    def __post_init__(self) -> None:
        super().__post_init__()
        demand(self, "fraction", lambda x: 0 < x <= 1, "choose a fraction above 0, up to 1, such as 0.005")

    @override
    def space(self, steps: int, *, timed: bool) -> list[Dimension]:
        sent = Dimension.around("replicas.fraction", self.fraction, 4, most=1.0)
        return [*super().space(steps, timed=timed), *([sent] if timed else [])]


@dataclass(frozen=True, kw_only=True)
class FedAvgConfig(CompressedConfig):
    """Settings of `fedavg`."""

    sync_every: int = 50
    """Inner steps a round (H)."""
    outer_lr: float = 1.0
    """Outer learning rate (lr); the paper's average is 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("sync_every", self.sync_every, 1)
        positive_rate(self.outer_lr)


@dataclass(frozen=True, kw_only=True)
class FedAdamConfig(FedAvgConfig):
    """Settings of `fedadam` and `fedyogi`."""

    outer_lr: float = 0.01
    """About what a weight is to move a round (lr)."""
    outer_betas: tuple[float, float] = (0.9, 0.99)
    """Share that each round keeps of the mean (b1) and of the mean square (b2)."""
    tau: float = 1e-3
    """Added to the root of the mean square; the least size of a change that counts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.outer_betas) != 2 or not all(0 <= beta < 1 for beta in self.outer_betas):
            raise ValueError(f"outer_betas = {list(self.outer_betas)}: choose two in [0, 1), such as [0.9, 0.99]")
        demand(self, "tau", lambda x: 0 < x < float("inf"), "choose a positive number, such as 1e-3")


@dataclass(frozen=True, kw_only=True)
class SparseLoCoConfig(FedAvgConfig):
    """Settings of `sparseloco`; defaults of the public runs."""

    sync_every: int = 30
    outer_lr: float = 0.4
    codec: str = "topk:64+int2"
    error_feedback: Feedback = "local"
    feedback_decay: float = 0.95


@dataclass(frozen=True, kw_only=True)
class DiLoCoConfig(CompressedConfig):
    """Settings of `diloco`; defaults of the paper, section 3."""

    sync_every: int = 500
    """Inner steps a round (H)."""
    outer_lr: float = 0.7
    """Outer learning rate (lr)."""
    outer_momentum: float = 0.9
    """Outer momentum (mu)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("sync_every", self.sync_every, 1)
        positive_rate(self.outer_lr)
        momentum_in_range(self.outer_momentum)


@dataclass(frozen=True, kw_only=True)
class SlowMoConfig(DiLoCoConfig):
    """Settings of `slowmo`."""

    sync_every: int = 48
    """Inner steps a round (H)."""
    outer_lr: float = 1.0
    """Outer learning rate (alpha)."""
    outer_momentum: float = 0.5
    """Outer momentum (beta); tune it between 0.4 and 0.8."""


@dataclass(frozen=True, kw_only=True)
class DelayedConfig(DiLoCoConfig):
    """Settings of `delayed`."""

    sync_every: int = 100
    outer_lr: float = 0.1
    outer_delay: int = 1
    """Rounds that a mean comes late (d)."""
    fragments: Fragments = "whole"
    """How the model is cut: "strided", "sequential", "whole", or lists of parameter names or their beginnings."""
    layers_per_fragment: int | None = None
    """Blocks in each; left out, 3, or half of a shorter model's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("outer_delay", self.outer_delay, 1)
        check_fragments(self.fragments, self.layers_per_fragment)


@dataclass(frozen=True, kw_only=True)
class EagerConfig(DelayedConfig):
    """Settings of `eager`; defaults of the paper."""

    outer_lr: float = 0.4


@dataclass(frozen=True, kw_only=True)
class StreamingConfig(DiLoCoConfig):
    """Settings of `streaming-diloco`; defaults of the paper, section 3."""

    sync_every: int = 100
    outer_lr: float = 0.4
    codec: str = "fp4"
    fragments: Fragments = "strided"
    """How the model is cut: "strided", "sequential", "whole", or lists of parameter names or their beginnings."""
    layers_per_fragment: int | None = None
    """Blocks in each; left out, 3, or half of a shorter model's."""
    overlap_steps: int | tuple[int, ...] = 1
    """Inner steps after which a mean lands (tau), below sync_every; a list gives each worker its own."""
    merge_alpha: float = 0.5
    """Share of the live weights where they meet the anchor (alpha), 0..1."""
    first_sync: FirstSync = "full_window"
    """When a fragment is first sent: "full_window", after H steps; "offset", at its own offset."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fragments(self.fragments, self.layers_per_fragment, self.first_sync)
        steps = (self.overlap_steps,) if isinstance(self.overlap_steps, int) else self.overlap_steps
        if not steps or not all(0 <= tau < self.sync_every for tau in steps):
            raise ValueError(
                f"overlap_steps = {self.overlap_steps}: choose 0 or more, below sync_every = {self.sync_every}, or "
                "such a number for each worker"
            )
        demand(self, "merge_alpha", lambda x: 0 <= x <= 1, "choose the local weights' share, 0 to 1")
