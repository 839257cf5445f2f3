"""Read a checkpoint of torch.distributed.checkpoint (DCP), whoever wrote it, on however many ranks.

FOLDER/.metadata is a pickle, and to unpickle is to run it. Here `pickletools` lists its instructions, and those that a
checkpoint has are followed as data: a class is a name, an object a table of its fields. Nothing is imported or called.
"""

from __future__ import annotations

import io
import pickletools
from pathlib import Path
from typing import Any

import torch
from torch import nn

from isles.base.errors import printable

METADATA = ".metadata"


def load_dcp(model: nn.Module, folder: Path) -> None:
    """Fill `model` from tensors named as its state, or "model." and that; others are passed over.

    ValueError, one line, where tensors are missing, too many or misshapen, and where the checkpoint is damaged.
    """
    try:
        _load(model, folder)
    except Exception as error:  # whatever damaged bytes lead to
        text = str(error) if isinstance(error, ValueError | OSError) else f"damaged, {type(error).__name__}: {error}"
        raise ValueError(" ".join(printable(text).split())) from error


@torch.no_grad()
def _load(model: nn.Module, folder: Path) -> None:
    root, own = _read(folder / METADATA), model.state_dict()
    places = {(key["fqn"], key.get("offset")): place for key, place in root["storage_data"].items()}
    prefix = "" if own.keys() & root["state_dict_metadata"].keys() else "model."
    theirs = {name: one for name, one in root["state_dict_metadata"].items() if name.startswith(prefix)}
    ours = {prefix + name: tensor for name, tensor in own.items()}
    if differ := sorted(theirs.keys() ^ ours.keys()):
        raise ValueError(f"{differ[0]} is {'missing' if differ[0] in ours else 'too much'}; {len(differ)} names differ")
    for name, one in theirs.items():
        there = sum(torch.Size(chunk["sizes"]).numel() for chunk in one["chunks"])
        found = ("".join(one["properties"][0]), torch.Size(one["size"]), there)
        if found != (wanted := (str(ours[name].dtype), ours[name].shape, ours[name].numel())):
            raise ValueError("{} is {} {} of {} entries, in the model {} {} of {}".format(name, *found, *wanted))
        if ours[name].is_floating_point():
            ours[name].fill_(torch.nan)  # a gap that pieces over each other hide is then seen
        for chunk in one["chunks"]:
            place = places[name, chunk["offsets"]]
            with (folder / Path(place["relative_path"]).name).open("rb") as file:
                file.seek(place["offset"])
                part = torch.load(io.BytesIO(file.read(place["length"])), map_location="cpu", weights_only=True)
            area = [slice(at, at + size) for at, size in zip(chunk["offsets"], chunk["sizes"], strict=True)]
            ours[name][tuple(area)] = part.view(chunk["sizes"])


_Object = type("_Object", (dict,), {"__hash__": object.__hash__})  # a key of tables, too
_MAKES: dict[str, Any] = {  # what an instruction puts on the stack, from what it takes
    **dict.fromkeys(("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_TUPLE"), lambda *items: items),
    **dict.fromkeys(("NEWOBJ", "REDUCE"), lambda of, arguments: arguments[0] if of == "torch.Size" else _Object()),
    **dict.fromkeys(("MEMOIZE", "STOP"), lambda one: one),
    "STACK_GLOBAL": lambda module, name: f"{module}.{name}",
}
_MAKES |= {"EMPTY_LIST": list, "EMPTY_DICT": dict, "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": bool}
_CHANGES: dict[str, Any] = {  # how one changes the first thing that it takes, which stays on the stack
    **dict.fromkeys(("APPEND", "APPENDS"), lambda to, *items: to.extend(items)),
    **dict.fromkeys(("SETITEM", "SETITEMS"), lambda to, *x: to.update(zip(x[::2], x[1::2], strict=True))),
    "BUILD": lambda to, state: to.update(enumerate(state) if isinstance(state, tuple) else state),
}
_MODULES = ("torch", "torch.serialization", "collections", "pathlib", "pathlib._local")
_MODULES += ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
_VALUES = ([pickletools.pyint], [pickletools.pyunicode], [pickletools.pyfloat])


def _read(path: Path) -> Any:
    """What the pickle at `path` describes, up to 64 MB: lists, tuples, numbers, text, and tables for objects."""
    stack, marks, memo = list[Any](), list[int](), dict[Any, Any]()
    for operation, value, _ in pickletools.genops(path.read_bytes() if path.stat().st_size < 1 << 26 else b""):
        kind, takes = operation.name, operation.stack_before
        at = (marks.pop() + 2 if pickletools.markobject in takes else len(stack)) - len(takes)
        taken, stack[at:] = stack[at:], []
        if kind == "MARK":
            marks.append(at)
        elif kind in _MAKES and (kind != "STACK_GLOBAL" or taken[0] in _MODULES):
            stack.append(_MAKES[kind](*taken))
            if kind == "MEMOIZE":
                memo[len(memo)] = stack[-1]
        elif kind in _CHANGES:
            _CHANGES[kind](*taken)
            stack.append(taken[0])
        elif "BINGET" in kind or operation.stack_after in _VALUES:
            stack.append(memo[value] if "BINGET" in kind else value)
        elif kind not in ("PROTO", "FRAME"):
            raise ValueError(f"{kind} {'.'.join(taken) or value} is not what a checkpoint has: do not use it")
    return stack.pop()
