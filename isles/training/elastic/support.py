"""Which configurations workers may join and leave, and the lighthouse's rules of one. Loads no torch, except for a
user's own method or model.
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
"""Defaults of such runs."""


def elastic(tables: Tables) -> Config:
    """The configuration of these tables for workers that join and leave: they go on without lost ones.

    ValueError, with the key and the remedy, if that is not possible.
    """
    config = resolve(tables)
    if kind_of(config.pipeline).has_peers:
        return among_peers(config)
    provided = tables.get("replicas", {})
    if provided.get("on_peer_failure") == "raise":  # as `isles config` prints it
        warnings.warn(
            'replicas.on_peer_failure = "raise": a lost worker does not end an elastic run, so it is "solo"',
            stacklevel=2,
        )
        provided = {key: value for key, value in provided.items() if key != "on_peer_failure"}
    return in_rounds(_as_ours(config, {key: value for key, value in _OURS.items() if key not in provided}))


def going_on(config: Config) -> Config:
    """`config` for workers that join and leave on the virtual clock, and go on without lost ones. ValueError as
    `in_rounds`.
    """
    return in_rounds(_as_ours(config, {"on_peer_failure": "solo"}), simulated=True)


def _as_ours(config: Config, ours: dict[str, str]) -> Config:
    """`config` with those of the settings `ours` that its method has."""
    return changed(config, {f"replicas.{key}": value for key, value in ours.items() if hasattr(config.replicas, key)})


def in_rounds(config: Config, *, simulated: bool = False) -> Config:
    """`config`; with run.tokens its end is moved to the end of a round. ValueError, with the key and the remedy, if its
    workers cannot join and leave.
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
    """`config`, for peers that join a lighthouse. ValueError, with the key and the remedy, if they cannot."""
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
    """ValueError if the first round waits for more members than are allowed."""
    if (most := config.world.elastic.max_members) < founders:
        raise ValueError(
            f"world.elastic.max_members = {most}: the first round waits for {founders}; choose as many or more, or "
            "fewer world.workers (--founders)"
        )


def goes_on(config: Config) -> bool:
    """Whether its method can go on without lost workers, with the defaults of such runs."""
    try:
        refuse_conflicts(_as_ours(config, _OURS), "workers that come and go")
    except ValueError:
        return False
    return True


def lands_together(config: Config) -> bool:
    """Whether all workers land the same mean, as in DiLoCo. Methods of pairs or groups, such as NoLoCo, have the
    setting `group_size` and no `mixing`.
    """
    return hasattr(config.replicas, "mixing") or not hasattr(config.replicas, "group_size")


def final_rule(config: Config) -> dict[str, Any]:
    """How the members' models become the run's, as arguments of `lighthouse.mean.candidates`."""
    robust = getattr(config.replicas, "robust", "none")
    return {"alike": lands_together(config), "ratio": config.world.trust_ratio, "robust": robust}


def is_quorum(config: Config) -> bool:
    """Whether means are of the shares that arrive in time (`replicas.on_late = "quorum"`)."""
    return isinstance(config.replicas, WeightedConfig) and config.replicas.on_late == "quorum"


def sync_every(config: Config) -> int:
    """Inner steps per round."""
    return cast(Any, config.replicas).sync_every


def last_round(config: Config, view: View | None) -> int:
    """The number of the run's last round, by the newest view; the first is 1."""
    if not config.run.tokens:
        return config.run.steps // sync_every(config)
    return _FAR if view is None else data_ledger.last_round(view, batches_in_all(config))


def batches_in_all(config: Config) -> int:
    """Batches of one worker and inner step after which a run of `run.tokens` ends."""
    return -(-config.run.tokens // tokens_a_step(config, 1))


def rules(config: Config) -> Rules:
    """The rules of the lighthouse of `config`."""
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
    """Bytes of the run's initial model; 0, with a warning, if it cannot be built here."""
    try:
        return state_bytes(config.model)
    except (ValueError, OSError) as error:
        warnings.warn(f"what is fetched has no size limit: the model cannot be built here ({error})", stacklevel=2)
        return 0
