"""The mean of what workers came to, file by file, without torch and one tensor at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from isles.durable import plain_mode, replacing


def write_mean(models: Sequence[Path], out: Path) -> None:
    """Write the mean of float tensors, and the first one's other tensors, to `out`: added in this order and divided, as
    a fixed world takes it (`isles.comm.collectives.mean`).

    ValueError, with the file, for one that is damaged, or of other names, shapes or types than the first.
    """
    means: dict[str, np.ndarray] = {}
    files = [(path, _opened(path)) for path in models]
    (_, first), *others = files
    for name in sorted(first.keys()):
        mean = _tensor(models[0], first, name)
        if np.issubdtype(mean.dtype, np.floating):
            for path, file in others:
                one = _tensor(path, file, name)
                if one.shape != mean.shape or one.dtype != mean.dtype:
                    raise ValueError(f"{path}: {name} is of another shape or type")
                mean = mean + one
            mean = mean / mean.dtype.type(len(files))
        means[name] = mean
    with replacing(out) as partial, plain_mode(partial):
        save_file(means, str(partial), metadata=first.metadata())


def same_weights(one: Path, two: Path) -> bool:
    """Whether both hold the same tensors, bit for bit."""
    first, second = _opened(one), _opened(two)
    return sorted(first.keys()) == sorted(second.keys()) and all(
        np.array_equal(_tensor(one, first, name), _tensor(two, second, name))
        for name in first.keys()  # noqa: SIM118
    )


def spread(models: Sequence[Path], mean: Path) -> float:
    """Of the models about their mean: sqrt(sum (p - mean p)^2 / (models * floats)), see `ReplicaSync.replica_std`."""
    middle, squares, count = _opened(mean), 0.0, 0
    for path in models:
        file = _opened(path)
        for name in middle.keys():  # noqa: SIM118  no mapping
            center = _tensor(mean, middle, name)
            if np.issubdtype(center.dtype, np.floating):
                apart = _tensor(path, file, name).astype(np.float64) - center
                squares, count = squares + float((apart**2).sum()), count + center.size
    return math.sqrt(squares / count) if count else 0.0


def _opened(path: Path) -> safe_open:
    try:
        return safe_open(str(path), framework="np")
    except SafetensorError as error:
        raise ValueError(f"{path}: no safetensors file ({error})") from None


def _tensor(path: Path, file: safe_open, name: str) -> np.ndarray:
    """ValueError where it is missing, or not finite."""
    try:
        found = file.get_tensor(name)
    except (SafetensorError, TypeError) as error:
        raise ValueError(f"{path}: {name} cannot be read ({error})") from None
    if np.issubdtype(found.dtype, np.floating) and not np.isfinite(found).all():
        raise ValueError(f"{path}: {name} is not finite")
    return found
