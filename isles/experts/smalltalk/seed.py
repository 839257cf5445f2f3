"""SMALLTALK LM of one seed, until its experts can be trained: pool, routers, shares.

OUT/seed-0/pool/                  the sequences of all domains in equal numbers (a stored corpus)
OUT/seed-0/routers/router-E/      models; rounds.jsonl: loss, load, purity, margin and bytes of each round
OUT/seed-0/clusters.safetensors   instead of routers with `gate = "clusters"`
OUT/seed-0/assignment.npy, .json  which expert each sequence of the pool belongs to; held.npy, .json: the same of its
                                  validation sequences. That is all that has to travel.
OUT/seed-0/segments/E/            the share of each expert (a stored corpus), made from the pool and these
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from isles.comm.errors import CommError
from isles.data import load_tokenizer
from isles.data.corpus import rows_corpus
from isles.experts.domains import DomainText, Pool, pooled, store_rows
from isles.experts.jobs import ExpertJob, JobProgress
from isles.experts.registry import Forest, ForestMember
from isles.experts.routing.assignment import Assignment, assign
from isles.experts.routing.clusters import clustered, texts_of
from isles.experts.routing.em import RouterTask, train_router
from isles.experts.routing.routing import Gate, gate_of, route
from isles.experts.smalltalk import smalltalk
from isles.experts.smalltalk.smalltalk import SmalltalkConfig
from isles.launch.nodes import SINGLE_NODE
from isles.launch.workers import raise_first
from isles.parsing import parse_json
from isles.training.config.sections import Config
from isles.training.records.checkpoint import Checkpoints
from isles.training.records.rundir import clear_logs
from isles.training.records.writer import write_config
from isles.training.running.interrupts import first_interrupt
from isles.training.running.run import Interrupted
from isles.training.running.starting import starter

ROUTED, ROUNDS, CLUSTERS = "routers.json", "rounds.jsonl", "clusters.safetensors"
ASSIGNMENT, HELD = "assignment.npy", "held.npy"


class SmalltalkSeed:
    """What lies in `folder`. base: what its runs share, but for the seed."""

    def __init__(self, own: SmalltalkConfig, base: Config, seed: int, folder: Path) -> None:
        self.own, self.folder = own, folder
        self.base = smalltalk.seeded(base, seed)

    def jobs(self) -> list[ExpertJob]:
        """The experts' runs and the dense ones."""
        return smalltalk.expert_jobs(self.own, self.base, self.folder / "segments", self.folder / "pool")

    def pool(self, trained: Sequence[DomainText]) -> Pool:
        """The sequences that are parted among the experts."""
        return pooled(trained, self.folder / "pool", self.base.run.seed, judged=self.own.sequences)

    def forest(self) -> Forest:
        """Experts, and what chooses among them."""
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
        gate = gate_of(self.forest(), load_tokenizer(self.base.data.tokenizer))
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
        paths = [self.folder / name for name in (HELD, ASSIGNMENT)]
        if not all(path.exists() for path in paths):
            if self.own.gate == "clusters":
                self._cluster(pool, progress)
            elif not (self.folder / ROUTED).exists():
                self._train_routers(pool, progress)
            progress.notice(f"parting {len(pool.rows):,} sequences among {self.own.experts} experts")
            gate = self.gate()
            # No balance among those that are held out: they are what each expert would be asked in use.
            held = route(gate, torch.from_numpy(pool.held.astype(np.int64)), self.own.prefix).numpy()
            Assignment(held, self.own.experts).save(paths[0])
            self._partition(gate, pool).save(paths[1])
        held, assignment = map(Assignment.load, paths)
        if (len(held.expert_of), len(assignment.expert_of)) != (len(pool.held), len(pool.rows)):
            raise ValueError(f"{paths[1]}: is of another pool; remove it, or copy it again")
        for expert in range(self.own.experts):
            rows = pool.rows[assignment.rows(expert)], pool.held[held.rows(expert)]
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
