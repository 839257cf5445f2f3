"""Settings of methods that have one file each, of `noloco` and of `streaming-noloco`; symbols as in the methods' files.
They are together because most take over another one's and change a default. Loads no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from typing_extensions import override

from isles.base.errors import demand
from isles.comm.codecs.kinds import read_form
from isles.replicas.config import (
    CompressedConfig,
    Dimension,
    Feedback,
    FirstSync,
    FragmentedConfig,
    Fragments,
    MethodConfig,
    OuterConfig,
    PartsConfig,
    WeightedConfig,
    at_least,
    check_fragments,
    momentum_in_range,
    one_of,
    positive_rate,
    rounds,
)
from isles.replicas.parts.legal import OWN, PLAIN, refuse


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
class DiLoCoConfig(FedAvgConfig):
    """Settings of `diloco`; defaults of the paper, section 3."""

    sync_every: int = 500
    outer_lr: float = 0.7
    """Outer learning rate (lr)."""
    outer_momentum: float = 0.9
    """Outer momentum (mu)."""

    def __post_init__(self) -> None:
        super().__post_init__()
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
class DelayedConfig(FragmentedConfig, DiLoCoConfig):
    """Settings of `delayed`."""

    sync_every: int = 100
    outer_lr: float = 0.1
    outer_delay: int = 1
    """Rounds that a mean comes late (d)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("outer_delay", self.outer_delay, 1)
        check_fragments(self.fragments, self.layers_per_fragment)


@dataclass(frozen=True, kw_only=True)
class EagerConfig(DelayedConfig):
    """Settings of `eager`; defaults of the paper."""

    outer_lr: float = 0.4


@dataclass(frozen=True, kw_only=True)
class StreamingConfig(FragmentedConfig, DiLoCoConfig):
    """Settings of `streaming-diloco`; defaults of the paper, section 3."""

    sync_every: int = 100
    outer_lr: float = 0.4
    codec: str = "fp4"
    fragments: Fragments = "strided"
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


ExchangeForm = Literal["delta+phi", "single_vector", "theta_only"]


@dataclass(frozen=True, kw_only=True)
class NoLoCoConfig(PartsConfig, OuterConfig):
    """Settings of `noloco`; defaults of the paper, Table 1, and of its code."""

    sync_every: int = 50
    """Inner steps a round (m)."""
    outer_lr: float = 0.7
    """Outer learning rate (beta)."""
    outer_momentum: float = 0.5
    """Outer momentum (alpha)."""
    gamma: float | None = None
    """Pull to the group's anchors; left out, it equals outer_lr."""
    group_size: int = 2
    """Workers a group (n)."""
    exchange: ExchangeForm = "delta+phi"
    """What travels, see the module: delta+phi, or half the bytes, single_vector or theta_only."""
    prefetch_phi: bool = True
    """Send phi as soon as it is final, not with Delta."""
    codec: str = "none"
    """Form of Delta on the wire, or package.module:Class; a lossy one needs exchange = "delta+phi"."""
    anchor_codec: str = "none"
    """Form of phi on the wire: none, bf16, int8; a lossy one needs exchange = "delta+phi"."""
    on_peer_failure: Literal["raise", "solo"] = "raise"
    """Where a partner is lost or late: raise, or solo: go on alone in that round."""
    seed: int = 0
    """Seed of the groups."""

    def __post_init__(self) -> None:
        at_least("sync_every", self.sync_every, 1)
        positive_rate(self.outer_lr)
        momentum_in_range(self.outer_momentum)
        named = read_form(self.codec)  # refuses an unknown one
        self.check_own()
        kind = OWN if named.is_own else self.codec.partition(":")[0]
        refuse(PLAIN | {"mixing": "groups", "rule": "noloco", "codec": kind})
        one_of("anchor_codec", self.anchor_codec, ("none", "bf16", "int8"))
        at_least("group_size", self.group_size, 2)
        at_least("gamma", self.pull, 0)
        one_of("exchange", self.exchange, get_args(ExchangeForm))
        one_of("on_peer_failure", self.on_peer_failure, ("raise", "solo"))
        if self.exchange != "delta+phi" and (self.codec, self.anchor_codec) != ("none", "none"):
            raise ValueError(f'exchange = {self.exchange!r} travels in full precision: lossy codecs want "delta+phi"')
        if self.exchange == "theta_only" and self.pull != self.outer_lr:
            raise ValueError(f'exchange = "theta_only" needs gamma = outer_lr, not {self.gamma}: leave gamma out')

    @property
    @override
    def survives(self) -> bool:
        return self.on_peer_failure == "solo"

    @property
    def pull(self) -> float:
        return self.outer_lr if self.gamma is None else self.gamma


@dataclass(frozen=True, kw_only=True)
class StreamingNoLoCoConfig(FragmentedConfig, NoLoCoConfig):
    """Settings of `streaming-noloco`."""

    sync_every: int = 100
    fragments: Fragments = "strided"
    overlap_steps: int = 1
    """Inner steps after which an answer lands (tau), below sync_every, the same for all."""
    merge_alpha: float = 0.5
    """Share of the live weights where they meet the anchor (alpha), 0..1."""
    first_sync: FirstSync = "full_window"
    """When a fragment is first sent: "full_window", after H steps; "offset", at its own offset."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fragments(self.fragments, self.layers_per_fragment, self.first_sync)
        if not 0 <= self.overlap_steps < self.sync_every:
            raise ValueError(f"overlap_steps = {self.overlap_steps}: choose 0 to {self.sync_every - 1}")
        if not 0 <= self.merge_alpha <= 1:
            raise ValueError(f"merge_alpha = {self.merge_alpha}: choose the local weights' share, 0 to 1")


SAMPLERS = ("random", "stratified", "rolling", "fixed")
SERVERS = ("partitioned", "central")


@dataclass(frozen=True, kw_only=True)
class ISTConfig(MethodConfig):
    """Settings of `ist`."""

    sync_every: int = 50
    """Inner steps between two divisions (H)."""
    split: str = "all"
    """What is divided: heads, ffn, heads+ffn, or "all" that the model can (never whole blocks)."""
    sampler: Literal["random", "stratified", "rolling", "fixed"] = "random"
    """Who trains which units: random; stratified (equally from each server); rolling (moved on by 1 a round); fixed."""
    server: Literal["partitioned", "central"] = "partitioned"
    """Who keeps them between rounds: partitioned (1/n each) or central (worker 0)."""
    optimizer_state: Literal["travel", "reset"] = "travel"
    """What becomes of the inner optimizer's moments: travel (they go with their units) or reset (fresh every round)."""
    eval_scale: Literal["keep_fraction", "none"] = "keep_fraction"
    """Of what reads divided units, in the full model: keep_fraction (1/n) or none."""
    seed: int = 0
    """Seed of the divisions."""

    def __post_init__(self) -> None:
        at_least("sync_every", self.sync_every, 1)
        one_of("sampler", self.sampler, SAMPLERS)
        one_of("server", self.server, SERVERS)
        one_of("optimizer_state", self.optimizer_state, ("travel", "reset"))
        one_of("eval_scale", self.eval_scale, ("keep_fraction", "none"))

    @override
    def space(self, steps: int, *, timed: bool) -> list[Dimension]:
        """H counts at equal tokens, too: what a worker does not hold for long it does not learn."""
        who = Dimension(name="replicas.sampler", start=self.sampler, choices=("random", "stratified", "rolling"))
        return [who, rounds(self, steps)]
