from __future__ import annotations

from pathlib import Path

import pytest

from isles.network.machines import MACHINES, known_gpu, machine, to_toml


def test_names_are_found_whatever_their_case() -> None:
    assert machine("rtx 3060") is not None
    assert machine("rtx 3060").device_bytes == 12e9


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_is_read_back_from_its_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text(to_toml(MACHINES[name]), encoding="utf-8")
    assert machine(str(path)) == MACHINES[name]


def test_fields_are_laid_over_a_known_machine(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text(
        'base = "H100"\nname = "ours"\ndevice_bytes = "24GiB"\nup = "10GB/s"\npeak = "165T"\n', encoding="utf-8"
    )
    made = machine(str(path))
    assert (made.name, made.device_bytes, made.up, made.up_both, made.peak) == ("ours", 24 * 2**30, 10e9, 10e9, 165e12)
    assert (made.down, made.host_bytes) == (MACHINES["H100"].down, MACHINES["H100"].host_bytes)
    assert machine("H100", {"mfu": 0.5}).mfu == 0.5


def test_seconds_are_operations_over_what_is_reached() -> None:
    assert machine("A100-40").seconds(312e12 * 0.45) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('base = "H1000"', "unknown machine 'H1000': did you mean 'H100'?"),
        ('base = "H100"\nupp = 1.0', "unknown field 'upp': did you mean 'up'?"),
        ('base = "H100"\nmfu = 1.4', "mfu = 1.4: choose a share"),
        ('base = "H100"\ndevice_bytes = "12 parsecs"', "device_bytes = '12 parsecs': write a number and a unit"),
        ('base = "H100"\ndevice_bytes = 0', "device_bytes = 0.0: choose a number above 0"),
        ('base = "H100"\nup_both = "60GB/s"', "up_both = 6e+10: choose at most up = 5e+10"),
        ('base = "H100"\ndisk_bytes = "1TB"', "a disk has rates too"),
        ('name = "mine"', "device_bytes is missing: give it, or base"),
        ('base = "H100"\nup = true', "up = True: write a number"),
    ],
)
def test_what_cannot_be_is_one_line(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"^[^\n]*$") as caught:
        machine(str(path))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "gibibytes", "known"),
    [
        ("NVIDIA H200", 139.8, "H200"),
        ("NVIDIA H100 80GB HBM3", 79.1, "H100"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "A100-40"),
        ("NVIDIA A100 80GB PCIe", 79.3, "A100-80"),
        ("Tesla V100-SXM2-16GB", 15.8, "V100-16"),
        ("Tesla V100-SXM2-32GB", 31.7, None),
        ("NVIDIA GeForce RTX 4090", 23.6, "RTX 4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 15.6, None),
        ("NVIDIA GeForce RTX 3060", 7.8, None),
        ("NVIDIA T4", 14.6, None),
    ],
)
def test_a_gpu_is_known_by_its_name_and_size(name: str, gibibytes: float, known: str | None) -> None:
    """One of a known name with less memory is another one: a plan for it would not fit."""
    found = known_gpu(name, gibibytes * 2**30)
    assert (None if found is None else found.name) == known
