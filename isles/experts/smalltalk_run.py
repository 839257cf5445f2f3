"""SMALLTALK LM from settings to results: each seed's routers, shares and experts, and how well they do.

OUT/experts.toml, domains/        as in HDEE
OUT/seed-0/pool/                  the sequences of all domains in equal numbers (a stored corpus)
OUT/seed-0/routers/router-E/      models; rounds.jsonl: loss, load, purity, margin and bytes of each round
OUT/seed-0/clusters.safetensors   instead of routers with `gate = "clusters"`
OUT/seed-0/assignment.npy, .json  which expert each sequence of the pool belongs to; held.npy, .json: the same of its
                                  validation sequences. That is all that has to travel.
OUT/seed-0/segments/E/            the share of each expert (a stored corpus), made from the pool and these
OUT/seed-0/expert-E, dense-*      ordinary runs (`jobs`)
OUT/seed-0/forests/smalltalk.json experts and routers (`forest`)
OUT/results.json                  everything that was measured; means over seeds beside each seed's

Called again with the same settings it goes on where it stopped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from isles.base.parsing import parse_json
from isles.comm.errors import CommError
from isles.data import load_tokenizer
from isles.data.corpus import rows_corpus
from isles.experts import mixture, smalltalk
from isles.experts.domains import DomainText, Pool, pooled, store_rows
from isles.experts.forest import Forest, ForestMember, Served, score
from isles.experts.jobs import ExpertJob, JobProgress
from isles.experts.meters import bytes_of, score_bytes
from isles.experts.routing import Assignment, Gate, assign, clustered, gate_of, growing, purity, route, texts_of
from isles.experts.smalltalk import RouterTask, SmalltalkConfig, train_router
from isles.experts.system import System
from isles.launch.nodes import SINGLE_NODE
from isles.launch.workers import raise_first
from isles.models import flops_per_token, parameters
from isles.running.run import Interrupted, starter
from isles.training.config.sections import Config
from isles.training.interrupts import first_interrupt
from isles.training.records.checkpoint import Checkpoints
from isles.training.records.rundir import clear_logs
from isles.training.records.saved_run import SavedRun, load_saved
from isles.training.records.writer import write_config

ROUTED, ROUNDS, CLUSTERS = "routers.json", "rounds.jsonl", "clusters.safetensors"
ASSIGNMENT, VALIDATION = "assignment.npy", "held.npy"


class SmalltalkSeed:
    """What lies in `folder`. base: what its runs share, but for the seed."""

    def __init__(self, own: SmalltalkConfig, base: Config, seed: int, folder: Path) -> None:
        self.own, self.folder = own, folder
        self.base = smalltalk.seeded(base, seed)

    def jobs(self) -> list[ExpertJob]:
        return smalltalk.expert_jobs(self.own, self.base, self.folder / "segments", self.folder / "pool")

    def pool(self, trained: Sequence[DomainText]) -> Pool:
        """The sequences that are parted among the experts."""
        return pooled(trained, self.folder / "pool", self.base.run.seed, validation=self.own.sequences)

    def forest(self) -> Forest:
        experts = self._members("expert", self.folder)
        if self.own.gate == "clusters":
            clusters = self.folder / CLUSTERS
            return Forest(system="smalltalk", experts=experts, clusters=clusters, prefix=self.own.prefix)
        routers = self._members("router", self.folder / "routers")
        return Forest(system="smalltalk", experts=experts, routers=routers, prefix=self.own.prefix)

    def _members(self, role: str, folder: Path) -> tuple[ForestMember, ...]:
        names = (f"{role}-{number}" for number in range(self.own.experts))
        return tuple(ForestMember(name=name, run=folder / name) for name in names)

    def gate(self) -> Gate:
        """What chooses, trained."""
        gate = gate_of(self.forest(), load_tokenizer(self.base.data.tokenizer, self.base.data.vocab))
        assert gate is not None
        return gate

    def assignment(self) -> Assignment:
        """Of the pool. ValueError where there is none."""
        return Assignment.load(self.folder / ASSIGNMENT)

    def routed(self) -> list[dict[str, Any]]:
        """What each router's training came to; empty without routers."""
        path = self.folder / ROUTED
        return parse_json(path.read_text(encoding="utf-8")) if path.exists() else []

    def purity_by_round(self) -> list[float]:
        """Of the routers' shares."""
        path = self.folder / "routers" / ROUNDS
        lines = [parse_json(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
        # A round that was done again after a stop has lines of both times, which are equal.
        return list({line["round"]: line["purity"] for line in lines}.values())

    def prepare(self, trained: Sequence[DomainText], progress: JobProgress) -> None:
        """Routers, assignment and segments, those that are not there yet. KeyboardInterrupt with a checkpoint."""
        pool = self.pool(trained)
        paths = [self.folder / name for name in (VALIDATION, ASSIGNMENT)]
        if not all(path.exists() for path in paths):
            if self.own.gate == "clusters":
                self._cluster(pool, progress)
            elif not (self.folder / ROUTED).exists():
                self._train_routers(pool, progress)
            progress.notice(f"parting {len(pool.rows):,} sequences among {self.own.experts} experts")
            gate = self.gate()
            # No balance among those that are held out: they are what each expert would be asked in use.
            validation = route(gate, torch.from_numpy(pool.validation.astype(np.int64)), self.own.prefix).numpy()
            Assignment(validation, self.own.experts).save(paths[0])
            self._partition(gate, pool).save(paths[1])
        validation, assignment = map(Assignment.load, paths)
        if (len(validation.expert_of), len(assignment.expert_of)) != (len(pool.validation), len(pool.rows)):
            raise ValueError(f"{paths[1]}: is of another pool; remove it, or copy it again")
        for expert in range(self.own.experts):
            rows = pool.rows[assignment.rows(expert)], pool.validation[validation.rows(expert)]
            corpus = rows_corpus(f"segment {expert}", pool.corpus.tokenizer, *rows)
            store_rows(corpus, self.folder / "segments" / str(expert))

    def _train_routers(self, pool: Pool, progress: JobProgress) -> None:
        folder = self.folder / "routers"
        folder.mkdir(parents=True, exist_ok=True)
        config = smalltalk.router_config(self.own, self.base, pool.folder)
        task = RouterTask(own=self.own, config=config, label=pool.label, out=folder)
        checkpoints, written = Checkpoints(folder), [0]
        resume = max(checkpoints.steps(), default=None)
        name = f"{self.folder.name}/routers"
        progress.begin(name, self.own.experts, self.own.rounds)
        lines = folder / ROUNDS
        if resume is None:
            lines.unlink(missing_ok=True)

        def take(event: dict[str, Any]) -> None:
            if "round" in event:
                with lines.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(event) + "\n")
                progress.line(name, {**event, "step": event["round"], "val_loss": None})
            elif "checkpoint" in event:
                written[0] += 1
                if written[0] % self.own.experts == 0:
                    checkpoints.commit(event["checkpoint"], range(self.own.experts), {}, keep=1)

        try:
            results = run_workers(train_router, self.own.experts, config, (task, resume), take, folder)
        except CommError as error:  # a worker was lost, and no round can end without its scores
            done = max(checkpoints.steps(), default=0)
            error.add_note(f"the same command, with this --out, goes on after round {done} of {self.own.rounds}")
            raise
        if any(result is None for result in results):
            raise Interrupted(folder, SINGLE_NODE)
        for member in self.forest().routers:
            write_config(config, member.run)
        (self.folder / ROUTED).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        progress.end(name)

    def _cluster(self, pool: Pool, progress: JobProgress) -> None:
        """Centres from as many sequences as the routers' rounds would read, at most."""
        count = min(len(pool.rows), self.own.experts * self.own.round_sequences * self.own.rounds)
        progress.notice(f"clustering {count:,} sequences")
        texts = texts_of(pool.rows[:count], pool.corpus.tokenizer)
        clustered(texts, self.own.experts, self.base.run.seed).save(self.folder / CLUSTERS)

    def _partition(self, gate: Gate, pool: Pool) -> Assignment:
        """The whole pool, in balance, chunk by chunk. Clusters read whole sequences: no prefix is trained for."""
        length = self.own.prefix if self.own.gate == "routers" else pool.rows.shape[1]
        scores_NE = gate.scores(torch.from_numpy(pool.rows.astype(np.int64)), length).T.numpy()
        chunk = self.own.chunk or len(scores_NE)
        parts = [assign(scores_NE[n : n + chunk], self.own.assignment) for n in range(0, len(scores_NE), chunk)]
        return Assignment(np.concatenate(parts), self.own.experts)


def run_workers(
    worker: Callable[..., Any],
    workers: int,
    config: Config,
    args: Sequence[Any],
    on_event: Callable[[Any], None],
    out: Path,
) -> list[Any]:
    """`worker(world, *args)` on `workers` workers, as [world] says: processes here, or the virtual backend; results in
    rank order. The first Ctrl-C makes `world.stop_here` true on all of them at one step. Errors as in `run_local`.
    """
    pool = starter(config.world.backend).call(worker, workers, config, args, out)
    with first_interrupt(pool.stop):
        results = pool.join(on_event)
    raise_first(results, pool.failures)
    clear_logs(out)
    return results


DomainScores = dict[str, Tensor]
"""Of the sequences of one or more domains: the scores of "experts" (E, N, T) and of each dense model (N, T), and what
the gate says: "routed" and "prefix-P" (N,), "chances" (E, N) in logs, and the "growing" weights (E, N, T) in logs.
"""


def evaluate_seed(seed: SmalltalkSeed, texts: Mapping[str, DomainText]) -> dict[str, Any]:
    """Perplexities on all trained domains together and on each one, and how the gate divided them."""
    own, forest = seed.own, seed.forest()
    forest.check()
    forest.save(seed.folder / "forests" / "smalltalk.json")
    gate, experts = seed.gate(), Served.load(forest.experts)
    dense: dict[str, SavedRun] = {form: load_saved(seed.folder / f"dense-{form}") for form in own.dense}
    by_domain = {
        name: _scored(seed, gate, experts, dense, text.sequences("test", own.sequences)) for name, text in texts.items()
    }
    trained = [name for name, text in texts.items() if text.domain.trained]
    seen = {key: torch.cat([by_domain[name][key] for name in trained], dim=_axis(key)) for key in by_domain[trained[0]]}
    routed_N = seen["routed"].numpy()
    label_N = np.repeat(np.arange(len(trained)), [len(by_domain[name]["routed"]) for name in trained])
    assignment = seed.assignment()
    pool = seed.pool([texts[name] for name in trained])
    return {
        "trained": _evaluated(seed, seen),
        "by_domain": {
            name: {**_evaluated(seed, scored), "alone": [mixture.perplexity(s) for s in scored["experts"]]}
            for name, scored in by_domain.items()
        },
        "routing": {
            "purity_training": purity(assignment.expert_of, pool.label),
            "purity_test": purity(routed_N, label_N),
            "loads_training": assignment.loads,
            "loads_test": np.bincount(routed_N, minlength=own.experts).tolist(),
            "entropy_test": float(-torch.xlogy(seen["chances"].exp(), seen["chances"].exp()).sum(0).mean()),
        },
        "purity_by_round": seed.purity_by_round(),
    }


def _scored(
    seed: SmalltalkSeed, gate: Gate, experts: Served, dense: Mapping[str, SavedRun], tokens: Tensor
) -> DomainScores:
    own = seed.own
    return {
        **{form: score(run, tokens) for form, run in dense.items()},
        **{f"prefix-{length}": route(gate, tokens, length) for length in own.prefixes},
        "experts": experts.scores(tokens),
        "routed": route(gate, tokens, own.prefix),
        "chances": gate.log_chances(gate.scores(tokens, own.prefix)),
        "growing": growing(gate, tokens, len(experts), own.reweigh_every),
    }


def _axis(key: str) -> int:
    """Along which the sequences lie."""
    return 1 if key in ("experts", "chances", "growing") else 0


def _evaluated(seed: SmalltalkSeed, scored: DomainScores) -> dict[str, Any]:
    """Perplexities on all tokens, and on those after the prefix (None where there are none)."""
    experts_ENT = scored["experts"]
    count, length = experts_ENT.shape[1:]

    def by(expert_of: Tensor) -> Tensor:
        return experts_ENT[expert_of, torch.arange(count, dtype=torch.int64, device="cpu")]

    by_method: DomainScores = {form: scored[form] for form in seed.own.dense}
    by_method["mixture"] = by(scored["routed"])
    by_method |= {key: by(chosen) for key, chosen in scored.items() if key.startswith("prefix-")}
    # All experts by the gate's chances: E times the cost at inference.
    by_method["weighted"] = mixture.mix(experts_ENT, mixture.constant(experts_ENT, scored["chances"]))
    by_method["growing"] = mixture.mix(experts_ENT, scored["growing"])
    for k in range(1, min(3, len(experts_ENT))):
        by_method[f"growing-{k}"] = mixture.mix(experts_ENT, mixture.top_k(scored["growing"], k))
    by_method["oracle"] = by(experts_ENT.sum(-1).argmax(0))
    # Another one of the E with equal chances, whatever the text: the mean over all choices.
    by_method["random"] = experts_ENT.mean(0)
    behind = seed.own.prefix - 1
    after = (
        {method: mixture.perplexity(scores[:, behind:]) for method, scores in by_method.items()}
        if behind < length
        else None
    )
    return {"all": {method: mixture.perplexity(scores) for method, scores in by_method.items()}, "after_prefix": after}


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
            progress.notice(f"evaluating the experts of {folder}")
            records.append(evaluate_seed(seed, self.texts))
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
