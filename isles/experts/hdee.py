"""HDEE, the Heterogeneous Domain Expert Ensemble (arXiv 2502.19385), on Branch-Train-Merge (arXiv 2208.03306): the
plan.

seed       one model of each size is trained on a mixture of the domains
branch     each expert starts from the seed of its size; one expert a difficulty: easy, medium, difficult
iterate    iteration r continues every expert, from its own weights, on the r-th domain of its difficulty
serve      the forest of three mixes its next-token distributions by a posterior over domains (`mixture`)

    variant      sizes (ffn)             steps
    m-ho-i-ho    medium for all          the middle for all      the baseline, and the budget of all
    m-ho-i-he    medium for all          few, middle, many
    m-he-i-ho    small, medium, large    the middle for all
    m-he-i-he    small, medium, large    few, middle, many; the outer two scaled by one factor, so that the budget holds

Deviations from the authors' code: lengths chain through all iterations and each run has a schedule of its own length
(there all chain from one step and share one horizon); weights are float32; the cached prior is estimated on validation
text and not on what is judged; the seed's corpus is a mixture of the trained domains unless `seed_path` names another.
The medium expert is the same run in all variants, by its name.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from isles.errors import unknown_name
from isles.experts.domains import TRAINED, Domain, of_difficulty
from isles.experts.jobs import Job, configured
from isles.experts.meters import TOLERANCE, Share, check_budget
from isles.models import Shape, flops_per_token
from isles.training.config import Config

VARIANTS = ("m-ho-i-ho", "m-ho-i-he", "m-he-i-ho", "m-he-i-he")
Three = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class HdeeConfig:
    """variants: which ensembles to build. seeds: one whole set of runs each; tables show means. iterations: domains
    that each expert is trained on, one after another. seed_steps: inner steps of each seed. seed_path: text of the
    seeds; "" is a mixture of the trained domains. steps: of the easy, medium and difficult expert with heterogeneous
    steps; the middle one is every expert's with homogeneous ones. ffn: width of the gated MLP of a small, medium and
    large model. lr, warmup_steps: of the experts' runs; those of the seeds stand in [inner]. tolerance: by how much a
    variant's training may miss the budget of three medium experts, as a share. characters: of each default domain.
    sequences: so many of each domain are judged, and so many give the cached prior (at most 100 of them). prefix:
    tokens from which the ridge gate chooses an expert.
    """

    variants: tuple[str, ...] = VARIANTS
    seeds: tuple[int, ...] = (0,)
    iterations: int = 1
    seed_steps: int = 20_000
    seed_path: str = ""
    steps: Three = (300, 400, 500)
    ffn: Three = (2304, 3072, 3840)
    lr: float = 6e-5
    warmup_steps: int = 50
    tolerance: float = TOLERANCE
    characters: int = 600_000
    sequences: int = 256
    prefix: int = 32

    def __post_init__(self) -> None:
        for name in self.variants:
            if name not in VARIANTS:
                raise ValueError(unknown_name("variant", name, VARIANTS))
        for key in ("variants", "seeds"):
            values = getattr(self, key)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{key} = {list(values)}: name each one once, and at least one")
        for key in ("iterations", "seed_steps", "characters", "sequences", "prefix"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} = {getattr(self, key)}: choose 1 or more")
        for key in ("steps", "ffn"):
            values = getattr(self, key)
            if min(values) < 1 or list(values) != sorted(values):
                raise ValueError(f"{key} = {list(values)}: three numbers of at least 1, the smallest first")
        if min(self.seeds) < 0:
            raise ValueError(f"seeds = {list(self.seeds)}: choose 0 or more")
        if not 0 <= self.tolerance < 1:
            raise ValueError(f"tolerance = {self.tolerance}: choose a share in [0, 1), such as {TOLERANCE}")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One variant. ffn, steps: by difficulty. ratio: its training FLOPs over three medium experts'."""

    variant: str
    ffn: Three
    steps: Three
    ratio: float


def cell(own: HdeeConfig, base: Config, variant: str) -> Cell:
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
        costs = [flops * t for flops, t in zip(_flops(own, base), steps, strict=True)]
        few = max(1, round(steps[0] * 2 * costs[1] / (costs[0] + costs[2])))
        left = 2 * costs[1] - costs[0] / steps[0] * few  # so that one rounding makes up for the other
        steps = (few, steps[1], max(1, round(left / costs[2] * steps[2])))
    shares: dict[str, Share] = {d: Share(_shape(base, f), t) for d, f, t in zip(TRAINED, ffn, steps, strict=True)}
    ratio = check_budget(variant, shares, Share(_shape(base, own.ffn[1]), own.steps[1]), own.tolerance)
    return Cell(variant=variant, ffn=ffn, steps=steps, ratio=ratio)


def _flops(own: HdeeConfig, base: Config) -> list[float]:
    return [float(flops_per_token(_shape(base, ffn))) for ffn in own.ffn]


def _shape(base: Config, ffn: int) -> Shape:
    if base.model.own is not None:
        raise ValueError(f"model.{base.model.own}: HDEE makes sizes of Isles' own decoder by its ffn; take it out")
    return replace(base.model, ffn=ffn).shape()


@dataclass(frozen=True, kw_only=True)
class HdeePlan:
    """All jobs of one seed, in an order in which each finds what it starts from. forests: by variant, the name of the
    expert of each difficulty after each iteration.
    """

    jobs: tuple[Job, ...]
    seeds: dict[int, str]
    forests: dict[str, list[tuple[str, str, str]]]


def plan(own: HdeeConfig, base: Config, domains: list[Domain], seed: int, folder: Path, seed_path: str) -> HdeePlan:
    """The runs of one seed below `folder`; shared runs come once. ValueError: a budget that does not balance, or too
    few domains of a difficulty.
    """
    cells = [cell(own, base, variant) for variant in own.variants]
    lessons = {difficulty: of_difficulty(domains, difficulty) for difficulty in TRAINED}
    for difficulty, found in lessons.items():
        if len(found) < own.iterations:
            raise ValueError(
                f'hdee.iterations = {own.iterations} needs as many domains of difficulty "{difficulty}", there are '
                f"{len(found)}: add some as [domains.NAME], or lower it"
            )
    jobs: dict[str, Job] = {}
    seeds = {}
    for ffn in dict.fromkeys([own.ffn[1], *(ffn for one in cells for ffn in one.ffn)]):
        config = configured(base, steps=own.seed_steps, path=seed_path, model={"ffn": ffn}, run={"seed": seed})
        seeds[ffn] = f"seed-f{ffn}"
        jobs[seeds[ffn]] = Job(name=seeds[ffn], config=config, role="seed")
    forests: dict[str, list[tuple[str, str, str]]] = {}
    inner = {"lr": own.lr, "warmup_steps": own.warmup_steps}
    for one in cells:
        forests[one.variant] = []
        before = [seeds[ffn] for ffn in one.ffn]
        for iteration in range(own.iterations):
            for place, difficulty in enumerate(TRAINED):
                ffn, steps = one.ffn[place], one.steps[place]
                name = f"{difficulty}-f{ffn}-t{steps}-r{iteration + 1}"
                domain = lessons[difficulty][iteration]
                start = folder / before[place]
                config = configured(
                    base,
                    steps=steps,
                    path=domain.path,
                    model={"ffn": ffn},
                    inner=inner,
                    run={"seed": seed, "start": str(start)},
                )
                history = tuple(one.name for one in lessons[difficulty][: iteration + 1])
                jobs.setdefault(name, Job(name=name, config=config, role="expert", domains=history))
                before[place] = name
            forests[one.variant].append((before[0], before[1], before[2]))
    return HdeePlan(jobs=tuple(jobs.values()), seeds=seeds, forests=forests)
