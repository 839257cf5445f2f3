"""The stages of a swarm put together at one peer, whoever is lost meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from isles.comm.codecs.base import as_bytes
from isles.comm.collectives.mail import MailNote
from isles.comm.errors import Malformed
from isles.models.cuts import Piece
from isles.models.stages import Stage
from isles.pipeline.swarm.post import STATE
from isles.pipeline.swarm.swarm import Swarm


def state_bytes(whole: nn.Module, piece: Piece) -> int:
    """Of a stage of `whole`, which may be on the meta device."""
    return sum(tensor.nbytes for tensor in Stage(whole, piece).state_dict().values())


@torch.no_grad()
def gathered(swarm: Swarm, whole: nn.Module, pieces: Sequence[Piece], mend: Callable[[], None] | None = None) -> bool:
    """Fill `whole` with the weights of all stages, at the first peer of stage 0 that is left; whether this one is that.
    All peers ask together; `whole` may be on the meta device where it is not filled. Bytes sent: of a stage's state, by
    the first peer of each other stage. mend: see `Swarm.step`.
    """
    post, agreement = swarm.agreement.post, swarm.agreement
    while True:
        agreement.agree([])
        swarm.place(mend)
        firsts = [swarm.peers(stage)[0] for stage in range(swarm.count)]
        holds = 1
        if swarm.me == firsts[0]:
            holds = int(_fill(swarm, whole, pieces, firsts))
        elif swarm.me in firsts:
            state = swarm.peer.work.stage.state_dict().values()
            body = torch.cat([as_bytes(tensor.detach().to("cpu").contiguous().view(-1)) for tensor in state])
            post.mail.send(firsts[0], MailNote(STATE, 0, post.turn, swarm.peer.stage), body)
        said = agreement.agree([holds])
        swarm.place(mend)
        if firsts[0] in said and said[firsts[0]][0]:
            return swarm.me == firsts[0]


def _fill(swarm: Swarm, whole: nn.Module, pieces: Sequence[Piece], firsts: Sequence[int]) -> bool:
    """False where somebody was lost before its stage came."""
    post, mail = swarm.agreement.post, swarm.agreement.post.mail
    state = whole.state_dict()
    for name, tensor in swarm.peer.work.stage.state_dict().items():
        state[name].copy_(tensor)
    missing = set(range(1, swarm.count))
    while missing:
        post.sort()
        for letter in post.of_turn():
            stage = letter.note.number
            if letter.note.kind != STATE or stage not in missing or letter.sender != firsts[stage]:
                continue
            names = list(Stage(whole, pieces[stage]).state_dict())
            if letter.body.numel() != sum(state[name].nbytes for name in names):
                mail.refuse(letter.sender, Malformed(mail.group.ranks[letter.sender], "a stage of another length"))
                continue
            _copy(letter.body, [state[name] for name in names])
            missing.discard(stage)
        if any(firsts[stage] in swarm.agreement.lost for stage in missing):
            return False
        if missing:
            post.wait_for_news(swarm.agreement.patience, swarm.agreement.patience, firsts[min(missing)])
    return True


def _copy(body: Tensor, tensors: Sequence[Tensor]) -> None:
    begin = 0
    for tensor in tensors:
        part = body[begin : begin + tensor.nbytes].clone().view(tensor.dtype)  # a copy, for it may lie unaligned
        tensor.copy_(part.view(tensor.shape))
        begin += tensor.nbytes
