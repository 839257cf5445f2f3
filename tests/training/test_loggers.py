"""TensorBoard and W&B get the lines of metrics.jsonl; each is read back with its own reader."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from isles.running.run import launch
from isles.training.config.reading import read_config
from isles.training.records import loggers
from tests.training.runs import Told, lines_of, run, tiny, write_text


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Tag -> (step, value) as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def written(out: Path, worker: int | None) -> dict[str, list[tuple[int, float]]]:
    """The same of metrics.jsonl."""
    found: dict[str, list[tuple[int, float]]] = {}
    for line in lines_of(out / "metrics.jsonl"):
        if line.get("worker") == worker:
            for key in line.keys() - {"step", "worker"}:
                found.setdefault(key, []).append((line["step"], line[key]))
    return found


def same(shown: dict[str, Any], lines: dict[str, Any]) -> None:
    assert shown.keys() == lines.keys()
    for tag, points in lines.items():
        assert [step for step, _ in shown[tag]] == [step for step, _ in points], tag
        # Scalars are float32 there.
        assert [value for _, value in shown[tag]] == pytest.approx([value for _, value in points], rel=1e-6)


def test_tensorboard_shows_what_metrics_jsonl_says(text: Path, tmp_path: Path) -> None:
    """Worker by worker; a resumed run replaces the steps beyond its checkpoint."""
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install '.[tensorboard]'")
    config = tiny(text, 'run.loggers=["tensorboard"]', "run.checkpoint_every=4", "run.log_every=1", steps=8)
    out = tmp_path / "run"
    summary = run(config, out)
    (out / "summary.json").unlink()
    before = scalars(out / "tensorboard" / "worker-0")
    launch(config, out, Told().lines.append, Told().notices.append, resume=4)
    for worker in (0, 1):
        same(scalars(out / "tensorboard" / f"worker-{worker}"), written(out, worker))
    assert [step for step, _ in before["loss"]] == list(range(1, 9))
    shown = scalars(out / "tensorboard" / "all")
    assert [step for step, _ in shown.pop("replica_std")] == list(range(1, 9))
    assert shown["summary/val_loss"][-1] == (8, pytest.approx(summary["val_loss"], rel=1e-6))
    assert set(shown) == {f"summary/{key}" for key, value in summary.items() if isinstance(value, (int, float))}


def test_wandb_writes_an_offline_run(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under one id also when resumed; nothing is sent, and no process stays."""
    pytest.importorskip("wandb", reason="wandb is not installed: pip install '.[wandb]'")
    import psutil

    monkeypatch.delenv("WANDB_MODE", raising=False)
    config = tiny(text, 'run.loggers=["wandb"]', "run.checkpoint_every=4", steps=6)
    out = tmp_path / "run"
    run(config, out)
    (file,) = out.glob("wandb/offline-run-*/*.wandb")
    assert file.stem == f"run-{(out / 'wandb' / 'id.txt').read_text()}"
    rows = wandb_rows(file)
    for worker in (0, 1):
        shown = [(row["step"], row[f"worker-{worker}/loss"]) for row in rows if f"worker-{worker}/loss" in row]
        assert shown == written(out, worker)["loss"]
    assert not [child for child in psutil.Process().children(recursive=True) if "wandb" in child.name()]


def test_wandb_goes_on_where_it_was(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under one id, with rows numbered on, for W&B drops those of a number that it has passed; steps are the run's."""
    pytest.importorskip("wandb", reason="wandb is not installed: pip install '.[wandb]'")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    out = tmp_path / "run"
    config = tiny(text, 'run.loggers=["wandb"]', "run.checkpoint_every=4", steps=6)
    run(config, out)
    (out / "summary.json").unlink()
    launch(config, out, Told().lines.append, Told().notices.append, resume=4)
    files = sorted(out.glob("wandb/offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime)
    assert len({file.name for file in files}) == 1
    # Of two sessions in one second W&B makes one folder, and the later file.
    rows = [row for file in files for row in wandb_rows(file)]
    numbers = [row["_step"] for row in rows]
    assert numbers == sorted(set(numbers)) and numbers[-1] == int((out / "wandb" / "rows.txt").read_text()) - 1
    assert numbers[-1] > len(rows) - 1 or len(files) == 2
    again = [row["step"] for row in wandb_rows(files[-1]) if "worker-0/loss" in row]
    assert again == [6]


def wandb_rows(file: Path) -> list[dict[str, Any]]:
    """The rows of a W&B file, a log of records in blocks of 32 kB as LevelDB has them, behind seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, record, rows = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        left = (1 << 15) - at % (1 << 15)
        if left < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            held, record = Record.FromString(record), b""
            items = held.history.item
            if items:
                rows.append({item.key or item.nested_key[0]: json.loads(item.value_json) for item in items})
    return rows


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_an_absent_extra_is_one_line_before_anything_starts(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard" if name == "tensorboard" else name, None)
    with pytest.raises(ValueError) as caught:
        run(tiny(text, f'run.loggers=["{name}"]'), tmp_path / "run")
    assert f'pip install ".[{name}]"' in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_the_names_are_those_of_the_configuration(tmp_path: Path) -> None:
    for name in loggers.LOGGERS:
        assert read_config(None, {}, [f'run.loggers=["{name}"]']).run.loggers == (name,)
