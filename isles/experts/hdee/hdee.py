"""HDEE, the Heterogeneous Domain Expert Ensemble (arXiv 2502.19385), on Branch-Train-Merge (arXiv 2208.03306): the
plan.

seed       one model of each size is trained on a mixture of the domains branch     each expert starts from the seed of
its size; one expert a difficulty: easy, medium, difficult iterate    iteration r continues every expert on the r-th
domain of its difficulty: from its own weights, or (BTM) from
           the average of the forest's experts, by their posterior on that domain
serve      the forest of three mixes its next-token distributions by a posterior over domains (`mixture`)

    variant      sizes (ffn)             steps
    m-ho-i-ho    medium for all          the middle for all      the baseline, and the budget of all
    m-ho-i-he    medium for all          few, middle, many
    m-he-i-ho    small, medium, large    the middle for all
    m-he-i-he    small, medium, large    few, middle, many; the outer two scaled by one factor, so that the budget holds

Baselines: "random", three experts of the medium size that train on random thirds of the mixture, which should be worth
little more than one of them; "dense", one medium model that trains on the mixture for the steps of all three.

Deviations from the authors' code: lengths chain through all iterations and each run has a schedule of its own length
(there all chain from one step and share one horizon); weights are float32; the cached prior is estimated on validation
text and not on what is evaluated; the seed's corpus is a mixture of the trained domains unless `seed_path` names
another. The medium expert is the same run in all variants, by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from isles.base.errors import demand, unknown_name
from isles.experts.domains import TRAINED, Difficulty, Domain, of_difficulty
from isles.experts.jobs import ExpertJob, configured
from isles.experts.meters import TOLERANCE, ExpertTraffic, Share, bytes_of, check_budget
from isles.models import Shape, flops_per_token, parameters
from isles.training.config.sections import Config

Branch = Literal["own", "average"]
Baseline = Literal["random", "dense"]
MIXTURE = "mixture"  # the folder of the text of all trained domains
VARIANTS = ("m-ho-i-ho", "m-ho-i-he", "m-he-i-ho", "m-he-i-he")
Three = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class HdeeConfig:
    """Settings of `hdee`."""

    variants: tuple[str, ...] = VARIANTS
    """Which ensembles to build."""
    seeds: tuple[int, ...] = (0,)
    """A whole set of runs for each; tables show means."""
    iterations: int = 1
    """Domains that each expert is trained on, one after another."""
    branch: Branch = "own"
    """What an expert of the second iteration and later starts from, its "own" weights or the "average" of its forest's
    experts.
    """
    baselines: tuple[Baseline, ...] = get_args(Baseline)
    """What to train beside, "random" and "dense" (see the module)."""
    seed_steps: int = 20_000
    """Inner steps of each seed."""
    seed_path: str = ""
    """Text of the seeds; "" is a mixture of the trained domains."""
    steps: Three = (300, 400, 500)
    """Inner steps of the easy, medium and difficult expert with heterogeneous steps; the middle one is every expert's
    with homogeneous ones.
    """
    ffn: Three = (2304, 3072, 3840)
    """Width of the gated MLP of a small, medium and large model."""
    lr: float = 6e-5
    """Peak learning rate of the experts' runs; that of the seeds stands in [inner]."""
    warmup_steps: int = 50
    """Warm-up of the experts' runs; that of the seeds stands in [inner]."""
    tolerance: float = TOLERANCE
    """By how much a variant's training may miss the budget of three medium experts, as a share."""
    characters: int = 600_000
    """Characters of each default domain."""
    sequences: int = 256
    """Sequences of each domain that are evaluated, and as many that give the cached prior (at most 100 of them)."""
    prefix: int = 32
    """Tokens from which the ridge gate chooses an expert."""

    def __post_init__(self) -> None:
        for name in self.variants:
            if name not in VARIANTS:
                raise ValueError(unknown_name("variant", name, VARIANTS))
        for key in ("variants", "seeds", "baselines"):
            values = getattr(self, key)
            if len(set(values)) < len(values) or not (values or key == "baselines"):
                raise ValueError(f"{key} = {list(values)}: name each one once, and at least one")
        demand(self, "iterations seed_steps characters sequences prefix", lambda x: x >= 1, "choose 1 or more")
        for key in ("steps", "ffn"):
            values = getattr(self, key)
            if min(values) < 1 or list(values) != sorted(values):
                raise ValueError(f"{key} = {list(values)}: three numbers of at least 1, the smallest first")
        if self.branch == "average" and self.iterations < 2:
            raise ValueError('branch = "average" is of the second iteration: raise hdee.iterations, or leave it out')
        unequal = [name for name in self.variants if name.startswith("m-he")]
        if self.branch == "average" and unequal:
            raise ValueError(
                f'branch = "average" needs experts of one size: leave {" and ".join(unequal)} out of hdee.variants'
            )
        if min(self.seeds) < 0:
            raise ValueError(f"seeds = {list(self.seeds)}: choose 0 or more")
        if not 0 <= self.tolerance < 1:
            raise ValueError(f"tolerance = {self.tolerance}: choose a share in [0, 1), such as {TOLERANCE}")


@dataclass(frozen=True, kw_only=True)
class RunGroup:
    """One variant. ffn, steps: by difficulty. ratio: its training FLOPs over three medium experts'."""

    variant: str
    ffn: Three
    steps: Three
    ratio: float


def run_group(own: HdeeConfig, base: Config, variant: str) -> RunGroup:
    """The sizes and steps of a variant. ValueError where its budget does not balance, or [model] says another size."""
    if base.model.ffn not in (None, own.ffn[1]):
        raise ValueError(
            f"model.ffn = {base.model.ffn}: the medium model's width is hdee.ffn's second, {own.ffn[1]}; make them "
            "equal, or take model.ffn out"
        )
    sizes, lengths = variant.split("-i-")
    ffn = own.ffn if sizes == "m-he" else (own.ffn[1],) * 3
    steps = own.steps if lengths == "he" else (own.steps[1],) * 3
    if variant == "m-he-i-he":
        costs = [float(flops_per_token(_shape(base, f))) * t for f, t in zip(own.ffn, steps, strict=True)]
        few = max(1, round(steps[0] * 2 * costs[1] / (costs[0] + costs[2])))
        left = 2 * costs[1] - costs[0] / steps[0] * few  # so that one rounding makes up for the other
        steps = (few, steps[1], max(1, round(left / costs[2] * steps[2])))
    shares: dict[str, Share] = {d: Share(_shape(base, f), t) for d, f, t in zip(TRAINED, ffn, steps, strict=True)}
    ratio = check_budget(variant, shares, Share(_shape(base, own.ffn[1]), own.steps[1]), own.tolerance)
    return RunGroup(variant=variant, ffn=ffn, steps=steps, ratio=ratio)


def traffic(own: HdeeConfig, base: Config) -> ExpertTraffic:
    """Of one seed."""
    shapes = [_shape(base, ffn) for ffn in own.ffn]
    weights = [4 * parameters(shape) for shape in shapes]
    return bytes_of(weights, weights, shapes[0].vocab, serving=len(TRAINED))


def _shape(base: Config, ffn: int) -> Shape:
    if base.model.own is not None:
        raise ValueError(f"model.{base.model.own}: HDEE makes sizes of Isles' own decoder by its ffn; take it out")
    return replace(base.model, ffn=ffn).shape()


@dataclass(frozen=True, kw_only=True)
class HdeePlan:
    """All jobs of one seed, in an order in which each finds what it starts from. forests: by variant, the name of the
    expert of each difficulty after each iteration. random, dense: names of the baselines; empty where left out.
    """

    jobs: tuple[ExpertJob, ...]
    seeds: dict[int, str]
    forests: dict[str, list[tuple[str, ...]]]
    random: tuple[str, ...]
    dense: str


def plan(own: HdeeConfig, base: Config, domains: list[Domain], seed: int, folder: Path) -> HdeePlan:
    """The runs of one seed below `folder`; shared runs come once. ValueError: a budget that does not balance, or too
    few domains of a difficulty.
    """
    groups = [run_group(own, base, variant) for variant in own.variants]
    lessons = {difficulty: of_difficulty(domains, difficulty) for difficulty in TRAINED}
    for difficulty, found in lessons.items():
        if len(found) < own.iterations:
            raise ValueError(
                f'hdee.iterations = {own.iterations} needs as many domains of difficulty "{difficulty}", there are '
                f"{len(found)}: add some as [domains.NAME], or lower it"
            )
    planner = _Planner(own, base, seed, folder)
    seeds = {ffn: planner.seed(ffn) for ffn in dict.fromkeys([own.ffn[1], *(ffn for one in groups for ffn in one.ffn)])}
    forests = {one.variant: planner.forests(one, lessons) for one in groups}
    steps = own.steps[1] * own.iterations
    random = [planner.baseline("random", f"splits/{index}", steps, f"-{index}") for index in range(len(TRAINED))]
    dense = planner.baseline("dense", MIXTURE, steps * len(TRAINED))
    return HdeePlan(
        jobs=tuple(planner.jobs.values()), seeds=seeds, forests=forests, random=tuple(filter(None, random)), dense=dense
    )


class _Planner:
    """Gathers the jobs of one seed, by name."""

    def __init__(self, own: HdeeConfig, base: Config, seed: int, folder: Path) -> None:
        self.own, self.base, self.run, self.folder = own, base, {"seed": seed}, folder
        self.jobs: dict[str, ExpertJob] = {}

    def seed(self, ffn: int) -> str:
        """The seed of one size; its name."""
        path = self.own.seed_path or str(self.folder / MIXTURE)
        config = configured(self.base, steps=self.own.seed_steps, path=path, model={"ffn": ffn}, run=self.run)
        return self._add(ExpertJob(name=f"seed-f{ffn}", config=config, role="seed"))

    def forests(self, one: RunGroup, lessons: Mapping[Difficulty, list[Domain]]) -> list[tuple[str, ...]]:
        """The experts of a variant: their names after each iteration, in the order of their difficulty."""
        made: list[tuple[str, ...]] = []
        before = tuple(f"seed-f{ffn}" for ffn in one.ffn)
        for iteration in range(self.own.iterations):
            parents = before if iteration and self.own.branch == "average" else ()
            # An average depends on the whole forest, so its expert is of that variant alone.
            variant = f"{one.variant}-" if parents else ""
            names = []
            for difficulty, ffn, steps, start in zip(TRAINED, one.ffn, one.steps, before, strict=True):
                name = f"{variant}{difficulty}-f{ffn}-t{steps}-r{iteration + 1}"
                lesson, *earlier = reversed(lessons[difficulty][: iteration + 1])
                config = self._branched(lesson.path, ffn, steps, f"{name}-start" if parents else start)
                history = tuple(domain.name for domain in [*reversed(earlier), lesson])
                names.append(
                    self._add(ExpertJob(name=name, config=config, role="expert", domains=history, parents=parents))
                )
            before = tuple(names)
            made.append(before)
        return made

    def baseline(self, role: Baseline, text: str, steps: int, suffix: str = "") -> str:
        """A medium model that branches from its seed on a text below the folder; "" where it is not wanted."""
        if role not in self.own.baselines:
            return ""
        ffn = self.own.ffn[1]
        config = self._branched(str(self.folder / text), ffn, steps, f"seed-f{ffn}")
        return self._add(ExpertJob(name=f"{role}{suffix}-f{ffn}-t{steps}", config=config, role=role))

    def _branched(self, path: str, ffn: int, steps: int, start: str) -> Config:
        """A run on the text of `path` that begins with the weights of `start`, with the experts' rate."""
        inner = {"lr": self.own.lr, "warmup_steps": self.own.warmup_steps}
        run = {**self.run, "start": str(self.folder / start)}
        return configured(self.base, steps=steps, path=path, model={"ffn": ffn}, inner=inner, run=run)

    def _add(self, job: ExpertJob) -> str:
        self.jobs.setdefault(job.name, job)
        return job.name
