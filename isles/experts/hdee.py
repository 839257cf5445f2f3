"""HDEE, the Heterogeneous Domain Expert Ensemble (arXiv 2502.19385), on Branch-Train-Merge (arXiv 2208.03306): the
plan.

seed       one model of each size is trained on a mixture of the domains
branch     each expert starts from the seed of its size; one expert a difficulty: easy, medium, difficult
iterate    iteration r continues every expert on the r-th domain of its difficulty: from its own weights, or (BTM) from
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

From settings to results: texts, seeds, experts, forests, and the table of perplexities.

OUT/experts.toml             what was asked for
OUT/domains/*.jsonl          the default domains, where none were listed
OUT/seed-0/mixture/          what the seeds train on (a stored corpus), and splits/0 1 2: random thirds of it
OUT/seed-0/seed-f192/ ...    runs: seeds and experts (`jobs`)
OUT/seed-0/forests/*.json    one forest a variant and iteration (`forest`)
OUT/results.json             everything that was measured; means over seeds beside each seed's

Called again with the same settings it goes on where it stopped.

The ridge gate (as in DUME and IR3DE): which expert a text belongs to, by a linear map of its tokens' embeddings.

    A = sum_tokens x x^T,   B[:, j] = sum of x over the tokens of expert j's text;   W = (A + lambda I)^-1 B

with x a token's embedding and a 1; the columns of W are normalised. A text's tokens each vote for the largest entry of
x W, and the expert with most votes answers (equal: the lower number). No training: the sums are taken in one pass, and
an expert comes or goes by adding or subtracting its part. As x depends on the token alone, counts of tokens are enough.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from isles.base.errors import demand, unknown_name
from isles.data.corpus import rows_corpus
from isles.experts import mixture
from isles.experts.domains import (
    TRAINED,
    Difficulty,
    Domain,
    DomainPart,
    DomainText,
    of_difficulty,
    pooled,
    read_domains,
    store_rows,
)
from isles.experts.ensemble import averaged
from isles.experts.evaluation import JOININGS, evaluate
from isles.experts.forest import Forest, ForestMember, Served, score
from isles.experts.jobs import ExpertJob, JobProgress, configured
from isles.experts.meters import TOLERANCE, ExpertTraffic, Share, bytes_of, check_budget
from isles.experts.routing import cached
from isles.experts.system import System
from isles.models import Shape, flops_per_token, parameters
from isles.training.config.sections import Config
from isles.training.records.saved_run import SavedRun, load_saved

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


LAMBDA = 1e-2


class RidgeGate:
    """embeddings: (V, D), of any one model that all agree on (the seed's)."""

    def __init__(self, embeddings: np.ndarray) -> None:
        ones = np.ones((len(embeddings), 1))
        self.features_VF = np.concatenate([embeddings.astype(np.float64), ones], axis=1)
        self.counts: dict[str, np.ndarray] = {}

    def add(self, name: str, tokens: np.ndarray) -> None:
        """An expert, by text that it was trained on: token ids of any shape. ValueError where there are none."""
        if not tokens.size:
            raise ValueError(f"expert {name!r}: no text to know it by; give some")
        self.counts[name] = np.bincount(tokens.ravel(), minlength=len(self.features_VF)).astype(np.float64)

    def weights(self) -> np.ndarray:
        """W (F, E), in the order in which the experts came."""
        counts_VE = np.stack(list(self.counts.values()), axis=1)
        weighted_VF = self.features_VF * counts_VE.sum(1)[:, None]
        gram_FF = self.features_VF.T @ weighted_VF + LAMBDA * np.eye(self.features_VF.shape[1])
        solved_FE = np.linalg.solve(gram_FF, self.features_VF.T @ counts_VE)
        return solved_FE / np.linalg.norm(solved_FE, axis=0, keepdims=True)

    def route(self, tokens_NT: np.ndarray) -> np.ndarray:
        """(N,) the expert of each sequence."""
        choice_V = (self.features_VF @ self.weights()).argmax(1)
        votes_NE = (choice_V[tokens_NT][..., None] == np.arange(len(self.counts))).sum(1)
        return votes_NE.argmax(1)


class Hdee(System[HdeeConfig]):
    """One HDEE directory."""

    held_out = ("comments", "headers")

    @override
    def check(self) -> None:
        if self.own.prefix > self.context:
            raise ValueError(f"hdee.prefix = {self.own.prefix} is longer than model.context = {self.context}: lower it")
        self.groups = {variant: run_group(self.own, self.base, variant) for variant in self.own.variants}
        if self.asked.domains:  # the default ones are known to be enough, and may have to be written
            domains = read_domains(self.asked.domains, self.out / "domains", self.own.characters)
            plan(self.own, self.base, domains, 0, self.out)

    @override
    def remarks(self) -> list[str]:
        lessons = [of_difficulty(self.domains, difficulty)[self.own.iterations :] for difficulty in TRAINED]
        left = [domain.name for domains in lessons for domain in domains]
        if not left:
            return []
        return [
            f"hdee.iterations = {self.own.iterations}: no expert trains on {', '.join(left)}; raise it, or give one "
            "domain of each difficulty"
        ]

    def plan(self, seed: int) -> HdeePlan:
        return plan(self.own, self.base, self.domains, seed, self.folder(seed))

    def folder(self, seed: int) -> Path:
        return self.out / f"seed-{seed}"

    @override
    def placed_jobs(self) -> list[tuple[str, ExpertJob]]:
        return [(self.folder(seed).name, job) for seed in self.own.seeds for job in self.plan(seed).jobs]

    def prepare(self, folder: str, progress: JobProgress) -> None:
        """The mixture that the seeds and the dense baseline train on, and its random thirds."""
        path = self.out / folder
        seed = next(seed for seed in self.own.seeds if self.folder(seed) == path)
        pool = pooled(self.trained, path / MIXTURE, seed, validation=self.own.sequences)
        for third in range(len(TRAINED)) if "random" in self.own.baselines else ():
            rows = pool.rows[third :: len(TRAINED)]  # they are in a random order already
            corpus = rows_corpus(f"random third {third}", pool.corpus.tokenizer, rows, pool.validation)
            store_rows(corpus, path / "splits" / str(third))

    def evaluate(self, progress: JobProgress) -> dict[str, Any]:
        """Judge every forest on every domain and write the forests and OUT/results.json."""
        records = []
        for seed in self.own.seeds:
            progress.notice(f"evaluating the experts of seed {seed}")
            records.append(self._evaluate_seed(seed))
        return self.write_results(
            records,
            groups={name: vars(group) for name, group in self.groups.items()},
            flops=self._flops(),
            bytes=asdict(traffic(self.own, self.base)),
            ways=JOININGS,
            posterior_over_text=self._posterior_over_text(),
            sequences={name: len(text.held_rows("test", self.own.sequences)) for name, text in self.texts.items()},
        )

    def forest(self, variant: str, seed: int, iteration: int | None = None) -> Forest:
        """The forest of a variant after an iteration (from 1; None: the last)."""
        plan = self.plan(seed)
        names = plan.forests[variant][(iteration or self.own.iterations) - 1]
        by_name = {job.name: job for job in plan.jobs}
        members = [
            ForestMember(name=name, run=self.folder(seed) / name, domains=by_name[name].domains) for name in names
        ]
        return Forest(system="hdee", experts=tuple(members))

    def _evaluate_seed(self, seed: int) -> dict[str, Any]:
        folder, plan = self.folder(seed), self.plan(seed)
        scored = _SeedScores(folder, self.texts, self.own.sequences)
        seed_name = plan.seeds[self.own.ffn[1]]
        gate = self._ridge(scored.run(seed_name))
        record: dict[str, Any] = {"seed": self._alone(scored, seed_name)}
        if plan.dense:
            record["dense"] = self._alone(scored, plan.dense)
        if plan.random:
            record["random"] = {domain: scored.evaluated(plan.random, domain) for domain in self.texts}
        for variant in self.own.variants:
            record[variant] = {}
            for iteration in range(1, self.own.iterations + 1):
                forest = self.forest(variant, seed, iteration)
                forest.save(folder / "forests" / f"{variant}-r{iteration}.json")
                names = tuple(member.name for member in forest.experts)
                domains = record[variant][f"r{iteration}"] = {
                    domain: scored.evaluated(names, domain) for domain in self.texts
                }
                for domain, found in domains.items():
                    found["perplexity"]["ridge"] = self._by_ridge(gate, scored.of(names, domain, "test"), domain)
                    found["with_seed"] = scored.evaluated((*names, seed_name), domain)["perplexity"]["posterior"]
                    if variant.startswith("m-ho"):
                        found["parameter_average"] = self._by_average(scored, names, domain)
        return record

    def _alone(self, scored: _SeedScores, name: str) -> dict[str, float]:
        return {domain: mixture.perplexity(scored.one(name, domain, "test")) for domain in self.texts}

    def _by_ridge(self, gate: RidgeGate, test_ENT: Tensor, domain: str) -> float:
        chosen = gate.route(self.texts[domain].held_rows("test", self.own.sequences)[:, : self.own.prefix])
        return mixture.perplexity(
            test_ENT[torch.from_numpy(chosen), torch.arange(len(chosen), dtype=torch.int64, device="cpu")]
        )

    def _by_average(self, scored: _SeedScores, names: Sequence[str], domain: str) -> float:
        """BTM's one model, its shares those of the cached prior."""
        shares = cached(scored.of(names, domain, "prior"), statistic="mean").exp().tolist()
        one = averaged(Served(names, [scored.run(name) for name in names]), shares)
        return mixture.perplexity(score(one, self.texts[domain].sequences("test", self.own.sequences)))

    def _posterior_over_text(self) -> dict[str, Any]:
        """How the posterior of the first forest moves over one test sequence of each trained domain."""
        forest = self.forest(self.own.variants[0], self.own.seeds[0])
        served = Served.load(forest.experts)
        record = {}
        for text in self.trained:
            sequence = text.sequences("test", 1)
            believed = mixture.posterior(served.scores(sequence), mixture.uniform(len(served))).exp()
            record[text.domain.name] = {
                "experts": list(TRAINED),
                "values": believed[:, 0].tolist(),
                "text": served.tokenizer.decode(sequence[0].numpy()),
            }
        return record

    def _ridge(self, seed: SavedRun) -> RidgeGate:
        """A gate over the difficulties, by the embeddings of the seed model and the text that is trained on."""
        gate = RidgeGate(seed.model.embed.weight.detach().cpu().numpy())
        for difficulty in TRAINED:
            seen = of_difficulty(self.domains, difficulty)[: self.own.iterations]
            gate.add(difficulty, np.concatenate([self.texts[d.name].training_rows()[:, :-1].ravel() for d in seen]))
        return gate

    def _flops(self) -> dict[str, float]:
        """Of the runs of one seed, by what they are, and of a token in use."""
        found: dict[str, float] = {}
        for job in self.plan(self.own.seeds[0]).jobs:
            found[f"training, {job.role}"] = found.get(f"training, {job.role}", 0.0) + (job.flops or 0.0)
        one = float(flops_per_token(replace(self.base.model, ffn=self.own.ffn[1]).shape(), backward=False))
        return {**found, "a token by one medium model": one, "a token by three of them": 3 * one}


class _SeedScores:
    """What the runs of one seed say of the domains: each asked once, however many forests it stands in."""

    def __init__(self, folder: Path, texts: Mapping[str, DomainText], sequences: int) -> None:
        self.folder, self.texts, self.sequences = folder, texts, sequences
        self.runs: dict[str, SavedRun] = {}
        self.scores: dict[tuple[str, str, DomainPart], Tensor] = {}

    def run(self, name: str) -> SavedRun:
        if name not in self.runs:
            self.runs[name] = load_saved(self.folder / name)
        return self.runs[name]

    def one(self, name: str, domain: str, part: DomainPart) -> Tensor:
        """(N, T) of one run."""
        key = name, domain, part
        if key not in self.scores:
            self.scores[key] = score(self.run(name), self.texts[domain].sequences(part, self.sequences))
        return self.scores[key]

    def of(self, names: Sequence[str], domain: str, part: DomainPart) -> Tensor:
        """(E, N, T) of several."""
        return torch.stack([self.one(name, domain, part) for name in names])

    def evaluated(self, names: Sequence[str], domain: str) -> dict[str, Any]:
        """Several as a forest, in all ways of joining them."""
        return evaluate(self.of(names, domain, "test"), self.of(names, domain, "prior"))
