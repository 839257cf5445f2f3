"""Hybrids that cut the model: every matrix among devices of one host (tensor parallel), the blocks into stages
(pipeline), and replicas of both that average their gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from isles.memory.costs import Profile, ends_update, least_peak, tail, unit_time
from isles.memory.parallel.decoder import HalfDecoder, profile_of
from isles.memory.parallel.job import ParallelJob, ParallelWay, deepest, divisors
from isles.memory.parallel.uncut import least
from isles.network.links import Links
from isles.network.routing.orders import in_flight
from isles.network.routing.replay import TaskSeconds, fixed_step
from isles.network.routing.routes import MOST_VISITS
from isles.network.routing.wires import Sizes

_HOLDS = ("1f1b", "auto")  # as few forwards as keep stages busy, or two more where messages take long


@dataclass(frozen=True, kw_only=True, slots=True)
class HybridSplit:
    """tensor x stages x replicas devices, each microbatch one sequence. holds: forwards that stages keep."""

    tensor: int
    stages: int
    replicas: int
    holds: str


def splits(job: ParallelJob, *, tensor: bool) -> list[HybridSplit]:
    """All that fill the devices, up to 16 stages; tensor: also with matrices cut among devices of a host."""
    found = []
    for cut in divisors(job.per_host):
        if (cut > 1 and not tensor) or job.devices % cut or job.shape.heads % cut:
            continue
        for stages in divisors(job.devices // cut):
            replicas = job.devices // cut // stages
            if stages > min(job.shape.layers, MOST_VISITS) or job.sequences % replicas:
                continue
            for holds in _HOLDS if stages > 1 else _HOLDS[:1]:
                found.append(HybridSplit(tensor=cut, stages=stages, replicas=replicas, holds=holds))
    return found


def hybrid(job: ParallelJob, *, tensor: bool) -> ParallelWay:
    """The fastest split, and the largest model of any."""
    largest = deepest(lambda shape: _fits(job, shape, tensor), job.shape)
    return replace(fastest_hybrid(job, tensor=tensor), largest=largest)


def fastest_hybrid(job: ParallelJob, *, tensor: bool) -> ParallelWay:
    """The fastest split."""
    best = ParallelWay(name="tensor x pipeline x data" if tensor else "pipeline x data")
    every = splits(job, tensor=tensor)
    fitting = [
        (StageSeconds(job, split, again), split, again) for split in every if (again := remade(job, split)) is not None
    ]
    for stages, split, again in sorted(fitting, key=lambda one: one[0].bound):
        if best.step is not None and stages.bound >= best.step:
            break
        step, idle = stages.seconds()
        if best.step is None or step < best.step:
            peak = max(_peak(job, job.shape, split, stage, again[stage]) for stage in range(split.stages))
            parts = (split.tensor, split.stages, split.replicas) if tensor else (split.stages, split.replicas)
            best = replace(
                best,
                how=f"{' x '.join(map(str, parts))}, {sum(again)} of {job.shape.layers} made again",
                step=step,
                device_bytes=peak,
                bound_by=f"idle {idle:.0%}",
            )
    return best


def _fits(job: ParallelJob, shape: HalfDecoder, tensor: bool) -> bool:
    """Whether the split into most pieces can train it, its fullest stages that is: the first, which keeps the most
    forwards, and the last, with the head.
    """
    cut = max(one.tensor for one in splits(job, tensor=tensor))
    stages = max(one for one in divisors(job.devices // cut) if one <= min(shape.layers, MOST_VISITS))
    split = HybridSplit(tensor=cut, stages=stages, replicas=job.devices // cut // stages, holds=_HOLDS[0])
    layers = _layers(shape, stages)
    return all(_peak(job, shape, split, stage, layers[stage]) <= job.machine.device_bytes for stage in (0, stages - 1))


def _layers(shape: HalfDecoder, stages: int) -> list[int]:
    """Of each stage; the last ones, which have the head, take no more than the others."""
    return [shape.layers // stages + (stage < shape.layers % stages) for stage in range(stages)]


def _stage(job: ParallelJob, shape: HalfDecoder, split: HybridSplit, stage: int) -> Profile:
    """Of one stage and one sequence, the all-reduces of cut matrices among its seconds."""
    made = profile_of(shape, 1, layers=_layers(shape, split.stages)[stage], cut=split.tensor)
    ends = made.ends
    if stage < split.stages - 1:
        ends = replace(ends, top=0, flops=0.0)
    if 0 < stage < split.stages - 1:
        ends = replace(ends, params=0, weights=0, states=0, top_gradients=0)
    reduced = 2 * 2 * shape.stream(1) * (split.tensor - 1) / split.tensor / job.near  # two a pass
    units = tuple(
        replace(
            unit,
            forward=job.machine.seconds(unit.flops) + reduced,
            backward=2 * job.machine.seconds(unit.flops) + reduced,
        )
        for unit in made.units
    )
    held = in_flight(split.holds, 1, split.stages)[stage]
    return replace(made, units=units, ends=ends, in_flight=min(held, job.sequences // split.replicas))


def _peak(job: ParallelJob, shape: HalfDecoder, split: HybridSplit, stage: int, again: int) -> int:
    made = _stage(job, shape, split, stage)
    units = len(made.units)
    return least_peak(made, tail("device", "recompute", units, units - again), job.sequences // split.replicas)


def remade(job: ParallelJob, split: HybridSplit) -> list[int] | None:
    """Blocks of each stage that must be made again to fit; None: some stage does not fit even then."""
    found = []
    for stage, layers in enumerate(_layers(job.shape, split.stages)):
        again = least(
            layers, lambda count, stage=stage: _peak(job, job.shape, split, stage, count) <= job.machine.device_bytes
        )
        if again is None:
            return None
        found.append(again)
    return found


class StageSeconds:
    """The seconds of a split: forward, backward and the update by stage, and the mean of its gradients.

    bound: no step is shorter.
    """

    def __init__(self, job: ParallelJob, split: HybridSplit, again: list[int]) -> None:
        self.job, self.split, self.microbatches = job, split, job.sequences // split.replicas
        self.forward, self.backward, self.update, self.mean, self.blocks = [], [], [], [], []
        rate = job.mean_rate(split.tensor * split.stages)
        for stage, count in enumerate(again):
            made = _stage(job, job.shape, split, stage)
            units = len(made.units)
            pairs = zip(made.units, tail("device", "recompute", units, units - count), strict=True)
            times = [unit_time(unit, one, job.machine) for unit, one in pairs]
            head = job.machine.seconds(made.ends.flops)
            nbytes = made.ends.weights + sum(unit.weights for unit in made.units)
            self.forward.append(sum(one.forward for one in times) + head)
            self.backward.append(sum(one.backward for one in times) + 2 * head)
            self.update.append(ends_update(made, job.machine) + sum(one.update for one in times))
            self.mean.append(2 * nbytes * (split.replicas - 1) / split.replicas / rate)
            self.blocks.append(len(times))
        self.bound = max(map(self._least, range(split.stages)))

    def _least(self, stage: int) -> float:
        """A step is not shorter: the stage's first forward pass waits for those before, and so do the updates of the
        first stage for the backward passes from there on.
        """
        work = self.microbatches * (self.forward[stage] + self.backward[stage])
        after = max(self._left(stage), sum(self.backward[:stage]) + self._left(0))
        return sum(self.forward[:stage]) + work + after

    def _left(self, stage: int) -> float:
        """What is still to do when a stage's last backward pass is over: of the mean, which begins block by block
        within that, and the update.
        """
        mean = self.mean[stage]
        return max(mean - self.backward[stage], mean / self.blocks[stage]) + self.update[stage]

    def seconds(self) -> tuple[float, float]:
        """(seconds of a step, share of it that a device waits): a replica's tasks and messages replayed, and the
        rest.
        """
        job, split = self.job, self.split
        size = job.shape.stream(1) // split.tensor  # cut matrices' devices each send a part
        near = split.tensor * split.stages <= job.per_host
        rate = job.near if near else min(job.near, job.link / job.per_host)
        seconds = TaskSeconds(forward=self.forward, loss=[0.0] * split.stages, backward=self.backward)
        sizes = Sizes(forward=size, home=size, backward=size)
        played = fixed_step(self.microbatches, seconds, split.holds, Links(bandwidth=8 * rate), sizes)
        ends = [max(span.end for span in played.spans if span.worker == stage) for stage in range(split.stages)]
        step = max(end + self._left(stage) for stage, end in enumerate(ends))
        return step, 1 - sum(played.busy.values()) / split.stages / step
