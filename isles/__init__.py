"""Isles: train one language model on poorly connected workers.

    world = isles.init()
    optimizer = isles.NoLoCo(model, torch.optim.AdamW(model.parameters(), lr=6e-4), world.outer, sync_every=50)

Names are imported on first use, so `import isles` is quick and loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from isles.base.imports import on_first_use
from isles.base.version import __version__
from isles.replicas import METHODS

if TYPE_CHECKING:
    from isles.comm.codecs import codec
    from isles.comm.codecs.base import Codec, as_bytes
    from isles.comm.codecs.lowrank import LowRank
    from isles.comm.errors import DeadlinePassed, Diverged, PeerLost, WorkerFailed
    from isles.comm.group import Group
    from isles.comm.mesh import Mesh, init, mesh
    from isles.comm.transport import Deadlines
    from isles.comm.virtual.cluster import run_virtual
    from isles.launch.workers import run_local
    from isles.memory.costs import Profile as MemoryProfile
    from isles.memory.optimizer import Managed as ManagedOptimizer
    from isles.memory.plan import InfeasibleBudget, MemoryPlan
    from isles.memory.profile import profile as memory_profile
    from isles.memory.search import Search as MemorySearch
    from isles.network.churn import ChurnEvent, churn, read_trace, write_trace
    from isles.network.clusters import ClusterNode, ClusterScore, ModelLoad, NodeCluster, form_clusters, read_nodes
    from isles.network.links import Links
    from isles.network.machines import Machine, machine
    from isles.network.pauses import Pauses
    from isles.network.routing.events import Route, fixed_routes, random_routes
    from isles.network.routing.plan import PipelinePlan, PlanNetwork, plan_network, read_plan
    from isles.network.routing.problem import PathRules, RoutingCosts, RoutingProblem
    from isles.network.routing.search import RoutingStrategy, SearchEffort, routing_strategies
    from isles.pipeline.boundaries.base import Boundary, FullStream
    from isles.pipeline.config import PipelineConfig
    from isles.pipeline.pipeline import Pipeline
    from isles.pipeline.ravnest.assignment import ClusterAssignment
    from isles.pipeline.ravnest.averaging import ClusterAverage
    from isles.pipeline.ravnest.stage import AsyncStage
    from isles.pipeline.routers import PipelineGrid, Router
    from isles.pipeline.swarm.balancer import PeerBalancer
    from isles.pipeline.swarm.placement import Rebalancer, StagePlacement
    from isles.pipeline.swarm.swarm import Swarm
    from isles.replicas import *  # every method by its class
    from isles.replicas import method
    from isles.replicas.config import MethodConfig
    from isles.replicas.island.fsdp import shard
    from isles.replicas.loop.outer import OuterSync
    from isles.replicas.methods.diloco import Nesterov
    from isles.replicas.methods.fedavg import Descent
    from isles.replicas.methods.localsgd import Average
    from isles.replicas.methods.noloco import DeltaPhi
    from isles.replicas.methods.slowmo import HeavyBall
    from isles.replicas.parts.choices import (
        Blend,
        Carry,
        Eager,
        EveryH,
        Everyone,
        Nobody,
        RandomGroups,
        Received,
        Replace,
    )
    from isles.replicas.parts.interfaces import (
        Answer,
        Cadence,
        Composition,
        ErrorFeedback,
        Landing,
        Mixing,
        OuterRule,
        Reading,
        RuleState,
    )
    from isles.replicas.replica import Plain
    from isles.replicas.sync import ReplicaSync, unwrap
    from isles.running.python import Run, load_run, simulate, train
    from isles.training.config.reading import read_config
    from isles.training.elastic.replay import repeat as replay_run
    from isles.training.elastic.support import going_on
    from isles.training.simulated_churn import SimulatedClusters, SimulatedElasticRun, SimulatedSwarm

_names, __getattr__, __dir__ = on_first_use(__name__, (row.target for row in METHODS.values()))
__all__ = ["METHODS", "__version__", *_names]
