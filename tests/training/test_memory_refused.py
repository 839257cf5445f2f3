"""What cannot be with `[memory]`: each is one line with its key and the mend, before anything is written."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from isles.memory.disk import check_folder
from isles.running.run import launch
from isles.training.config.reading import read_config
from isles.training.memory import in_use
from isles.training.memory import plans as planning
from isles.training.memory.plans import machine_of, planned, profile_of
from tests.training.test_memory import _config, _launch

GPU = ["memory.method=auto", "memory.machine=RTX 3060"]
DISK = ["memory.method=auto", "memory.machine=laptop-16", "memory.device_budget=3.7MB"]
LINE = r"^[^\n]*$"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["memory.device_budget=12GiB"], 'memory.device_budget = "12GiB" is of a plan: set memory.method'),
        (["memory.method=auto", 'memory.device_budget="12"'], "memory.device_budget = '12': write its unit too"),
        (["memory.method=auto", 'memory.host_budget="64"'], "memory.host_budget = '64': write its unit too"),
        (["memory.method=auto", "memory.device_budget=12 parsecs"], "device_budget = '12 parsecs': write a number"),
        (["memory.method=auto", "memory.device_budget=0GiB"], "memory.device_budget = '0GiB': choose memory above 0"),
        (["memory.method=auto", "memory.host_budget=0B"], "memory.host_budget = '0B': choose memory above 0"),
        (
            ["memory.method=auto", "memory.machine=H100", "memory.device_budget=1TiB"],
            "memory.device_budget = '1TiB' is more than the 74.5GiB of H100: choose less, or another memory.machine",
        ),
        ([*GPU, "memory.host_budget=1TiB"], "memory.host_budget = '1TiB' is more than the 59.6GiB of RTX 3060"),
        (["memory.method=auto", "memory.machine=H1000"], "memory.machine: unknown machine 'H1000'"),
        (["memory.method=autoo"], "memory.method = 'autoo': input should be 'none', 'auto', 'autohete'"),
        (["memory.metod=auto"], "unknown key 'memory.metod'"),
        ([*GPU, "memory.update=early"], 'set it to 0, or memory.update = "exact"'),
        ([*GPU, "memory.device_budget=100kB"], "the least that works"),
        (["memory.method=auto", "memory.plan=none.json"], "memory.plan = 'none.json': cannot be read"),
        (["memory.method=auto", "model.compile=true"], "model.compile = true does not go with a plan of memory"),
        (
            ["memory.method=auto", "world.backend=distributed", "memory.machine=H100"],
            "memory.machine = 'H100' has a device beside its host, and this worker computes on a CPU: set "
            "memory.emulate = true",
        ),
        ([*GPU, "memory.disk=."], "memory.disk = '.': the disk of RTX 3060 is not known; give disk_read"),
        (
            [*GPU, "memory.method=checkpoint", "inner.max_norm=0", "memory.update=early"],
            'memory.update = "early": memory.method = "checkpoint" keeps all weights and states on the device: leave',
        ),
        ([*GPU, "memory.method=karma", "memory.shard=true"], 'memory.shard = true: memory.method = "karma" keeps all'),
        (
            [*DISK, "memory.disk=.", "memory.method=autohete"],
            'memory.method = "autohete" keeps all weights and states in memory',
        ),
        ([*DISK, "memory.disk=nowhere"], "memory.disk = 'nowhere': there is no such folder; make it, or name another"),
    ],
)
def test_what_cannot_be_is_one_line(words: list[str], told: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=LINE) as caught:
        _launch(_config(*words), tmp_path / "run")
    assert told in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_plans_file_is_what_the_rest_says(tmp_path: Path) -> None:
    """Updates before the gradients are clipped would change the weights."""
    config = _config(*GPU, "memory.device_budget=2MB")
    here, made = machine_of(config), profile_of(config)
    plan, path = planned(config, made, here), tmp_path / "plan.json"
    for other, run, told in (
        (replace(plan, update="early"), [], 'has early updates: set memory.update = "early", or plan again'),
        (plan, ["inner.max_norm=0", "memory.update=early"], 'has exact updates: set memory.update = "exact"'),
        (plan, ["inner.accumulation=2"], "is for 1 batches a step, and this run adds up 2: plan again"),
        (plan, ["memory.device_budget=1500kB"], 'MiB, more than memory.device_budget = "1500kB": plan again with it'),
        (plan, ["memory.host_budget=10kB"], 'MiB, more than memory.host_budget = "10kB": plan again with it'),
    ):
        path.write_text(other.to_json(), encoding="utf-8")
        with pytest.raises(ValueError, match=LINE) as caught:
            planned(_config(*GPU, *run, f"memory.plan={path}"), made, here)
        assert told in str(caught.value)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("ist", "it changes the widths of blocks in place, so no plan holds for them; set memory"),
        ("fsdp", "fsdp keeps the storages of the parameters itself, so none can be moved; set it"),
    ],
)
def test_methods_that_hold_parameters_by_themselves_are_refused(name: str, told: str, tmp_path: Path) -> None:
    config = read_config(None, {"replicas.method": name, "memory.method": "auto"}, ["memory.machine=H100"])
    with pytest.raises(ValueError, match=rf"^[^\n]* does not go with a plan of memory[^\n]*: {told}[^\n]*$"):
        _launch(config, tmp_path / "run")


class _Model(nn.Module):
    """blocks: an nn.ModuleList of two, with or without weights of their own; None: something else."""

    def __init__(self, blocks: nn.Module) -> None:
        super().__init__()
        self.embedding, self.blocks, self.head = nn.Embedding(256, 8), blocks, nn.Linear(8, 256)

    def forward(self, tokens: torch.Tensor) -> SimpleNamespace:
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:  # type: ignore[not-iterable]
            x = block(x)
        loss = nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())
        return SimpleNamespace(loss=loss)


def without() -> nn.Module:
    return _Model(nn.Sequential(nn.Linear(8, 8)))


def sharing() -> nn.Module:
    blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    blocks[1].weight = blocks[0].weight  # type: ignore[union-attr]
    return _Model(blocks)


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (without, "memory.method: the model has no blocks in an nn.ModuleList to plan by; hold them in one"),
        (sharing, "memory.method: blocks.1 shares 'weight' with blocks.0, so neither can be moved alone; untie them"),
    ],
)
def test_a_model_that_cannot_be_cut_is_one_line(made: Callable[[], nn.Module], told: str, tmp_path: Path) -> None:
    model = [f"model.factory={made.__module__}:{made.__name__}", "model.context=32", "model.vocab=256"]
    config = read_config(None, {}, [*GPU, *model, "data.batch_size=2", "world.backend=virtual"])
    with pytest.raises(ValueError, match=LINE) as caught:
        _launch(config, tmp_path / "run")
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["model.layers=3"], "another model: make a plan for this model, or run the plan's"),
        pytest.param(
            ["data.batch_size=4"],
            "another batch: plan again with this batch, its tokens and its number format",
            marks=pytest.mark.long,
        ),
        pytest.param(["model.context=16"], "another batch", marks=pytest.mark.long),
        pytest.param(["model.autocast=bf16"], "another batch", marks=pytest.mark.long),
        pytest.param(["model.dtype=bfloat16"], "another model", marks=pytest.mark.long),
        pytest.param(
            ["memory.machine=RTX 4090"], "another machine: plan again for this machine", marks=pytest.mark.long
        ),
        pytest.param(["inner.optimizer=sgd"], "another model", marks=pytest.mark.long),
    ],
)
def test_a_plan_of_something_else_is_one_line(words: list[str], what: str, tmp_path: Path) -> None:
    config = _config(*GPU)
    made, here = profile_of(config), machine_of(config)
    (tmp_path / "plan.json").write_text(planned(config, made, here).to_json(), encoding="utf-8")
    with pytest.raises(ValueError, match=LINE) as caught:
        _launch(_config(*GPU, f"memory.plan={tmp_path / 'plan.json'}", *words), tmp_path / "run")
    assert f"memory.plan was made for {what}" in str(caught.value)


@pytest.mark.parametrize("what", ["a checkpoint", "a later version", "a list"])
def test_a_file_that_is_no_plan_is_one_line(what: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    if what == "a checkpoint":
        torch.save({"weights": torch.zeros(3)}, path)
    else:
        path.write_text(json.dumps({"format": 2} if what == "a later version" else [1]), encoding="utf-8")
    with pytest.raises(ValueError, match=LINE) as caught:
        _launch(_config(*GPU, f"memory.plan={path}"), tmp_path / "run")
    assert str(caught.value).startswith(f"memory.plan = '{path}'")


def test_no_part_of_the_ram_plays_a_device_where_there_is_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(planning, "choose_device", lambda config: torch.device("cuda"))
    with pytest.raises(ValueError, match=r"^memory\.emulate is for CPUs; on a GPU, memory\.device_budget makes it sm"):
        _launch(_config(*GPU, "memory.emulate=true", backend="distributed"), tmp_path / "run")


def test_a_gpu_that_does_not_keep_the_bits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any of a run is done on it."""

    def fails(device: torch.device) -> None:
        raise RuntimeError(f"on {device}, copies beside kernels leave other bits than copies alone")

    monkeypatch.setattr(in_use, "try_out", fails)
    config = _config(*GPU, backend="distributed")
    memory = in_use.PlannedMemory(config, torch.device("cuda", 5))
    assert memory.home == torch.device("cpu")
    with pytest.raises(ValueError, match=r'^memory\.method: on cuda:5, copies beside .* alone; choose "checkpoint"$'):
        memory._engine()


def test_a_plan_leaves_room_on_a_gpu(tmp_path: Path) -> None:
    config = _config(*GPU)
    made, here = profile_of(config), machine_of(config)
    whole = planned(config, made, here)
    assert planned(config, made, here, free=0.9 * whole.peak).peak <= 0.9 * whole.peak
    with pytest.raises(ValueError, match="is more than the"):
        planned(_config(*GPU, "memory.device_budget=1GiB"), made, here, free=2**29)
    path = tmp_path / "plan.json"
    path.write_text(whole.to_json(), encoding="utf-8")
    with pytest.raises(ValueError, match="of this GPU are free: end what else uses it, or plan again"):
        planned(_config(*GPU, f"memory.plan={path}"), made, here, free=whole.peak / 2)


# ---------------------------------------------------------------------------------------------------------------------
# Folders


@contextmanager
def _nobody() -> Iterator[None]:
    """Someone who may not write everywhere, as root may."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def test_a_folder_that_may_only_be_read() -> None:
    folder = tempfile.mkdtemp(dir="/tmp")  # pytest's own lies in one that is closed to others
    try:
        os.chmod(folder, 0o555)
        told = r"memory\.disk = .*: nothing can be written there \(Permission denied\); name a folder of your own$"
        with _nobody(), pytest.raises(ValueError, match=told):
            check_folder(folder, 0)
    finally:
        os.rmdir(folder)


def test_a_folder_without_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(1 << 30, 1 << 30, 1000))
    with pytest.raises(ValueError, match=LINE) as caught:
        _launch(_config(*DISK, f"memory.disk={tmp_path}"), tmp_path / "run")
    assert "beside the 1000 bytes that memory.disk has" in str(caught.value)


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no RAM disk here")
def test_a_ram_disk_is_noted(tmp_path: Path) -> None:
    notices: list[str] = []
    config = _config(*DISK, "memory.disk=/dev/shm", steps=2)
    launch(config, tmp_path / "run", lambda line: None, notices.append)
    assert [line for line in notices if "memory.disk = '/dev/shm' is a RAM disk" in line]
