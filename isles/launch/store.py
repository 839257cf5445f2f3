"""The store where workers meet. It listens at one address; torch by itself would listen at all of them. It asks nobody
who he is.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from isles.comm.sockets.addresses import listen

_PATIENCE = timedelta(minutes=5)


def open_store(host: str) -> dist.TCPStore:
    """The store itself, at a free port of the address `host` of this machine, as long as the object lives."""
    listening = listen(0, host)
    port = listening.getsockname()[1]
    return dist.TCPStore(host, port, None, True, wait_for_workers=False, master_listen_fd=listening.detach())


def join_store(host: str, port: int) -> dist.TCPStore:
    """A worker's connection to it."""
    return dist.TCPStore(host, port, None, False, timeout=_PATIENCE)
