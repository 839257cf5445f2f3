"""The state of a stage from one peer that serves it to one that comes to it, at the border of a step.

    WANT    to the first peer of the stage that has it; to the next one where that is lost
    GIFT    the state, as bytes

Whoever has a state answers wherever it waits until an exchange begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from isles.comm.collectives.mail import MailLetter, MailNote
from isles.pipeline.swarm.post import GIFT, WANT, Post

AsBytes = Callable[[], bytes]


class StateGifts:
    """Answers whoever asks for this peer's state, which is `state` of when it is sent. While it is closed, who asks
    waits: what an exchange moves is nobody's state until it has landed.
    """

    def __init__(self, post: Post, state: AsBytes) -> None:
        self._post, self._state = post, state
        self._is_open = True
        self._asked: list[MailLetter] = []
        post.answers[WANT] = self._answer

    def close(self) -> None:
        """Keep who asks waiting."""
        self._is_open = False

    def open(self) -> None:
        """Answer them, and who asks from now on."""
        self._is_open = True
        asked, self._asked = self._asked, []
        for letter in asked:
            self._answer(letter)

    def _answer(self, letter: MailLetter) -> None:
        if not self._is_open:
            self._asked.append(letter)
            return
        body = torch.frombuffer(bytearray(self._state()), dtype=torch.uint8)
        self._post.mail.send(letter.sender, MailNote(GIFT, 0, letter.note.attempt), body)


def take(post: Post, donors: Sequence[int], patience: float) -> Tensor | None:
    """The state of the first of `donors` that has sent it, uint8; None where all were lost before. DeadlinePassed where
    one is silent.
    """
    lost, came = post.mail.lost, dict[int, Tensor]()
    post.answers[GIFT] = lambda letter: came.update({letter.sender: letter.body})
    try:
        for donor in donors:
            if donor not in lost:
                post.mail.send(donor, MailNote(WANT, 0, post.turn))
                post.wait_for(lambda donor=donor: donor in came or donor in lost, patience, donor)
            if donor in came:
                return came[donor]
        return None
    finally:
        del post.answers[GIFT]
