"""A client's connection to a hub: made anew whenever it breaks, and everything declared on it said again.

All of it runs in the loop's thread, but for `opened` and `close`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from isles.comm import credentials
from isles.comm.credentials import Credentials
from isles.comm.elastic.net.lanes import Frame, FrameKind, LaneConnection
from isles.comm.sockets.lost import SILENCE, LinkLost, reason
from isles.comm.sockets.proof import TokenRefused, prove_as_node

_WAITING = 64 << 20  # bytes of its own words that wait to be sent
_AGAIN, _SELDOM = 0.1, 1.0  # seconds until the next try: twice as many each time
_DECLARES = (FrameKind.SERVE, FrameKind.PRESENT, FrameKind.WATCH)
BROKEN = (OSError, EOFError, RuntimeError, ValueError)  # what a connection may end by, TLS's and the proof's included


class Uplink:
    """To the hub at host:port, for whoever has `mine`. heard: called with what the hub says. lost: called when the
    connection breaks, and what was asked has no answer.

    where: host and port. name: as the hub has said last. is_local: whether the hub is on this machine.
    """

    def __init__(
        self,
        mine: Credentials,
        host: str,
        port: int,
        heard: Callable[[Frame, bool], bool],
        lost: Callable[[], None],
    ) -> None:
        self._mine, self.where, self._heard, self._lost = mine, (host, port), heard, lost
        self.name, self.is_local = "", False
        self._declared: list[Frame] = []
        self._lanes: LaneConnection | None = None
        self._welcomed = asyncio.Event()
        self._why = "nobody answers"
        self._task: asyncio.Task[None] | None = None

    async def start(self, lease: float, seconds: float) -> None:
        """Be connected within `seconds`. LinkLost with the last reason."""
        self._task = asyncio.get_running_loop().create_task(self._keep(lease))
        try:
            async with asyncio.timeout(seconds):
                await self._welcomed.wait()
        except TimeoutError:
            await self.end()
            raise LinkLost(self._why) from None

    def send(self, frame: Frame, urgent: bool) -> None:
        """Say it, or keep it until it can be said where it declares something."""
        if frame.kind in _DECLARES:
            self._declared.append(frame)
        if self._lanes is None:
            sent, answer = False, Frame(FrameKind.NOBODY, frame.number)
        else:
            sent = self._lanes.send(frame, urgent=urgent)
            answer = Frame(FrameKind.REFUSAL, frame.number, payload=b"later")
        if frame.kind == FrameKind.ASK and not sent:
            self._heard(answer, True)

    async def end(self) -> None:
        """Be gone, once what was said has left."""
        lanes, task = self._lanes, self._task
        if lanes is not None:
            await lanes.close()
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _keep(self, lease: float) -> None:
        pause = _AGAIN
        while True:
            try:
                async with asyncio.timeout(SILENCE):
                    lanes = await self._connect(lease)
                pause = _AGAIN
                await self._attend(lanes)
            except BROKEN as error:
                self._why = str(error) if isinstance(error, TokenRefused | LinkLost) else reason(error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _SELDOM)

    async def _connect(self, lease: float) -> LaneConnection:
        tls = credentials.unverified_context()  # `prove_as_node` compares the certificate
        reader, writer = await asyncio.open_connection(*self.where, ssl=tls, server_hostname=credentials.NAME)
        try:
            await prove_as_node(reader, writer, self._mine.token, self.where[0])
        except BaseException:
            writer.transport.abort()
            raise
        return LaneConnection(reader, writer, lease, _WAITING)

    async def _attend(self, lanes: LaneConnection) -> None:
        def heard(frame: Frame, urgent: bool) -> None:
            if frame.kind != FrameKind.WELCOME:
                self._heard(frame, urgent)
                return
            self.name, self.is_local = frame.key, lanes.here == lanes.there
            lanes.expects(frame.milliseconds / 1000)
            for one in self._declared:
                lanes.send(one, urgent=True)
            self._lanes = lanes
            self._welcomed.set()

        try:
            await lanes.run(heard)
        finally:
            lanes.abort()
            if self._lanes is not None:
                self._lanes = None
                self._lost()
