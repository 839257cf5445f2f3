"""`plan_run`: what a run will be, before anything is started or written: the model, memory, exchanges, bytes, time.

So the numbers are those of the code that will run, not of a second description of it.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

from isles.data import load_tokenizer
from isles.data.sources import list_sources
from isles.models import limits
from isles.replicas import METHODS
from isles.training.clustered.cuts import cluster_cuts
from isles.training.config.clustered import refuse_spares
from isles.training.config.conflicts import refuse_conflicts
from isles.training.config.sections import Config
from isles.training.memory.planned import refusals
from isles.training.plan.clusters import plan_clusters
from isles.training.plan.fit import known_machine, memory_fit
from isles.training.plan.record import RunPlan
from isles.training.plan.replicas import plan_replicas
from isles.training.plan.sketch import sketch_run
from isles.training.plan.swarm import plan_swarm
from isles.training.records.saved import start_file
from isles.training.staged import planned_cut
from isles.training.text import check_vocabulary


def plan_run(config: Config, *, probe: bool = False, machines: int = 1, machine: str = "") -> RunPlan:
    """The plan of a run in any kind of world. probe: measure a step of one worker on this machine where the
    configuration gives no `step_seconds`. machines: that train together. machine: what each worker has, by name; "":
    that of [memory], or what is here. Reads the tokenizer and looks at the text's files, starts nothing, writes
    nothing. ValueError for what the run itself would refuse before it trains.
    """
    here, plan = known_machine(config, machine), _planned(config, probe=probe, machines=machines)
    return plan if here is None else replace(plan, fit=memory_fit(config, plan.workers, plan.placed, here))


def _planned(config: Config, *, probe: bool, machines: int) -> RunPlan:
    kind = {"ravnest": plan_clusters, "swarm": plan_swarm}.get(config.pipeline.routing)
    if kind is None:
        refuse_conflicts(config, "fixed workers")
        _refuse_files(config)
        return plan_replicas(config, probe=probe, machines=machines)
    if probe:
        raise ValueError("--probe: measures a whole model's step, and these workers hold stages; leave it out")
    refuse(config)
    return kind(config)


def refuse(config: Config, *, joined: bool = False) -> None:
    """ValueError for the settings that a plan refuses, so that a run can be refused before its processes start. Models
    of the user's own and of Hugging Face, and methods of the user's own, which may read weights that a sketch does not
    have, are not made for that: workers do, and refuse there. joined: workers come and go in it.
    """
    if not joined:
        refuse_conflicts(config, "fixed workers")
    _refuse_files(config)
    if config.pipeline.routing == "ravnest":
        refuse_spares(config.pipeline)
        cluster_cuts(config)
    elif config.pipeline.routing == "swarm":
        planned_cut(config)
    elif config.model.factory is None and config.model.hf is None and config.method in METHODS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the run says it again
            sketch_run(config)


def _refuse_files(config: Config) -> None:
    """ValueError for files that cannot be read, and what does not go with the model's limits."""
    check_vocabulary(limits(config.model).vocab, load_tokenizer(config.data.tokenizer))
    list_sources(config.data.path)
    refusals(config)
    if config.run.start:
        start_file(config.run.start)
