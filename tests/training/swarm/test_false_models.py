"""A member of a swarm that says it has the run's model: at step 0, or with a file that is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from isles.membership.messages import Finished
from isles.membership.state_transfer import MODEL
from isles.training.swarm.connect import SwarmParticipant
from tests.training.swarm.members import SwarmRun, elastic_config
from tests.training.swarm.test_members import settings


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.long), 1])
def test_no_member_ends_the_run_before_its_last_step(tmp_path: Path, stage: int) -> None:
    """It has a model of 84 bytes, a result, and says "finished" from its first step on; the others go on to the end."""
    run = SwarmRun(elastic_config(*settings("[1,1,1]", 6, "pipeline.stages=3")), tmp_path)
    numbers = [run.join(at) for at in range(3)]
    run.until(lambda: run.step(numbers[stage]) >= 1)
    liar = run.peers[numbers[stage]]
    save_file({"w": torch.zeros(3)}, tmp_path / "false")
    liar.transfers.publish(MODEL, tmp_path / "false", {})
    liar.client.report({"result": _result()})
    step = run.keeper.coordinator.step
    liar.client.ask(Finished())
    assert step < 6
    summary = run.end()
    assert len(load_file(tmp_path / "model.safetensors")) > 1 and summary["val_loss"] > 1.0, run.notices


def _result() -> dict[str, Any]:
    names = ("tokens", "parameters", "replica_std", "bytes_sent", "bytes_received", "ddp_bytes", "compute_seconds")
    names += ("blocked_seconds", "train_seconds", "virtual_seconds")
    return dict.fromkeys(names, 1) | {
        "val_loss": 0.001,
        "val_loss_replica": 0.001,
        "channels": {},
        "corpus_sha256": "",
        "memory": None,
    }


@pytest.mark.long
@pytest.mark.parametrize("false", ["tiny", "not finite", "another", "far"])
def test_a_false_model_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, false: str) -> None:
    """The first peer of stage 0 publishes it: the run begins again from the states that were saved, without it."""
    peers = {"another": "[2,2,1]", "far": "[1,1,1]"}.get(false, "[2,1,1]")
    run = SwarmRun(elastic_config(*settings(peers, 8, "run.checkpoint_every=4")), tmp_path)
    publish, liars = SwarmParticipant._conclude, list[int]()

    def lies(self: SwarmParticipant, trainer: Any, result: dict[str, Any]) -> None:
        if result["parameters"] and not liars:
            liars.append(self.client.member)
            path = self.folder / "model.safetensors"
            times = {"not finite": torch.nan, "another": 1.01, "far": 100.0}.get(false, 0.0)
            wrong = {name: one * times for name, one in load_file(path).items()}
            save_file(wrong if times else {"w": torch.zeros(3)}, path)
        publish(self, trainer, result)

    monkeypatch.setattr(SwarmParticipant, "_conclude", lies)
    for at in (0, *[0] * (false != "far"), 1, *[1] * (false == "another"), 2):
        run.join(at)
    summary = run.end(120.0)
    (line,) = [line for line in run.notices if line.startswith(f"worker {liars[0]}'s model is not written (")]
    assert {"another": "is not what most peers", "far": "times its norm"}.get(false, "its tensors are not") in line
    assert len(load_file(tmp_path / "model.safetensors")) > 1 and summary["val_loss"] > 1.0
    assert summary["begun"] == 2
