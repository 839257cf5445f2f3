"""A worker's random generators in its checkpoint. No GPU is needed: `torch.cuda`'s two functions are stood in for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from isles.training.records.checkpoint import Checkpoints
from isles.training.step import carried_draws, draws_state, new_draws, restore_draws, seed_draws

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)


class Cards:
    """The generators of two GPUs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.states = {index: torch.full((16,), index, dtype=torch.uint8) for index in (0, 1)}
        monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: self.states[device.index].clone())
        monkeypatch.setattr(torch.cuda, "set_rng_state", self.set)

    def set(self, state: torch.Tensor, device: torch.device) -> None:
        assert device.index is not None
        self.states[device.index] = state


def test_a_gpus_draws_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a checkpoint's file: those of the worker's own device, and the host's."""
    cards = Cards(monkeypatch)
    seed_draws(7, 1)
    Checkpoints(tmp_path).write_shard(4, 0, draws_state(CUDA), "run")
    expected = torch.rand(3)
    cards.states = {index: torch.zeros(16, dtype=torch.uint8) for index in (0, 1)}
    restore_draws(Checkpoints(tmp_path).read_shard(4, 0), CUDA)
    assert torch.equal(torch.rand(3), expected)
    assert cards.states[1].tolist() == [1] * 16 and not cards.states[0].any()


def test_states_of_other_devices_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's draws alone go on; a device is left at the beginning of its own."""
    cards = Cards(monkeypatch)
    before = {index: state.clone() for index, state in cards.states.items()}
    for state in (draws_state(CPU), {"random": torch.get_rng_state()}, new_draws(7, 3)):
        restore_draws(carried_draws(state), CUDA)
    restore_draws(draws_state(CUDA), CPU)
    assert all(torch.equal(cards.states[index], before[index]) for index in (0, 1))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_dropout_on_a_gpu_goes_on() -> None:
    seed_draws(7, 0)
    device = torch.device("cuda", 0)
    state, expected = draws_state(device), torch.rand(5, device=device)
    torch.rand(5, device=device)
    restore_draws(state, device)
    assert torch.equal(torch.rand(5, device=device), expected)
