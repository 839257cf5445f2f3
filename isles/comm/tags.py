"""Message addresses: a `Tag` is unique per message between two ranks, so a late message can never pass for a new one.

On the wire of torch.distributed a tag is a non-negative 32-bit integer, of which `pack` fills 31 bits:

    channel 3, form 3, then 25 of    round | fragment | phase     widths by form: the first of eight that both fit into;
                                                                  the round, modulo what is left of the 25
    channel 3,         then 28 of    microbatch 22 | phase 6      on `pipeline`, where the round is the number of a
                                                                  microbatch in the run and the phase its task and hop

gloo cannot cancel: a message without a receive, and a receive without a message, stay posted until the process ends.
They would match whatever uses their address next, and the data does not say which round it belongs to. So rounds whose
addresses repeat (`rounds_apart`) must not leave any behind.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

Channel = Literal["outer", "inner", "pipeline", "control", "eval"]
CHANNELS: tuple[Channel, ...] = get_args(Channel)
MAX_FRAGMENTS = 256
MAX_PHASES = 512
MAX_MICROBATCHES = 1 << 22
_FORMS = ((0, 4), (0, 7), (0, 9), (5, 4), (5, 7), (5, 9), (8, 4), (8, 9))
"""Bits of the fragment and of the phase."""
_SHARED = 25  # bits of round, fragment and phase
_TASK = 6  # bits of the phase on `pipeline`
_PIPELINE = CHANNELS.index("pipeline")
_EVALUATION = len(CHANNELS)  # in place of a channel: microbatches of an evaluation, numbered separately


class Tag(NamedTuple):
    """(channel, round, fragment, phase) of one message from one rank to another.

    attempt: of a round that is repeated among those who are left; worlds that do not change repeat none.
    view: of the world (`isles.membership`), for messages without a round of their own. A round's have none: workers in
    different views meet and read it in the header, where else both would wait for a deadline. Fragment 255 on `eval` is
    evaluation through a pipeline.
    """

    channel: Channel
    round: int
    fragment: int = 0
    phase: int = 0
    view: int = 0
    attempt: int = 0


def pack(tag: Tag) -> int:
    """The tag as one integer in [0, 2**31). ValueError when a field does not fit."""
    if not (0 <= tag.fragment < MAX_FRAGMENTS and 0 <= tag.phase < MAX_PHASES):
        raise ValueError(f"{tag}: fragment must be below {MAX_FRAGMENTS} and phase below {MAX_PHASES}")
    if tag.view or tag.attempt:
        raise ValueError(f"{tag}: the world of torch.distributed does not change: view and attempt are 0 there")
    if tag.channel == "pipeline":
        return _pack_microbatch(tag, _PIPELINE, fragment=0)
    if tag.channel == "eval" and tag.fragment == MAX_FRAGMENTS - 1:
        return _pack_microbatch(tag, _EVALUATION, fragment=MAX_FRAGMENTS - 1)
    number, (fragment, phase) = _form(tag.fragment, tag.phase)
    rounds = _SHARED - fragment - phase
    head = CHANNELS.index(tag.channel) << 3 | number
    return ((head << rounds | tag.round % (1 << rounds)) << fragment | tag.fragment) << phase | tag.phase


def rounds_apart(fragments: int, phases: int) -> int:
    """After how many rounds, of so many fragments and phases, an address is used again on torch.distributed's wire."""
    return 1 << _SHARED - sum(_form(fragments - 1, phases - 1)[1])


def _form(fragment: int, phase: int) -> tuple[int, tuple[int, int]]:
    return next((n, widths) for n, widths in enumerate(_FORMS) if not (fragment >> widths[0] or phase >> widths[1]))


def _pack_microbatch(tag: Tag, code: int, fragment: int) -> int:
    """The address of a microbatch, whose number is the tag's round. code: of the channel, above the microbatch's bits;
    fragment: the one that all its tags have.
    """
    if not (0 <= tag.round < MAX_MICROBATCHES and tag.fragment == fragment and tag.phase >> _TASK == 0):
        raise ValueError(
            f"{tag}: a run has addresses for {MAX_MICROBATCHES} microbatches of {1 << _TASK} phases: take larger ones"
        )
    return (code << 22 | tag.round) << _TASK | tag.phase
