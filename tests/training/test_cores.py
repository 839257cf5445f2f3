"""Which cores a worker with a GPU of its own takes."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from isles.comm.collectives.basic import HEADER_BYTES
from isles.comm.collectives.mean import native_bytes
from isles.plan.run_plan import plan_run
from isles.training import optimizer as assemble
from isles.training import setup as cores
from isles.training.config.reading import read_config

_NEAR = ("0-3,8", "4-7", "4-7", "")
"""By GPU, as the kernel tells it; "" where it does not."""


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What is set, on a machine of ten cores, of which this process may not use the last one, and four GPUs."""
    for index, told in enumerate(_NEAR):
        place = tmp_path / "bus/pci/devices" / f"0000:{0x3A + index:02x}:00.0"
        place.mkdir(parents=True)
        if told:
            (place / "local_cpulist").write_text(told + "\n")
    monkeypatch.setattr(cores, "_SYS", tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(_NEAR))
    ids = {"pci_domain_id": 0, "pci_device_id": 0}
    gpus = [SimpleNamespace(pci_bus_id=0x3A + index, **ids) for index in range(len(_NEAR))]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpus[index])
    found: dict[str, Any] = {}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(9)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, own: found.update(cores=own))
    monkeypatch.setattr(torch, "set_num_threads", lambda number: found.update(threads=number))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    return found


@pytest.mark.parametrize(
    ("gpu", "own", "threads"),
    [(0, {0, 1, 2, 3, 8}, 5), (1, {4, 5, 6, 7}, 2), (2, {4, 5, 6, 7}, 2), (3, set(range(9)), 9)],
)
def test_a_worker_takes_its_share_of_the_cores_near_its_gpu(
    taken: dict[str, Any], gpu: int, own: set[int], threads: int
) -> None:
    cores.take_cores(read_config(None, {}, []), torch.device("cuda", gpu))
    assert taken == {"cores": own, "threads": threads}


@pytest.mark.parametrize(
    ("said", "here", "device", "settings"),
    [
        ([], "4", "cuda:1", {"reduction": "native"}),
        (["world.inside=fsdp"], "4", "cuda:1", {}),
        (["memory.method=auto"], "4", "cuda:1", {}),
        ([], "5", "cuda:1", {}),  # two workers share a GPU, which NCCL refuses
        ([], "4", "cpu", {}),
        (["world.backend=virtual"], "4", "cuda:1", {}),
    ],
)
def test_islands_of_gpus_sum_by_torchs_own_collectives(
    taken: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    said: list[str],
    here: str,
    device: str,
    settings: dict[str, str],
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", here)
    config = read_config(None, {}, ["world.workers=4", "world.inner=2", *said])
    model: Any = SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device=torch.device(device))]))
    assert assemble._native(config, model, None) == settings


@pytest.mark.parametrize(
    ("workers", "machines", "device", "native"),
    [(4, 1, "auto", True), (8, 1, "auto", False), (8, 2, "auto", True), (4, 1, "cpu", False)],
)
def test_a_dry_run_foretells_them(
    taken: dict[str, Any], workers: int, machines: int, device: str, native: bool
) -> None:
    """A step of a pair sends its gradient once either way; two_shot a header beside it, native sums one number to begin
    with.
    """
    said = ["world.inner=2", f"world.workers={workers}", "run.steps=1", "replicas.sync_every=1"]
    plan, other = (
        plan_run(read_config(None, {}, [*said, f"model.device={on}"]), machines=machines) for on in (device, "cpu")
    )
    more = sum(other.bytes_sent) - sum(plan.bytes_sent)
    assert more == (workers * (HEADER_BYTES - native_bytes(1, torch.float32, 2)) if native else 0)


@pytest.mark.parametrize(
    ("said", "device", "here"),
    [
        (["world.threads=2"], "cuda:1", "4"),
        (["world.backend=virtual"], "cuda:1", "4"),
        ([], "cpu", "4"),
        ([], "cuda:1", "5"),  # two workers share a GPU
        (["model.device=cuda:1"], "cuda:1", "2"),
    ],
)
def test_else_nothing_is_changed(
    taken: dict[str, Any], monkeypatch: pytest.MonkeyPatch, said: list[str], device: str, here: str
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", here)
    cores.take_cores(read_config(None, {}, [*said, "world.workers=4"]), torch.device(device))
    assert taken == {}
