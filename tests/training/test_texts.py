"""Runs that read a mixture and validate on several texts: the losses of each, in every kind of run, are those of a
plain loop over its windows; a resumed run reads on; the page, the command and the files name each text.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from isles.cli.data import prepare
from isles.cli.model import evaluate, export
from isles.network.churn import ChurnEvent
from isles.report import write_report
from isles.training.config.reading import gather, read_config
from isles.training.config.sections import Config
from isles.training.elastic.support import elastic, going_on
from isles.training.records.saved_run import load_saved
from tests.training.clusters import test_clusters as clusters
from tests.training.elastic.runs import Run
from tests.training.elastic.test_simulated import churned
from tests.training.runs import CONTEXT, TINY, metrics, run, tiny, write_text
from tests.training.swarm import test_swarm as swarm
from tests.training.swarm.members import SwarmRun, elastic_config
from tests.training.swarm.test_members import settings

KEYS = {"val_loss.long", "val_loss.short-1"}


def texts(folder: Path) -> list[str]:
    """A mixture of two texts, and two for validation: 12 windows of 16, of which 7 are read, and 3."""
    sizes = {"long": 12 * 16, "short-1": 3 * 16, "a": 4000, "b": 3000}
    paths = {name: write_text(folder / f"{name}.txt", size, seed=size) for name, size in sizes.items()}
    train = [f"data.path.{name}={paths[name]}" for name in ("a", "b")]
    held = [f"data.validation_path.{name}={paths[name]}" for name in ("long", "short-1")]
    return [*train, *held, "data.mixture.a=1", "data.mixture.b=3", "data.validation_sequences=7"]


def own_paths(config: Config) -> dict[str, Any]:
    """What a worker that joins says for itself."""
    return {"data": {"path": config.data.path, "validation_path": config.data.validation_path}}


def plain(out: Path, name: str, count: int) -> list[float]:
    """By hand: the loss of each of the windows that are read of the text, of the run's model."""
    tokens, saved = torch.tensor(list((out.parent / f"{name}.txt").read_bytes() + b"\n")), load_saved(out)
    among = [tokens[at : at + CONTEXT + 1] for at in range(0, len(tokens) - CONTEXT, CONTEXT)]
    rows = torch.stack([among[number * len(among) // count] for number in range(count)])
    with torch.no_grad():
        losses = cross_entropy(
            saved.logits(rows[:, :-1]).flatten(0, 1).float(), rows[:, 1:].flatten(), reduction="none"
        )
    return losses.reshape(count, CONTEXT).mean(1).tolist()


def check(out: Path, summary: dict[str, Any], lines: Sequence[dict[str, Any]]) -> None:
    """Losses of the summary are those of the model; of each line with a validation, the mean is of 7 and 3 windows."""
    long, short = plain(out, "long", 7), plain(out, "short-1", 3)
    assert summary["val_loss.long"] == pytest.approx(sum(long) / 7, abs=2e-5)
    assert summary["val_loss.short-1"] == pytest.approx(sum(short) / 3, abs=2e-5)
    assert summary["val_loss"] == pytest.approx(sum(long + short) / 10, abs=2e-5)
    validated = [line for line in lines if line.get("val_loss") is not None]
    for line in validated:
        mean = (7 * line["val_loss.long"] + 3 * line["val_loss.short-1"]) / 10
        assert line["val_loss"] == pytest.approx(mean, rel=1e-12)
    assert validated and all(KEYS & line.keys() in (KEYS, set()) for line in lines)


def test_losses_of_each_text_are_written_and_shown_and_a_resumed_run_reads_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = [*texts(tmp_path), "run.checkpoint_every=2", "run.keep_checkpoints=0", "run.validate_every=2"]
    config, out, copy = tiny(tmp_path, *more, method="ddp", steps=6), tmp_path / "run", tmp_path / "copy"
    summary = run(config, out)
    check(out, summary, metrics(out))
    assert json.loads((out / "summary.json").read_text()) == summary

    shutil.copytree(out, copy)
    (copy / "summary.json").unlink()
    assert run(read_config(str(copy / "config.toml"), {}, []), copy, resume=2)["val_loss"] == summary["val_loss"]
    assert (copy / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()

    page = write_report(out).read_text()
    for name in ("long", "short-1"):
        assert f"validation on {name}" in page and f"Validation loss on {name}" in page
    evaluate(out)
    printed = " ".join(capsys.readouterr().out.split())
    for name in ("long", "short-1"):
        assert f"loss of {name} {summary[f'val_loss.{name}']:.4f} nats/token" in printed
    with pytest.raises(ValueError, match="parts = "):
        run(read_config(str(copy / "config.toml"), {}, ["data.mixture.a=2"]), copy, resume=2)


def test_prepare_says_what_is_read_of_each_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run of 2 workers x 50 steps x 2 x 16 = 3,200 tokens, a quarter of them of the first part."""
    prepare(set_=[*TINY, *texts(tmp_path), "world.workers=2", "run.steps=50"])
    printed = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "a 4,000 to train on, 25.0% of what is read: 0.2 epochs of it in 3,200 tokens" in printed
    assert "b 3,001 to train on, 75.0% of what is read: 0.8 epochs of it in 3,200 tokens" in printed


PIPELINE = ["model.layers=2", "model.tie_embeddings=false", "pipeline.stages=2", "pipeline.microbatches=2"]


def test_in_stages_and_in_a_swarm(tmp_path: Path) -> None:
    more = [*texts(tmp_path), "run.validate_every=2"]
    staged = tiny(tmp_path, *more, *PIPELINE, method="noloco", workers=4, steps=4)
    check(tmp_path / "staged", run(staged, tmp_path / "staged"), metrics(tmp_path / "staged"))
    own = ["pipeline.swarm.peers=[1,1,1]", "world.workers=3", "pipeline.microbatches=2", "run.steps=4"]
    summary, _ = swarm.train(swarm.config(*own, *more), tmp_path / "swarm")
    check(tmp_path / "swarm", summary, metrics(tmp_path / "swarm"))


@pytest.mark.long
def test_in_clusters_and_on_the_card_of_an_export(tmp_path: Path) -> None:
    out = tmp_path / "clusters"
    check(out, clusters.train(clusters.config(*texts(tmp_path)), out), metrics(out))
    export(out, device="cpu")
    card = (out / "export-hf" / "README.md").read_text()
    assert '[data.path]\na = "a.txt"' in card and str(tmp_path) not in card


@pytest.mark.long
def test_in_a_swarm_over_a_lighthouse(tmp_path: Path) -> None:
    own = [one for one in settings("[1,2]", 4, *texts(tmp_path)) if not one.startswith("run.validate_every")]
    run = SwarmRun(elastic_config(*own, "run.validate_every=2"), tmp_path / "run")
    run.own = own_paths(run.config)
    for _ in range(3):
        run.join()
    check(tmp_path / "run", run.end(), metrics(tmp_path / "run"))


@pytest.mark.long
def test_in_simulated_rounds(tmp_path: Path) -> None:
    config = tiny(tmp_path, *texts(tmp_path), "run.validate_every=3", method="diloco", workers=3, steps=9)
    made = churned(going_on(config), [ChurnEvent(2.0, "join", 1)], tmp_path)
    check(made.out, json.loads((made.out / "summary.json").read_text()), metrics(made.out))


def test_where_workers_come_and_go_the_lighthouse_judges_each_text(tmp_path: Path) -> None:
    own = [one for one in TINY if not one.startswith("world.backend")]
    own += [*texts(tmp_path), "run.steps=4", "world.workers=2", "replicas.method=diloco", "run.validate_every=2"]
    world = Run(elastic(gather(None, {}, [*own, "replicas.sync_every=2"])), tmp_path / "run")
    world.own = own_paths(world.config)
    world.join()
    world.join()
    check(tmp_path / "run", world.end(), metrics(tmp_path / "run"))
