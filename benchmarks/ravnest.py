"""Ravnest's asynchronous stages against the synchronous pipeline: loss, seconds, memory and bytes.

    python -m benchmarks.ravnest [--tune] [--only "ravnest x 1" ...] [--write] [--json]

1. The decoder of six blocks over bytes (the embedded text, batches and rates) in 2 stages, once (2 nodes) and twice (4
   nodes), on the simulated network: nodes that take 3 and 1, or 3, 1, 2 and 2 times as long for the same work, drawn
   anew for each task (sigma 0.3), every two of them over home fibre. A whole step takes a node of factor 1 a second.
   Each way is cut where it is fastest by its own dry run; two replicas take one cut, two clusters one each. Replicas
   average in every step (ddp) or every 20 (localsgd), clusters every 4, with AdamW's state, or every 20; those that
   never talk are judged each by itself, and one pipeline with the text of both takes twice as many steps. Memory is
   counted: all storages that a stage's operations make in four steps, of the first copy. --tune makes the runs by which
   "best rate" is chosen, on a seed and on text that are not judged; commit tuned.jsonl before the others are made
   (`benchmarks._once`).
2. Loss against steps on a quadratic at 1, 2 and 4 clusters (`benchmarks._delayed`).

--write puts the tables into docs/ravnest.md.

Bounds: at as many samples the loss is within 3 % of the synchronous pipeline's, and a sample takes less time; slopes
are -0.5 within 0.05, and C clusters are worth sqrt(C) within a tenth.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from benchmarks._delayed import Course, played, slope
from benchmarks._measure import Row, report
from benchmarks._once import best, coursed, judging
from benchmarks._pages import written
from benchmarks._stage_memory import peaks
from isles.models.sizes import Shape
from isles.pipeline.config import PipelineConfig
from isles.plan.peers import plan_clusters
from isles.plan.run_plan import plan_run
from isles.training.config.reading import read_config
from isles.training.config.sections import Config

PAGE, STEPS_HERE = "ravnest.md", 400
BLOCKS, STAGES, MICROBATCHES, BATCH = 6, 2, 2, 8
FACTORS = {1: (3.0, 1.0), 2: (3.0, 1.0, 2.0, 2.0)}
BASE = (
    f"model.layers={BLOCKS}",
    "model.tie_embeddings=false",
    "world.backend=virtual",
    "world.virtual.links=home-fibre",
    "world.virtual.step_seconds=1.0",
    "pipeline.clip=stage",
)
NOBODY = ("replicas.method=none",)
SELDOM = ("replicas.method=localsgd", "replicas.sync_every=20")
OFTEN = ("replicas.method=localsgd", "replicas.sync_every=4", "pipeline.ravnest.average_optimizer=true")
MEANS = (0.25, 0.5, 0.75, 1.0)
"""Of the time that Ravnest takes, when losses are compared."""
CLOCKS = {1: "ravnest x 1", 2: "ravnest x 2, every 4"}
RATES = (3e-3, 6e-3, 1.2e-2)


@dataclass(frozen=True, kw_only=True)
class Way:
    """How it is trained. copies: replicas, or clusters. times: as many steps as others. is_tuned: at the best of
    RATES.
    """

    copies: int
    settings: tuple[str, ...]
    ravnest: bool = False
    times: int = 1
    is_tuned: bool = False


WAYS: Mapping[str, Way] = {
    "pipeline x 1": Way(copies=1, settings=NOBODY),
    "pipeline x 1, best rate": Way(copies=1, settings=NOBODY, is_tuned=True),
    "pipeline x 1, recomputing": Way(copies=1, settings=(*NOBODY, "pipeline.recompute=true")),
    "ravnest x 1": Way(copies=1, settings=NOBODY, ravnest=True),
    "ravnest x 1, recomputing": Way(copies=1, settings=(*NOBODY, "pipeline.recompute=true"), ravnest=True),
    "pipeline x 2, ddp": Way(copies=2, settings=("replicas.method=ddp",)),
    "ravnest x 2, every 4": Way(copies=2, settings=OFTEN, ravnest=True),
    "pipeline x 2, localsgd": Way(copies=2, settings=SELDOM),
    "ravnest x 2, every 20": Way(copies=2, settings=SELDOM, ravnest=True),
    "pipeline x 2, never talk": Way(copies=2, settings=NOBODY),
    "pipeline x 1, the text of both": Way(copies=1, settings=NOBODY, times=2),
}
RIVALS = {
    "ravnest x 1": "pipeline x 1",
    "ravnest x 1, recomputing": "pipeline x 1, recomputing",
    "ravnest x 2, every 4": "pipeline x 2, ddp",
    "ravnest x 2, every 20": "pipeline x 2, localsgd",
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a way came to. loss: nats a byte on held-out text. rate: of the inner optimizer. seconds: virtual, of
    training. course: (seconds, loss) of each validation. sent: bytes of a node to stages, and to other copies; peaks:
    bytes, by stage.
    """

    loss: float
    rate: float
    seconds: float
    sequences: int
    course: tuple[tuple[float, float], ...]
    sent: tuple[float, float]
    cuts: tuple[int, ...]
    peaks: tuple[int, ...]

    def at(self, second: float) -> float:
        """Loss then, between validations along a line."""
        return float(np.interp(second, *zip(*self.course, strict=True)))


def configured(way: Way, cuts: tuple[int, ...], steps: int = STEPS_HERE) -> Config:
    """cuts: where the second stage begins, of each cluster; of all replicas where there is one."""
    if way.ravnest:
        where = ("pipeline.routing=ravnest", f"pipeline.ravnest.clusters={[[cut] for cut in cuts]}")
    else:
        where = (f"pipeline.stages={STAGES}", f"pipeline.cut=[{cuts[0]}]", "pipeline.together=false")
    where += (f"pipeline.microbatches={MICROBATCHES}",)
    workers = STAGES * way.copies
    more = [f"world.workers={workers}", f"world.virtual.step_factors={list(FACTORS[way.copies])}"]
    more += [f"run.steps={steps * way.times}", "run.validate_every=40", "world.virtual.step_jitter=0.3"]
    return read_config(None, {}, [*BASE, *way.settings, *where, *more])


def best_cuts(way: Way) -> tuple[int, ...]:
    """Where its steps are fastest, as its dry run says."""
    if not way.ravnest:

        def step(cut: int) -> float:
            told = plan_run(configured(way, (cut,), 40)).time
            assert told is not None and told.step is not None
            return told.step

        return (min(range(1, BLOCKS), key=step),)
    found = []
    for copy in range(way.copies):
        slowest = {}
        for cut in range(1, BLOCKS):
            plan = plan_clusters(configured(way, (cut,) * way.copies, 40))
            slowest[cut] = max(node.seconds or 0.0 for node in plan.workers if node.cluster == copy)
        found.append(min(slowest, key=slowest.__getitem__))
    return tuple(found)


def config_of(name: str) -> tuple[Config, tuple[int, ...]]:
    """At its rate, with its cuts."""
    way = WAYS[name]
    cuts = best_cuts(way)
    config = configured(way, cuts)
    if not way.is_tuned:
        return config, cuts
    tried = {rate: replace(config, inner=replace(config.inner, lr=rate)) for rate in RATES}
    return tried[best(PAGE, name, tried)], cuts


def outcome(name: str) -> Outcome:
    """Of its run."""
    config, cuts = config_of(name)
    line = judging(PAGE, name, config, coursed)
    return Outcome(
        loss=line["loss"],
        rate=config.inner.lr,
        seconds=line["seconds"],
        sequences=config.run.steps * BATCH * WAYS[name].copies,
        course=tuple((second, loss) for second, loss in line["course"]),
        sent=(line["sent"][0], line["sent"][1]),
        cuts=cuts,
        peaks=tuple(peaks(_shape(config), BATCH, _alone(config, cuts[0]))),
    )


def _shape(config: Config) -> Shape:
    return config.model.shape()


def _alone(config: Config, cut: int) -> PipelineConfig:
    """Of one copy."""
    own = config.pipeline
    return PipelineConfig(
        stages=STAGES,
        cut=(cut,),
        microbatches=own.microbatches,
        routing=own.routing,
        recompute=own.recompute,
        clip="stage",
    )


def table(found: Mapping[str, Outcome]) -> str:
    """For the page."""
    lines = [
        "| | cut before block | loss, nats/byte | virtual s a sequence | loss at 25, 50, 75, 100 % of Ravnest's time "
        "| peak memory by stage, MB | sent by a node: to stages, to copies, MB |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, one in found.items():
        clock = found.get(CLOCKS[WAYS[name].copies * WAYS[name].times], one)
        ahead = ", ".join(f"{one.at(share * clock.seconds):.3f}" for share in MEANS)
        rate = f" ({one.rate:g})" if WAYS[name].is_tuned else ""
        lines.append(
            f"| {name}{rate} | {', '.join(map(str, one.cuts))} | {one.loss:.3f} | {one.seconds / one.sequences:.4f} "
            f"| {ahead} | {', '.join(f'{peak / 1e6:.1f}' for peak in one.peaks)} "
            f"| {one.sent[0] / 1e6:.1f}, {one.sent[1] / 1e6:.1f} |"
        )
    return "\n".join(lines)


def rows(found: Mapping[str, Outcome]) -> list[Row]:
    """Measured, with bounds."""
    made = [Row(f"{name}: loss", one.loss, "nats/byte") for name, one in found.items()]
    for name, rival in RIVALS.items():
        if name not in found or rival not in found:
            continue
        ours, theirs = found[name], found[rival]
        made.append(Row(f"{name}: loss / {rival}'s", ours.loss / theirs.loss, "", ("<=", 1.03)))
        seconds = (ours.seconds / ours.sequences) / (theirs.seconds / theirs.sequences)
        made.append(Row(f"{name}: seconds a sequence / {rival}'s", seconds, "", ("<=", 1.0)))
    return made


STEPS = (1000, 4000, 16000)
CLUSTERS = (1, 2, 4)


def quadratic() -> dict[int, list[float]]:
    """By clusters, the mean squared gradient after so many steps."""
    return {clusters: [played(Course(clusters=clusters, steps=steps)) for steps in STEPS] for clusters in CLUSTERS}


def quadratic_table(found: Mapping[int, list[float]]) -> str:
    """For the page."""
    heads = " | ".join(f"{steps:,} steps" for steps in STEPS)
    lines = [f"| clusters | {heads} | slope | worth, of one cluster |", "|---" * (len(STEPS) + 3) + "|"]
    for clusters, values in found.items():
        worth = found[1][-1] / values[-1]
        cells = " | ".join(f"{value:.4f}" for value in values)
        lines.append(f"| {clusters} | {cells} | {slope(list(STEPS), values):.3f} | {worth:.2f} |")
    return "\n".join(lines)


def quadratic_rows(found: Mapping[int, list[float]]) -> list[Row]:
    """With bounds."""
    made = []
    for clusters, values in found.items():
        made.append(Row(f"quadratic, {clusters} clusters: slope + 0.5", abs(slope(list(STEPS), values) + 0.5), "",
                        ("<=", 0.05)))  # fmt: skip
        worth = found[1][-1] / values[-1] / clusters**0.5
        made.append(Row(f"quadratic, {clusters} clusters: worth / sqrt", abs(worth - 1), "", ("<=", 0.1)))
    return made


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--only", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.tune:
        print({name: config_of(name)[0].inner.lr for name, way in WAYS.items() if way.is_tuned})
        return 0
    found = {name: outcome(name) for name in given.only}
    squares = quadratic()
    print(table(found), quadratic_table(squares), sep="\n\n")
    if given.write:
        written(PAGE, "benchmarks.ravnest", table(found))
        written(PAGE, "benchmarks.ravnest, quadratic", quadratic_table(squares))
    return report(rows(found) + quadratic_rows(squares), given.json)


if __name__ == "__main__":
    sys.exit(main())
