"""TensorBoard and W&B get the lines of metrics.jsonl; each is read back with its own reader."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from isles.training.config.reading import read_config
from isles.training.records import loggers
from isles.training.running.run import launch
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
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'isles[tensorboard]'")
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
    pytest.importorskip("wandb", reason="wandb is not installed: pip install 'isles[wandb]'")
    import psutil

    monkeypatch.delenv("WANDB_MODE", raising=False)
    config = tiny(text, 'run.loggers=["wandb"]', "run.checkpoint_every=4", steps=6)
    out = tmp_path / "run"
    run(config, out)
    (file,) = out.glob("wandb/offline-run-*/*.wandb")
    assert file.stem == f"run-{(out / 'wandb' / 'id.txt').read_text()}"
    # W&B has no reader for Python; the log holds names and values as they are, each as its JSON.
    held = file.read_bytes()
    for worker in (0, 1):
        assert held.count(f"worker-{worker}/loss".encode()) >= 3
        assert all(json.dumps(value).encode() in held for _, value in written(out, worker)["loss"])
    (out / "summary.json").unlink()
    launch(config, out, Told().lines.append, Told().notices.append, resume=4)
    assert {path.name for path in out.glob("wandb/offline-run-*/*.wandb")} == {file.name}
    assert not [child for child in psutil.Process().children(recursive=True) if "wandb" in child.name()]


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_an_absent_extra_is_one_line_before_anything_starts(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard" if name == "tensorboard" else name, None)
    with pytest.raises(ValueError) as caught:
        run(tiny(text, f'run.loggers=["{name}"]'), tmp_path / "run")
    assert f'pip install "isles[{name}]"' in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_the_names_are_those_of_the_configuration(tmp_path: Path) -> None:
    for name in loggers.LOGGERS:
        assert read_config(None, {}, [f'run.loggers=["{name}"]']).run.loggers == (name,)
