"""HDEE from settings to results: texts, seeds, experts, forests, and the table of perplexities.

OUT/experts.toml             what was asked for
OUT/domains/*.jsonl          the default domains, where none were listed
OUT/seed-0/mixture/          what the seeds train on (a stored corpus), and splits/0 1 2: random thirds of it
OUT/seed-0/seed-f192/ ...    runs: seeds and experts (`jobs`)
OUT/seed-0/forests/*.json    one forest a variant and iteration (`registry`)
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
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from isles.data.corpus import rows_corpus
from isles.experts import mixture
from isles.experts.averages import averaged
from isles.experts.domains import TRAINED, DomainPart, DomainText, of_difficulty, pooled, read_domains, store_rows
from isles.experts.evaluation import JOININGS, evaluate
from isles.experts.forest import Forest, ForestMember, Served, score
from isles.experts.hdee import hdee
from isles.experts.hdee.hdee import HdeeConfig, HdeePlan
from isles.experts.jobs import ExpertJob, JobProgress
from isles.experts.routing.routing import cached
from isles.experts.system import System
from isles.models import flops_per_token
from isles.training.records.saved_run import SavedRun, load_run

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
        self.groups = {variant: hdee.run_group(self.own, self.base, variant) for variant in self.own.variants}
        if self.asked.domains:  # the default ones are known to be enough, and may have to be written
            domains = read_domains(self.asked.domains, self.out / "domains", self.own.characters)
            hdee.plan(self.own, self.base, domains, 0, self.out)

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
        return hdee.plan(self.own, self.base, self.domains, seed, self.folder(seed))

    def folder(self, seed: int) -> Path:
        return self.out / f"seed-{seed}"

    @override
    def placed_jobs(self) -> list[tuple[str, ExpertJob]]:
        return [(self.folder(seed).name, job) for seed in self.own.seeds for job in self.plan(seed).jobs]

    def prepare(self, folder: str, progress: JobProgress) -> None:
        """The mixture that the seeds and the dense baseline train on, and its random thirds."""
        path = self.out / folder
        seed = next(seed for seed in self.own.seeds if self.folder(seed) == path)
        pool = pooled(self.trained, path / hdee.MIXTURE, seed, validation=self.own.sequences)
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
            bytes=asdict(hdee.traffic(self.own, self.base)),
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
            self.runs[name] = load_run(self.folder / name)
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
