"""Which configurations workers may come and go in, and what the lighthouse needs to know of one. Loads no torch but for
a method or a model of one's own.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any, cast

from isles.comm.elastic import cells
from isles.comm.elastic.orders import Rules
from isles.comm.view import View
from isles.models.model_limits import state_bytes
from isles.replicas import METHODS, method
from isles.replicas.loop.config import OuterConfig, WeightedConfig
from isles.training.config.reading import Tables, resolve
from isles.training.config.sections import Config
from isles.training.config.tokens import ending, tokens_a_step
from isles.training.growing import refuse_full, refuse_idle, refuse_unsupported
from isles.training.swarmed.terms import among_peers, peer_rules

_FAR = 1 << 40
PEERS = ("swarm", "ravnest")
"""Routings whose workers are peers that agree among themselves."""
_TAKEN = "noloco and diloco are"
_AT_ONCE = {"delay": "none", "outer_delay": 0, "overlap_steps": 0, "fragments": "whole"}
"""Settings with which all that is sent lands at once."""
_OURS = {"on_peer_failure": "solo", "on_broken": "leave out"}
"""What such runs choose where the configuration does not."""


def elastic(tables: Tables) -> Config:
    """The configuration of these tables for workers that come and go: they go on without whoever is lost.

    ValueError, with the key and the mend, where it cannot be one.
    """
    config = resolve(tables)
    if config.pipeline.routing in PEERS:
        return among_peers(config)
    ours = {key: value for key, value in _OURS.items() if hasattr(config.replicas, key)}
    given = tables.get("replicas", {})
    if given.get("on_peer_failure") == "raise":  # as `isles config` prints it
        warnings.warn(
            'replicas.on_peer_failure = "raise": whoever is lost ends nobody here, so it is "solo"', stacklevel=2
        )
        given = {key: value for key, value in given.items() if key != "on_peer_failure"}
    ours = {key: value for key, value in ours.items() if key not in given}
    return in_rounds(replace(config, replicas=replace(config.replicas, **ours)))


def going_on(config: Config) -> Config:
    """`config` for workers that come and go on the virtual clock; they go on without whoever is lost. ValueError as
    `check`.
    """
    key = "on_peer_failure"
    if hasattr(config.replicas, key):
        config = replace(config, replicas=replace(config.replicas, **{key: "solo"}))
    return in_rounds(config, simulated=True)


def in_rounds(config: Config, *, simulated: bool = False) -> Config:
    """`config`, whose end is one of a round where it is one of tokens. ValueError as `check`."""
    if hasattr(config.replicas, "sync_every"):
        config = ending(config, sync_every(config))
    check(config, simulated=simulated)
    return config


def check(config: Config, *, simulated: bool = False) -> None:
    """ValueError, with the key and the mend, where workers of `config` cannot come and go."""
    if config.pipeline.routing in PEERS and not simulated:
        routing = config.pipeline.routing
        raise ValueError(f'pipeline.routing = "{routing}": its workers serve stages: join it with isles swarm peer')
    _check_method(config)
    _check_world(config, simulated=simulated)
    if config.model.autocast == "fp16":
        raise ValueError('model.autocast = "fp16" is not there yet where workers come and go: choose "bf16" or "none"')
    keys = ("memory.method", "memory.vectors", "run.loggers", "run.start", "data.split", "data.batch_mode")
    refuse_unsupported(config, "workers", *keys)
    refuse_idle(config, "workers", "run.keep_checkpoints")
    if not simulated:
        refuse_full(config.world, config.replicas_in_all)
    waits = ("world.pipeline_deadline", *(() if config.world.inner > 1 else ("world.join_deadline",)))
    refuse_idle(config, "workers", *waits)
    if config.run.steps % sync_every(config):
        raise ValueError(
            f"run.steps = {config.run.steps}: where workers come and go a run ends with a round: choose a multiple of "
            f"replicas.sync_every = {sync_every(config)}"
        )


def goes_on(config: Config) -> bool:
    """Whether its method does its rounds without whoever is lost, with what such runs choose."""
    ours = {key: value for key, value in _OURS.items() if hasattr(config.replicas, key)}
    try:
        _check_method(replace(config, replicas=replace(config.replicas, **ours)))
    except ValueError:
        return False
    return True


def _check_method(config: Config) -> None:
    """The method, and its settings: rounds that can be done without whoever is lost, and end with nothing in flight."""
    name, replicas = config.method, config.replicas
    goes_on = isinstance(replicas, OuterConfig) if name in METHODS else method(name).follows_roster
    if not goes_on:
        raise ValueError(
            f"replicas.method = {name!r}: it exchanges in every step and needs everybody, so workers cannot come and "
            f"go: use isles train --nodes, or a method that exchanges now and then ({_TAKEN} some)"
        )
    for key, value in _AT_ONCE.items():
        given = getattr(replicas, key, value)
        if given not in (value, None):
            raise ValueError(
                f"replicas.{key} = {given!r}: a joiner takes a state right after a landing, when nothing is under way, "
                f"and here something always is; choose {value!r}, or use isles train --nodes"
            )
    if getattr(replicas, "every_step_until", 0):
        raise ValueError(
            "replicas.every_step_until: where workers come and go all rounds are of sync_every steps; set it to 0"
        )
    mixing = getattr(replicas, "mixing", "all")
    if mixing != "all":
        raise ValueError(
            f"replicas.mixing = {mixing!r}: such a round cannot be done without a lost worker; choose "
            '"all", or the method noloco'
        )
    if getattr(replicas, "on_peer_failure", "solo") != "solo":
        raise ValueError(
            'replicas.on_peer_failure = "raise": where workers come and go a lost one must not end the others: leave '
            "it out"
        )


def _check_world(config: Config, *, simulated: bool) -> None:
    """What a worker is, and where it runs."""
    world = config.world
    if config.pipeline.stages > 1:
        raise ValueError(
            "pipeline.stages: where workers come and go each is a whole replica; take it out, or use isles train "
            "--nodes"
        )
    if world.inner > 1 and simulated:
        raise ValueError(
            f"world.inner = {world.inner}: islands do not come and go on the virtual clock: take it out, or use isles "
            "lighthouse"
        )
    if world.inner > 1 and is_quorum(config):
        raise ValueError(
            f'world.inner = {world.inner}: islands come and go with replicas.on_late = "wait": choose that, or take '
            "world.inner out"
        )
    refuse_idle(config, "workers", "world.silence")
    if world.is_simulated and not simulated:
        raise ValueError(
            'world.backend = "virtual": real workers join a lighthouse; take it out, or use isles simulate --churn'
        )


def lands_together(config: Config) -> bool:
    """Whether all workers land the same mean, as in DiLoCo; not so with methods of pairs or groups, as NoLoCo."""
    return hasattr(config.replicas, "mixing") or not hasattr(config.replicas, "group_size")


def is_quorum(config: Config) -> bool:
    """Whether a mean is taken of those who have delivered in time (`replicas.on_late = "quorum"`)."""
    return isinstance(config.replicas, WeightedConfig) and config.replicas.on_late == "quorum"


def sync_every(config: Config) -> int:
    """Inner steps a round."""
    return cast(Any, config.replicas).sync_every


def last_round(config: Config, view: View | None) -> int:
    """The number of the run's last round, as it is known with the newest view; the first is 1."""
    if not config.run.tokens:
        return config.run.steps // sync_every(config)
    return _FAR if view is None else cells.last_round(view, batches_in_all(config))


def batches_in_all(config: Config) -> int:
    """Batches of one worker and inner step after which a run of `run.tokens` ends."""
    return -(-config.run.tokens // tokens_a_step(config, 1))


def rules(config: Config) -> Rules:
    """The rules that the lighthouse of `config` decides by."""
    weights = _first_bytes(config)
    if config.pipeline.routing in PEERS:
        return replace(peer_rules(config), weights=weights)
    return Rules(
        founders=config.replicas_in_all,
        sync_every=sync_every(config),
        agrees=lands_together(config),
        last=None if config.run.tokens else last_round(config, None),
        most=config.world.elastic.max_members,
        batches=batches_in_all(config) if config.run.tokens else None,
        quorum=cast(Any, config.replicas).quorum if is_quorum(config) else 0.0,
        weights=weights,
        waits=config.world.outer_deadline,
        judges=config.world.eval_deadline,
    )


def _first_bytes(config: Config) -> int:
    """Bytes of the model that the run begins with; 0, and a warning, where it cannot be made here."""
    try:
        return state_bytes(config.model)
    except (ValueError, OSError) as error:
        warnings.warn(f"what is fetched has no size limit: the model cannot be built here ({error})", stacklevel=2)
        return 0
