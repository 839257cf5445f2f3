"""Which configurations workers may come and go in, and what the lighthouse needs to know of one. Loads no torch but for
a method or a model of one's own.
"""

from __future__ import annotations

import warnings
from typing import Any, cast

from isles.base.tables import changed
from isles.membership import data_ledger
from isles.membership.effects import Rules
from isles.membership.messages import View
from isles.models.model_limits import state_bytes
from isles.replicas.config import WeightedConfig
from isles.training.config.conflicts import refuse_conflicts
from isles.training.config.reading import Tables, ending, resolve, tokens_a_step
from isles.training.config.sections import Config
from isles.training.kinds import kind_of

_FAR = 1 << 40
_OURS = {"on_peer_failure": "solo", "on_broken": "leave out"}
"""What such runs choose where the configuration does not."""


def elastic(tables: Tables) -> Config:
    """The configuration of these tables for workers that come and go: they go on without whoever is lost.

    ValueError, with the key and the mend, where it cannot be one.
    """
    config = resolve(tables)
    if kind_of(config.pipeline).has_peers:
        return among_peers(config)
    provided = tables.get("replicas", {})
    if provided.get("on_peer_failure") == "raise":  # as `isles config` prints it
        warnings.warn(
            'replicas.on_peer_failure = "raise": a lost worker ends no other one here, so it is "solo"', stacklevel=2
        )
        provided = {key: value for key, value in provided.items() if key != "on_peer_failure"}
    return in_rounds(_as_ours(config, {key: value for key, value in _OURS.items() if key not in provided}))


def going_on(config: Config) -> Config:
    """`config` for workers that come and go on the virtual clock; they go on without whoever is lost. ValueError as
    `in_rounds`.
    """
    return in_rounds(_as_ours(config, {"on_peer_failure": "solo"}), simulated=True)


def _as_ours(config: Config, ours: dict[str, str]) -> Config:
    """With those of the settings that its method has."""
    return changed(config, {f"replicas.{key}": value for key, value in ours.items() if hasattr(config.replicas, key)})


def in_rounds(config: Config, *, simulated: bool = False) -> Config:
    """`config`, whose end is one of a round where it is one of tokens. ValueError, with the key and the mend, where its
    workers cannot come and go.
    """
    if hasattr(config.replicas, "sync_every"):
        config = ending(config, sync_every(config))
    refuse_conflicts(config, "workers that come and go", *(() if simulated else ("a lighthouse",)))
    if not simulated:
        _refuse_full(config, config.replicas_in_all)
    if config.run.steps % sync_every(config):
        raise ValueError(
            f"run.steps = {config.run.steps}: where workers come and go a run ends with a round: choose a multiple of "
            f"replicas.sync_every = {sync_every(config)}"
        )
    return config


def among_peers(config: Config) -> Config:
    """`config`, for peers that join a lighthouse. ValueError, with the key and the mend, where they cannot."""
    kind = kind_of(config.pipeline)
    if not kind.has_peers:
        mend = "its workers do not come and go yet: use isles train --nodes"
        if config.pipeline.stages == 1:
            mend = "its workers hold whole replicas: join it with isles join"
        raise ValueError(f'pipeline.routing = "{config.pipeline.routing}": {mend}')
    refuse_conflicts(config, *kind.situations)
    _refuse_full(config, config.world.workers)
    return config


def _refuse_full(config: Config, founders: int) -> None:
    """ValueError where the first round waits for more than may be there."""
    if (most := config.world.elastic.max_members) < founders:
        raise ValueError(
            f"world.elastic.max_members = {most}: the first round waits for {founders}; choose as many or more, or "
            "fewer world.workers (--founders)"
        )


def goes_on(config: Config) -> bool:
    """Whether its method does its rounds without whoever is lost, with what such runs choose."""
    try:
        refuse_conflicts(_as_ours(config, _OURS), "workers that come and go")
    except ValueError:
        return False
    return True


def lands_together(config: Config) -> bool:
    """Whether all workers land the same mean, as in DiLoCo; not so with methods of pairs or groups, as NoLoCo."""
    return hasattr(config.replicas, "mixing") or not hasattr(config.replicas, "group_size")


def is_quorum(config: Config) -> bool:
    """Whether a mean is taken of those who have delivered in time (`replicas.on_late = "quorum"`)."""
    return isinstance(config.replicas, WeightedConfig) and config.replicas.on_late == "quorum"


def sync_every(config: Config) -> int:
    """Inner steps per round."""
    return cast(Any, config.replicas).sync_every


def last_round(config: Config, view: View | None) -> int:
    """The number of the run's last round, as it is known with the newest view; the first is 1."""
    if not config.run.tokens:
        return config.run.steps // sync_every(config)
    return _FAR if view is None else data_ledger.last_round(view, batches_in_all(config))


def batches_in_all(config: Config) -> int:
    """Batches of one worker and inner step after which a run of `run.tokens` ends."""
    return -(-config.run.tokens // tokens_a_step(config, 1))


def rules(config: Config) -> Rules:
    """The rules that the lighthouse of `config` decides by."""
    weights = _first_bytes(config)
    if kind_of(config.pipeline).has_peers:  # a step is a round
        most, steps = config.world.elastic.max_members, config.run.steps
        return Rules(founders=config.world.workers, sync_every=1, last=steps, most=most, weights=weights)
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
        evaluates=config.world.eval_deadline,
    )


def _first_bytes(config: Config) -> int:
    """Bytes of the model that the run begins with; 0, and a warning, where it cannot be made here."""
    try:
        return state_bytes(config.model)
    except (ValueError, OSError) as error:
        warnings.warn(f"what is fetched has no size limit: the model cannot be built here ({error})", stacklevel=2)
        return 0
