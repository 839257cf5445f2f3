"""Stage 2 of SMALLTALK where a machine dies: the others do not change, and the lost expert goes on later."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import torch

from isles.experts.jobs import Progress, weights_sha256
from isles.experts.registry import Forest
from isles.experts.routing import gate_of, route
from isles.experts.system import System
from isles.experts.systems import opened
from isles.training.checkpoint import Checkpoints
from tests.cli.command import Command, eventually
from tests.experts.small import SMALLTALK, asked, made, write_domains

WORDS = ["smalltalk.experts=3", "smalltalk.steps=150", "smalltalk.dense=[]", "run.checkpoint_every=10"]
LOST = "runs/expert-1"


def test_an_expert_that_is_killed_harms_no_other_and_goes_on(tmp_path: Path) -> None:
    config = write_domains(tmp_path)
    whole = made("smalltalk", config, tmp_path / "whole", *WORDS)
    system = opened(asked("smalltalk", config, *WORDS), tmp_path / "cut")
    system.prepare(Progress())
    sets = [part for word in [*SMALLTALK, *WORDS] for part in ("--set", word)]
    command = Command(
        "experts", "smalltalk", config.name, *sets, "--out", str(system.out), "--job", LOST, folder=tmp_path
    )
    assert eventually(lambda: Checkpoints(system.out / LOST).steps() or command.process.poll() is not None)
    command.process.send_signal(signal.SIGKILL)
    assert command.end()[0] == -signal.SIGKILL
    assert system.jobs()[LOST][1].startswith("stopped at step")

    # The others, on their machines.
    assert not system.train(Progress(), ["runs/expert-0", "runs/expert-2"])
    for name in ("runs/expert-0", "runs/expert-2"):
        assert weights_sha256(system.out / name) == weights_sha256(whole.out / name)
    _two_of_three_are_the_masked_best(whole, tmp_path)

    assert system.train(Progress())  # with the lost one, from its checkpoint
    assert weights_sha256(system.out / LOST) == weights_sha256(whole.out / LOST)
    results = [one.evaluate(Progress()) for one in (whole, system)]
    assert json.dumps(results[0]) == json.dumps(results[1])


def _two_of_three_are_the_masked_best(whole: System[object], folder: Path) -> None:
    """Without an expert, the choice is the best of those that are left."""
    forest = whole.forest()  # type: ignore[attr-defined]
    forest.remove("expert-1").save(folder / "rest.json")
    every, rest = (
        gate_of(one, whole.texts["easy"].corpus.tokenizer) for one in (forest, Forest.load(folder / "rest.json"))
    )
    assert every is not None and rest is not None
    tokens = torch.cat([text.sequences("test", 8) for text in whole.texts.values()])
    masked = every.scores(tokens, 8)
    masked[1] = -float("inf")
    kept = torch.tensor([0, 2])
    assert torch.equal(kept[route(rest, tokens, 8)], masked.argmax(0))
    assert 1 in route(every, tokens, 8)
