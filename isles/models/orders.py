"""A model's blocks in another order, or some of them: what a microbatch sees that leaves out stages or exchanges them.

A block that is left out passes the stream on as it is, as if what it writes to the stream were zero. Nothing else of a
forward pass knows the order: positions are rotary inside each block, and the last norm comes where it always does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from isles.models.blocks import check_order
from isles.models.cuts import Piece
from isles.models.stages import cuttable
from isles.models.twins import sharing


def logits_in_order(model: nn.Module, tokens_BT: Tensor, order: Sequence[int]) -> Tensor:
    """Scores (B, T, V) for the token after each of `tokens_BT`, int64, where only the blocks `order` run, in that
    order. ValueError for a model that does not come in pieces, and for a block that it does not have.
    """
    part = cuttable(sharing(model))
    check_order("order", order, len(part.blocks), "block")
    x = part.enter(tokens_BT)
    for number in order:
        x = part.through(part.blocks[number], x)
    return part.leave(x)


def blocks_of_stages(pieces: Sequence[Piece], stages: Iterable[int]) -> list[int]:
    """The blocks of `stages`, in their order."""
    return [number for stage in stages for number in pieces[stage].blocks]
