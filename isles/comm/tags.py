"""Message addresses: a `Tag` is unique per message between two ranks, so a late message can never pass for a new one.

On the wire of torch.distributed a tag is a non-negative 32-bit integer; `pack` lays the four fields into 31 bits:
channel 3, round 11 (modulo 2048), fragment 8, phase 9. A receive that missed its deadline stays posted and swallows its
own late message, and the header of every transfer repeats the full round, so the modulo cannot confuse two rounds.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

Channel = Literal["outer", "inner", "pipeline", "control", "eval"]
CHANNELS: tuple[Channel, ...] = get_args(Channel)
MAX_FRAGMENTS = 256
MAX_PHASES = 512
_ROUNDS = 2048


class Tag(NamedTuple):
    """(channel, round, fragment, phase) of one message from one rank to another."""

    channel: Channel
    round: int
    fragment: int = 0
    phase: int = 0


def pack(tag: Tag) -> int:
    """The tag as one integer in [0, 2**31). ValueError when a field does not fit."""
    if not (0 <= tag.fragment < MAX_FRAGMENTS and 0 <= tag.phase < MAX_PHASES):
        raise ValueError(f"{tag}: fragment must be below {MAX_FRAGMENTS} and phase below {MAX_PHASES}")
    return ((CHANNELS.index(tag.channel) * _ROUNDS + tag.round % _ROUNDS) << 17) | (tag.fragment << 9) | tag.phase
