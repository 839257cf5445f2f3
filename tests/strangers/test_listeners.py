"""What listens does so at one address, the one that was meant."""

from __future__ import annotations

import gc
import os

import pytest

from isles.comm.sockets.listener import Listener
from isles.comm.tcp import listen, own_address
from isles.launch.worker import join_store, open_store
from tests.launch.local_workers import heard_at

ALL = ("0.0.0.0", "::")


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


@pytest.mark.parametrize("before", [False, True])
def test_a_listener_leaves_the_garbage_collector_as_it_was(before: bool) -> None:
    """What a program has set aside (gc.freeze) is still aside afterwards; what a listener did is not."""
    counts = gc.get_freeze_count
    gc.unfreeze()
    if before:
        gc.freeze()
    aside = counts()
    with Listener(listen(0, "127.0.0.1"), None, seconds=1.0):  # type: ignore[arg-type]  # nobody comes
        assert counts() > 0
    assert (counts() > 0.9 * aside) if before else counts() == 0
    gc.unfreeze()
