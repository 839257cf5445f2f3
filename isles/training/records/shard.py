"""States and models in safetensors files, and checks that they are finite. No pickle.

A state is one file: its tensors under their paths in the nested state, and everything else as JSON in one more tensor
of bytes. Checkpoints, the lighthouse's states and state transfers between workers have this format.

The format of safetensors: 8 bytes of length, a JSON header of that length with each tensor's dtype, shape and offsets,
then the bytes, little-endian. Tensors are written one at a time, so that only one that is on a device or on disk is in
memory; the library's `save_file` needs all of them in the host's memory, each with a storage of its own.

Before a checkpoint is committed or a model saved, its values are checked, as a finite loss does not show that the step
after it gave finite weights. Parameters must be finite; buffers and optimizer state may hold infinities (a causal mask
does); no tensor may hold a NaN. The error names the tensor, the step and the setting to change.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Container, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file
from torch import Tensor, nn

from isles.base.durable import replacing
from isles.base.parsing import parse_json
from isles.comm.errors import WorkerFailed
from isles.training.config.sections import Config
from isles.training.records.checksums import CHECK_AT, UNCHECKED, read_notes

_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_ALIGNED = 8


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def copy_to_host(tensors: Mapping[str, Tensor], buffer: Tensor | None = None) -> dict[str, Tensor]:
    """Copies of `tensors` in the host's memory. buffer: at least `copied_size` bytes to use; None: new ones, which are
    freed with the last of the copies.
    """
    order = _aligned(tensors)
    if buffer is None:
        buffer = torch.empty(copied_size(tensors), dtype=torch.uint8, device="cpu")
    parts = buffer[: copied_size(tensors)].split([tensors[name].nbytes for name in order])
    copies = {}
    for name, part in zip(order, parts, strict=True):
        tensor = tensors[name]
        copies[name] = part.view(tensor.dtype).view(tensor.shape)
        copies[name].copy_(tensor.detach())
    return copies


def copied_size(tensors: Mapping[str, Tensor]) -> int:
    """Bytes that `copy_to_host` takes."""
    return sum(tensor.nbytes for tensor in tensors.values())


def write_tensors(path: Path, tensors: Mapping[str, Tensor], notes: Mapping[str, str] | None = None) -> None:
    """Write `tensors` to `path`. notes: the header's metadata. OSError if that fails; then the file is deleted."""
    try:
        with path.open("wb") as file:
            write_into(file, tensors, notes or {})
    except OSError:
        path.unlink(missing_ok=True)  # free the space for what is written next
        raise


def save_model(model: nn.Module, path: Path) -> None:
    """Write the weights as safetensors, one at a time, all or nothing; tied tensors once, under the first name."""
    distinct, tied = _distinct(model)
    with replacing(path) as partial:
        write_tensors(partial, distinct, tied)


def model_form(model: nn.Module) -> dict[str, Any]:
    """The header of `save_model`'s file, without offsets."""
    distinct, tied = _distinct(model)
    form = {name: {"dtype": _NAMES[one.dtype], "shape": list(one.shape)} for name, one in distinct.items()}
    return form | ({"__metadata__": tied} if tied else {})


def _distinct(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a model's state, and of others that share their memory the names."""
    distinct, tied = dict[str, Tensor](), dict[str, str]()
    names = dict[tuple[Any, ...], str]()
    for name, tensor in sorted(model.state_dict().items()):
        if (first := names.setdefault(_memory(tensor, name), name)) == name:
            distinct[name] = tensor
        else:
            tied[name] = first
    return distinct, tied


def _memory(tensor: Tensor, name: str) -> tuple[Any, ...]:
    """Equal for tensors that share all of their memory; a tensor without any has its name."""
    if not tensor.numel() or not tensor.data_ptr():
        return (name,)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def write_into(file: BinaryIO, tensors: Mapping[str, Tensor], notes: Mapping[str, str]) -> None:
    """Write `tensors` into the empty `file`. If the first of `notes` is "check", it becomes the file's checksum."""
    order = _aligned(tensors)
    header, end = dict[str, object]({"__metadata__": dict(notes)} if notes else {}), 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in _NAMES:
            raise TypeError(f"{name} is {tensor.dtype}, which a checkpoint has no name for")
        begin, end = end, end + tensor.numel() * tensor.itemsize
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNED)
    text = len(text).to_bytes(8, "little") + text
    file.write(text)
    checksum = zlib.crc32(text)
    for name in order:
        piece = _bytes(tensors[name])
        file.write(piece)
        checksum = zlib.crc32(piece, checksum) if "check" in notes else 0
        del piece  # before the next one is copied from its device
    if "check" in notes:
        file.seek(CHECK_AT)
        file.write(f"{checksum:08x}".encode())


def _aligned(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names, by item size, descending: written in this order, each tensor is aligned."""
    return sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))


State = dict[str, Any]

_STRUCTURE = "__structure__"
_TENSOR, _PAIRS, _TUPLE = "__tensor__", "__pairs__", "__tuple__"


def split_state(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """Split a nested state of dicts, lists, tuples, tensors, numbers, strings and None into a JSON-able structure and
    its tensors by path (not copied). Tensors that share their memory are one, under the first path.
    """
    tensors, paths = dict[str, Tensor](), dict[tuple[Any, ...], str]()

    def visit(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            first = paths.setdefault(_memory(value, path), path)
            tensors.setdefault(first, value.detach())
            return {_TENSOR: first}
        if isinstance(value, Mapping):
            pairs = [(key, visit(entry, f"{path}.{key}")) for key, entry in value.items()]
            if all(isinstance(key, str) for key, _ in pairs):
                return dict(pairs)
            return {_PAIRS: pairs}  # JSON would turn an optimizer's integer keys into strings
        if isinstance(value, tuple):
            return {_TUPLE: [visit(entry, f"{path}.{index}") for index, entry in enumerate(value)]}
        if isinstance(value, list):
            return [visit(entry, f"{path}.{index}") for index, entry in enumerate(value)]
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise TypeError(
            f"state{path} is a {type(value).__name__}: a checkpoint holds tensors, numbers, strings and None"
        )

    return visit(state, ""), tensors


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
    """Write a state to `path`. notes: its run, worker and step. OSError if that fails; then the file is deleted."""
    write_tensors(path, _packed(state), _checked(notes))


def read_state(path: Path) -> tuple[State, dict[str, str]]:
    """Read the state in `path`, exactly as written, with tensors on the CPU, and its notes. ValueError if the file is
    damaged, or is no state.
    """
    try:
        notes = read_notes(path)
        return _unpacked(load_file(str(path))), notes
    except (SafetensorError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path}: damaged") from error


class StateCopy:
    """A copy of the current `state` in the host's memory, to be written later."""

    def __init__(self, state: State) -> None:
        self._tensors = copy_to_host(_packed(state))

    def write(self, path: Path) -> None:
        """As `write_state`."""
        write_tensors(path, self._tensors, _checked(None))

    def to_bytes(self) -> bytes:
        """The bytes that `write` writes."""
        file = BytesIO()
        write_into(file, self._tensors, _checked(None))
        return file.getvalue()


def state_from_bytes(data: bytes) -> State:
    """Decode `StateCopy.to_bytes`. ValueError if it is no state."""
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


_IN_FLIGHT = ("flights", "ahead")  # not checked: values that a skipped round left there are never used


def not_finite(weights: Mapping[str, Tensor], parameters: Container[str]) -> str | None:
    """The name of the first invalid tensor. parameters: names of those that must be finite; others may hold infinities,
    but no NaN.
    """
    for name, tensor in weights.items():
        if tensor.is_floating_point() and not (tensor.isfinite().all() if name in parameters else _has_no_nan(tensor)):
            return name
    return None


def first_nan(state: Any) -> str | None:
    """Path of the first tensor with a NaN in a worker's state (`Trainer.state_dict`), without exchanges in flight."""
    return next((path for path, tensor in _tensors(state, ()) if not _has_no_nan(tensor)), None)


def _has_no_nan(tensor: Tensor) -> bool:
    return not tensor.isnan().any()


def _tensors(state: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(state, Tensor):
        if state.is_floating_point():
            yield ".".join(path), state
    elif isinstance(state, Mapping):
        for key, entry in state.items():
            if key not in _IN_FLIGHT:
                yield from _tensors(entry, (*path, str(key)))
    elif isinstance(state, Sequence) and not isinstance(state, str):
        for index, entry in enumerate(state):
            yield from _tensors(entry, (*path, str(index)))


def refuse_losses(config: Config, rank: int, last: int, losses: Sequence[Tensor], each: int = 1) -> None:
    """WorkerFailed if a loss of the inner steps up to `last` is not finite. each: number of losses per step."""
    values = torch.stack(list(losses)).tolist() if losses else []
    for number, loss in enumerate(values):
        if not math.isfinite(loss):
            step = last - (len(values) - 1 - number) // each
            raise _diverged(config, rank, f"its loss is {loss} at inner step {step}")


def refuse_state(config: Config, rank: int, step: int, state: Mapping[str, Any], parameters: Container[str]) -> None:
    """WorkerFailed if weights or other tensors of `state` are invalid after `step`. state: under "model" the weights by
    name, if they are not in the optimizer's state. parameters: names of those that must be finite.
    """
    broken = not_finite(state.get("model", {}), parameters) or first_nan(state)
    if broken is not None:
        raise _diverged(config, rank, f"its weights are not finite after inner step {step} ({broken})")


class NotFinite(WorkerFailed):
    """Values of the run are not finite: its learning rates are too high."""


def _diverged(config: Config, rank: int, what: str) -> NotFinite:
    mend = f"lower inner.lr (now {config.inner.lr:g}), or replicas.outer_lr where the method has one"
    return NotFinite(rank, f"{what}: {mend}")
