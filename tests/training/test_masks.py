"""Runs on rows with `labels`, and on isolated documents, against plain loops that read each document alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from isles.base.marks import FIRST, ids_of
from isles.data import Loader, load_corpus
from isles.experts.domains import Domain, DomainText
from isles.experts.hdee import HdeeConfig
from isles.experts.reading import checked
from isles.models import build
from isles.network.churn import ChurnEvent
from isles.replicas import METHODS
from isles.training.config.reading import read_config
from isles.training.config.sections import Config
from isles.training.elastic.support import going_on
from isles.training.swarm.step import of_all
from tests.covers import share
from tests.training.elastic.test_simulated import churned
from tests.training.runs import CONTEXT, ROWS, TINY, VOCAB, run, tiny, write_rows

STEPS = 6
PLAIN = ["inner.optimizer=sgd", "inner.schedule=constant", "inner.warmup_steps=0", "inner.weight_decay=0"]
PLAIN += ["inner.max_norm=0", "inner.lr=0.3", "model.dtype=float64"]


def masked(rows: Path, *more: str, **other: Any) -> Config:
    return tiny(rows, *ROWS, *PLAIN, "model.layers=2", *more, steps=STEPS, **other)


def plain_loss(model: Any, tokens: Tensor) -> tuple[Tensor, int]:
    """The sum of the losses of all learned targets, and their number; a document at a time."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row in tokens:
        begins = [0, *(at for at in range(1, CONTEXT) if row[at] < -FIRST), CONTEXT]
        for begin, end in pairwise(begins):
            logits = model.logits(ids_of(row)[None, begin:end])[0]
            for at in range(begin, end):
                if row[at + 1] >= 0:
                    total, count = total + F.cross_entropy(logits[at - begin], row[at + 1]), count + 1
    return total, count


def plain_run(config: Config, every: int) -> tuple[dict[str, Tensor], float]:
    """The weights and the validation loss of workers that average gradients (every = 0), or weights every so often."""
    workers, corpus = config.world.workers, load_corpus(config.data)
    models: list[Any] = [build(config.model, config.run.seed)]
    models += [deepcopy(models[0]) for _ in range(workers - 1)]
    loaders = [Loader(corpus, config.data, context=CONTEXT, worker=one, workers=workers) for one in range(workers)]
    for step in range(1, config.run.steps + 1):
        gradients = []
        for model, loader in zip(models, loaders, strict=True):
            total, count = plain_loss(model, torch.cat([*islice(loader, config.inner.accumulation)]))
            gradients.append(torch.autograd.grad(total / max(count, 1), [*model.parameters()]))
        means = [torch.stack(all_of).mean(0) for all_of in zip(*gradients, strict=True)]
        with torch.no_grad():
            for model, own in zip(models, gradients, strict=True):
                for parameter, gradient in zip(model.parameters(), own if every else means, strict=True):
                    parameter -= config.inner.lr * gradient
            if every and step % every == 0:
                for parts in zip(*(model.parameters() for model in models), strict=True):
                    for part, mean in zip(parts, [torch.stack(parts).mean(0)] * workers, strict=True):
                        part.copy_(mean)
    with torch.no_grad():
        sums = [plain_loss(models[0], batch) for batch in loaders[0].validation_batches()]
    return models[0].state_dict(), float(sum(total for total, _ in sums)) / sum(count for _, count in sums)


def hold(out: Path, expected: tuple[dict[str, Tensor], float]) -> None:
    weights, val_loss = expected
    found = load_file(out / "model.safetensors")
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-9, atol=1e-12)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["val_loss"] == pytest.approx(val_loss, rel=1e-9)


DILOCO = ["replicas.outer_lr=1", "replicas.outer_momentum=0"]


@pytest.mark.parametrize("isolate", ["false", "true"])
@pytest.mark.parametrize(("method", "more"), [("ddp", ["inner.accumulation=2"]), ("diloco", DILOCO)])
def test_two_workers_do_what_a_plain_loop_does(method: str, more: Sequence[str], isolate: str, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl")
    config = masked(rows, *more, f"data.isolate_documents={isolate}", method=method)
    run(config, tmp_path / "out")
    hold(tmp_path / "out", plain_run(config, 3 if method == "diloco" else 0))


def test_batches_of_a_step_count_by_what_is_learned(tmp_path: Path) -> None:
    """Two batches of two sequences are one of four, also where one has nothing to learn; in chunks too."""
    rows = write_rows(tmp_path / "rows.jsonl", learned=0.1)
    whole = masked(rows, "data.batch_size=4", method="none", workers=1)
    parts = masked(
        rows, "data.batch_size=1", "inner.accumulation=4", "model.logits_megabytes=0.0005", method="none", workers=1
    )
    summaries = [run(one, tmp_path / name) for one, name in ((whole, "whole"), (parts, "parts"))]
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    assert summaries[0]["val_loss"] == pytest.approx(summaries[1]["val_loss"], rel=1e-9)


def test_a_run_goes_on_in_the_middle(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl")
    config = masked(rows, "data.isolate_documents=true", "run.checkpoint_every=4", "run.keep_checkpoints=0")
    run(config, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "stopped")
    (tmp_path / "stopped" / "model.safetensors").unlink()
    run(config, tmp_path / "stopped", resume=4)
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "stopped"))
    assert one == other


def write_tails(path: Path, seed: int) -> Path:
    """Documents whose last tokens are of `seed` and not learned: nothing sees them where documents are isolated."""
    draw, tails, rows = np.random.default_rng(0), np.random.default_rng(seed), []
    for _ in range(150):
        head, tail = draw.integers(0, VOCAB, draw.integers(1, 15)), tails.integers(0, VOCAB, 4)
        mask = [1] * len(head) + [0] * len(tail)
        rows.append(json.dumps({"input_ids": [*head.tolist(), *tail.tolist()], "loss_mask": mask}))
    path.write_text("\n".join(rows))
    return path


@pytest.mark.parametrize("name", share(METHODS, turn=9, of=99))
def test_what_nobody_sees_and_nobody_learns_changes_no_bit(name: str, tmp_path: Path) -> None:
    """Of any method, on the model and on the validation loss; without isolation it does."""
    for isolate in ("true", "false")[: 1 + (name == "noloco")]:
        found = set()
        for seed in (1, 2):
            rows, out = write_tails(tmp_path / f"{seed}.jsonl", seed), tmp_path / f"{isolate}-{seed}"
            backend = "distributed" if name == "fsdp" else "virtual"
            words = ["model.layers=2", f"data.isolate_documents={isolate}", f"world.backend={backend}"]
            summary = run(tiny(rows, *ROWS, *words, method=name), out)
            found.add(((out / "model.safetensors").read_bytes(), summary["val_loss"]))
        assert len(found) == (1 if isolate == "true" else 2)


@pytest.mark.long
def test_so_it_is_where_workers_come_and_go(tmp_path: Path) -> None:
    trace = [ChurnEvent(31.0, "join", 1), ChurnEvent(65.0, "kill", 1)]
    found = set()
    for seed in (1, 2):
        (folder := tmp_path / str(seed)).mkdir()
        small = tiny(write_tails(folder / "rows.jsonl", seed), *ROWS, "data.isolate_documents=true", workers=3)
        world = replace(small.world, virtual=replace(small.world.virtual, step_seconds=10.0))
        done = churned(going_on(replace(small, world=world)), trace, folder)
        found.add(((done.out / "model.safetensors").read_bytes(), done.summary["val_loss"]))
    assert len(found) == 1


@pytest.mark.parametrize("where", ["validation_path", "validation_fraction"])
def test_validation_that_learns_nothing_is_refused(tmp_path: Path, where: str) -> None:
    """Its loss would be a mean over no token."""
    learned, none = write_rows(tmp_path / "a.jsonl"), write_rows(tmp_path / "none.jsonl", learned=0)
    words = [f"data.path={learned}", "data.validation_path.quiet=" + str(none), *ROWS[:-1]]
    if where == "validation_fraction":
        words = [f"data.path.quiet={none}", *ROWS]
    with pytest.raises(ValueError, match=rf"^data\.{where}: no token of quiet that validation reads is learned; raise"):
        run(read_config(None, {"replicas.method": "none", "world.workers": 1}, [*TINY, *words]), tmp_path / "out")


def test_models_that_do_not_obey_are_refused_before_training(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl")
    words = [word for word in TINY if not word.startswith("model.")]
    own = ["model.factory=tests.training.own_models:build", "model.context=16", *ROWS]
    config = read_config(None, {"replicas.method": "none", "world.workers": 1}, [f"data.path={rows}", *words, *own])
    with pytest.raises(
        ValueError,
        match=r"^data: this Bigram does not obey labels and loss_mask, or see docs/own-model",
    ):
        run(config, tmp_path / "out")
    with pytest.raises(ValueError, match=r"^domain 'chat': experts learn every token; leave labels and loss_mask out$"):
        DomainText(Domain(name="chat", path=str(rows)), config.data, 16)
    with pytest.raises(
        ValueError, match=r"^data\.isolate_documents: experts are evaluated on whole windows: take it out$"
    ):
        checked("hdee", HdeeConfig, {"data": {"isolate_documents": True}})


def test_peers_on_ids_are_compared(tmp_path: Path) -> None:
    """Whatever their paths and tokenizers are: their tokens are compared by hash."""
    ours, theirs = (masked(write_rows(tmp_path / name), method="diloco") for name in ("a.jsonl", "b.jsonl"))
    assert of_all(ours) == of_all(theirs)
    assert of_all(ours) != of_all(replace(ours, data=replace(ours.data, isolate_documents=True)))


def test_what_learns_every_token_refuses(tmp_path: Path) -> None:
    rows, stages = write_rows(tmp_path / "rows.jsonl"), ["pipeline.stages=2", "pipeline.microbatches=2"]
    with pytest.raises(ValueError, match=r"^data\.path: stages learn every token; set pipeline\.stages = 1, or"):
        run(masked(rows, *stages, method="none"), tmp_path / "out")
    with pytest.raises(ValueError, match=r"^data\.isolate_documents = true does not go with pipeline\.stages > 1: "):
        masked(rows, *stages, "data.isolate_documents=true", method="none")
