"""`pipeline.routing = "swarm"`: peers of stages, which make up one replica."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from isles.comm.layout import Layout
from isles.training.kinds.peers import PeerWorld, absent
from isles.training.records.checkpoint import Checkpoints, newest_whole, seat_of

if TYPE_CHECKING:
    from isles.comm.mesh import Mesh
    from isles.data import Corpus
    from isles.training.config.sections import Config
    from isles.training.plan.record import RunPlan
    from isles.training.trainer import Trainer


class SwarmWorld(PeerWorld):
    """See `WorldKind`."""

    @override
    def check(self, config: Config) -> int:
        config.pipeline.peers_of(config.world.workers)
        return super().check(config)

    @override
    def replicas(self, config: Config) -> int:
        return 1

    @override
    def layout(self, config: Config) -> Layout:
        return Layout.columns(config.pipeline.peers_of(config.world.workers))

    @override
    def refuse(self, config: Config) -> None:
        from isles.training.staged import planned_cut

        planned_cut(config)

    @override
    def plan(self, config: Config, *, probe: bool, machines: int) -> RunPlan:
        from isles.training.plan.swarm import plan_swarm

        return plan_swarm(config)

    @override
    def trainer(self, config: Config, world: Mesh, corpus: Corpus | None) -> Trainer:
        from isles.training.swarmed.trainer import SwarmTrainer

        return SwarmTrainer(config, world, corpus)

    @override
    def seat(self, checkpoints: Checkpoints, step: int, rank: int) -> int:
        return seat_of(checkpoints, step, rank)

    @override
    def lost(self, run: Path, step: int, config: Config, *, newest: bool) -> tuple[int, list[str]] | None:
        whole = newest_whole(Checkpoints(run)) if newest else step
        if whole is None:
            raise ValueError(f"{run}: no checkpoint has the weights of every stage; start again")
        who = absent(run, whole, config)
        return whole, [f"workers {who} begin with what their stages' peers saved"] if who else []

    @override
    def churned(self) -> Callable[..., Any]:
        from isles.training.swarmed.churned import ChurnedSwarm

        return ChurnedSwarm

    @override
    def keeper(self) -> type[Any]:
        from isles.training.swarmed.keeping import SwarmKeeper

        return SwarmKeeper


KIND = SwarmWorld()
