"""A state in one file: a safetensors file that holds its tensors by their place in it, and beside them, as one tensor
of bytes, everything else as JSON. So lie checkpoints on disk, states that a lighthouse keeps, and those that one worker
hands to another. No pickle.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file
from torch import Tensor

from isles.parsing import parse_json
from isles.training.records.checked import UNCHECKED, read_notes
from isles.training.records.tensors import copy_to_host, write_into, write_tensors

State = dict[str, Any]

_STRUCTURE = "__structure__"
_TENSOR, _PAIRS, _TUPLE = "__tensor__", "__pairs__", "__tuple__"


def split_state(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """A nested state of dicts, lists, tuples, tensors, numbers, strings and None as JSON-able structure and flat
    tensors, the same ones.
    """
    tensors: dict[str, Tensor] = {}

    def walk(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            tensors[path] = value.detach()
            return {_TENSOR: path}
        if isinstance(value, Mapping):
            pairs = [(key, walk(entry, f"{path}.{key}")) for key, entry in value.items()]
            if all(isinstance(key, str) for key, _ in pairs):
                return dict(pairs)
            return {_PAIRS: pairs}  # JSON would turn an optimizer's integer keys into strings
        if isinstance(value, tuple):
            return {_TUPLE: [walk(entry, f"{path}.{index}") for index, entry in enumerate(value)]}
        if isinstance(value, list):
            return [walk(entry, f"{path}.{index}") for index, entry in enumerate(value)]
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise TypeError(
            f"state{path} is a {type(value).__name__}: a checkpoint holds tensors, numbers, strings and None"
        )

    return walk(state, ""), tensors


def join_state(structure: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `split_state`."""
    if isinstance(structure, list):
        return [join_state(entry, tensors) for entry in structure]
    if not isinstance(structure, dict):
        return structure
    if _TENSOR in structure:
        return tensors[structure[_TENSOR]]
    if _PAIRS in structure:
        return {key: join_state(entry, tensors) for key, entry in structure[_PAIRS]}
    if _TUPLE in structure:
        return tuple(join_state(entry, tensors) for entry in structure[_TUPLE])
    return {key: join_state(entry, tensors) for key, entry in structure.items()}


def write_state(path: Path, state: State, notes: Mapping[str, str] | None = None) -> None:
    """Write a state to `path`. notes: what it is of. OSError: no part of the file stays then."""
    write_tensors(path, _packed(state), _checked(notes))


def read_state(path: Path) -> tuple[State, dict[str, str]]:
    """The state in `path`, exactly as written, with tensors on the CPU, and what it is of. ValueError where the file is
    damaged, or none of these.
    """
    try:
        notes = read_notes(path)
        return _unpacked(load_file(str(path))), notes
    except (SafetensorError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path}: damaged") from error


class StateCopy:
    """A copy of `state` in the host's memory, as it is now, to be written later."""

    def __init__(self, state: State) -> None:
        self._tensors = copy_to_host(_packed(state))

    def write(self, path: Path) -> None:
        """As `write_state`."""
        write_tensors(path, self._tensors, _checked(None))

    def to_bytes(self) -> bytes:
        """What `write` would write."""
        file = BytesIO()
        write_into(file, self._tensors, _checked(None))
        return file.getvalue()


def state_from_bytes(data: bytes) -> State:
    """Of `StateCopy.to_bytes`. ValueError where it is none."""
    try:
        return _unpacked(load(data))
    except (SafetensorError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"no state: {str(error).splitlines()[0][:120]}") from error


def _packed(state: State) -> dict[str, Tensor]:
    structure, tensors = split_state(state)
    text = bytearray(json.dumps(structure).encode("ascii"))
    return {**tensors, _STRUCTURE: torch.frombuffer(text, dtype=torch.uint8)}


def _unpacked(tensors: dict[str, Tensor]) -> State:
    return join_state(parse_json(tensors.pop(_STRUCTURE).numpy().tobytes()), tensors)


def _checked(notes: Mapping[str, str] | None) -> dict[str, str]:
    return {"check": UNCHECKED, **(notes or {})}
