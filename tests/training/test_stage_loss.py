"""Runs that lose stages: they go on, to the same bits on both backends and from their checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from isles.pipeline.recovery import lost_stages
from isles.running.run import launch
from tests.training.runs import Told, metrics, run, tiny, without_clocks, write_text

STEPS, CHANCE = 6, 0.1


def seed_of(stages: int, wanted: list[int], step: int) -> int:
    """A seed with which `wanted` are lost after `step`, and nothing else."""
    for seed in range(10000):
        lost = {at: lost_stages(at, stages, CHANCE, seed) for at in range(1, STEPS + 1)}
        if lost.pop(step) == wanted and not any(lost.values()):
            return seed
    raise AssertionError("no such seed")


def words(stages: int, seed: int, *more: str) -> list[str]:
    return [
        f"model.layers={stages}",
        f"pipeline.stages={stages}",
        "pipeline.microbatches=4",
        "data.batch_size=4",
        f"pipeline.recovery.stage_loss={CHANCE}",
        f"run.seed={seed}",
        "run.log_every=1",
        *more,
    ]


@pytest.mark.parametrize(
    "kind",
    ["checkfree+", *(pytest.param(k, marks=pytest.mark.long) for k in ("checkfree", "copy", "random", "checkpoint"))],
)
def test_a_run_goes_on_after_a_loss_and_from_its_checkpoint_with_the_same_bits(kind: str, tmp_path: Path) -> None:
    text = write_text(tmp_path / "text.txt")
    more = [f'pipeline.recovery.kind="{kind}"', "run.checkpoint_every=3"]
    more += ["pipeline.recovery.every=2"] if kind == "checkpoint" else []
    config = tiny(text, *words(3, seed_of(3, [1], 4), *more), method="ddp", workers=3, steps=STEPS)
    whole, copy = tmp_path / "whole", tmp_path / "copy"
    told = Told()
    launch(config, whole, told.lines.append, told.notices.append)
    assert any(f'stage 1 was lost after inner step 4, restored by "{kind}"' in notice for notice in told.notices)
    shutil.copytree(whole, copy)
    (copy / "summary.json").unlink()
    again = Told()
    launch(config, copy, again.lines.append, again.notices.append, resume=3)
    lines = [sorted(str(without_clocks(line)) for line in metrics(one)) for one in (whole, copy)]
    assert lines[0] == lines[1]
    assert (copy / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


@pytest.mark.long
def test_a_stage_in_the_middle_is_mended_alike_on_both_backends(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text.txt")
    given = words(4, seed_of(4, [2], 3))
    for name, backend in (("virtual", []), ("real", ["world.backend=distributed"])):
        run(tiny(text, *given, *backend, method="ddp", workers=8, steps=STEPS), tmp_path / name)
    virtual, real = (load_file(tmp_path / name / "model.safetensors") for name in ("virtual", "real"))
    assert all(torch.equal(virtual[name], real[name]) for name in virtual)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (["pipeline.recovery.stage_loss=1.0"], "pipeline.recovery.stage_loss = 1.0: choose a chance"),
        (["pipeline.loss_at=last"], 'pipeline.loss_at = "last": the first stage is never lost'),
        (
            ["pipeline.recovery.kind=checkfree+", "pipeline.routing=random"],
            'pipeline.recovery.kind = "checkfree\\+" exchanges',
        ),
        (["pipeline.recovery.every=7"], "pipeline.recovery.every = 7 acts with"),
        (
            ["pipeline.recovery.stage_loss=0.0", "pipeline.recovery.kind=copy"],
            'pipeline.recovery.kind = "copy" acts with stage_loss',
        ),
        (["replicas.method=diloco"], 'replicas.method = "diloco" does not go with pipeline.recovery.stage_loss'),
    ],
)
def test_what_cannot_be_is_one_line(change: list[str], told: str, tmp_path: Path) -> None:
    text = write_text(tmp_path / "text.txt")
    with pytest.raises(ValueError, match=told) as refusal:
        tiny(text, *words(3, 0), *change, method="ddp", workers=3, steps=STEPS)
    assert "\n" not in str(refusal.value)
