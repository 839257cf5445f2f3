"""What is measured of this machine: a machine that plans read back, and what it lacks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from isles.memory.measurement import MeasuringEffort, measure_machine
from isles.models.sizes import SIZES
from isles.network.machines import machine, to_toml

LITTLE = MeasuringEffort(
    product=64, shape=SIZES["0.12M"], tokens=16, params=1 << 12, copied=1 << 16, filed=1 << 17, laps=1
)


def test_what_is_measured_is_read_back(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    found = measure_machine(str(tmp_path), LITTLE)
    assert torch.get_num_threads() == threads
    assert not list(tmp_path.iterdir())
    path = tmp_path / "my.toml"
    path.write_text(to_toml(found.machine), encoding="utf-8")
    assert machine(str(path)) == found.machine
    here = found.machine
    assert min(here.device_bytes, here.peak, here.device_rate, here.host_update) > 0
    assert min(here.disk_read, here.disk_write, here.disk_bytes) > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_what_a_machine_lacks_is_said(tmp_path: Path) -> None:
    found = measure_machine(str(tmp_path), LITTLE)
    assert (found.machine.host_bytes, found.machine.up, found.machine.down) == (0, 0, 0)
    assert any(note.startswith("no GPU: the RAM is the device") for note in found.notes)


def test_a_folder_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^memory\.disk = .*there is no such folder; make it, or name another one$"):
        measure_machine(str(tmp_path / "none"), LITTLE)
