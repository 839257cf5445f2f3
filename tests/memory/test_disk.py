"""States, or all of a unit, in a file: the same bits, the bytes of the plan, one line for what a disk does wrong."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from isles.memory.costs import Placement
from isles.memory.disk import DiskFile, Section, StagingSlot, check_folder
from isles.memory.engines.base import DiskFailed, Inline, ThreadEngine
from isles.memory.optimizer import Managed
from isles.memory.plan import table
from isles.models.decoder import Decoder
from isles.network.machines import MACHINES
from tests.memory.loops import DECODER, SHAPE, UNITS, Left, adamw, plan_of, profiled, train

STEPS = 3
STATES = (Placement("disk", "keep"),) * UNITS
ALL = (Placement("file", "recompute"),) * UNITS
MIXED = tuple(
    Placement(tier, one)  # type: ignore[arg-type]
    for tier, one in (("device", "keep"), ("file", "keep"), ("device", "recompute"), ("file", "recompute"))
)
BESIDE = tuple(
    Placement(tier, one)  # type: ignore[arg-type]
    for tier, one in (("disk", "recompute"), ("host", "swap"), ("disk", "swap"), ("optimizer", "keep"))
)


@cache
def _plain(settings: tuple[tuple[str, Any], ...]) -> Left:
    return train(DECODER, steps=STEPS, **dict(settings))


@pytest.mark.parametrize(
    ("plan", "engine", "settings"),
    [
        (STATES, ThreadEngine, {"max_norm": 1.0}),
        (ALL, ThreadEngine, {"max_norm": 1.0, "accumulation": 2}),
        (MIXED, Inline, {"max_norm": None, "autocast": "bf16"}),
        (BESIDE, ThreadEngine, {"max_norm": None, "update": "early"}),
        pytest.param(ALL, Inline, {"max_norm": None, "update": "early"}, marks=pytest.mark.long),
        pytest.param(STATES, Inline, {"max_norm": 1.0, "accumulation": 2, "autocast": "bf16"}, marks=pytest.mark.long),
        pytest.param(MIXED, ThreadEngine, {"max_norm": 1.0, "accumulation": 2}, marks=pytest.mark.long),
    ],
)
def test_the_disk_keeps_the_bits(
    plan: tuple[Placement, ...], engine: Callable[[], Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    wanted = _plain(tuple((key, value) for key, value in settings.items() if key != "update"))
    got = train(DECODER, plan, engine=engine(), steps=STEPS, disk=str(tmp_path), **settings)
    assert got.losses == wanted.losses
    assert got.same(wanted)
    assert got.peak <= got.planned
    if engine is ThreadEngine:  # without lanes one update is over before the next begins, in one slot of two
        assert got.peak >= 0.9 * got.planned
    made = profiled(DECODER, settings.get("autocast", "none"))
    rows = table(plan_of(made, plan, accumulation=settings.get("accumulation", 1)), made)
    assert got.moved is not None
    assert got.moved["write"] == STEPS * sum(row["written"] for row in rows)
    states = sum(unit.states for unit, one in zip(made.units, plan, strict=True) if one.tier in ("disk", "file"))
    most = STEPS * sum(row["read"] for row in rows) - states  # none to read before the first update
    assert got.moved["read"] <= most  # what stays from forward to backward is not read again
    if "file" not in {one.tier for one in plan}:
        assert got.moved["read"] == most
    assert not list(tmp_path.iterdir())  # the file has no name


def test_a_run_goes_on_from_states_on_disk_and_onto_them(tmp_path: Path) -> None:
    whole = train(DECODER, steps=4)
    halfway: list[Any] = []
    train(DECODER, ALL, engine=Inline(), steps=2, ends_with=halfway, disk=str(tmp_path))
    rest = train(DECODER, STATES, engine=Inline(), steps=2, first=2, start=tuple(halfway), disk=str(tmp_path))
    assert rest.losses == whole.losses[2:]
    assert all(map(torch.equal, rest.weights, whole.weights))
    assert all(map(torch.equal, rest.state, whole.state))


def _managed(folder: Path | str, plan: tuple[Placement, ...] = ALL) -> tuple[Decoder, Managed]:
    model, made = Decoder(SHAPE), profiled(DECODER, "none")
    chosen = plan_of(made, plan)
    return model, Managed(chosen, model, adamw(model), profile=made, machine=MACHINES["H100"], disk=str(folder))


def _step(model: Decoder, managed: Managed, number: int = 0) -> None:
    model(DECODER.batch(number)).loss.backward()
    managed.step()
    managed.zero_grad()


def test_what_is_written_past_the_executor_is_used(tmp_path: Path) -> None:
    other = Decoder(SHAPE, seed=7)
    model, managed = _managed(tmp_path)
    with managed:
        _step(model, managed)
        model.load_state_dict(other.state_dict())
        assert model(DECODER.batch(0)).loss.item() == other(DECODER.batch(0)).loss.item()
        with torch.no_grad():
            assert model(DECODER.batch(1)).loss.item() == other(DECODER.batch(1)).loss.item()
            managed.runner.passes.left.clear()


def test_nothing_of_the_units_stays_in_memory(tmp_path: Path) -> None:
    model, managed = _managed(tmp_path)
    with managed:
        _step(model, managed)
        managed.catch_up()
        for stored in managed.runner.stored.values():
            assert stored.states is not None
            assert stored._is_there(stored._tensors(managed.inner.state))
            assert all(parameter.grad is None for parameter in stored.parameters)
        with open("/proc/self/maps", encoding="utf-8") as maps:
            mapped = sum("isles-" in line and "(deleted)" in line for line in maps)
        assert mapped >= 2 * UNITS  # weights and states


@pytest.mark.parametrize("fault", ["full", "short", "gone"])
def test_a_disk_that_fails_is_one_line(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, managed = _managed(tmp_path)
    with pytest.raises(OSError, match=r"memory\.disk = [^\n]*") as caught, managed:
        _step(model, managed)
        managed.catch_up()
        file = next(iter(managed.runner.stored.values())).file
        if fault == "short":
            os.ftruncate(file._cached, 4096)
        elif fault == "full":
            monkeypatch.setattr(os, "pwritev", _raises(28))
        else:
            monkeypatch.setattr(os, "preadv", _raises(5))
        _step(model, managed, 1)
        managed.catch_up()
    assert isinstance(caught.value, DiskFailed)
    told = {"full": "writing failed (No space left", "short": "ends ", "gone": "reading failed (Input/output"}
    assert told[fault] in str(caught.value)
    assert "\n" not in str(caught.value)


def _raises(number: int) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


def test_a_disk_that_is_full_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", _raises(28))
    with pytest.raises(OSError, match=r"no room for [0-9]+ bytes more .No space left"):
        _managed(tmp_path)


def test_folders(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no such folder"):
        check_folder(str(tmp_path / "none"), 1)
    with pytest.raises(ValueError, match="the plan needs 1000000000000000000; name another folder"):
        check_folder(str(tmp_path), 10**18)
    with pytest.raises(ValueError, match="the plan puts units on disk; name a folder"):
        _managed("")
    assert check_folder(str(tmp_path), 1) == []
    if Path("/dev/shm").is_dir():
        assert "is a RAM disk" in check_folder("/dev/shm", 1)[0]


@pytest.mark.parametrize("direct", [True, False])
def test_both_ways_to_the_file_show_the_same(direct: bool, tmp_path: Path) -> None:
    file = DiskFile(str(tmp_path))
    tensors = [torch.arange(3000.0), torch.tensor(7.0), torch.arange(10, dtype=torch.int64)]
    section = Section(file, tensors, cached=not direct)
    assert section.nbytes == sum(tensor.nbytes for tensor in tensors)
    slot = StagingSlot().take(section.room)
    for number in range(3):
        for view, tensor in zip(section.views(slot), tensors, strict=True):
            view.copy_(tensor + number)
        section.write(slot)
        assert all(torch.equal(one, two + number) for one, two in zip(section.mapped, tensors, strict=True))
        section.mapped[0].mul_(2)
        slot.zero_()
        assert torch.equal(section.read(slot)[0], (tensors[0] + number) * 2)
