"""SMALLTALK where a machine dies, with real processes: experts do not mind, routers go on from their last round."""

from __future__ import annotations

import json
import multiprocessing
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from isles.cli import main
from isles.experts.forest import Forest
from isles.experts.jobs import JobProgress, weights_sha256
from isles.experts.planning import opened
from isles.experts.routing import gate_of, route
from isles.experts.system import System
from isles.training.records.checkpoint import Checkpoints
from tests.cli.command import Command, eventually, gone
from tests.experts.small import SMALLTALK, asked, made, write_domains
from tests.training.runs import lines_of

WORDS = ["smalltalk.experts=3", "smalltalk.steps=40", "smalltalk.dense=[]", "run.checkpoint_every=10"]
LOST = "seed-0/expert-1"


@pytest.mark.long
def test_an_expert_that_is_killed_harms_no_other_and_goes_on(tmp_path: Path) -> None:
    config = write_domains(tmp_path)
    whole = made("smalltalk", config, tmp_path / "whole", *WORDS)
    system = opened(asked("smalltalk", config, *WORDS), tmp_path / "cut")
    system.prepare("seed-0", JobProgress())
    sets = [part for word in [*SMALLTALK, *WORDS] for part in ("--set", word)]
    words = ["experts", "smalltalk", str(config), *sets, "--out", str(system.out), "--job", LOST]
    process = multiprocessing.get_context("forkserver").Process(target=_isles, args=(words,))
    process.start()
    assert eventually(lambda: Checkpoints(system.out / LOST).steps() or not process.is_alive())
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert system.jobs()[LOST][1].startswith("stopped at step")

    # The others, on their machines.
    assert not system.train(JobProgress(), ["seed-0/expert-0", "seed-0/expert-2"])
    for name in ("seed-0/expert-0", "seed-0/expert-2"):
        assert weights_sha256(system.out / name) == weights_sha256(whole.out / name)
    _two_of_three_are_the_masked_best(whole, tmp_path)

    assert system.train(JobProgress())  # with the lost one, from its checkpoint
    assert weights_sha256(system.out / LOST) == weights_sha256(whole.out / LOST)
    results = [one.evaluate(JobProgress()) for one in (whole, system)]
    assert json.dumps(results[0]) == json.dumps(results[1])


def _isles(words: list[str]) -> None:
    """The command, in a process that has torch already."""
    sys.argv = ["isles", *words]
    main()


def _two_of_three_are_the_masked_best(whole: System[object], folder: Path) -> None:
    """Without an expert, the choice is the best of those that are left."""
    forest = whole.seeds["seed-0"].forest()  # type: ignore[attr-defined]
    experts, routers = ((members[0], *members[2:]) for members in (forest.experts, forest.routers))
    replace(forest, experts=experts, routers=routers).save(folder / "rest.json")
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


@pytest.mark.long
def test_a_router_that_is_killed_ends_its_round_and_the_same_command_goes_on(tmp_path: Path) -> None:
    """With the routers, to the bit, of a run on the virtual backend that nothing happened to."""
    config = write_domains(tmp_path)
    rounds = ["smalltalk.dense=[]", "smalltalk.rounds=10", "smalltalk.round_sequences=96"]
    whole = opened(asked("smalltalk", config, *rounds), tmp_path / "whole")
    whole.prepare("seed-0", JobProgress())
    sets = [part for word in [*SMALLTALK, *rounds, "world.backend=distributed"] for part in ("--set", word)]
    words = ["experts", "smalltalk", config.name, *sets, "--out", "cut"]
    command = Command(*words, folder=tmp_path)
    routers = Checkpoints(tmp_path / "cut/seed-0/routers")
    assert eventually(lambda: routers.steps() or command.process.poll() is not None)
    server = [process.pid for process in psutil.Process(command.process.pid).children()]
    workers = [process for process in command.left() if process.ppid() in server]
    assert len(workers) == 2
    workers[1].kill()
    code, _, error = command.end()
    assert code == 1 and re.search(r"the same command, with this --out, goes on after round \d+ of 10", error), error
    done = routers.steps()[-1]
    assert 1 <= done < 10 and gone(command.mark)

    again = opened(asked("smalltalk", config, *rounds, "world.backend=distributed"), tmp_path / "cut")
    again.prepare("seed-0", JobProgress())
    lines = lines_of(tmp_path / "cut/seed-0/routers/rounds.jsonl")
    assert [line["round"] for line in lines].count(done + 1) >= 2 and [line["round"] for line in lines].count(1) == 2
    for router in range(2):
        name = f"seed-0/routers/router-{router}"
        assert weights_sha256(tmp_path / "cut" / name) == weights_sha256(whole.out / name)
    assert (tmp_path / "cut/seed-0/assignment.npy").read_bytes() == (whole.out / "seed-0/assignment.npy").read_bytes()
