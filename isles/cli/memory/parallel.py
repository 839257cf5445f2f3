"""What `isles plan --compare-parallel` was asked for, as a `ParallelJob`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from isles.cli.plan_job import Asked
    from isles.memory.parallel.job import ParallelJob

_TAKEN = ("--params", "--layers", "--workers", "--machine", "--per-host", "--sequence", "--step-tokens")
_LINKS = ("--links", "--bandwidth", "--inner-links")


def parallel_job_of(asked: Asked) -> tuple[ParallelJob, str]:
    """The job, and its network's name. ValueError that names what is missing or wrong."""
    from isles.cli.plan_job import network_of
    from isles.memory.parallel.decoder import decoder_like
    from isles.memory.parallel.job import ParallelJob
    from isles.network.machines import machine
    from isles.network.named import links as named
    from isles.network.units import parse_count

    extra = [option for option in asked.given if option not in (*_TAKEN, *_LINKS)]
    if extra:
        raise ValueError(f"--compare-parallel: leave out {', '.join(extra)}")
    needed = ("--params", "--layers", "--workers", "--machine", "--step-tokens")
    missing = [option for option in needed if option not in asked.given]
    missing += [] if asked.links or asked.bandwidth else ["--links or --bandwidth"]
    if missing:
        raise ValueError(f"--compare-parallel: missing: {', '.join(missing)}")
    assert asked.layers is not None and asked.workers is not None and asked.params and asked.step_tokens
    sequence, per_host = asked.sequence or 1024, asked.per_host or 1
    tokens = parse_count("--step-tokens", asked.step_tokens)
    if asked.layers < 1 or sequence < 1 or per_host < 1:
        raise ValueError("--layers, --sequence and --per-host: choose 1 or more")
    if tokens % sequence:
        raise ValueError(
            f"--step-tokens {asked.step_tokens}: {tokens:.0f} tokens are no whole number of sequences of {sequence}"
        )
    whole = machine(asked.machine or "")
    between, name = network_of(asked)
    near = None if asked.inner_links is None else named(asked.inner_links)
    job = ParallelJob(
        shape=decoder_like(parse_count("--params", asked.params), asked.layers, sequence),
        devices=asked.workers,
        per_host=per_host,
        machine=replace(whole, host_bytes=whole.host_bytes / per_host, host_update=whole.host_update / per_host),
        sequences=round(tokens / sequence),
        link=between.way_rate(0, 1) / 8,
        near=(between if near is None else near).way_rate(0, 1) / 8,
    )
    return job, name
