"""The sum of a stage's gradients over its peers, by letters: a loss fails it, and nothing else happens.

Each peer adds up one share of the vector, in the order of positions, and tells the others: all hold the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from isles.comm.collectives.mail import MailLetter, MailNote
from isles.comm.errors import Malformed
from isles.pipeline.swarm.post import MEAN, SHARD, Post


def stage_sum(
    post: Post, peers: Sequence[int], own: Tensor, lost: Callable[[], set[int]], wait: Callable[[set[int]], None]
) -> Tensor | None:
    """Sum of `own` (n,) over positions `peers`, this one among them; None where one of them is lost. wait: for news
    from some of them. Bytes sent: 2 (p - 1) / p times own's. Refused shares end their sender's mail.
    """
    me, count = post.mail.group.rank, len(peers)
    if count == 1:
        return own.clone()
    place, numel = peers.index(me), own.numel()
    bounds = [numel * at // count for at in range(count + 1)]
    shares = {peer: own[bounds[at] : bounds[at + 1]] for at, peer in enumerate(peers)}
    for peer in peers:
        if peer != me:
            post.mail.send(peer, MailNote(SHARD, 0, post.turn), shares[peer].view(torch.uint8))
    parts = {me: shares[me]}
    total = torch.empty_like(own)
    done: set[int] = set()
    letters: list[MailLetter] = []
    while len(done) < count:
        post.sort()
        letters += post.work()
        for letter in letters:
            _read(post, letter, own.dtype, bounds, peers, place, parts, total, done)
        letters.clear()
        if me not in done and len(parts) == count:
            added = parts[peers[0]].clone()
            for peer in peers[1:]:
                added += parts[peer]
            total[bounds[place] : bounds[place + 1]] = added
            done.add(me)
            for peer in peers:
                if peer != me:
                    post.mail.send(peer, MailNote(MEAN, 0, post.turn), added.view(torch.uint8))
        missing = set(peers) - done - {me} | set(peers) - parts.keys()
        if missing & lost():
            return None
        if missing:
            wait(missing)
    return total


def _read(
    post: Post,
    letter: MailLetter,
    dtype: torch.dtype,
    bounds: Sequence[int],
    peers: Sequence[int],
    place: int,
    parts: dict[int, Tensor],
    total: Tensor,
    done: set[int],
) -> None:
    sender, kind = letter.sender, letter.note.kind
    if kind not in (SHARD, MEAN) or sender not in peers:
        return  # of the microbatches of before: too late
    at = place if kind == SHARD else peers.index(sender)
    begin, end = bounds[at], bounds[at + 1]
    if letter.body.numel() != (end - begin) * dtype.itemsize:
        rank = post.mail.group.ranks[sender]
        post.mail.refuse(sender, Malformed(rank, f"a share of {letter.body.numel()} bytes"))
        return
    share = letter.body.view(dtype)
    if kind == SHARD:
        parts[sender] = share
    else:
        total[begin:end] = share
        done.add(sender)
