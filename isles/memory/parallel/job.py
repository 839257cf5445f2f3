"""What is compared: a decoder, equal devices on equal hosts, the links between them, and a way to train it there."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from isles.memory.parallel.decoder import HalfDecoder
from isles.network.machines import Machine

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
class ParallelWay:
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
