"""Tensors into a safetensors file, one after the other: what lies on a device or on disk is in memory one at a time.

The library's own `save_file` wants all of them in the host's memory, each with a storage to itself. The format: 8 bytes
of length, a JSON header of that length with each tensor's dtype, shape and place, then the bytes, little-endian.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from isles.durable import replacing
from isles.training.records.checked import CHECK_AT

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


def copy_to_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of them, in one piece of the host's memory, which goes when the last of them does."""
    order = _aligned(tensors)
    held = torch.empty(sum(tensors[name].nbytes for name in order), dtype=torch.uint8, device="cpu")
    parts = held.split([tensors[name].nbytes for name in order])
    copies = {}
    for name, part in zip(order, parts, strict=True):
        tensor = tensors[name]
        copies[name] = part.view(tensor.dtype).view(tensor.shape)
        copies[name].copy_(tensor.detach())
    return copies


def write_tensors(path: Path, tensors: Mapping[str, Tensor], notes: Mapping[str, str] | None = None) -> None:
    """Write them, with notes for whoever reads the header. OSError where that fails: no part of the file stays then."""
    try:
        with path.open("wb") as file:
            write_into(file, tensors, notes or {})
    except OSError:
        path.unlink(missing_ok=True)  # it would take room from what is written next
        raise


def save_model(model: nn.Module, path: Path) -> None:
    """Write the weights as safetensors, one after the other, all or nothing; tied tensors once, by the first name."""
    kept, tied = dict[str, Tensor](), dict[str, str]()
    names = dict[tuple[Any, ...], str]()
    for name, tensor in sorted(model.state_dict().items()):
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) if tensor.numel() else (name,)
        if names.setdefault(key, name) == name:
            kept[name] = tensor
        else:
            tied[name] = names[key]
    with replacing(path) as partial:
        write_tensors(partial, kept, tied)


def write_into(file: BinaryIO, tensors: Mapping[str, Tensor], notes: Mapping[str, str]) -> None:
    """Write them into `file`, which is empty. Where the first of `notes` is "check", it becomes the file's checksum."""
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
        del piece  # and what it may have copied
    if "check" in notes:
        file.seek(CHECK_AT)
        file.write(f"{checksum:08x}".encode())


def _aligned(tensors: Mapping[str, Tensor]) -> list[str]:
    """Their names in an order in which, one behind the other, each is aligned."""
    return sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
