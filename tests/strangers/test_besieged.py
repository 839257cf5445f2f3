"""Who listens where while runs go on, as the kernel tells it; and a besieged run in a network of its own."""

from __future__ import annotations

import ipaddress
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.cli.command import Command
from tests.netns import run_isolated, skip_unless_available
from tests.strangers.test_real_run import PATIENCE, besieged_run
from tests.training.runs import write_folder


def listeners() -> set[str]:
    """Addresses that somebody listens at in this network, by `ss` (iproute2); UDP too."""
    told = subprocess.run(["ss", "-H", "-l", "-n", "-t", "-u"], capture_output=True, text=True, check=True).stdout
    return {line.split()[4].rsplit(":", 1)[0].split("%")[0].strip("[]") for line in told.splitlines()}


def one_machine(folder: str) -> list[str]:
    """All addresses that were listened at while a run of two workers went on, asked again and again."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    run = Command("train", "tiny.toml", "--workers", "2", "--steps", "12", "--out", "run", folder=Path(folder))
    seen, ends_at = set[str](), time.monotonic() + PATIENCE
    while run.process.poll() is None:
        assert time.monotonic() < ends_at
        seen.update(listeners())
        time.sleep(0.1)
    code, _, error = run.end(60.0)
    assert code == 0, error
    return sorted(seen)


@pytest.mark.long
def test_one_machine_is_heard_on_loopback_alone(tmp_path: Path) -> None:
    """From the first process to the last: what `ss` shows is loopback's."""
    skip_unless_available()
    if shutil.which("ss") is None:
        pytest.skip("needs ss of iproute2")
    seen = run_isolated("tests.strangers.test_besieged:one_machine", str(write_folder(tmp_path)))
    assert seen and all(ipaddress.ip_address(address).is_loopback for address in seen), seen


def besieged(folder: str) -> dict[str, object]:
    """A run of two nodes in this network, with strangers at its rendezvous all the time."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    seen = set[str]()
    grown = besieged_run(Path(folder), look=lambda: seen.update(listeners()))
    return {"grown": grown, "while": sorted(seen), "after": sorted(listeners())}


@pytest.mark.long
def test_a_besieged_run_in_a_network_of_its_own(tmp_path: Path) -> None:
    """Nothing but loopback is there: no name is looked up, nobody else is asked. Afterwards nobody listens."""
    skip_unless_available()
    if shutil.which("ss") is None:
        pytest.skip("needs ss of iproute2")
    found = run_isolated("tests.strangers.test_besieged:besieged", str(tmp_path), timeout=900.0)
    print(f"node 0's launcher took {found['grown'] / 1e6:.1f} MB more than without strangers")
    assert found["after"] == [] and found["while"]
    assert all(ipaddress.ip_address(address).is_loopback for address in found["while"]), found
