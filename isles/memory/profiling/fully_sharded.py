"""What a worker of fully sharded data parallel training has on its device: rows of everything, and the weights of a few
units while they are gathered. A plan says what is kept and what is made again; where the weights are is the method's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from isles.memory.costs import Passes, Profile, Transient
from isles.memory.profile import StateBytes
from isles.memory.units import units_of


def fully_sharded(
    made: Profile, model: nn.Module, size: int, *, keeps_gathered: bool, batches: int, state_bytes: StateBytes
) -> Profile:
    """The profile of `model` at one of `size` workers. keeps_gathered: a unit's weights stay gathered from its forward
    to its backward pass. batches: of a step; gradients are whole until the last of them.

    Counted as torch's `fully_shard` goes about it on a CPU: a gathered unit is there twice while it is taken apart, the
    next one's weights come while a backward pass runs, and gradients are laid out once more to be scattered.
    """
    units = units_of(model)
    inside = {id(parameter) for unit in units for parameter in unit.parameters}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in inside]
    whole = [size * _share(unit.parameters, size) for unit in units]
    trained = [size * _share([p for p in unit.parameters if p.requires_grad], size) for unit in units]
    most = max(whole, default=0)
    ends = made.ends
    waiting = (sum(whole) if keeps_gathered else 0) + (sum(trained) if batches > 1 else 0)
    sharded = []
    for index, unit in enumerate(units):
        own = made.units[index]

        def passes(taken: Passes, whole: int, trained: int) -> Passes:
            here = 0 if keeps_gathered else whole

            def around(one: Transient) -> Transient:
                scattered = trained + 2 * trained // size  # laid out, everyone's parts for this worker, their mean
                made = max(one.backward, scattered) + (trained if batches == 1 else 0)
                ahead = 0 if keeps_gathered else most
                return Transient(here + max(one.forward, whole), here + ahead + made)

            return replace(taken, kept=around(taken.kept), recomputed=around(taken.recomputed))

        resident = passes(own.resident, whole[index], trained[index])
        weights = _share(unit.parameters, size)
        states = sum(_states(parameter, size, state_bytes) for parameter in unit.parameters)
        sharded.append(replace(own, weights=weights, states=states, resident=resident))
    return replace(
        made,
        units=tuple(sharded),
        ends=replace(
            ends,
            weights=_share(rest, size),
            states=sum(_states(parameter, size, state_bytes) for parameter in rest),
            before=ends.before + size * _share(rest, size) + waiting,
            top=max(ends.top, size * _share(rest, size)),
        ),
    )


def _share(tensors: Sequence[Tensor], size: int) -> int:
    """Bytes of the first worker's rows, which are as many as any worker's."""
    return sum(-(-tensor.shape[0] // size) * (tensor.nbytes // max(tensor.shape[0], 1)) for tensor in tensors)


def _states(parameter: Tensor, size: int, state_bytes: StateBytes) -> int:
    if not parameter.requires_grad:
        return 0
    whole, rows = parameter.shape[0], -(-parameter.shape[0] // size)
    return -(-state_bytes(parameter) * rows // max(whole, 1))
