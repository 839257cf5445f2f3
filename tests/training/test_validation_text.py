"""A run with a validation text of its own: which text its losses are of, and the same bits after a resume."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from isles.cli.model import evaluate
from isles.training.records.saved_run import load_saved
from tests.training.runs import CONTEXT, metrics, run, tiny, write_text


def test_its_losses_are_of_that_text_and_it_resumes_to_the_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, held = write_text(tmp_path / "text.txt"), write_text(tmp_path / "held.txt", 8 * CONTEXT, seed=1)
    more = [f"data.validation_path={held}", "run.checkpoint_every=2", "run.keep_checkpoints=0"]
    config = tiny(text, *more, "data.validation_sequences=99", steps=4)
    whole, copy = tmp_path / "whole", tmp_path / "copy"
    summary = run(config, whole)
    # By hand: each window of the text, of which the first begins at the first byte.
    tokens, saved = torch.tensor(list(held.read_bytes() + b"\n")), load_saved(whole)
    rows = torch.stack([tokens[at : at + CONTEXT + 1] for at in range(0, len(tokens) - CONTEXT, CONTEXT)])
    assert len(rows) == 8
    loss = cross_entropy(saved.logits(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    assert summary["val_loss"] == pytest.approx(loss.item(), abs=1e-5)
    for data, of in ((None, held), (str(text), text)):  # of TEXT the usual share
        evaluate(whole, data=data)
        printed = capsys.readouterr().out
        assert (f"loss        {loss:.4f}" in printed) == (of == held)

    assert run(config, copy_of(whole, copy), resume=2)["val_loss"] == summary["val_loss"]
    assert sorted(map(str, metrics(copy))) == sorted(map(str, metrics(whole)))
    assert (copy / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    held.write_text(held.read_text().replace("the", "THE"))
    with pytest.raises(ValueError, match="corpus_sha256"):
        run(config, copy_of(whole, tmp_path / "other"), resume=2)


def test_of_another_text_a_part_is_evaluated_though_the_run_kept_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = write_text(tmp_path / "text.txt"), tmp_path / "run"
    run(tiny(text, "data.validation_fraction=0", method="none", workers=1, steps=1), out)
    evaluate(out, data=str(text))
    printed = capsys.readouterr().out
    written = (out / "config.toml").read_text()
    with pytest.raises(ValueError, match=r"^data\.validation_fraction = 0 keeps no text"):
        evaluate(out)
    (out / "config.toml").write_text(re.sub("(validation_fraction) = .*", r"\1 = 0.05", written))
    evaluate(out)
    assert printed.startswith("loss ") and printed == capsys.readouterr().out


def copy_of(run_directory: Path, to: Path) -> Path:
    """Without its end."""
    shutil.copytree(run_directory, to)
    (to / "summary.json").unlink()
    return to
