"""One model out of its stages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from isles.comm.collectives.basic import all_done
from isles.comm.group import Group
from isles.comm.transport import Work
from isles.models.cuts import Piece
from isles.models.stages import Stage


@torch.no_grad()
def assembled(stage: Stage, group: Group, whole: nn.Module, pieces: Sequence[Piece]) -> nn.Module | None:
    """`whole` with the weights of all stages of `group` (mesh.stage) at stage 0; None at the others, which send theirs.
    All must ask together. pieces: of every stage. Bytes sent: those of a stage's state, once.
    """
    if group.rank:
        tensors = list(stage.state_dict().values())
        works = [_send(group, tensor) for tensor in tensors]
        group.start(all_done(works), "control", nbytes=sum(tensor.nbytes for tensor in tensors)).wait()
        return None
    state = whole.state_dict()
    for name, tensor in stage.state_dict().items():
        state[name].copy_(tensor)
    for position in range(1, group.size):
        names = Stage(whole, pieces[position]).state_dict()
        arrived = {name: torch.empty_like(state[name], device="cpu").contiguous() for name in names}
        works = [group.call("control").recv(position, tensor.view(-1)) for tensor in arrived.values()]
        group.start(all_done(works), "control", nbytes=sum(tensor.nbytes for tensor in arrived.values())).wait()
        for name, tensor in arrived.items():
            state[name].copy_(tensor)
    return whole


def _send(group: Group, tensor: Tensor) -> Work:
    return group.call("control").send(0, tensor.detach().to("cpu").contiguous().view(-1))
