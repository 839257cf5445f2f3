"""What the settings of all methods have in common, and checks that several share; each error is one line that names the
key and what to do. No file of settings loads torch: a run's configuration is read, and checked, without the code of its
method. `isles.replicas.METHODS` names the settings of each.

    here                   what methods share; of outer methods, too
    gradient/config.py     ddp, fsdp, dct-dp
    methods/config.py      methods that take over one another's settings, and ist
    methods/*/config.py    others

`Dimension`: what of a method's settings is worth a search, in coordinates in which it is easy.

outer step      outer_lr / (1 - outer_momentum), where a constant outer gradient takes the anchor a round: what is
                good of it hardly depends on the momentum
outer_momentum  0 to 0.9
1 - KEY         of a share near 1, on a logarithmic scale: 0.9 is as far from 0.99 as that from 0.999
sync_every      where time counts, as all that only says how much is sent: at equal tokens or steps more costs nothing
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from inspect import Parameter, Signature, signature
from typing import Any, Literal, TypeVar, get_args

from isles.base.errors import unknown_name
from isles.base.parts import check_options
from isles.comm.codecs.kinds import read_form
from isles.comm.collectives.robust_rules import ROBUST, Robust

STEP, MOMENTUM = "replicas.outer_lr / (1 - outer_momentum)", "replicas.outer_momentum"
_RATE, _EVERY = "replicas.outer_lr", "replicas.sync_every"
_WIDE, _LOW, _HIGH, _LEFT = 5.0, 0.2, 3.0, "1 - "


@dataclass(frozen=True, kw_only=True)
class Dimension:
    """A setting, or a coordinate of several: between low and high, on a logarithmic scale if log, in whole numbers if
    whole; or one of choices. start: what the configuration itself has, which is tried first.
    """

    name: str
    start: Any
    low: float = 0.0
    high: float = 0.0
    log: bool = True
    whole: bool = False
    choices: Sequence[Any] = ()

    @classmethod
    def around(cls, name: str, start: float, factor: float, most: float = math.inf, whole: bool = False) -> Dimension:
        """Between start / factor and start x factor, or `most`."""
        low = max(start // factor, 1) if whole else start / factor
        return cls(name=name, start=start, low=low, high=max(min(start * factor, most), start), whole=whole)

    @classmethod
    def below_1(cls, key: str, start: float, factor: float) -> Dimension:
        """What a share leaves of 1."""
        return cls.around(f"{_LEFT}{key}", 1 - start, factor, most=1.0)


def usual_space(config: Any, steps: int, *, timed: bool) -> list[Dimension]:
    """That of a method with an outer rate, an outer momentum, a number of inner steps a round, or some of them. steps:
    of the run. timed: whether what is searched for is the best at equal time.
    """
    found = []
    rate, momentum = getattr(config, "outer_lr", None), getattr(config, "outer_momentum", None)
    if rate is not None and momentum is not None:
        start = rate / (1 - momentum)
        low, high = min(_LOW, start / 2), max(_HIGH, start * 2)
        found.append(Dimension(name=STEP, start=start, low=low, high=high))
        found.append(Dimension(name=MOMENTUM, start=momentum, low=0.0, high=max(0.9, momentum), log=False))
    elif rate is not None:
        found.append(Dimension.around(_RATE, rate, _WIDE))
    if timed and getattr(config, "sync_every", None) is not None:
        found.append(rounds(config, steps))
    return found


def rounds(config: Any, steps: int) -> Dimension:
    """Inner steps a round: four of them in the run, at least."""
    return Dimension.around(_EVERY, config.sync_every, 4, most=steps // 4, whole=True)


def settings_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """{"section.key": value} of a point in such a space; four digits, which can be typed."""
    found = {key: value for key, value in values.items() if key != STEP}
    if STEP in values:
        found[_RATE] = values[STEP] * (1 - values[MOMENTUM])
    found = {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in found.items()}
    return {key.removeprefix(_LEFT): round(1 - x, 12) if _LEFT in key else x for key, x in found.items()}


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

    options: dict[str, dict[str, Any]] | None = None
    """What parts of your own are called with, a table each: [replicas.options.codec]."""

    def check_own(self) -> None:
        """ValueError for options without code. Imports nothing."""
        check_options("replicas", self)

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


Weights = Literal["equal", "samples"]
Fragments = str | tuple[tuple[str, ...], ...]
FirstSync = Literal["full_window", "offset"]
PATTERNS = ("whole", "sequential", "strided")
OnLate = Literal["wait", "quorum"]


@dataclass(frozen=True, kw_only=True)
class OuterConfig(MethodConfig):
    """What every outer method takes."""

    on_broken: OnBroken = "skip"
    """Where a worker's share is not finite: skip, nobody takes that round; leave out, the mean is of the others'."""
    robust: Robust = "none"
    """How the workers' shares become one, against wrong ones below world.trust_ratio: "none", their mean; "clip", no
    share counts for more than the middle one's distance from their median; "trimmed", the mean without a quarter of
    the values at each end; "median". All workers count alike. In pairs and groups: of the last model alone.
    """


@dataclass(frozen=True, kw_only=True)
class WeightedConfig(OuterConfig):
    """What a method takes whose answer is a mean over all workers."""

    weights: Weights = "equal"
    """How much each worker counts in the mean: "equal", or by the "samples" of its share of the text."""
    on_late: OnLate = "wait"
    """Where workers come and go: wait for all; or take the mean of those who have delivered once they are a "quorum",
    by inner steps, while all train on; who is late delivers into the next round.
    """
    quorum: float = 0.75
    """Share of the workers that is one, above 0."""

    def __post_init__(self) -> None:
        one_of("weights", self.weights, get_args(Weights))
        one_of("on_late", self.on_late, get_args(OnLate))
        if not 0 < self.quorum <= 1:
            raise ValueError(f"quorum = {self.quorum}: choose a share of the workers, above 0 and at most 1")
        if self.on_late == "wait" and self.quorum != type(self).quorum:
            raise ValueError(f'quorum = {self.quorum}: acts with on_late = "quorum" alone; set that, or leave it out')
        one_of("robust", self.robust, ROBUST)
        if self.robust != "none" and self.weights == "samples":
            raise ValueError(f'robust = "{self.robust}" counts all workers alike: choose weights = "equal"')
        if self.on_late == "quorum" and self.weights == "samples":
            raise ValueError('on_late = "quorum" counts workers by inner steps: choose weights = "equal"')


@dataclass(frozen=True, kw_only=True)
class CompressedConfig(PartsConfig, WeightedConfig):
    """What a method takes of which a mean of outer gradients travels, in any form."""

    codec: str = "none"
    """Form of the outer gradient on the wire (none, fp16, bf16, int8, int4, fp4, sign, topk:64, powersgd:16, ...), or
    package.module:Class."""
    error_feedback: Feedback = "none"
    """What the codec loses is added to the next round's: "none", "local" (this worker's own loss) or "global" (what
    differs from the mean that came back).
    """
    feedback_decay: float = 1.0
    """Factor on it each round, 0..1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        read_form(self.codec)  # refuses an unknown one
        self.check_own()
        check_feedback(self.error_feedback, self.feedback_decay)


@dataclass(frozen=True, kw_only=True)
class FragmentedConfig(OuterConfig):
    """What a method takes that may cut the model."""

    fragments: Fragments = "whole"
    """How the model is cut: "strided", "sequential", "whole", or lists of parameter names or their beginnings."""
    layers_per_fragment: int | None = None
    """Blocks in each; left out, 3, or half of a shorter model's."""


def check_fragments(
    fragments: Fragments, layers_per_fragment: int | None, first_sync: FirstSync = "full_window"
) -> None:
    """What can be said without a model. ValueError for what fits none."""
    one_of("first_sync", first_sync, get_args(FirstSync))
    if first_sync == "offset" and fragments == "whole":
        raise ValueError('first_sync = "offset" acts on several fragments only: leave it out, or cut the model')
    if isinstance(fragments, str):
        one_of("fragments", fragments, PATTERNS)
    elif not fragments:
        raise ValueError('fragments = []: name the parameters of each, or choose "whole"')
    if layers_per_fragment is not None:
        at_least("layers_per_fragment", layers_per_fragment, 1)
        if fragments not in ("sequential", "strided"):
            raise ValueError(
                f"layers_per_fragment = {layers_per_fragment} acts on sequential and strided fragments only: leave it "
                'out, or choose fragments = "strided"'
            )
