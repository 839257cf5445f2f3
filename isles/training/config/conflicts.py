"""Which settings of a run go together: the table conflicts.toml, read by configurations and by `isles methods --legal`.

A rule applies where all its situations hold. Those of `FOLLOW` follow from the configuration; those of
`EXTERNAL_SITUATIONS` are known to whoever asks. Loads no torch, but for methods where a rule asks for their kind.

`check` and `plan_of`: for `pipeline.routing = "skippipe"`, its plan, and whether the configuration can run by it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from isles.base.errors import as_typed
from isles.base.parsing import parse_toml
from isles.base.tables import non_defaults, parse_value
from isles.comm.codecs.kinds import KINDS
from isles.network.links import links as named
from isles.network.routing.plan import PipelinePlan, fingerprint, read_plan
from isles.pipeline.config import PipelineConfig
from isles.replicas import METHODS, method
from isles.replicas.config import OuterConfig
from isles.training.config.sections import Config
from isles.training.kinds import kind_of

EXTERNAL_SITUATIONS = {
    "workers that come and go": "isles lighthouse and join, isles simulate --churn",
    "a lighthouse": "isles lighthouse and join",
    "peers that come and go": "isles lighthouse and swarm peer",
    "clusters that come and go": "isles swarm peer and isles simulate --churn, of Ravnest",
    "--churn": "isles simulate --churn",
    "fixed workers": "isles train",
    "a plan of memory": "memory.method",
    'memory.vectors = "disk"': "with memory.method or without",
}
"""Situations, and where they hold."""


def has_rounds(config: Config) -> bool:
    """Whether its method exchanges in rounds, and can do so without lost workers."""
    if config.method in METHODS:
        return isinstance(config.replicas, OuterConfig)
    return bool(method(config.method).follows_roster)


def _has_equal_replicas(config: Config) -> bool:
    """Whether workers, or those of an island, have the same weights after every step."""
    from isles.replicas.gradient.bucketed import BucketedSync

    return issubclass(method(config.world.inside if config.world.inner > 1 else config.method), BucketedSync)


def _has_robust_mean(config: Config) -> bool:
    """Whether `replicas.robust` acts on the shares of all workers; in pairs and groups it acts on the last model."""
    mixing = getattr(config.replicas, "mixing", "" if hasattr(config.replicas, "group_size") else "all")
    return mixing == "all" and getattr(config.replicas, "robust", "none") != "none"


def _drops_entries(config: Config) -> bool:
    kind = KINDS.get(getattr(config.replicas, "codec", "none").partition(":")[0], KINDS["none"])
    has_low_rank = getattr(config.replicas, "rank", 0) != 0
    return has_low_rank or (kind.biased and not kind.shared_mask)


FOLLOW: dict[str, Callable[[Config], bool]] = {
    "pipeline.stages > 1": lambda config: config.pipeline.stages > 1,
    "pipeline.recovery.stage_loss": lambda config: config.pipeline.recovery.stage_loss > 0,
    'pipeline.routing = "swarm"': lambda config: config.pipeline.routing == "swarm",
    "pipeline.swarm.delay_updates": lambda config: bool(config.pipeline.swarm.delay_updates),
    'pipeline.routing = "ravnest"': lambda config: config.pipeline.routing == "ravnest",
    "peers": lambda config: kind_of(config.pipeline).has_peers,
    "several clusters": lambda config: config.replicas_in_all > 1,
    "a plan of paths": lambda config: bool(config.pipeline.skippipe.plan),
    "diloco": lambda config: config.method == "diloco",
    "noloco": lambda config: config.method == "noloco",
    "a method with rounds": lambda config: config.method != "none",
    "a method of every step": lambda config: not has_rounds(config),
    "a robust mean of all workers": _has_robust_mean,
    "a codec that drops entries": _drops_entries,
    "a method that is an optimizer": lambda config: method(config.method).level == "optimizer",
    "replicas that are kept alike": _has_equal_replicas,
    "replicas with weights of their own": lambda config: not _has_equal_replicas(config),
    "fsdp": lambda config: (config.world.inside if config.world.inner > 1 else config.method) == "fsdp",
    "inner.max_norm": lambda config: config.inner.max_norm > 0,
    "islands": lambda config: config.world.inner > 1,
    "workers alone": lambda config: config.world.inner == 1,
    "the virtual clock": lambda config: config.world.is_simulated,
    "blocks that move": lambda config: config.memory.method != "checkpoint" or config.memory.emulate,
    "memory.disk": lambda config: bool(config.memory.disk),
    "vectors in memory": lambda config: config.memory.vectors != "disk",
    'memory.update = "early"': lambda config: config.memory.update == "early",
}


class Conflict(NamedTuple):
    """where: situations. what: the settings that do not go, as the table has them: `keys`, which must have one of the
    values `goes`, or none of `never`, or their defaults.
    """

    where: tuple[str, ...]
    what: str
    keys: tuple[str, ...]
    goes: tuple[object, ...]
    never: tuple[object, ...]
    because: str
    mend: str

    @property
    def situations(self) -> str:
        """The situations, without those in brackets, which only restrict the rule."""
        return " and ".join(where for where in self.where if not where.startswith("("))

    def refused(self, config: Config, changed: dict[str, Any]) -> str | None:
        """The first of its keys that does not go, with its value. changed: settings that are not at their defaults."""
        for key in self.keys:
            value = _value(config, key)
            if self.goes:
                does_not = value is not None and value not in self.goes
            else:
                does_not = value in self.never or "any" in self.never if self.never else key in changed
            if does_not:
                return f"{key} = {as_typed(value)}"
        return None


@cache
def conflicts() -> Sequence[Conflict]:
    """The table, in its order."""
    tables = parse_toml((files("isles.training.config") / "conflicts.toml").read_text(encoding="utf-8"))
    return [_conflict(tuple(where.split(" & ")), *row) for where, rows in tables.items() for row in rows.items()]


def _conflict(where: tuple[str, ...], what: str, why: str) -> Conflict:
    keys, goes, never = what, "", ""
    if " other than " in what:
        keys, goes = what.split(" other than ")
    elif " = " in what:
        keys, never = what.split(" = ")
    values, others = (tuple(map(parse_value, some.split(", "))) if some else () for some in (goes, never))
    because, _, mend = why.partition("; ")
    usual = f"choose {' or '.join(map(as_typed, values))}" if goes else "leave it out"
    return Conflict(where, what, tuple(keys.split(", ")), values, others, because, mend or usual)


def wanted(*where: str) -> dict[str, object]:
    """{key: value} of settings that can have one value alone in these situations."""
    ones = [rule for rule in conflicts() if rule.where == where and len(rule.goes) == 1]
    return {key: rule.goes[0] for rule in ones for key in rule.keys}


def refuse_conflicts(config: Config, *situations: str) -> None:
    """Refuse settings that do not go together.

    Args:
        config: of the run.
        situations: of `EXTERNAL_SITUATIONS`, those that hold: only rules with one of them apply. Without any: only
            rules of none.

    Raises:
        ValueError: "KEY = VALUE does not go with SITUATIONS: why; remedy", of the first rule that applies.
    """
    changed = dict(non_defaults(config))
    for rule in conflicts():
        needed = EXTERNAL_SITUATIONS.keys() & set(rule.where)
        if bool(needed) != bool(situations) or not needed <= set(situations):
            continue
        others = [where for where in rule.where if where not in EXTERNAL_SITUATIONS]
        refused = rule.refused(config, changed)
        if refused and all(FOLLOW[where.strip("()")](config) for where in others):
            raise ValueError(f"{refused} does not go with {rule.situations}: {rule.because}; {rule.mend}")


def _value(config: Config, key: str) -> Any:
    """None where the method has no such setting."""
    if key == "replicas.method":
        return config.method
    if key == "model.tie_embeddings":  # which a named size may say
        return config.model.own is None and config.model.shape().tie_embeddings
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name, None)
    return value


_STEPS_WAITED = 5
"""Of a plan's steps, before somebody who is silent counts as lost: its last microbatch may come at the step's end."""


def plan_of(pipeline: PipelineConfig) -> PipelinePlan | None:
    """The plan of a run; None where its routing has none. ValueError as `read_plan`."""
    if not pipeline.skippipe.plan:
        return None
    try:
        return read_plan(pipeline.skippipe.plan)
    except ValueError as error:
        raise ValueError(f"pipeline.skippipe.plan = {error}") from None


def longest_wait(plan: PipelinePlan) -> float:
    """Seconds that nodes of a plan wait for each other at least."""
    return _STEPS_WAITED * plan.step_seconds


def check(config: Config) -> int:
    """Workers that read text: the plan's origins. ValueError, one line that names the key, where the plan is for
    something else than the run, or the run cannot keep to any.
    """
    pipeline, world = config.pipeline, config.world
    plan = plan_of(pipeline)
    assert plan is not None
    try:
        plan.refuse(workers=world.workers)
        if world.is_simulated:
            plan.refuse(links=fingerprint(named(world.virtual.links), world.workers))
        if pipeline.cut and len(pipeline.cut) == len(plan.problem.stages) - 1:
            plan.refuse(cuts=pipeline.cut)
    except ValueError as error:
        raise ValueError(f"pipeline.skippipe.plan = {pipeline.skippipe.plan}: {error}") from None
    problem, own = plan.problem, plan.problem.memory * plan.problem.waves
    if len(problem.stages) != pipeline.stages:
        raise ValueError(
            f"pipeline.stages = {pipeline.stages}: the plan has {len(problem.stages)}; set it to that, or plan again"
        )
    if pipeline.microbatches != own:
        raise ValueError(
            f"pipeline.microbatches = {pipeline.microbatches}: the plan sends {own} from each origin in a step (memory "
            f"{problem.memory} x waves {problem.waves}); set it to that"
        )
    return len(problem.origins)
