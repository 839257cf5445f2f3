"""Where a worker is reached by others of its run, and by those for whom it carries."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from isles.comm.elastic.p2p.stream import PAIR
from isles.comm.elastic.p2p.ties import Ties
from isles.comm.sockets.listener import MOST, peeked
from isles.comm.sockets.lost import SILENCE
from isles.comm.sockets.reachable import EchoServer


class PairListener(EchoServer):
    """Listens at host:port for other workers; port 0: any. welcome: called, in a thread of its own, with each that
    begins as one does; others get the echo by which the lighthouse sees that `name` is reached. ties: of a worker that
    carries for others. ValueError where the address cannot be had.
    """

    def __init__(
        self,
        host: str,
        port: int,
        name: str,
        welcome: Callable[[socket.socket], object],
        ties: Ties | None = None,
    ) -> None:
        self._welcome, self._ties = welcome, ties
        self._threads = ThreadPoolExecutor(MOST, "isles-welcomes")
        super().__init__(host, port, name, SILENCE, self._attends)

    def close(self) -> None:
        """Stop listening."""
        self.__exit__()
        if self._ties is not None:
            self._ties.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _attends(self, connection: socket.socket) -> bool:
        if self._ties is not None and await self._ties.take(connection):
            return True
        if not await peeked(connection, PAIR):
            return False
        try:
            await asyncio.get_running_loop().run_in_executor(self._threads, self._welcome, connection)
        except BaseException:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # its thread waits for nothing any more
            raise
        return True
