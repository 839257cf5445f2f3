"""Memory does not depend on the size of the text: of a run of four workers, and of 2 GB. test_store.py measures the
quick case.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from isles.data import DataConfig, load_corpus

LIMIT = 50e6  # bytes that may be added from 50 to 200 MB of text
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Gone after the test, which pytest's own would not be."""
    yield tmp_path
    shutil.rmtree(tmp_path)


def library() -> str:
    """The standard library's source."""
    return load_corpus(DataConfig(validation_fraction=0)).train.tokens.tobytes().decode()


def write_text(path: Path, text: str, size: int) -> Path:
    with path.open("w", encoding="utf-8") as file:
        for _ in range(size // len(text) + 1):
            file.write(text)
    return path


def peaks(command: list[str], folder: Path) -> dict[str, float]:
    """Bytes at the peak of the command's own process, and of those that it starts, the largest: of pages that are
    their own ("own"), and of all, so also of mapped files, which the system takes back when it needs room ("whole").
    """
    environment = {**os.environ, "ISLES_HOME": str(folder / "home"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
    found: dict[str, float] = {}
    first = psutil.Process(process.pid)
    while process.poll() is None:
        with contextlib.suppress(psutil.Error):
            for role, one in [("first", first), *(("others", other) for other in first.children(recursive=True))]:
                with contextlib.suppress(OSError, IndexError):
                    status = Path(f"/proc/{one.pid}/status").read_text()
                    for what, key in (("own", "RssAnon:"), ("whole", "VmHWM:")):
                        size = 1024.0 * int(status.split(key)[1].split()[0])
                        found[f"{role} {what}"] = max(found.get(f"{role} {what}", 0), size)
        time.sleep(0.02)
    assert process.returncode == 0, (folder / "log").read_text()[-2000:]
    return found


@pytest.mark.long
def test_a_run_of_four_workers_at_50_and_200_mb_with_32k_ids(folder: Path) -> None:
    """One document of the standard library's source, again and again."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    text = library()
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=32_000, show_progress=False)
    made.train_from_iterator([text[at : at + 10_000] for at in range(0, len(text), 10_000)], trainer)
    made.save(str(folder / "tokenizer.json"))
    settings = [f"data.tokenizer={folder / 'tokenizer.json'}", "model.vocab=32000", "model.context=64"]
    settings += ["model.d_model=16", "model.layers=1", "model.heads=2", "model.ffn=24", "replicas.sync_every=5"]
    found = []
    for size in (50, 200):
        file = write_text(folder / f"{size}.txt", text, size * 1_000_000)
        options = [f"--set={one}" for one in settings]
        command = ["train", "--data", str(file), "--workers", "4", "--steps", "20", "--out", f"run-{size}"]
        found.append(peaks([sys.executable, "-m", "isles", *command, *options], folder))
    print("MB at 50 and 200 MB:", {key: [round(one[key] / 1e6) for one in found] for key in found[0]})
    for key in found[0]:
        assert found[1][key] - found[0][key] < LIMIT, (key, found)


@pytest.mark.long
def test_2_gb_in_the_memory_of_20_mb(folder: Path) -> None:
    text, found, seconds = library(), [], 0.0
    for size in (20, 2000):
        file = write_text(folder / f"{size}.txt", text, size * 1_000_000)
        begun = time.monotonic()
        command = ["data", "prepare", "--set", f"data.path={file}", "--set", f"data.cache={folder / 'cache'}"]
        found.append(peaks([sys.executable, "-m", "isles", *command], folder))
        seconds = time.monotonic() - begun
    print(
        f"MB at 20 and 2000 MB, {seconds:.0f} s:", {key: [round(one[key] / 1e6) for one in found] for key in found[0]}
    )
    assert all(found[1][key] - found[0][key] < LIMIT for key in found[0]), found
    assert seconds < 15 * 60
