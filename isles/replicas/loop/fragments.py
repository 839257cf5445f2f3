"""How a model is cut into fragments that are exchanged apart (Streaming DiLoCo, arXiv 2501.18512, section 2.2).

    whole         one fragment
    sequential    blocks [0, n), [n, 2n), ...; then one of everything else (embedding, last norm, head)
    strided       with P = ceil(blocks / n): blocks {q, q + P, q + 2P, ...} for q = 0..P-1; then everything else
    [[...], ...]  one's own: lists of parameter names or their beginnings, such as "blocks.0"

"Blocks" are the members of the model's ModuleList with the most parameters. Every trainable parameter belongs to
exactly one fragment, a tied one to that of its first name. Where blocks are frozen, those of sequential and strided
that hold nothing else are left out.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from isles.comm.tags import MAX_FRAGMENTS
from isles.models.blocks import blocks_of
from isles.replicas.loop.config import Fragments
from isles.replicas.names import clean_name

_LAYERS = 3  # the paper's; a model of fewer than five blocks is cut in two nevertheless


def cut(model: nn.Module, fragments: Fragments, layers_per_fragment: int | None = None) -> list[list[nn.Parameter]]:
    """The parameters of each fragment, in the model's order. ValueError for what does not fit the model."""
    named = {clean_name(name): parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if fragments == "whole":
        return [list(named.values())]
    if isinstance(fragments, str):
        own = _by_blocks(model, fragments, layers_per_fragment)
    else:
        own = [[clean_name(prefix) for prefix in prefixes] for prefixes in fragments]
    owners = {name: _owner(name, own) for name in named}
    lost = [name for name, owner in owners.items() if owner is None]
    if lost and not isinstance(fragments, str):
        raise ValueError(f"fragments: {lost[0]!r} is in none of them; name every parameter, or its beginning, once")
    cut = [[named[name] for name in named if owners[name] == index] for index in range(len(own))]
    if lost:
        cut.append([named[name] for name in lost])
    if isinstance(fragments, str):
        cut = [parameters for parameters in cut if parameters]  # blocks that are frozen as a whole are no fragment
    if len(cut) > MAX_FRAGMENTS:
        raise ValueError(f"fragments: {len(cut)} are more than {MAX_FRAGMENTS}; choose a larger layers_per_fragment")
    empty = [index for index, parameters in enumerate(cut) if not parameters]
    if empty:
        raise ValueError(f"fragments: number {empty[0]} holds no trainable parameter of the model; take it out")
    return cut


def _by_blocks(model: nn.Module, pattern: str, layers: int | None) -> list[list[str]]:
    name, blocks = blocks_of(model)
    if not blocks:
        raise ValueError(
            f'fragments = "{pattern}" needs a model with its blocks in an nn.ModuleList; choose "whole", or name the '
            "fragments one by one"
        )
    if layers is None:
        layers = min(_LAYERS, -(-len(blocks) // 2))
    count = -(-len(blocks) // layers)
    numbers = range(len(blocks))
    groups = (
        [numbers[q * layers : (q + 1) * layers] for q in range(count)]
        if pattern == "sequential"
        else [numbers[q::count] for q in range(count)]
    )
    return [[clean_name(f"{name}.{number}") if name else str(number) for number in group] for group in groups]


def _owner(name: str, own: Sequence[Sequence[str]]) -> int | None:
    """The fragment whose prefix of `name` is there; ValueError where there are two."""
    found = [
        index
        for index, prefixes in enumerate(own)
        if any(name == prefix or name.startswith(prefix.rstrip(".") + ".") for prefix in prefixes)
    ]
    if len(found) > 1:
        raise ValueError(f"fragments: {name!r} is in number {found[0]} and in number {found[1]}; name it once")
    return found[0] if found else None
