"""A decoder in half precision as the papers on memory count it, in closed form: nothing is profiled.

    parameters     12 d^2 a block, V d for the embedding, which is the head too
    bytes          2 a parameter for weights and gradients, 12 for AdamW's state with float32 masters
    activations    of a block without fused attention: 34 a token and d, 5 a head and pair of tokens

d: width; V: vocabulary. Of a tensor-parallel worker: the matrices are cut, so are the pairs and 24 of the 34.

`ParallelJob`: such a decoder, equal devices on equal hosts, and the links between them. `ParallelPlan`: one way to
train it there, at its fastest.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from isles.memory.costs import Ends, Passes, Profile, Transient, UnitProfile
from isles.network.machines import Machine

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
        brought=passes,
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
