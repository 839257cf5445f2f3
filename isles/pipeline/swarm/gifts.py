"""The state of a stage from one peer that serves it to one that comes to it, at the border of a step.

    WANT    to the first peer of the stage that has it; to the next one where that is lost
    GIFT    the state, as bytes

Whoever has a state answers wherever it waits: between two steps nobody's changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from isles.comm.collectives.mail import MailLetter, MailNote
from isles.comm.errors import DeadlinePassed
from isles.pipeline.swarm.post import GIFT, WANT, Post

AsBytes = Callable[[], bytes]


def give(post: Post, state: AsBytes) -> None:
    """Answer whoever asks from now on with what `state` is then."""

    def answer(letter: MailLetter) -> None:
        body = torch.frombuffer(bytearray(state()), dtype=torch.uint8)
        post.mail.send(letter.sender, MailNote(GIFT, 0, letter.note.attempt), body)

    post.answers[WANT] = answer


def take(post: Post, donors: Sequence[int], patience: float) -> Tensor | None:
    """The state of the first of `donors` that has sent it, uint8; None where all were lost before. DeadlinePassed where
    one is silent.
    """
    mail, now = post.mail, post.mail.group.transport.now
    came: list[MailLetter] = []
    post.answers[GIFT] = came.append
    try:
        for donor in donors:
            if donor in mail.lost:
                continue
            mail.send(donor, MailNote(WANT, 0, post.turn))
            until = now() + patience
            while donor not in mail.lost:
                post.sort()
                found = [letter.body for letter in came if letter.sender == donor]
                if found:
                    return found[0]
                if now() >= until:
                    raise DeadlinePassed(mail.group.ranks[donor], "pipeline", patience)
                mail.wait(until - now())
        return None
    finally:
        del post.answers[GIFT]
