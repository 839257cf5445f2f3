"""Models with some of their stages: which orders are judged, what they are worth, what is refused."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from isles import cli
from isles.models import Decoder, Shape
from isles.models.cuts import pieces
from isles.models.stages import blocks_of_stages
from isles.training.scoring import asked_order, curves, dropped, exchanged, order_loss
from isles.training.step import validation_loss
from tests.training.runs import run, tiny, write_text

SHAPE = Shape(d_model=8, layers=4, heads=2, ffn=12, vocab=20, context=6, tie_embeddings=True)
BATCHES = [torch.randint(0, 20, (rows, 7), generator=torch.Generator().manual_seed(rows)) for rows in (3, 2)]


def test_all_blocks_in_order_are_the_model_and_a_dropped_one_writes_nothing() -> None:
    model = Decoder(SHAPE, seed=3)
    whole = validation_loss(model, BATCHES, nullcontext())
    assert order_loss(model, BATCHES, range(4), nullcontext()) == whole
    without = order_loss(model, BATCHES, [0, 2, 3], nullcontext())
    for writer in (model.blocks[1].attention.out, model.blocks[1].mlp.down):
        writer.weight.data.zero_()
    assert without == validation_loss(model, BATCHES, nullcontext()) != whole
    assert blocks_of_stages(pieces([1, 3], 4, loss_at_origin=True), (0, 2, 1)) == [0, 3, 1, 2]


def test_orders_of_the_curves() -> None:
    assert dropped(4, 2) == [(0, 3), (0, 2), (0, 1)]
    assert exchanged(5, 2) == [(0, 2, 1, 4, 3)]
    assert len(exchanged(6, 1)) == 4 and exchanged(3, 0) == [(0, 1, 2)]
    many = dropped(9, 4)
    assert len(set(many)) == 12 and all(len(order) == 5 and order[0] == 0 for order in many)
    points = curves(4, lambda order: float(len(order)))
    assert [(point.kind, point.count, point.mean) for point in points] == [
        *[("dropped", count, 4.0 - count) for count in range(4)],
        ("exchanged", 0, 4.0),
        ("exchanged", 1, 4.0),
        *[("left early", count, 4.0 - count) for count in range(4)],
    ]


def test_asked_orders() -> None:
    assert asked_order(4, drop=[2]) == (0, 1, 3) and asked_order(4, leave=1) == (0, 1)
    assert asked_order(4, order=[0, 2, 1]) == (0, 2, 1)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    write_text(folder / "text.txt")
    run(tiny(folder / "text.txt", "model.layers=3", method="none", workers=1, steps=2), folder / "run")
    return folder / "run"


def asked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], run: Path, *words: str):
    monkeypatch.setattr(sys, "argv", ["isles", "eval", str(run), *words])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return int(caught.value.code or 0), *capsys.readouterr()


def test_the_command_judges_orders(finished: Path, monkeypatch, capsys) -> None:
    losses = {}
    for words in ((), ("--order", "0,1,2"), ("--drop-stages", "1,2"), ("--early-exit", "0"), ("--order", "0,2,1")):
        code, out, _ = asked(monkeypatch, capsys, finished, *words)
        assert code == 0
        losses[words] = out.splitlines()[-2].split()[1]
    told = json.loads((finished / "summary.json").read_text())["val_loss"]
    assert losses[()] == losses["--order", "0,1,2"] == f"{told:.4f}"
    assert losses["--drop-stages", "1,2"] == losses["--early-exit", "0"]
    code, out, _ = asked(monkeypatch, capsys, finished, "--curves")
    rows = [line.split() for line in out.splitlines()[1:]]
    assert code == 0 and len(rows) == 3 + 2 + 3 and rows[0][3] == losses[()]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--drop-stages", "0"], "stage 0 makes the stream of the tokens"),
        (["--drop-stages", "3"], "--drop-stages: there is no stage 3; they are numbered 0 to 2"),
        (["--drop-stages", "one"], "--drop-stages one: write numbers of stages"),
        (["--order", "0,1,1"], "--order = 0,1,1: name each stage once"),
        (["--order", "1,0"], "stage 0 makes the stream of the tokens"),
        (["--early-exit", "3"], "--early-exit: there is no stage 3"),
        (["--early-exit", "1", "--order", "0,1"], "give one of them"),
        (["--curves", "--early-exit", "1"], "--curves evaluates many orders by itself"),
    ],
)
def test_mistakes_are_one_line(finished: Path, monkeypatch, capsys, words: list[str], told: str) -> None:
    code, _, err = asked(monkeypatch, capsys, finished, *words)
    assert code == 2 and told in err and err.count("\n") == 1
