"""How replicas begin as one: the same settings everywhere, worker 0's weights everywhere, then proof of it; how far
apart they are later; and proof that they end as one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any, TypeVar
from zlib import crc32

import torch
from torch import Tensor

from isles.comm.codecs import codec
from isles.comm.errors import DeadlinePassed, Diverged
from isles.comm.group import Group, hashed, numbers, odd_one, same_text
from isles.comm.tags import Channel
from isles.replicas.flat import FlatParameters, digest

T = TypeVar("T")
OTHER_STATE = "it goes on from another state than this worker: load the states of one run and step on all, or none"
OTHER_SETTINGS = (
    "its inner optimizer has other settings (learning rate, weight decay, scale of the loss, ...): set them alike on "
    "all workers"
)
EVEN = (
    "give all workers the same number of inner steps: drop the rest of the longer loader, skip no step on one alone, "
    "load states of one step"
)


def same_settings(group: Group, settings: str, names: Sequence[str] = ()) -> None:
    """Diverged, naming the odd worker, unless `settings` is the same text on all, and `names`, of its model's tensors,
    the same in the same order.
    """
    try:
        what = "its method, settings or model shapes differ; start all workers with the same ones"
        same_text(group, f"{settings} {list(names)}", what)
    except Diverged:  # on all workers: what follows is only asked then
        if names and len({int(count) for count in group.all_gather(numbers(len(names)))}) == 1:
            peer, apart = _differing(group, numbers(*map(hashed, names)), names)
            if apart:
                where = f"from number {apart[0] + 1} on ({names[apart[0]]} on this worker)"
                why = "its model's parameters or buffers have other names, or another order"
                hint = "build the same layers in the same order on all (sorted, of no set)"
                raise Diverged(peer, 0, f"{where} {why}; {hint}") from None
        raise


def _differing(group: Group, hashes: Tensor, names: Sequence[str]) -> tuple[int, list[int]]:
    """The odd worker, and at which of `names` its hashes differ from the usual ones."""
    gathered = [theirs.tolist() for theirs in group.all_gather(hashes)]
    odd, usual = odd_one(list(map(tuple, gathered)))
    apart = (
        [] if odd is None else [index for index in range(len(names)) if gathered[odd][index] != gathered[usual][index]]
    )
    return group.ranks[odd or 0], apart


def same_weights(group: Group, tensors: Mapping[str, Tensor], step: int = 0) -> int:
    """A hash of `tensors`, by name. Diverged, naming the odd worker and the first tensor, unless they are equal to the
    bit on all. Bytes sent: 8 to each of the others, and 8 a tensor where they differ.
    """
    hashes = _hashes(tensors.values())
    own = digest(list(hashes))
    if len({int(theirs) for theirs in group.all_gather(numbers(own))}) > 1:
        names = list(tensors)
        peer, apart = _differing(group, hashes, names)
        others = f" and {len(apart) - 1} others" if len(apart) > 1 else ""
        when = "where all must be equal" if step else "after the broadcast"
        raise Diverged(peer, step, f"{names[apart[0]]}{others} differ {when}; check memory and versions")
    return own


def hash_of(tensors: Iterable[Tensor]) -> int:
    """Of 64 bits; never 0."""
    return digest(list(_hashes(tensors))) or 1


def _hashes(tensors: Iterable[Tensor]) -> Tensor:
    flats = [FlatParameters([tensor]) for tensor in tensors]
    return numbers(*(flat.digest(flat.read(flat.new())) for flat in flats))


def same_end(group: Group, steps: int, rounds: str) -> int:
    """The most inner steps that a worker has done; all are in their last round. Diverged, naming the odd worker, unless
    all have done the same `rounds`. Bytes sent: 8 to each of the others.
    """
    gathered = [int(theirs) for theirs in group.all_gather(numbers(steps << 32 | crc32(rounds.encode())))]
    odd, _ = odd_one([theirs & 0xFFFFFFFF for theirs in gathered])
    if odd is not None:
        done = f"it ends after {gathered[odd] >> 32} inner steps, this worker after {steps}, in different rounds"
        raise Diverged(group.ranks[odd], steps, f"{done}; {EVEN}")
    return max(theirs >> 32 for theirs in gathered)


@contextmanager
def among_even() -> Iterator[None]:
    """Around waits for what a worker that has ended, or has loaded the state of another step, never sends."""
    try:
        yield
    except DeadlinePassed as error:
        raise DeadlinePassed(
            error.peer, error.channel, error.seconds, f"if it has ended or is at another step, {EVEN}"
        ) from error


def spread_from_first(group: Group, tensors: Sequence[Tensor]) -> None:
    """Overwrite `tensors` with those of worker 0, a message for each format. See `opening_exchanges`."""
    for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
        same = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.detach().reshape(-1).cpu() for tensor in same])
        group.broadcast(flat)
        parts = flat.split([tensor.numel() for tensor in same])
        torch._foreach_copy_(same, [part.view(tensor.shape) for part, tensor in zip(parts, same, strict=True)])


def bytes_by_format(tensors: Sequence[Tensor]) -> list[int]:
    """Bytes of `tensors`, for each number format."""
    totals = Counter[torch.dtype]()
    for tensor in tensors:
        totals[tensor.dtype] += tensor.nbytes
    return list(totals.values())


class SettingsHash:
    """A hash of the hyper-parameters that are plain numbers, or on the CPU, as they are now."""

    def __init__(self) -> None:
        self._seen: list[Any] = []
        self._hash, self._may_change = 0, False

    def of(self, groups: Sequence[dict[str, Any]], scale: float = 0.0) -> int:
        """Of those groups, and of the loss. Only looks where nothing was set since: this is done in every step."""
        now = [len(value) if key == "params" else value for group in groups for key, value in group.items()] + [scale]
        if self._may_change or now != self._seen:
            self._seen, self._may_change = now, any(isinstance(value, Tensor | list) for value in now)
            self._hash = crc32(repr([scale, settings_of(groups)]).encode())
        return self._hash


def settings_of(groups: Sequence[dict[str, Any]], *, everywhere: bool = False) -> list[Any]:
    """Sizes of each group's parameters, and its settings that are numbers: on the CPU alone, or `everywhere`."""
    gathered: list[Any] = []
    for group in groups:
        gathered.append(sorted(parameter.numel() for parameter in group["params"]))
        for key in sorted(group.keys() - {"params", "initial_lr"}):
            values = group[key] if isinstance(group[key], tuple | list) else (group[key],)
            gathered += [(key, float(one)) for one in values if _is_number(one, everywhere)]
    return gathered


def _is_number(value: Any, everywhere: bool) -> bool:
    is_one = isinstance(value, Tensor) and value.numel() == 1
    return isinstance(value, Real) or (is_one and (everywhere or value.is_cpu))


def mean_over(group: Group, vector: Tensor, channel: Channel, robust: str = "none") -> Tensor:
    """`vector` (n,), replaced by its mean over the group."""
    group.mean(vector, codec("none"), channel=channel, robust=robust)
    return vector
