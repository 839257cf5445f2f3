"""A decoder in half precision as the papers on memory count it, in closed form: nothing is profiled.

    parameters     12 d^2 a block, V d for the embedding, which is the head too
    bytes          2 a parameter for weights and gradients, 12 for AdamW's state with float32 masters
    activations    of a block without fused attention: 34 a token and d, 5 a head and pair of tokens

d: width; V: vocabulary. Of a tensor-parallel worker: the matrices are cut, so are the pairs and 24 of the 34.

`ParallelJob`: such a decoder, equal devices on equal hosts, and the links between them. `ParallelPlan`: one way to
train it there, at its fastest.

The step of each way to train a decoder in parallel, from closed forms and `isles.memory`'s simulation.

out of core      every device computes the whole model, by a memory plan (KARMA's data parallelism)
fully sharded    every device computes the whole model, weights gathered unit by unit (fsdp)
hybrid           matrices cut among devices of one host (tensor parallel), blocks into stages (pipeline), and
                 replicas of both that average their gradients
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from isles.memory.costs import (
    Ends,
    Passes,
    Placement,
    Profile,
    Transient,
    UnitProfile,
    ends_update,
    host_bytes,
    least_peak,
    tail,
    unit_time,
)
from isles.memory.lanes import LaneRun, LaneTimeline
from isles.memory.search import Counts, Search, expand, possible
from isles.network.links import Links
from isles.network.machines import Machine
from isles.network.routing.events import MOST_VISITS, in_flight
from isles.network.routing.replay import Sizes, TaskSeconds, fixed_step

CONTEXT = 1_000_000_000
"""Bytes that a device's own context takes."""
WEIGHT, STATE = 2, 12


@dataclass(frozen=True, kw_only=True, slots=True)
class HalfDecoder:
    """layers: blocks. width: of the stream. sequence: tokens of one."""

    layers: int
    width: int
    heads: int
    sequence: int = 1024
    vocabulary: int = 50304

    @property
    def block_params(self) -> int:
        return 12 * self.width**2

    @property
    def embedding_params(self) -> int:
        return self.vocabulary * self.width

    @property
    def params(self) -> int:
        return self.layers * self.block_params + self.embedding_params

    def block_flops(self, tokens: int) -> float:
        return float(2 * self.block_params * tokens + 4 * self.sequence * self.width * tokens)

    def stream(self, sequences: int) -> int:
        """Bytes between two blocks."""
        return 2 * sequences * self.sequence * self.width


def decoder_like(params: float, layers: int, sequence: int) -> HalfDecoder:
    """The decoder of so many layers whose parameters come closest, its heads 64 wide."""
    low, high = 1, 1 << 16
    while high - low > 1:  # width / 64 of the largest that has no more of them
        middle = (low + high) // 2
        shape = HalfDecoder(layers=layers, width=64 * middle, heads=middle, sequence=sequence)
        low, high = (middle, high) if shape.params <= params else (low, middle)
    near = [HalfDecoder(layers=layers, width=64 * one, heads=one, sequence=sequence) for one in (low, high)]
    return min(near, key=lambda one: abs(one.params - params))


def profile_of(
    shape: HalfDecoder, sequences: int, *, layers: int | None = None, gpus: int = 1, cut: int = 1, gathered: int = 0
) -> Profile:
    """Of `layers` blocks (None: all) at so many sequences, with the embedding as the head.

    gpus: that keep weights and states in equal shares. gathered: bytes on top while a block's whole weights are there.
    cut: devices among which every matrix is cut.
    """
    width, tokens = shape.width, sequences * shape.sequence
    mine, boundary = shape.block_params // gpus // cut, shape.stream(sequences)
    pairs = 5 * shape.heads * shape.sequence * tokens // cut
    saved = 10 * tokens * width + 24 * tokens * width // cut + pairs
    passes = Passes(
        saved=saved,
        casts=0,
        keep=Transient(boundary + gathered, 4 * boundary + 2 * gathered),
        recompute=Transient(boundary + gathered, saved - boundary + 4 * boundary + 2 * gathered),
    )
    block = UnitProfile(
        name="",
        params=mine,
        weights=WEIGHT * mine,
        states=STATE * mine,
        moved=WEIGHT * mine,
        boundary=boundary,
        resident=passes,
        device_copy=passes,
        flops=shape.block_flops(tokens) / cut,
    )
    embedding = shape.embedding_params // gpus // cut
    ends = Ends(
        params=embedding,
        weights=WEIGHT * embedding,
        states=STATE * embedding,
        buffers=CONTEXT,
        before=0,
        top=6 * tokens * shape.vocabulary // cut,
        bottom=0,
        top_gradients=2 * embedding,
        bottom_gradients=0,
        carried=0,
        flops=2.0 * shape.embedding_params * tokens / cut,
    )
    count = shape.layers if layers is None else layers
    return Profile(
        model="decoder",
        units=tuple(replace(block, name=str(number)) for number in range(count)),
        ends=ends,
        stream=0,
        batch=sequences,
        tokens=shape.sequence,
        autocast="none",
    )


_MOST_LAYERS = 1025


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelJob:
    """shape: of the model. devices: of which per_host share a host. machine: one device with its share of the host.
    sequences: of a step of all devices. link: bytes a second each way between hosts, of a host; near: of a device,
    between those of one host.
    """

    shape: HalfDecoder
    devices: int
    machine: Machine
    sequences: int
    link: float
    near: float = math.inf
    per_host: int = 1

    def __post_init__(self) -> None:
        if self.devices < 2 or self.per_host < 1 or self.devices % self.per_host:
            raise ValueError(
                f"{self.devices} devices, {self.per_host} to a host: choose 2 or more that fill their hosts"
            )
        if self.sequences < 1 or self.sequences % self.devices:
            raise ValueError(
                f"{self.sequences} sequences a step do not divide among {self.devices} devices: choose a multiple"
            )
        if not self.link > 0 or not self.near > 0:
            raise ValueError("links: choose rates above 0")

    def mean_rate(self, apart: int) -> float:
        """Bytes a second of a mean over devices that are `apart` from one to the next: as many such means share a
        host's link, and none is on it where all devices are on one host.
        """
        if self.devices <= self.per_host:
            return self.near
        return min(self.near, self.link / min(apart, self.per_host))


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelPlan:
    """One way, at its fastest. how: in words. step: seconds. device_bytes, host_bytes: of a device and of its share of
    the host. bound_by: the lane that works longest, and its seconds. largest: parameters of the deepest model of this
    width that fits. step and bytes are None where this model does not fit.
    """

    name: str
    how: str = ""
    step: float | None = None
    device_bytes: int | None = None
    host_bytes: int = 0
    bound_by: str = ""
    largest: int = 0


def divisors(number: int) -> Iterator[int]:
    """All of them, rising."""
    return (one for one in range(1, number + 1) if number % one == 0)


def deepest(fits: Callable[[HalfDecoder], bool], shape: HalfDecoder) -> int:
    """Parameters of the model of most layers, as wide as `shape`, that fits; 0: none does."""
    fitting = bisect_left(range(1, _MOST_LAYERS), True, key=lambda layers: not fits(replace(shape, layers=layers)))
    return replace(shape, layers=fitting).params if fitting else 0


OUT_OF_CORE, OUT_OF_CORE_SHARED = "out of core, states on every host", "out of core, states shared"
_TRIED = 8  # plans that are simulated of every accumulation
_UPDATED = 3 * WEIGHT + 2 * STATE  # bytes that an update on the device reads and writes, a parameter

PassPlan = tuple[int, tuple[Placement, ...]]
"""Accumulated batches, and the plan of each."""


# ---------------------------------------------------------------------------------------------------------------------
# Out of core


def out_of_core(job: ParallelJob, *, shared: bool) -> ParallelPlan:
    """Every device trains the whole model under a plan of memory with early updates; gradients are averaged block by
    block while the backward pass goes on, between the hosts. shared: every host keeps and updates the states of its
    share of every block (`memory.shard`); else of all of it, as KARMA's do.
    """
    name = OUT_OF_CORE_SHARED if shared else OUT_OF_CORE
    found = planned(job, shared=shared)
    largest = deepest(lambda shape: _out_of_core_fits(job, shape, shared), job.shape)
    if found is None:
        return ParallelPlan(name=name, largest=largest)
    accumulation, plan = found
    made = averaged(job, job.shape, accumulation, shared=shared)
    timeline = played(job, found, shared=shared)
    runs = " ".join(f"{count}x{choice}" for choice, count in Counter(one.short for one in plan).items())
    return ParallelPlan(
        name=name,
        how=f"{runs}{f', {accumulation} batches a step' if accumulation > 1 else ''}",
        step=timeline.step,
        device_bytes=int(timeline.peak),
        host_bytes=host_bytes(made, plan),
        bound_by=busiest(timeline),
        largest=largest,
    )


def averaged(job: ParallelJob, shape: HalfDecoder, accumulation: int, *, shared: bool) -> Profile:
    """The model at one device's batch, with the mean of its gradients."""
    made = profile_of(shape, job.sequences // job.devices // accumulation)
    rate = job.mean_rate(1)
    units = (
        replace(unit, averaged=job.devices, peer_rate=rate, shared=job.devices if shared else job.per_host)
        for unit in made.units
    )
    return replace(made, units=tuple(units))


@lru_cache(maxsize=64)
def planned(job: ParallelJob, *, shared: bool) -> PassPlan | None:
    """The fastest plan of a family that is small enough to be played for every link; None where none fits."""
    best, fastest = None, math.inf
    for accumulation in divisors(job.sequences // job.devices):
        made = averaged(job, job.shape, accumulation, shared=shared)
        tried = Search(made, job.machine, disk=0.0, update="early", accumulation=accumulation)
        tried.first(_family(len(made.units)), _TRIED, below=fastest)
        for plan, seconds in tried.seconds.items():
            if seconds < fastest:
                best, fastest = (accumulation, plan), seconds
    return best


def played(job: ParallelJob, found: PassPlan, *, shared: bool) -> LaneTimeline:
    """A step of it with this job's links."""
    accumulation, plan = found
    made = averaged(job, job.shape, accumulation, shared=shared)
    return LaneRun(made, plan, job.machine, update="early", accumulation=accumulation).play()


def _family(units: int) -> Iterator[tuple[Placement, ...]]:
    """Some counts of each choice, the order that the search takes too."""
    some = sorted({0, units // 8, units // 4, units // 2, 7 * units // 8, units})
    few = sorted({0, units // 24, units // 12, units // 6, units // 3, units})
    for device in some:
        for moved in some:
            for saved in few:
                for swapped in few:
                    counts = Counts(device, moved, 0, 0, saved, swapped, 0)
                    if possible(units, counts):
                        yield expand(units, counts)


def _out_of_core_fits(job: ParallelJob, shape: HalfDecoder, shared: bool) -> bool:
    accumulation, here = job.sequences // job.devices, job.machine
    made = averaged(job, shape, accumulation, shared=shared)
    plan = (Placement("host", "recompute"),) * len(made.units)
    return least_peak(made, plan, accumulation) <= here.device_bytes and host_bytes(made, plan) <= here.host_bytes


def busiest(timeline: LaneTimeline) -> str:
    """The lane that works longest, with its share of the step."""
    name = max(timeline.busy, key=lambda lane: timeline.busy[lane])
    return f"{name} {timeline.busy[name] / timeline.step:.0%}"


# ---------------------------------------------------------------------------------------------------------------------
# Fully sharded


def fully_sharded(job: ParallelJob) -> ParallelPlan:
    """Every device keeps 1/devices of weights, gradients and states; a block's weights are gathered for each of its
    passes, its gradients summed to their owners. Played as a plan whose "host" is the other devices: up is gathering,
    down is summing, and the update is that of the device's own share.
    """
    name, best = "fsdp", ParallelPlan(name="fsdp")
    largest = deepest(lambda shape: _least_remade(job, shape, job.sequences // job.devices) is not None, job.shape)
    for accumulation in divisors(job.sequences // job.devices):
        remade = _least_remade(job, job.shape, accumulation)
        if remade is None:
            continue
        made, here = _sharded(job, job.shape, accumulation)
        plan = tail("host", "recompute", len(made.units), len(made.units) - remade)
        timeline = LaneRun(made, plan, here, update="early", accumulation=accumulation).play()
        if best.step is None or timeline.step < best.step:
            batches = f", {accumulation} batches a step" if accumulation > 1 else ""
            best = ParallelPlan(
                name=name,
                how=f"{remade} of {len(made.units)} made again{batches}",
                step=timeline.step,
                device_bytes=int(timeline.peak),
                bound_by=busiest(timeline).replace("up", "gathering").replace("down", "summing"),
            )
    return replace(best, largest=largest)


def _sharded(job: ParallelJob, shape: HalfDecoder, accumulation: int) -> tuple[Profile, Machine]:
    made = profile_of(shape, job.sequences // job.devices // accumulation)
    share = (WEIGHT + WEIGHT + STATE) * shape.layers * shape.block_params // job.devices
    ends = replace(  # the embedding is gathered for the whole step
        made.ends,
        weights=made.ends.weights // job.devices,
        states=made.ends.states // job.devices,
        buffers=made.ends.buffers + share + made.ends.weights,
    )
    units = tuple(replace(unit, shared=job.devices) for unit in made.units)
    rate = job.mean_rate(1) * job.devices / (job.devices - 1)  # the own share is there
    here = replace(
        job.machine,
        up=rate,
        down=rate,
        up_both=rate,
        down_both=rate,
        host_update=job.machine.device_rate / _UPDATED,
        host_bytes=math.inf,
    )
    return replace(made, units=units, ends=ends), here


def _least_remade(job: ParallelJob, shape: HalfDecoder, accumulation: int) -> int | None:
    """Blocks that must be made again to fit; None: not even all of them do."""
    made, _ = _sharded(job, shape, accumulation)
    units = len(made.units)

    def fits(remade: int) -> bool:
        plan = tail("host", "recompute", units, units - remade)
        return least_peak(made, plan, accumulation) <= job.machine.device_bytes

    return least(units, fits)


def least(most: int, fits: Callable[[int], bool]) -> int | None:
    """The least number up to `most` that fits, where every larger one does too; None: not even `most`."""
    found = bisect_left(range(most + 1), True, key=fits)
    return found if found <= most else None


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


def hybrid(job: ParallelJob, *, tensor: bool) -> ParallelPlan:
    """The fastest split, and the largest model of any."""
    largest = deepest(lambda shape: _fits(job, shape, tensor), job.shape)
    return replace(fastest_hybrid(job, tensor=tensor), largest=largest)


def fastest_hybrid(job: ParallelJob, *, tensor: bool) -> ParallelPlan:
    """The fastest split."""
    best = ParallelPlan(name="tensor x pipeline x data" if tensor else "pipeline x data")
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
    """Whether a model of this shape fits when it is split into as many pieces as possible. Only the two fullest stages
    are checked: the first, which keeps the most forwards, and the last, which has the head.
    """
    width = max(one.tensor for one in splits(job, tensor=tensor))
    stages = max(one for one in divisors(job.devices // width) if one <= min(shape.layers, MOST_VISITS))
    split = HybridSplit(tensor=width, stages=stages, replicas=job.devices // width // stages, holds=_HOLDS[0])
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
