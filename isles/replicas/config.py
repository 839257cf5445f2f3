"""What the settings of all methods have in common, and checks that several share; each error is one line that names the
key and what to do. No file of settings loads torch: a run's configuration is read, and checked, without the code of its
method. `isles.replicas.METHODS` names the settings of each.

    gradient/config.py, loop/config.py      what methods of a kind share; the former also all of ddp, fsdp, dct-dp
    methods/config.py                       methods of one file that take over one another's settings
    methods/*/config.py                     others
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from inspect import Parameter, Signature, signature
from typing import Any, ClassVar, Literal, TypeVar, get_args

from isles.base.errors import unknown_name
from isles.base.parts import check_options
from isles.replicas.search_space import Dimension, usual_space

_C = TypeVar("_C")  # a dataclass


def own_config(method: str, kind: type[_C], config: object, options: dict[str, Any]) -> _C:
    """The settings of a method: a `config` of its `kind`, or one made from `options`; not both."""
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    for name in options:
        if name not in known:
            raise ValueError(unknown_name(f"option of {method}", name, [*known, "max_norm"]))
    if config is None:
        return kind(**options)
    if not isinstance(config, kind):
        raise ValueError(f"{method} takes a {kind.__name__}, not a {type(config).__name__}")
    if options:
        raise ValueError(f"give {method} a config or options ({', '.join(options)}), not both")
    return config


def workers(members: Sequence[int]) -> str:
    """Their numbers in words."""
    return f"worker {members[0]}" if len(members) == 1 else f"workers {', '.join(map(str, members))}"


def at_least(key: str, value: float, least: float) -> None:
    """value >= least."""
    if not value >= least:
        raise ValueError(f"{key} = {value}: choose {least} or more")


def positive_rate(outer_lr: float) -> None:
    """0 < outer_lr < infinity."""
    if not 0 < outer_lr < math.inf:
        raise ValueError(f"outer_lr = {outer_lr}: choose a positive rate, such as 0.7")


def momentum_in_range(outer_momentum: float) -> None:
    """0 <= outer_momentum < 1."""
    if not 0 <= outer_momentum < 1:
        raise ValueError(f"outer_momentum = {outer_momentum}: choose 0 <= outer_momentum < 1")


def group_fits(group_size: int, workers: int) -> None:
    """group_size <= workers, or one worker alone."""
    if 1 < workers < group_size:
        raise ValueError(
            f"group_size = {group_size} in a world of {workers}: every round would be done alone; "
            f"choose group_size <= {workers}"
        )


def one_of(key: str, name: str, allowed: Collection[str]) -> None:
    """`name` is one of `allowed`."""
    if name not in allowed:
        raise ValueError(unknown_name(key, name, allowed))


def rounds_for_momentum(rounds: int, momentum: float) -> list[str]:
    """A warning where a run has too few rounds for its outer momentum: below 20 / (1 - momentum)."""
    needed = math.ceil(20 / (1 - momentum) - 1e-9)  # 20 / (1 - 0.9) is a little over 200
    if rounds >= needed or momentum == 0:
        return []
    hint = "lower outer_momentum (0.5 suits short runs) or sync_every" if momentum > 0.5 else "lower sync_every"
    return [f"outer_momentum = {momentum:g} wants {needed} rounds or more, this run has {rounds}: {hint}"]


def eager_rate(outer_lr: float, outer_momentum: float, workers: int) -> list[str]:
    """A warning where an eager reading goes further than its workers did: docs/outer-rate.md."""
    most = 1 - outer_momentum
    if workers <= 2 or outer_lr <= most + 1e-9:
        return []
    return [
        f"outer_lr = {outer_lr:g} with {workers} workers: an eager step is fresh by 1/{workers} only, and goes astray "
        f"above 1 - outer_momentum; choose outer_lr <= {most:.3g}, or streaming-diloco"
    ]


def uneven_fragments(sync_every: int, fragments: int) -> list[str]:
    """A warning where fragments cannot be spread evenly over a round."""
    if sync_every % fragments == 0:
        return []
    even = -(-sync_every // fragments) * fragments
    return [
        f"sync_every = {sync_every} is no multiple of the model's {fragments} fragments, which are then sent at uneven "
        f"steps; {even} would be one"
    ]


def with_options(function: Callable[..., Any], config: type[Any]) -> Signature:
    """Of a method's `__init__`, with the fields of its `config` (a dataclass) in place of **options; without self."""
    own = list(signature(function).parameters.values())[1:-1]
    theirs = [
        Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
        for field in fields(config)
    ]
    return Signature([*own, *theirs])


def refuse_other_run(
    state: dict[str, Any], method: str, config: Any, shapes: list[list[int]], names: list[str]
) -> None:
    """ValueError unless `state` was saved by `method` with these settings around parameters like these."""
    if state["method"] != method:
        raise ValueError(f"the state is of {state['method']}, this is {method}: use the method it was saved with")
    for field in fields(config):
        here, saved = getattr(config, field.name), state["config"].get(field.name)
        if here != saved:
            raise ValueError(f"{field.name} = {here!r}, but the state was saved with {saved!r}: set it back")
    saved = state.get("names", names)  # not in what an island keeps of the method inside
    moved = next((number for number, pair in enumerate(zip(saved, names, strict=False)) if len(set(pair)) > 1), None)
    if moved is not None and (state["shapes"] == shapes or sorted(saved) == sorted(names)):
        raise ValueError(
            f"parameter {moved + 1} of the state is {saved[moved]}, and of the model {names[moved]}: build the same "
            'layers in the same order; if they only have new names, put those into state["names"]'
        )
    if state["shapes"] != shapes:
        raise ValueError("the state is of a model with other parameter shapes: load it into its own model")


def not_finite(broken: Sequence[int], step: int, what: str) -> str:
    """The warning that the shares of `broken`, or of somebody, are of no use. what: what follows for the round."""
    who = workers(broken) if broken else "a worker"
    text = f"what {who} learned up to inner step {step} is not finite: {what}, and its weights go back"
    return f"{text} to the anchor; a lower learning rate, or max_norm, may keep it finite"


OnBroken = Literal["skip", "leave out"]
Feedback = Literal["none", "local", "global"]


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """What every method takes; a method's own config adds its hyper-parameters."""

    @property
    def survives(self) -> bool:
        """True if the workers that are left go on to the end of the run when others fail."""
        return False

    def space(self, steps: int, *, timed: bool) -> list[Dimension]:
        """What `isles tune` tries of a method beside the inner optimizer's; arguments as of `usual_space`."""
        return usual_space(self, steps, timed=timed)


@dataclass(frozen=True, kw_only=True)
class PartsConfig(MethodConfig):
    """What a method takes some of whose parts may be code of your own."""

    own_axes: ClassVar[tuple[str, ...]] = ("codec",)
    """The settings that may name it."""
    options: dict[str, dict[str, Any]] | None = None
    """What parts of your own are called with, a table each: [replicas.options.codec]."""

    def check_own(self) -> None:
        """ValueError for options without code. Imports nothing."""
        check_options(self.options, {axis: getattr(self, axis) for axis in self.own_axes})

    def options_of(self, axis: str) -> Mapping[str, Any]:
        """What the code that an axis names is called with."""
        return (self.options or {}).get(axis, {})


def check_feedback(form: str, decay: float) -> None:
    """ValueError for what is no error feedback."""
    one_of("error_feedback", form, get_args(Feedback))
    if not 0 <= decay <= 1:
        raise ValueError(f"feedback_decay = {decay}: choose 0 to 1, such as 0.95")
    if form == "none" and decay != 1:
        raise ValueError(
            f'feedback_decay = {decay} has no error feedback to act on: set error_feedback = "local", or this to 1'
        )
