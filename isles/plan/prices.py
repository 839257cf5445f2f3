"""Time and bytes of a run as if its model were a larger one: the small one learns, the named one is paid for.

    "1B"               a size of `isles.models.sizes`; a step is that of 131,072 tokens of a worker on an H100
    "1B, A100, 64k"    on another GPU of `isles.network.machines`, with so many tokens
    "1B, 2.5s"         a step of so many seconds

The exchanges are those that the run's method makes of the named model, its buckets, fragments and ranks, played message
by message as for `isles train --dry-run`. Where no rule waits on time no loss depends on them: a run can be priced on
any network without being trained again.
"""

from __future__ import annotations

from dataclasses import replace

from isles.base.tables import non_defaults
from isles.memory.config import MemoryConfig
from isles.models.config import ModelConfig
from isles.models.sizes import parameters, shape_of
from isles.network.machines import step_seconds, with_gpu
from isles.network.units import parse_count, parse_latency
from isles.plan.run_plan import plan_run
from isles.training.config.sections import Config
from isles.training.kinds import kind_of
from isles.training.records.summary import SummaryTable

_USUAL, _MFU = ("", "H100", "131072"), 0.4


def named(text: str) -> tuple[str, float]:
    """Size and seconds of a step."""
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
    """What summary.json says of a run priced as `text`, over its own links or others. ValueError: something in it waits
    on time, or there is too much to replay.
    """
    size, step = named(text)
    virtual = replace(config.world.virtual, links=over or config.world.virtual.links, step_seconds=step)
    world = replace(config.world, backend="virtual", virtual=virtual)
    waits = [f"world.virtual.{key}" for key, _ in non_defaults(virtual) if key in ("step_jitter", "pause_every")]
    if waits or config.pipeline.skippipe.plan or kind_of(config.pipeline).has_peers:
        raise ValueError(f"--as {text}: {(*waits, 'pipeline.routing')[0]} makes the run depend on time; leave it out")
    model = ModelConfig(size=size, dtype=config.model.dtype, device="cpu")
    data, run = replace(config.data, tokenizer="bytes"), replace(config.run, start="", priced_as="")
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
