"""What connections are told about trying again; real sockets on loopback."""

from __future__ import annotations

import socket

import pytest

from isles.comm import tcp


@pytest.mark.parametrize("silence", [60.0, 3600.0, 1e9])
def test_probes_are_spread_however_long_a_silence_may_be(silence: float) -> None:
    """Linux takes no more than two minutes between tries, and 2^31 milliseconds in all."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as line:
        if not tcp.try_soon(line, silence):
            pytest.skip("this kernel cannot be told (Linux 6.15)")
        look = tcp.connection_state(line)
        assert look is not None
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 0)
        tcp.keep_trying(line, look._replace(probes=1), silence)
        assert line.getsockopt(socket.IPPROTO_TCP, 44) == min(1000 * silence / 6, 120_000)
        assert line.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        tcp.keep_trying(line, look, silence)
        assert line.getsockopt(socket.IPPROTO_TCP, 44) == 2000
