"""Where the blocks of a model are: what fragments, islands, stages and memory cut it by."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def blocks_of(model: nn.Module) -> tuple[str, Sequence[nn.Module]]:
    """Name and members of the model's ModuleList with the most parameters; none without one."""
    lists = [(name, list(module)) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    return max(
        lists, key=lambda entry: sum(p.numel() for block in entry[1] for p in block.parameters()), default=("", [])
    )


def module_at(root: nn.Module, path: str) -> nn.Module | None:
    """The module at `path`; None where there is none."""
    try:
        return root.get_submodule(path)
    except AttributeError:
        return None


def check_order(key: str, order: Sequence[int], count: int, what: str) -> None:
    """ValueError, one line, for an order that names something twice or that there is not."""
    for number in order:
        if not 0 <= number < count:
            raise ValueError(f"{key}: there is no {what} {number}; they are numbered 0 to {count - 1}")
    if len(set(order)) < len(order):
        raise ValueError(f"{key} = {','.join(map(str, order))}: name each {what} once")
