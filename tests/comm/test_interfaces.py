"""By which network interface workers meet that torchrun has started: not by the machine's own name, as gloo would."""

from __future__ import annotations

import os

import pytest

from isles.comm.gloo.transport import DistributedTransport
from isles.comm.mesh import Mesh
from isles.comm.tcp import gloo_interface, interface_of, outward_address
from tests.gloo import run_gloo
from tests.launch.local_workers import heard_at


@pytest.fixture
def way_out() -> str:
    """This machine's address for others."""
    try:
        return outward_address()
    except ValueError:
        pytest.skip("this machine has no default route")


def test_the_interface_is_that_of_the_way_to_the_first_machine(way_out: str) -> None:
    """On the first one itself its name is 127.0.1.1 (Debian), or 127.0.0.1: the others are not there."""
    for first in (way_out, "127.0.1.1", "nobody.invalid"):
        reported = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": first}
        assert gloo_interface(reported) == interface_of(way_out) != "lo"
    for more in ({"LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": way_out}, {"MASTER_ADDR": "localhost"}, {}):
        assert gloo_interface({"WORLD_SIZE": "4", **more}) == interface_of("127.0.0.1")


def listens_at(world: Mesh, first: str, here: str) -> list[str]:
    """Where this worker listens that it did not before, as one of torchrun's."""
    before, saved = heard_at(os.getpid()), dict(os.environ)
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    os.environ |= {"RANK": str(world.rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": here, "MASTER_ADDR": first}
    try:
        transport, _ = DistributedTransport.from_environment()
        found = heard_at(os.getpid())
        transport.close()
    finally:
        os.environ.clear()
        os.environ.update(saved)
    for address in before:
        found.remove(address)
    return found


def test_workers_of_two_machines_listen_where_they_reach_each_other(way_out: str) -> None:
    """And those of one machine on loopback alone."""
    for here, where in (("1", way_out), ("2", "127.0.0.1")):
        assert run_gloo(listens_at, args=("127.0.1.1", here)) == [[where]] * 2
