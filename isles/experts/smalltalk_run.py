"""SMALLTALK LM from words to results: pool, routers, partition, experts, and how well they do.

OUT/experts.toml, domains/     as in HDEE
OUT/pool/                      the sequences of all domains in equal numbers (a stored corpus)
OUT/routers/router-E/          models; rounds.jsonl: loss, load, purity, margin and bytes of each round
OUT/clusters.safetensors       instead of routers with `gate = "clusters"`
OUT/assignment.npy, .json      which expert each sequence of the pool belongs to: all that has to travel
OUT/segments/E/                the share of each expert (a stored corpus), made from the two above
OUT/runs/expert-E, dense-*     ordinary runs (`jobs`)
OUT/forests/smalltalk.json     experts and routers (`registry`)
OUT/results.json               everything that was measured

Called again with the same words it goes on where it stopped.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isles.comm.party import HERE
from isles.data import load_tokenizer
from isles.data.corpus import rows_corpus
from isles.experts import mixture, smalltalk
from isles.experts.assignment import Assignment, assign, purity
from isles.experts.clusters import clustered, texts_of
from isles.experts.domains import Pool, pooled, store_rows
from isles.experts.em import RouterTask, train_router
from isles.experts.jobs import Job, Progress
from isles.experts.meters import bytes_of, score_bytes
from isles.experts.registry import Forest, Member
from isles.experts.routing import Gate, gate_of, route
from isles.experts.served import Served, score
from isles.experts.smalltalk import SmalltalkConfig
from isles.experts.system import System
from isles.experts.workers import run_workers
from isles.models import flops_per_token, parameters
from isles.training.checkpoint import Checkpoints
from isles.training.launch import Interrupted
from isles.training.records import write_config
from isles.training.saved import load_run

ROUTED, ROUNDS, CLUSTERS = "routers.json", "rounds.jsonl", "clusters.safetensors"


class Smalltalk(System[SmalltalkConfig]):
    """One SMALLTALK directory."""

    held_out = ("comments",)

    def check(self) -> None:
        """See System.check."""
        smalltalk.check(self.own, self.base.model, self.context)

    def placed_jobs(self) -> list[tuple[str, Job]]:
        """See System.placed_jobs."""
        jobs = smalltalk.expert_jobs(self.own, self.base, self.out / "segments", self.out / "pool")
        return [("runs", job) for job in jobs]

    def pool(self) -> Pool:
        """The sequences that are parted among the experts."""
        return pooled(self.trained, self.out / "pool", self.base.run.seed, judged=self.own.sequences)

    @property
    def router_members(self) -> tuple[Member, ...]:
        """The routers in the order of their experts."""
        return tuple(
            Member(name=f"router-{e}", run=self.out / "routers" / f"router-{e}") for e in range(self.own.experts)
        )

    def forest(self) -> Forest:
        """Experts and routers."""
        experts = tuple(
            Member(name=f"expert-{e}", run=self.out / "runs" / f"expert-{e}") for e in range(self.own.experts)
        )
        if self.own.gate == "clusters":
            return Forest(system="smalltalk", experts=experts, clusters=self.out / CLUSTERS, prefix=self.own.prefix)
        return Forest(system="smalltalk", experts=experts, routers=self.router_members, prefix=self.own.prefix)

    def gate(self) -> Gate:
        """What chooses, trained."""
        tokenizer = load_tokenizer(self.base.data.tokenizer)
        gate = gate_of(self.forest(), tokenizer)
        assert gate is not None
        return gate

    def prepare(self, progress: Progress) -> None:
        """Routers, assignment and segments, those that are not there yet. KeyboardInterrupt with a checkpoint."""
        segments = [self.out / "segments" / str(expert) for expert in range(self.own.experts)]
        pool = self.pool()
        if not (self.out / "assignment.npy").exists():
            if self.own.gate == "clusters":
                self._cluster(pool, progress)
            elif not (self.out / ROUTED).exists():
                self._train_routers(pool, progress)
            progress.notice(f"parting {len(pool.rows):,} sequences among {self.own.experts} experts")
            self._partition(pool).save(self.out / "assignment.npy")
        if not all(segment.exists() for segment in segments):
            assignment = Assignment.load(self.out / "assignment.npy")
            if len(assignment.expert_of) != len(pool.rows):
                raise ValueError(f"{self.out / 'assignment.npy'}: is of another pool; remove it, or copy it again")
            held = self._held_out_shares(pool)
            for expert, segment in enumerate(segments):
                rows = pool.rows[assignment.rows(expert)]
                corpus = rows_corpus(f"segment {expert}", pool.corpus.tokenizer, rows, held[expert])
                store_rows(corpus, segment)

    def _train_routers(self, pool: Pool, progress: Progress) -> None:
        folder = self.out / "routers"
        folder.mkdir(parents=True, exist_ok=True)
        config = smalltalk.router_config(self.own, self.base, pool.folder)
        task = RouterTask(own=self.own, config=config, label=pool.label, out=folder)
        checkpoints, written = Checkpoints(folder), [0]
        resume = max(checkpoints.steps(), default=None)
        progress.begin("routers", self.own.experts, self.own.rounds)
        lines = folder / ROUNDS
        if resume is None:
            lines.unlink(missing_ok=True)

        def take(event: dict[str, Any]) -> None:
            if "round" in event:
                with lines.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(event) + "\n")
                progress.line({**event, "step": event["round"], "val_loss": None})
            elif "checkpoint" in event:
                written[0] += 1
                if written[0] % self.own.experts == 0:
                    checkpoints.commit(event["checkpoint"], self.own.experts, {}, keep=1)

        results = run_workers(train_router, self.own.experts, config, (task, resume), take, folder)
        if any(result is None for result in results):
            raise Interrupted(folder, HERE)
        for member in self.router_members:
            write_config(config, member.run)
        (self.out / ROUTED).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        progress.end({})

    def _cluster(self, pool: Pool, progress: Progress) -> None:
        """Centres from as many sequences as the routers' rounds would read, at most."""
        count = min(len(pool.rows), self.own.experts * self.own.round_sequences * self.own.rounds)
        progress.notice(f"clustering {count:,} sequences")
        texts = texts_of(pool.rows[:count], pool.corpus.tokenizer)
        clustered(texts, self.own.experts, self.base.run.seed).save(self.out / CLUSTERS)

    def _partition(self, pool: Pool) -> Assignment:
        """The whole pool, in balance, chunk by chunk. Clusters read whole sequences: no prefix is trained for."""
        length = self.own.prefix if self.own.gate == "routers" else self.context + 1
        scores_NE = self.gate().scores(torch.from_numpy(pool.rows.astype(np.int64)), length).T.numpy()
        chunk = self.own.chunk or len(scores_NE)
        parts = [assign(scores_NE[n : n + chunk], self.own.assignment) for n in range(0, len(scores_NE), chunk)]
        return Assignment(np.concatenate(parts), self.own.experts)

    def _held_out_shares(self, pool: Pool) -> list[np.ndarray]:
        """The pool's validation sequences by the expert that would answer: no balance there."""
        rows = pool.corpus.validation.tokens.reshape(-1, self.context + 1)
        expert_of = route(self.gate(), torch.from_numpy(rows.astype(np.int64)), self.own.prefix).numpy()
        return [rows[expert_of == expert] for expert in range(self.own.experts)]

    def evaluate(self, progress: Progress) -> dict[str, Any]:
        """See System.evaluate."""
        progress.notice("judging the experts")
        forest = self.forest()
        forest.check()
        forest.save(self.out / "forests" / "smalltalk.json")
        gate, experts = self.gate(), Served.load(forest.experts)
        dense = {form: load_run(self.out / "runs" / f"dense-{form}") for form in self.own.dense}
        pool, assignment = self.pool(), Assignment.load(self.out / "assignment.npy")
        domains: dict[str, Any] = {}
        seen: list[dict[str, Tensor]] = []
        labels: list[int] = []
        for place, (name, text) in enumerate(self.texts.items()):
            tokens = text.sequences("test", self.own.sequences)
            scored: dict[str, Tensor] = {form: score(run, tokens) for form, run in dense.items()}
            scored["experts"] = experts.scores(tokens)
            routed = {f"prefix-{p}": route(gate, tokens, p) for p in self.own.prefixes}
            routed["routed"] = route(gate, tokens, self.own.prefix)
            chances = gate.chances(gate.scores(tokens, self.own.prefix))
            one = {**scored, **routed, "chances": chances}
            domains[name] = {**self._judged([one]), "alone": [mixture.perplexity(s) for s in scored["experts"]]}
            if text.domain.trained:
                seen.append(one)
                labels += [place] * len(tokens)
        routed_N = torch.cat([one["routed"] for one in seen]).numpy()
        chances_EN = torch.cat([one["chances"] for one in seen], dim=1)
        results = {
            "system": "smalltalk",
            "domains": [{"name": d.name, "difficulty": d.difficulty} for d in self.domains],
            "trained": self._judged(seen),
            "by_domain": domains,
            "routing": {
                "purity_training": purity(assignment.expert_of, pool.label),
                "purity_test": purity(routed_N, np.array(labels)),
                "loads_training": assignment.loads,
                "loads_test": np.bincount(routed_N, minlength=self.own.experts).tolist(),
                "entropy_test": float(-torch.xlogy(chances_EN, chances_EN).sum(0).mean()),
                "assignment_sha256": assignment.sha256,
            },
            "purity_by_round": self._purity_by_round(),
            "flops": self._flops(len(pool.rows)),
            "bytes": self._bytes(pool),
            "steps": self.own.steps,
            "experts": self.own.experts,
            "prefix": self.own.prefix,
        }
        return self.write_results(results)

    def _purity_by_round(self) -> list[float]:
        path = self.out / "routers" / ROUNDS
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
        # A round that was done again after a stop has lines of both times, which are equal.
        return list({line["round"]: line["purity"] for line in lines}.values())

    def _judged(self, parts: list[dict[str, Tensor]]) -> dict[str, Any]:
        """Perplexities over the sequences of `parts`: on all tokens, and on those after the prefix."""
        experts_ENT = torch.cat([part["experts"] for part in parts], dim=1)
        chances_EN = torch.cat([part["chances"] for part in parts], dim=1)
        routed = {
            key: torch.cat([part[key] for part in parts]) for key in parts[0] if key not in ("experts", "chances")
        }
        count = experts_ENT.shape[1]

        def by(expert_of: Tensor) -> Tensor:
            return experts_ENT[expert_of, torch.arange(count)]

        ways: dict[str, Tensor] = {form: routed[form] for form in self.own.dense}
        ways["mixture"] = by(routed["routed"])
        ways |= {key: by(routed[key]) for key in routed if key.startswith("prefix-")}
        # All experts by the gate's chances, as c-BTM joins them: E times the cost at inference.
        ways["weighted"] = mixture.mix(experts_ENT, mixture.constant(experts_ENT, chances_EN.log()))
        ways["oracle"] = by(experts_ENT.sum(-1).argmax(0))
        # Another one of the E with equal chances, whatever the text: the mean over all choices.
        ways["random"] = experts_ENT.mean(0)
        behind = self.own.prefix - 1
        return {
            "all": {way: mixture.perplexity(scores) for way, scores in ways.items()},
            "after_prefix": {way: mixture.perplexity(scores[:, behind:]) for way, scores in ways.items()}
            if behind < self.context
            else None,
        }

    def _flops(self, sequences: int) -> dict[str, float]:
        own, shape = self.own, self.base.model.shape()
        found = {
            "experts": sum(job.flops or 0.0 for _, job in self.placed_jobs() if job.role == "expert"),
            "inference": float(self.context * flops_per_token(shape, backward=False)),
        }
        if own.gate == "clusters":  # words are counted, no model runs
            return found
        router = replace(self.base.model, **vars(own.router)).shape()
        routed = json.loads((self.out / ROUTED).read_text(encoding="utf-8")) if (self.out / ROUTED).exists() else []
        length = own.prefix if own.router_length == "prefix" else self.context
        reading = (own.prefix - 1) * flops_per_token(router, backward=False, sequence=own.prefix) * own.experts
        return {
            **found,
            "routers": float(sum(r["tokens"] for r in routed) * flops_per_token(router, sequence=length)),
            "scoring_rounds": float(own.rounds * own.experts * own.round_sequences * reading),
            "scoring_pool": float(sequences * reading),
            "inference_routing": float(reading),
        }

    def _bytes(self, pool: Pool) -> dict[str, Any]:
        own = self.own
        routed = json.loads((self.out / ROUTED).read_text(encoding="utf-8")) if (self.out / ROUTED).exists() else []
        segment = pool.rows.nbytes // own.experts
        weights = [4 * parameters(self.base.model.shape())] * own.experts
        found = asdict(bytes_of([segment] * own.experts, weights, self.base.model.shape().vocab, serving=1))
        if own.gate == "clusters":
            return found
        return {
            **found,
            "scores_per_round": score_bytes(own.experts * own.round_sequences, own.experts),
            "rounds": own.rounds,
            "score_bytes_sent": [r["score_bytes_sent"] for r in routed],
            "score_bytes_received": [r["score_bytes_received"] for r in routed],
            "prefixes_read_per_round": own.experts * own.round_sequences * own.prefix * pool.rows.itemsize,
        }
