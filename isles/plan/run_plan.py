"""`plan_run`: a run's model, memory, exchanges, bytes and time, before anything is started or written.

The numbers come from the code that will run, not from a second description of it. `footprints`: what every method adds
to a worker's memory, per parameter, for `isles methods --memory`.

`priced`: time and bytes of a run as if its model were a larger one. The run trains the small model.

    "1B"               a size of `isles.models.sizes`; a step is that of 131,072 tokens of a worker on an H100
    "1B, A100, 64k"    on another GPU of `isles.network.machines`, with so many tokens
    "1B, 2.5s"         a step of so many seconds

The exchanges are those that the run's method makes of the named model, its buckets, fragments and ranks, replayed
message by message as in `isles train --dry-run`. If no rule waits for time, no loss depends on it, so a run can be
priced on any network without training it again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from isles.base.tables import non_defaults
from isles.data import DataConfig, load_tokenizer
from isles.data.sources import check_sample
from isles.memory.config import MemoryConfig
from isles.models import limits
from isles.models.config import ModelConfig
from isles.models.sizes import parameters, shape_of
from isles.network.machines import step_seconds, with_gpu
from isles.network.units import parse_count, parse_latency
from isles.pipeline.config import PipelineConfig
from isles.plan.memory_fit import known_machine, memory_fit
from isles.plan.record import RunPlan
from isles.plan.sketch import sketch_run
from isles.replicas import METHODS, config_of, method
from isles.training.config.conflicts import refuse_conflicts
from isles.training.config.sections import Config, WorldConfig
from isles.training.kinds import kind_of
from isles.training.memory.plans import refusals
from isles.training.records.saved_run import start_file
from isles.training.records.summary import SummaryTable
from isles.training.step import check_vocabulary


def plan_run(config: Config, *, probe: bool = False, machines: int = 1, machine: str = "") -> RunPlan:
    """The plan of a run in any kind of world.

    probe: measure a step of one worker on this machine if the configuration gives no `step_seconds`. machines: number
    of machines. machine: what each worker has, by name; "": that of [memory], or this machine. Reads the tokenizer and
    the beginning of the text; starts and writes nothing. ValueError for what the run itself would refuse at its start.
    """
    refuse_conflicts(config, "fixed workers")
    _refuse_files(config)
    kind, here = kind_of(config.pipeline), known_machine(config, machine)
    if probe and kind.has_peers:
        raise ValueError("--probe: measures a whole model's step, and these workers hold stages; leave it out")
    plan = kind.plan(config) if kind.has_peers else kind.plan(config, probe=probe, machines=machines)
    return plan if here is None else replace(plan, fit=memory_fit(config, plan.workers, plan.placed, here))


def refuse(config: Config, *, joined: bool = False) -> None:
    """ValueError for settings that a plan refuses, to refuse a run before its processes start.

    Models of the user's own or of Hugging Face and methods of the user's own are not built for that, because they may
    read weights that a sketch does not have; the workers check those. joined: workers come and go in the run.
    """
    if not joined:
        refuse_conflicts(config, "fixed workers")
    _refuse_files(config)
    kind_of(config.pipeline).refuse(config)


def _refuse_files(config: Config) -> None:
    """ValueError for files that cannot be read, and for settings beyond the model's limits."""
    check_vocabulary(limits(config.model).vocab, load_tokenizer(config.data.tokenizer, config.data.vocab))
    check_sample(config.data, limits(config.model).context)
    refusals(config)
    if config.run.start:
        start_file(config.run.start)


MODEL = ModelConfig(size="eager-35M")


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes per parameter on the host, beside weights, gradients and the inner optimizer's state.

    always: from the start. exchange: in addition, from the first exchange. end: in addition, for validation and after
    the last step.
    """

    method: str
    always: float
    exchange: float
    end: float


def footprints(workers: int, stages: int = 1) -> list[Footprint]:
    """The footprint of every method with its defaults, on a sketched decoder of float32 weights among `workers`
    replicas.

    stages: of each replica. Bytes are then a mean over the stages, per parameter of the whole model, and methods that
    need the whole model are left out. ValueError for more stages than blocks.
    """
    if stages < 1:
        raise ValueError(f"--stages {stages}: choose 1 or more")
    return [_footprint(name, workers, stages) for name in METHODS if stages == 1 or not method(name).needs_whole]


def _footprint(name: str, workers: int, stages: int) -> Footprint:
    config = Config(
        method=name,
        model=replace(MODEL, device="cpu"),
        replicas=config_of(name)(),
        pipeline=PipelineConfig(stages=stages),
        world=WorldConfig(workers=workers * stages),
    )
    sketch = sketch_run(config)
    sums = dict.fromkeys(("always", "exchange", "end"), 0.0)
    for item in (item for optimizer in sketch.optimizers for item in optimizer.memory()):
        if item.when in sums:
            sums[item.when] += item.nbytes / sketch.parameters / stages
    return Footprint(method=name, **sums)


_USUAL, _MFU = ("", "H100", "131072"), 0.4


def named(text: str) -> tuple[str, float]:
    """Parse the text of a price: (model size, seconds of a step)."""
    parts = [part.strip() for part in text.split(",")]
    try:
        size, hardware, tokens = (*parts, *_USUAL[len(parts) :])
        shape = shape_of(size)
        if hardware[:1].isdigit():
            return size, parse_latency("a step", hardware)
        return size, step_seconds(with_gpu(hardware), _MFU, parameters(shape), parse_count("tokens", tokens))
    except ValueError as error:
        raise ValueError(f'--as {text}: {error}; write it as "1B", "1B, A100, 64k" or "1B, 2.5s"') from None


def priced(config: Config, text: str, over: str | None = None) -> SummaryTable:
    """The summary.json of a run priced as `text`, over its own links or `over`. ValueError if something in the run
    waits for time, or there is too much to replay.
    """
    size, step = named(text)
    virtual = replace(config.world.virtual, links=over or config.world.virtual.links, step_seconds=step)
    world = replace(config.world, backend="virtual", virtual=virtual)
    waits = [f"world.virtual.{key}" for key, _ in non_defaults(virtual) if key in ("step_jitter", "pause_every")]
    if waits or config.pipeline.skippipe.plan or kind_of(config.pipeline).has_peers:
        raise ValueError(f"--as {text}: {(*waits, 'pipeline.routing')[0]} makes the run depend on time; leave it out")
    model = ModelConfig(size=size, dtype=config.model.dtype, device="cpu")
    data = DataConfig(batch_mode=config.data.batch_mode, batch_size=config.data.batch_size)  # a text for any vocabulary
    run = replace(config.run, start="", priced_as="")
    plan = plan_run(replace(config, model=model, data=data, memory=MemoryConfig(), world=world, run=run))
    whole = step * max(world.factors) if plan.time is None else plan.time.step
    if not whole:
        raise ValueError(f"--as {text}: a step of 0 s, or {world.workers} workers with too many messages to replay")
    steps, computing = run.steps, step * sum(world.factors) / world.workers
    return {
        "priced_as": f"{size}, {step:.4g} s a step, over {world.virtual.links}",
        "priced_bytes_per_worker": sum(plan.bytes_sent or ()) / plan.size,
        "virtual_seconds": steps * whole,
        "compute_seconds": steps * computing,
        "blocked_seconds": steps * (whole - computing),
        "compute_utilisation": computing / whole,
    }
