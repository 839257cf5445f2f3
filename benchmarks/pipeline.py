"""Pipelined steps: wall seconds against torch's 1F1B, CPU seconds of virtual workers against a plain loop, and a soak.

    python -m benchmarks.pipeline [--json]

Against torch.distributed.pipelining's Schedule1F1B: the same two stages in the same two processes over gloo, as many
forwards in flight, in turns, fifteen pairs of a few steps each; two sizes. Virtual: 16 workers (4 stages, 4 replicas)
of a model of 2 million parameters in one process, against a loop over the same microbatches with the whole model. Soak:
300 steps of two processes; threads and resident memory after 50 steps and at the end. Exit code 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from dataclasses import dataclass
from statistics import median, quantiles

import torch
import torch.distributed as dist
from torch import Tensor

import isles
from benchmarks import _torch_stages
from benchmarks._measure import Row, report
from benchmarks.overhead import resident
from isles.comm.mesh import Mesh
from isles.models import Decoder, Shape
from isles.pipeline.config import PipelineConfig

PAIRS = 15


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model, and its microbatches. steps: that are timed in one go."""

    d_model: int
    context: int
    microbatches: int
    sequences: int
    steps: int

    @property
    def shape(self) -> Shape:
        return Shape(
            d_model=self.d_model,
            layers=4,
            heads=4,
            ffn=3 * self.d_model,
            vocab=256,
            context=self.context,
            tie_embeddings=False,
        )

    @property
    def batch_size(self) -> int:
        return self.microbatches * self.sequences

    def batch(self, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(256, (self.batch_size, self.context + 1), generator=generator)


SIZES = {
    "width 64, 4 microbatches of 2 x 64": Size(d_model=64, context=64, microbatches=4, sequences=2, steps=6),
    "width 128, 8 microbatches of 4 x 128": Size(d_model=128, context=128, microbatches=8, sequences=4, steps=2),
}
VIRTUAL = Size(d_model=192, context=64, microbatches=4, sequences=2, steps=1)


def pipeline_of(size: Size, stages: int, in_flight: str) -> isles.Pipeline:
    """This worker's, of the decoder with seed 0."""
    config = PipelineConfig(stages=stages, microbatches=size.microbatches, in_flight=in_flight)
    return isles.Pipeline(
        Decoder(size.shape, seed=0),
        isles.mesh(stage=stages),
        batch_size=size.batch_size,
        context=size.context,
        vocab=256,
        config=config,
    )


def against_torch(world: Mesh, size: Size) -> list[tuple[float, float]]:
    """Wall seconds of a step, ours and torch's, of each pair; and the gradients are the same bits."""
    torch.set_num_threads(1)
    pipeline, batch, group = pipeline_of(size, 2, "1f1b"), size.batch(), dist.group.WORLD
    assert group is not None
    made = _torch_stages.schedule(pipeline.stage, group, "1f1b", size.microbatches)
    gradients: dict[str, list[Tensor]] = {}

    def timed(name: str) -> float:
        world.world.barrier()
        begun = time.perf_counter()
        for _ in range(size.steps):
            pipeline.stage.zero_grad()
            if name == "ours":
                pipeline.step(batch if pipeline.reads else None)
            else:
                _torch_stages.step(made, group, batch)
        world.world.barrier()
        seconds = (time.perf_counter() - begun) / size.steps
        gradients[name] = [p.grad.clone() for p in pipeline.stage.parameters() if p.grad is not None]
        return seconds

    pairs = []
    for number in range(PAIRS + 1):
        names = ("ours", "torch") if number % 2 else ("torch", "ours")
        seconds = {name: timed(name) for name in names}
        pairs.append((seconds["ours"], seconds["torch"]))
    assert all(torch.equal(*both) for both in zip(*gradients.values(), strict=True))
    return pairs[1:]  # the first one warms up


def wall_rows() -> list[Row]:
    rows = []
    for name, size in SIZES.items():
        pairs = isles.run_local(against_torch, 2, args=(size,))[0]
        ratios = [ours / theirs for ours, theirs in pairs]
        low, _, high = quantiles(ratios, n=4)
        ours, theirs = (1000 * median(pair[place] for pair in pairs) for place in (0, 1))
        words = f"quartiles {low:.2f} to {high:.2f}; {ours:.1f} ms against {theirs:.1f} ms a step"
        rows.append(Row(f"{name}: wall of a step / torch's 1F1B", median(ratios), "", ("<=", 1.10), words))
    return rows


def virtual_steps(world: Mesh, steps: int) -> None:
    """As a worker of a pipelined run on the simulated network."""
    pipeline = pipeline_of(VIRTUAL, 4, "auto")
    for number in range(steps):
        pipeline.step(VIRTUAL.batch(100 * number + world.rank) if pipeline.reads else None)


def plain_steps(replicas: int, steps: int) -> None:
    """The same microbatches through the whole model, one after the other."""
    models = [Decoder(VIRTUAL.shape, seed=0) for _ in range(replicas)]
    for number in range(steps):
        for replica, model in enumerate(models):
            for part in VIRTUAL.batch(100 * number + replica).split(VIRTUAL.sequences):
                (model(part).loss / VIRTUAL.microbatches).backward()


def cpu_rows() -> list[Row]:
    torch.set_num_threads(1)
    steps, few, pairs = 2, 1, []
    for _ in range(5):
        seconds = []
        for work in (
            lambda count: isles.run_virtual(virtual_steps, 16, links="lan", args=(count,), step_seconds=0.0),
            lambda count: plain_steps(4, count),
        ):
            ends = []
            for count in (few, few + steps):  # the start cancels
                begun = time.process_time()
                work(count)
                ends.append(time.process_time() - begun)
            seconds.append((ends[1] - ends[0]) / steps)
        pairs.append(seconds)
    pairs = pairs[1:]
    parameters = sum(parameter.numel() for parameter in Decoder(VIRTUAL.shape).parameters())
    ratio = median(ours / plain for ours, plain in pairs)
    words = f"{1000 * median(one for one, _ in pairs):.0f} ms against {1000 * median(one for _, one in pairs):.0f} ms"
    name = f"16 virtual workers of {parameters / 1e6:.1f}M parameters: CPU of a step / a plain loop"
    return [Row(name, ratio, "", ("<=", 1.5), words)]


def soak(world: Mesh, steps: int) -> tuple[list[int], list[float]]:
    """Threads, and resident megabytes, after 50 steps and at the end."""
    size = next(iter(SIZES.values()))
    pipeline, batch = pipeline_of(size, 2, "auto"), size.batch()
    threads, memory = [], []
    for number in range(1, steps + 1):
        pipeline.stage.zero_grad()
        pipeline.step(batch if pipeline.reads else None)
        if number in (50, steps):
            threads.append(threading.active_count())
            memory.append(resident("VmRSS") / 1e6)
    return threads, memory


def soak_rows() -> list[Row]:
    told = isles.run_local(soak, 2, args=(300,))
    more = max(threads[1] - threads[0] for threads, _ in told)
    grown = max(memory[1] - memory[0] for _, memory in told)
    return [
        Row("300 steps: threads more than after 50", more, "", ("<=", 0.0), f"{max(t[1] for t, _ in told)} threads"),
        Row("300 steps: memory more than after 50", grown, "MB", ("<=", 4.0), f"{max(m[1] for _, m in told):.0f} MB"),
    ]


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Pipelined steps.")
    parser.add_argument("--json", action="store_true", help="print JSON, nothing else")
    return report([*wall_rows(), *cpu_rows(), *soak_rows()], parser.parse_args().json)


if __name__ == "__main__":
    sys.exit(main())
