"""States that are saved behind the training: what is written is what there was when `save` was called."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from isles.training.records.saver import StateSaver
from isles.training.records.shard import read_state, write_state


def test_training_goes_on_while_the_copy_is_written() -> None:
    goes_on, seen = threading.Event(), list[Any]()

    def write(state: dict[str, Any]) -> None:
        assert goes_on.wait(30)
        seen.append(state["weights"].clone())

    weights = torch.arange(5.0)
    with StateSaver(lambda: math.inf) as saver:
        for step in range(3):  # each waits for the one before
            saver.save({"weights": weights, "step": step}, write)
            weights += 1
            goes_on.set()
    assert [one.tolist() for one in seen] == [
        [step, step + 1, step + 2, step + 3, step + 4] for step in (0.0, 1.0, 2.0)
    ]


@pytest.mark.parametrize("memory", [math.inf, 0.0], ids=["behind", "at once"])
def test_what_could_not_be_saved_is_raised(memory: float) -> None:
    """By the next look at the latest, and again by no other."""

    def fail(state: dict[str, Any]) -> None:
        raise OSError(28, "the disk is full")

    saver, state = StateSaver(lambda: memory), {"weights": torch.zeros(3)}
    with pytest.raises(OSError, match="the disk is full"), saver:
        saver.save(state, fail)
    saver.check()
    with pytest.raises(KeyError), saver:  # the first error is the one that counts
        saver.save(state, fail if memory else lambda state: None)
        raise KeyError("training failed too")


@pytest.mark.parametrize("memory", [math.inf, 0.0], ids=["behind", "at once"])
def test_memory_that_is_shared_is_written_once(tmp_path: Path, memory: float) -> None:
    """And read as one tensor under both names; what has no elements is no such thing."""
    first, model = nn.Embedding(300, 100), nn.Linear(100, 300, bias=False)
    model.weight = first.weight
    state = {"in": first.state_dict(), "out": model.state_dict(), "empty": [torch.empty(0), torch.empty(0, 2)]}
    with StateSaver(lambda: memory) as saver:
        saver.save(state, lambda copy: write_state(tmp_path / "state", copy))
    assert 120_000 < (tmp_path / "state").stat().st_size < 122_000
    found, _ = read_state(tmp_path / "state")
    assert found["in"]["weight"] is found["out"]["weight"]
    assert torch.equal(found["in"]["weight"], first.weight)
    assert [one.shape for one in found["empty"]] == [(0,), (0, 2)]


def test_a_larger_state_takes_a_larger_buffer(tmp_path: Path) -> None:
    """Where there is memory for it; else it is written at once."""
    asked = iter([1000.0, 0.0])
    with StateSaver(lambda: next(asked)) as saver:
        for size in (10, 5, 20):
            state = {"weights": torch.full((size,), float(size))}
            saver.save(state, lambda copy, size=size: write_state(tmp_path / str(size), copy))
            assert (size == 20) == ((tmp_path / "20").exists())
    assert [read_state(tmp_path / str(size))[0]["weights"].sum() for size in (10, 5, 20)] == [100, 25, 400]
