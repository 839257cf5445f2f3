"""A run on one machine is heard on loopback alone: nobody else can reach its store or its workers."""

from __future__ import annotations

import ipaddress
import os

import psutil
import pytest

from isles.comm.mesh import Mesh
from isles.launch.addresses import listen, own_address
from isles.launch.store import join_store, open_store
from isles.launch.workers import LocalWorkers

ALL = ("0.0.0.0", "::")


def heard_at(pid: int) -> list[str]:
    """Addresses at which a process listens, TCP."""
    return [str(c.laddr.ip) for c in psutil.Process(pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN]


def listeners(world: Mesh) -> list[str]:
    """Of this worker, which is connected to the others; a function that workers run."""
    return heard_at(os.getpid())


def test_a_run_on_one_machine_listens_on_loopback_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    before = len(heard_at(os.getpid()))
    pool = LocalWorkers(listeners, 2)
    here = heard_at(os.getpid())
    assert len(here) == before + 1, "the store does not listen: this test sees nothing"
    workers = pool.join()
    assert all(workers), "gloo does not listen: this test sees nothing"
    for address in (*here, *(one for worker in workers for one in worker)):
        assert ipaddress.ip_address(address).is_loopback, (here, workers)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1"])
def test_a_store_listens_where_it_is_told(host: str) -> None:
    try:
        store = open_store(host)
    except ValueError:
        pytest.skip(f"this machine has no {host}")
    other = join_store(host, store.port)
    other.set("key", "value")
    assert store.get("key") == b"value"
    assert host in heard_at(os.getpid()) and not set(heard_at(os.getpid())) & set(ALL)


def test_a_rendezvous_is_at_an_address_that_others_can_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that this machine alone resolves to loopback is refused; localhost and numbers are what was meant."""
    import socket

    assert own_address("127.0.0.1", "x") == "127.0.0.1" and own_address("localhost", "x") in ("127.0.0.1", "::1")
    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *more, **also: real(
        "127.0.1.1" if host == "my-machine" else host, *more, **also))  # fmt: skip
    with pytest.raises(ValueError, match=r"my-machine: is 127.0.1.1 on this machine, which no other can reach"):
        own_address("my-machine", "--rendezvous my-machine")
    with listen(0, "127.0.0.1") as listening:
        assert listening.getsockname()[0] == "127.0.0.1"
