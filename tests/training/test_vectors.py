"""What outer methods keep between rounds may lie on disk; checkpoints are written one tensor after the other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from isles.memory.disk import disk_vectors
from isles.memory.meter import MemoryMeter
from isles.training.config.reading import read_config
from isles.training.records.checkpoint import Checkpoints
from isles.training.records.shard import write_tensors
from tests.training.test_memory import _config, _launch


def test_vectors_lie_in_a_file(tmp_path: Path) -> None:
    make = disk_vectors(str(tmp_path))
    one, other = make(3000, torch.float32), make(7, torch.float64)
    one.fill_(1.0)
    other.fill_(2.0)
    assert one.shape == (3000,)
    assert bool((one == 1.0).all())
    with open("/proc/self/maps", encoding="utf-8") as maps:
        assert sum(str(tmp_path) in line for line in maps) == 2
    assert make(0, torch.float32).numel() == 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["memory.vectors=disk"], 'memory.vectors = "disk": set memory.disk to the folder'),
        (["memory.vectors=tape"], "memory.vectors = 'tape'"),
        (["memory.vectors=disk", "memory.disk=/nowhere"], "memory.disk = '/nowhere': there is no such folder"),
        (["memory.disk=."], 'memory.disk = "." is of a plan: set memory.method'),
    ],
)
def test_what_cannot_be_is_one_line(words: list[str], told: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]*$") as caught:
        _launch(_config(*words), tmp_path / "run")
    assert told in str(caught.value)


def test_a_method_without_vectors_is_refused(tmp_path: Path) -> None:
    config = read_config(None, {"replicas.method": "ddp"}, ["memory.vectors=disk", "memory.disk=."])
    with pytest.raises(ValueError, match=r'^replicas\.method = "ddp" does not go with memory\.vectors = "disk"'):
        _launch(config, tmp_path / "run")


def test_checkpoints_are_written_one_tensor_after_the_other(tmp_path: Path) -> None:
    strided = [torch.randn(300, 400).t() for _ in range(10)]
    meter = MemoryMeter()
    meter.track(*strided)
    before = meter.live
    with meter:
        Checkpoints(tmp_path).write_shard(1, 0, {"tensors": strided})
    assert meter.peak - before <= 1.1 * strided[0].nbytes


def test_what_is_written_is_read_by_safetensors(tmp_path: Path) -> None:
    shared = torch.randn(6)
    tensors = {
        "a": torch.arange(3, dtype=torch.int64),
        "b": torch.tensor(2.5),
        "c": torch.randn(3, 5).bfloat16(),
        "d": torch.tensor([True, False, True]),
        "e": torch.empty(0, 4),
        "f": shared[2:],
        "g": shared,
        "h": torch.arange(5, dtype=torch.uint8),
    }
    write_tensors(tmp_path / "file", tensors)
    read = load_file(str(tmp_path / "file"))
    assert read.keys() == tensors.keys()
    assert all(read[name].dtype == own.dtype and torch.equal(read[name], own) for name, own in tensors.items())
    with pytest.raises(OSError, match="No such file"):
        write_tensors(tmp_path / "none" / "file", tensors)
