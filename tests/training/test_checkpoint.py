"""Checkpoints: exact round trips, and readers that never meet half of one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from isles.training.records.checkpoint import Checkpoints
from isles.training.records.shard import join_state, split_state


def state(seed: int = 0) -> dict[str, Any]:
    """Everything that a training state is made of."""
    generator = torch.Generator().manual_seed(seed)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    model(torch.randn(4, 3, generator=generator)).sum().backward()
    optimizer.step()
    return {
        "optimizer": optimizer.state_dict(),  # integer keys, tuples, zero-dimensional tensors
        "half": torch.randn(5, generator=generator).to(torch.bfloat16),
        "view": torch.arange(12).reshape(3, 4).t(),
        "empty": torch.empty(0),
        "odd": [1, 2.5, math.inf, None, True, "text", (3, [torch.ones(2, dtype=torch.float64)])],
        "exact": 0.1 + 0.2,
    }


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and left == right


def test_a_state_comes_back_as_it_was() -> None:
    """Keys that are integers, tuples, dtypes and every bit of a float survive."""
    before = state()
    structure, tensors = split_state(before)
    assert same(join_state(structure, tensors), before)


def test_on_disk_too(tmp_path: Path) -> None:
    """The same through files, each worker its own."""
    checkpoints = Checkpoints(tmp_path)
    for worker in range(2):
        checkpoints.write_shard(40, worker, state(worker))
    checkpoints.commit(40, range(2), {"method": "noloco"}, keep=3)
    assert checkpoints.steps() == [40]
    assert checkpoints.manifest(40)["method"] == "noloco"
    assert all(same(checkpoints.read_shard(40, worker), state(worker)) for worker in range(2))


def test_without_a_manifest_there_is_no_checkpoint(tmp_path: Path) -> None:
    """A crash between the shards and the manifest leaves the checkpoint before it as the newest."""
    checkpoints = Checkpoints(tmp_path)
    checkpoints.write_shard(10, 0, state())
    checkpoints.commit(10, range(1), {}, keep=2)
    checkpoints.write_shard(20, 0, state())
    assert checkpoints.steps() == [10]
    checkpoints.commit(20, range(1), {}, keep=2)
    shard = tmp_path / "checkpoints" / "step-20" / "worker-0.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert checkpoints.steps() == [10]


@pytest.mark.parametrize("manifest", ["", "{", "[]", '{"files": {"worker-9.json": 3}}', '{"files": 5}'])
def test_a_spoilt_manifest_is_none(tmp_path: Path, manifest: str) -> None:
    """Whatever a manifest has become, reading never fails; the checkpoint just is not there."""
    checkpoints = Checkpoints(tmp_path)
    checkpoints.write_shard(10, 0, state())
    checkpoints.commit(10, range(1), {}, keep=2)
    (tmp_path / "checkpoints" / "step-10" / "manifest.json").write_text(manifest)
    assert checkpoints.steps() == []


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    """`keep` of them, by number and not by spelling."""
    checkpoints = Checkpoints(tmp_path)
    for step in (8, 9, 10, 100):
        checkpoints.write_shard(step, 0, {"step": step})
        checkpoints.commit(step, range(1), {}, keep=2)
    assert checkpoints.steps() == [10, 100]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-10", "step-100"]


def test_a_run_that_goes_back_leaves_the_shards_that_it_writes_again(tmp_path: Path) -> None:
    """Before its workers start: what one of them writes of a later step is there when an earlier one is committed."""
    checkpoints = Checkpoints(tmp_path)
    for step in (2, 4, 6):
        checkpoints.write_shard(step, 0, {"step": step})
        checkpoints.commit(step, range(1), {}, keep=0)
    checkpoints.go_back(2)
    assert checkpoints.steps() == [2]
    checkpoints.write_shard(4, 0, {"step": 4})
    checkpoints.write_shard(6, 0, {"step": 6})  # it is ahead of who commits
    checkpoints.commit(4, range(1), {}, keep=0)
    checkpoints.commit(6, range(1), {}, keep=0)
    assert checkpoints.steps() == [2, 4, 6]


def test_what_cannot_be_saved_is_said() -> None:
    """An object that JSON and safetensors cannot hold is named with its place."""
    with pytest.raises(TypeError, match=r"state\.a\.0 is a object"):
        split_state({"a": [object()]})
