"""The mean of the workers' models, from file to file, without torch, and in chunks."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open

from isles.base.durable import plain_mode, replacing
from isles.base.parsing import parse_json
from isles.comm.collectives.robust_rules import CLIP, trimmed

_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}  # NumPy has no bfloat16: read its bits as integers
T = TypeVar("T", str, bytes)
_AT_ONCE = 1 << 24  # bytes of all files together that are in memory


def digest(data: Any) -> str:
    """16 hex digits of the hash of a tensor's bytes."""
    return hashlib.sha256(data).hexdigest()[:16]


def consolidate(
    models: Mapping[int, Path], out: Path, *, alike: bool, ratio: float, robust: str = "none"
) -> dict[int, str]:
    """Write the likeliest of `candidates` to `out`; returns the members left out, with the reasons."""
    found, left = candidates(models, out, alike=alike, ratio=ratio, robust=robust)
    if found:
        write_mean([found[0].path], out)
    for one in found:
        if one.path not in models.values():
            one.path.unlink()
    return left


@dataclass(frozen=True)
class FinalModel:
    """A file that may be the run's model, and the members whose files it is made of."""

    path: Path
    members: tuple[int, ...]


def candidates(
    models: Mapping[int, Path], out: Path, *, alike: bool, ratio: float, robust: str = "none"
) -> tuple[list[FinalModel], dict[int, str]]:
    """What the run's model may be, made of `models` (by member), the likeliest first; and the members that are left
    out, with the reasons. A mean is written to `out`, or beside it.

    alike: all have landed the same means, so it is the file that more than half of them have, bit for bit; if there is
    none, any of the files that differ. Otherwise it is the mean, as `robust` says, of those whose distance from the
    entry-wise median is at most `ratio` (`world.trust_ratio`) times the median distance. Of two files, their mean or
    either of them; of files of several forms of which none has more than half, the mean of each form.
    """
    left, marks = dict[int, str](), dict[int, str]()
    for member, path in models.items():
        try:
            marks[member] = _Model(path).mark(whole=alike)
        except ValueError as error:
            left[member] = str(error)
    groups = [
        [member for member in marks if marks[member] == mark] for mark, _ in Counter(marks.values()).most_common()
    ]
    if groups and 2 * len(groups[0]) > len(marks):
        why = "it is not the one that the others have landed" if alike else "its tensors are not those of the others"
        left |= {member: why for group in groups[1:] for member in group}
        groups = groups[:1]
    if alike:
        return [FinalModel(models[group[0]], tuple(group)) for group in groups], left
    found = []
    for number, group in enumerate(groups):
        far, usual = _far([models[member] for member in group])
        if not usual:  # half of them are equal bit for bit, as in a pair: take a tenth of the model's own norm
            usual = _distances([models[group[far.argmin()]]], np.zeros_like)[0][0] ** 0.5 / 10 or 1e-30
        for member, times in zip(group, far / usual, strict=True):
            if times > ratio:
                left[member] = f"it is {times:.3g} times as far from the others as usual (world.trust_ratio)"
        of = [member for member in group if member not in left]
        path = out.with_name(f"{out.name}-{number}.partial")
        write_mean([models[member] for member in of], path, robust)
        found.append(FinalModel(path, tuple(of)))
        if len(of) == 2:
            found += [FinalModel(models[member], (member,)) for member in of]
    return found, left


def write_mean(models: Sequence[Path], out: Path, robust: str = "none") -> None:
    """Write the mean of models of one form: float tensors are summed in this order and divided, in float32 or wider, as
    in a fixed world (`isles.comm.collectives.mean`); of other tensors it takes the most frequent value. robust: as
    `replicas.robust`, where clipping looks at whole models.
    """
    files = [_Model(path) for path in models]
    far, usual = _far(models) if robust == CLIP and len(models) > 2 else (None, 0.0)
    with replacing(out) as partial, plain_mode(partial), partial.open("wb") as file:
        file.write(files[0].header)
        for offset, kind, rows in _runs(files):
            file.seek(offset)
            if kind not in _FLOATS:
                file.write(_most([row.tobytes() for row in rows]))
                continue
            if far is not None:
                every = np.stack(rows)
                center = np.median(every, axis=0)
                factors = np.minimum(1.0, usual / np.maximum(far, usual or 1.0))[:, None]
                rows = [*(center + (every - center) * factors).astype(every.dtype)]
            elif cut := trimmed(robust, len(rows)):
                rows = [*np.sort(np.stack(rows), axis=0)[cut:-cut]]
            file.write(_mean(rows, kind))


def form_of(path: Path) -> dict[str, Any] | None:
    """Types and shapes of a safetensors file by name, and its metadata; None if it is none, or a number of it is not
    finite.
    """
    try:
        model = _Model(path)
        model.mark(whole=False)
        return model.form
    except ValueError:
        return None


def digests(path: Path) -> dict[str, str]:
    """By tensor of a safetensors file, 16 hex digits of the hash of its bytes. ValueError if it is none."""
    return _Model(path).digests()


def drift(path: Path, states: Sequence[Path]) -> float:
    """How far a model is from the weights in the files `states` of a swarm's stages, or of a cluster's nodes, times the
    norm of these. ValueError if one is no safetensors file.
    """
    model, far, norm = _Model(path), 0.0, 0.0
    for state in map(_Model, states):
        for name, form in product(model.offsets, (".model.{}", ".parameters.{}.0")):
            saved = form.format(name)
            if state.form.get(saved) == model.form[name]:
                here = model.run(name, *model.offsets[name]).astype(np.float64)
                there = state.run(saved, *state.offsets[saved]).astype(np.float64)
                far, norm = far + float(((here - there) ** 2).sum()), norm + float((there**2).sum())
    return (far / norm) ** 0.5 if norm else 0.0


def same_weights(one: Path, two: Path) -> bool:
    """Whether both hold the same tensors, bit for bit."""
    return _Model(one).mark(whole=True) == _Model(two).mark(whole=True)


def spread(models: Sequence[Path], mean: Path) -> float:
    """Standard deviation of the models: sqrt(sum (p - mean p)^2 / (models * floats)), see `ReplicaSync.replica_std`."""
    squares, floats = _distances([mean, *models], lambda every: every[0])
    return float(squares.sum() / (len(models) * floats)) ** 0.5 if floats else 0.0


def _far(models: Sequence[Path]) -> tuple[np.ndarray, float]:
    """The distance of each model from their entry-wise median, and the middle one of these, the lesser of two."""
    far = _distances(models, lambda every: np.median(every, axis=0))[0] ** 0.5
    return far, np.sort(far)[(len(far) - 1) // 2]


def _distances(models: Sequence[Path], center: Callable[[np.ndarray], np.ndarray]) -> tuple[np.ndarray, int]:
    """The squared distance of each model from `center` of all, and the number of floats of each."""
    squares, floats = np.zeros(len(models)), 0
    for _, kind, rows in _runs([_Model(path) for path in models]):
        if kind in _FLOATS:
            # In float64: squares of float32 entries overflow, and sums of many lose the small ones.
            every = np.stack(rows).astype(np.float64)
            # A distance that overflows is infinite, and its model is left out as too far.
            with np.errstate(over="ignore"):
                squares += ((every - center(every)) ** 2).sum(axis=1)
            floats += every.shape[1]
    return squares, floats


class _Model:
    """A safetensors file. header: the bytes before the tensors. form: types and shapes by name, and metadata. offsets:
    by name, the first byte of a tensor and the one after its last.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with safe_open(str(path), framework="np"):  # raises if the file is truncated or damaged
                self._bytes = np.memmap(path, np.uint8, "r")
            length = 8 + int.from_bytes(self._bytes[:8].tobytes(), "little")
            self.header = self._bytes[:length].tobytes()
            self.form = parse_json(self.header[8:])
            offsets = {name: one.pop("data_offsets") for name, one in self.form.items() if name != "__metadata__"}
            self.offsets = {name: (length + begin, length + end) for name, (begin, end) in offsets.items()}
        except (SafetensorError, ValueError, LookupError) as error:
            raise ValueError(f"{path}: no safetensors file ({error})") from None

    def mark(self, *, whole: bool) -> str:
        """A hash of the file's form; whole: and of its bits. ValueError if a number is not finite."""
        digest = hashlib.sha256(json.dumps(self.form, sort_keys=True).encode())
        for _, _, (run,) in _runs([self]):
            digest.update(run.tobytes() if whole else b"")
        return digest.hexdigest()

    def digests(self) -> dict[str, str]:
        """See `digests`."""
        return {name: digest(self._bytes[begin:end]) for name, (begin, end) in self.offsets.items()}

    def run(self, name: str, begin: int, end: int) -> np.ndarray:
        """Bytes `begin` to `end` of a tensor; floats in float32 or wider. ValueError if one is not finite."""
        run, kind = self._bytes[begin:end], self.form[name]["dtype"]
        if kind not in _FLOATS:
            return run
        raw = run.view(_FLOATS[kind])
        floats = (raw.astype("<u4") << 16).view("<f4") if kind == "BF16" else raw
        if not np.isfinite(floats).all():
            raise ValueError(f"{self.path}: {name} is not finite")
        return floats.astype(np.result_type(floats, np.float32), copy=False)


def _runs(files: Sequence[_Model]) -> Iterator[tuple[int, str, list[np.ndarray]]]:
    """Chunks of all tensors, by name: offset in the first file, type, and the entries of each file."""
    first, step = files[0], max(_AT_ONCE // len(files), 8) & -8
    for name, (begin, end) in sorted(first.offsets.items()):
        for at in range(0, end - begin, step):
            until = min(at + step, end - begin)
            runs = [file.run(name, file.offsets[name][0] + at, file.offsets[name][0] + until) for file in files]
            yield begin + at, first.form[name]["dtype"], runs


def _most(values: Sequence[T]) -> T:
    """The most frequent value, the first one of equals."""
    return max(values, key=Counter(values).__getitem__)


def _mean(rows: Sequence[np.ndarray], kind: str) -> bytes:
    """The mean as bytes of type `kind`; bfloat16 is rounded to nearest, ties to even."""
    # One after the other, in the order of the members: a pairwise sum would have other bits than a fixed world's.
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    mean = total / total.dtype.type(len(rows))
    if kind != "BF16":
        return mean.astype(_FLOATS[kind]).tobytes()
    bits = mean.view("<u4")
    return ((bits + (0x7FFF + (bits >> 16 & 1))) >> 16).astype("<u2").tobytes()
