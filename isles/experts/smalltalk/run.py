"""SMALLTALK LM from words to results: each seed's routers, shares and experts, and how well they do.

OUT/experts.toml, domains/     as in HDEE
OUT/seed-0/pool, routers, assignment.npy, segments    see `seed`
OUT/seed-0/expert-E, dense-*   ordinary runs (`jobs`)
OUT/seed-0/forests/smalltalk.json    experts and routers (`registry`)
OUT/results.json               everything that was measured; means over seeds beside each seed's

Called again with the same words it goes on where it stopped.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import cached_property
from typing import Any

from typing_extensions import override

from isles.experts.jobs import ExpertJob, JobProgress
from isles.experts.meters import bytes_of, score_bytes
from isles.experts.smalltalk import smalltalk
from isles.experts.smalltalk.judging import judge_seed
from isles.experts.smalltalk.seed import SmalltalkSeed
from isles.experts.smalltalk.smalltalk import SmalltalkConfig
from isles.experts.system import System
from isles.models import flops_per_token, parameters


class Smalltalk(System[SmalltalkConfig]):
    """One SMALLTALK directory."""

    held_out = ("comments",)

    @override
    def check(self) -> None:
        smalltalk.check(self.own, self.base.model, self.context)

    @cached_property
    def seeds(self) -> dict[str, SmalltalkSeed]:
        """By folder below OUT."""
        names = {seed: f"seed-{seed}" for seed in self.own.seeds}
        return {name: SmalltalkSeed(self.own, self.base, seed, self.out / name) for seed, name in names.items()}

    @override
    def placed_jobs(self) -> list[tuple[str, ExpertJob]]:
        return [(folder, job) for folder, seed in self.seeds.items() for job in seed.jobs()]

    def prepare(self, folder: str, progress: JobProgress) -> None:
        """Routers, assignment and segments of a seed. KeyboardInterrupt with a checkpoint."""
        self.seeds[folder].prepare(self.trained, progress)

    @override
    def evaluate(self, progress: JobProgress) -> dict[str, Any]:
        records = []
        for folder, seed in self.seeds.items():
            progress.notice(f"judging the experts of {folder}")
            records.append(judge_seed(seed, self.texts))
        first = next(iter(self.seeds.values()))
        pool = first.pool(self.trained)
        return self.write_results(
            records,
            assignment_sha256=[seed.assignment().sha256 for seed in self.seeds.values()],
            flops=self._flops(first, len(pool.rows)),
            bytes=self._bytes(first, pool.rows.nbytes, pool.rows.itemsize),
            steps=self.own.steps,
            experts=self.own.experts,
            prefix=self.own.prefix,
            reweigh_every=self.own.reweigh_every,
        )

    def _flops(self, seed: SmalltalkSeed, sequences: int) -> dict[str, float]:
        """Of one seed, whose pool has so many sequences."""
        own, shape = self.own, self.base.model.shape()
        found = {
            "experts": sum(job.flops or 0.0 for job in seed.jobs() if job.role == "expert"),
            "inference": float(self.context * flops_per_token(shape, backward=False)),
        }
        if own.gate == "clusters":  # words are counted, no model runs
            return found
        routers = smalltalk.router_flops(own, self.base.model, self.context)
        return {
            **found,
            "routers": sum(r["tokens"] for r in seed.routed()) * routers.per_token,
            "scoring_rounds": routers.rounds(own),
            "scoring_pool": sequences * routers.reading,
            "inference_routing": routers.reading,
        }

    def _bytes(self, seed: SmalltalkSeed, pool_bytes: int, token_bytes: int) -> dict[str, Any]:
        """Of one seed."""
        own, routed = self.own, seed.routed()
        shape = self.base.model.shape()
        segments, weights = [pool_bytes // own.experts] * own.experts, [4 * parameters(shape)] * own.experts
        found = asdict(bytes_of(segments, weights, shape.vocab, serving=1))
        if own.gate == "clusters":
            return found
        return {
            **found,
            "scores_per_round": score_bytes(own.experts * own.round_sequences, own.experts),
            "rounds": own.rounds,
            "score_bytes_sent": [r["score_bytes_sent"] for r in routed],
            "score_bytes_received": [r["score_bytes_received"] for r in routed],
            "prefixes_read_per_round": own.experts * own.round_sequences * own.prefix * token_bytes,
        }
