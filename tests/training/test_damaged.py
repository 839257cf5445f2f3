"""Damaged run directories: refused in one line, or gone on from the checkpoint before; never other bits."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from isles.comm.errors import CommError
from isles.running.run import launch
from isles.training.records.reshard import prepare
from tests.training.runs import Told, run, tiny, write_text

STEPS, SAVED = 6, (2, 4)


@pytest.fixture(scope="module")
def broken_off(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, bytes]:
    """A run of two workers that broke off after its checkpoints, one of another seed, and the first's right model."""
    folder = tmp_path_factory.mktemp("runs")
    text = write_text(folder / "text.txt")
    models = []
    for name, seed in (("run", 0), ("other", 1)):
        config = tiny(text, "run.checkpoint_every=2", "run.keep_checkpoints=0", f"run.seed={seed}", steps=STEPS)
        run(config, folder / name)
        models.append((folder / name / "model.safetensors").read_bytes())
        for made in ("model.safetensors", "summary.json"):
            (folder / name / made).unlink()
    assert models[0] != models[1]
    return folder / "run", folder / "other", models[0]


def flipped(at: float) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        place = min(int(at * len(data)), len(data) - 1)
        return data[:place] + bytes([data[place] ^ 1 << random.Random(place).randrange(7)]) + data[place + 1 :]

    return change


def digit(data: bytes) -> bytes:
    """Another digit somewhere in the second half."""
    places = [place for place in range(len(data) // 2, len(data)) if chr(data[place]) in "012345678"]
    if not places:
        return data + b"1"
    place = places[len(places) // 2]
    return data[:place] + bytes([data[place] + 1]) + data[place + 1 :]


CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "without its last byte": lambda data: data[:-1],
    "one byte more": lambda data: data + b"\0",
    "twice": lambda data: data + data,
    "zeros": lambda data: bytes(len(data)),
    "noise": lambda data: random.Random(len(data)).randbytes(len(data)),
    "first bit": flipped(0.0),
    "early bit": flipped(0.03),
    "middle bit": flipped(0.5),
    "late bit": flipped(0.97),
    "a digit": digit,
    "braces": lambda data: b"{}",
    "deep": lambda data: b"[" * 200_000,
}
FILES = [f"checkpoints/step-4/{name}" for name in ("manifest.json", "worker-0.safetensors", "worker-1.safetensors")]
WHOLE = ("gone", "a folder", "of the other worker", "of another step", "of another run")
DAMAGES = [(file, change) for file in FILES for change in (*CHANGES, *WHOLE)]
DAMAGES.remove((FILES[0], "of the other worker"))  # a manifest is of all
DAMAGES += [("metrics.jsonl", change) for change in CHANGES]
DAMAGES += [("config.toml", change) for change in (*CHANGES, "gone", "of another run")]


def damage(folder: Path, other: Path, file: str, change: str) -> None:
    path = folder / file
    if change in CHANGES:
        path.write_bytes(CHANGES[change](path.read_bytes()))
    elif change == "of the other worker":
        shutil.copy(path.with_name(path.name.replace("0", "x").replace("1", "0").replace("x", "1")), path)
    elif change == "of another step":
        shutil.copy(folder / "checkpoints" / "step-2" / path.name, path)
    elif change == "of another run":
        shutil.copy(other / file, path)
    else:
        path.unlink()
        if change == "a folder":
            path.mkdir()


def comes_out(broken_off: tuple[Path, Path, bytes], tmp_path: Path, file: str, change: str) -> str:
    """ "refused", "same bits" or "told"; fails for anything else."""
    before, other, right = broken_off
    out = tmp_path / "run"
    shutil.copytree(before, out)
    damage(out, other, file, change)
    told = Told()
    try:
        ready = prepare(out, None)
        launch(ready.config, out, told.lines.append, told.notices.append, resume=ready.step)
    except (ValueError, OSError, CommError) as error:
        assert str(error) and "\n" not in str(error), error
        return "refused"
    if (out / "model.safetensors").read_bytes() == right:
        return "same bits"
    assert any("was changed since this checkpoint was written" in note for note in ready.notes), (file, change)
    return "told"


def test_what_is_whole_goes_on_to_the_same_bits(broken_off: tuple[Path, Path, bytes], tmp_path: Path) -> None:
    assert comes_out(broken_off, tmp_path, "metrics.jsonl", "twice") == "same bits"


def damages(each: int) -> Iterator[Any]:
    """All; one of so many is run always."""
    for number, one in enumerate(DAMAGES):
        yield pytest.param(*one, marks=() if number % each == 0 else pytest.mark.long)


@pytest.mark.parametrize(("file", "change"), list(damages(7)))
def test_never_other_bits(broken_off: tuple[Path, Path, bytes], tmp_path: Path, file: str, change: str) -> None:
    comes_out(broken_off, tmp_path, file, change)
