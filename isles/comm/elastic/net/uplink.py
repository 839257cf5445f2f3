"""A client's connection to a hub: made anew whenever it breaks, and everything declared on it said again.

All of it runs in the loop's thread, but for `opened` and `close`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from isles.comm.credentials import Token
from isles.comm.elastic.net.words import LONGEST, Frame, FrameKind, frame_of, packed
from isles.comm.sockets.connection import Connection
from isles.comm.sockets.lost import SILENCE, LinkLost, reason
from isles.comm.sockets.proof import SecretRefused, TokenRefused, dial

_WAITING = 64 << 20  # bytes of its own words that wait to be sent
_AGAIN, _SELDOM = 0.1, 1.0  # seconds until the next try: twice as many each time
_DECLARES = (FrameKind.SERVE, FrameKind.PRESENT, FrameKind.WATCH)
BROKEN = (OSError, EOFError, RuntimeError, ValueError)  # what a connection may end by, TLS's and the proof's included


class Uplink:
    """To the hub at host:port, for whoever has `token`. heard: called with what the hub says. lost: called when the
    connection breaks, and what was asked has no answer.

    where: host and port. name: as the hub has said last. is_local: whether the hub is on this machine.
    """

    def __init__(
        self,
        token: Token,
        host: str,
        port: int,
        heard: Callable[[Frame, bool], bool],
        lost: Callable[[], None],
    ) -> None:
        self._token, self.where, self._heard, self._lost = token, (host, port), heard, lost
        self.name, self.is_local = "", False
        self._declared: list[Frame] = []
        self._line: Connection | None = None
        self._welcomed = asyncio.Event()
        self._why: Exception | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self, seconds: float) -> None:
        """Be connected within `seconds`. LinkLost with the last reason; TokenRefused where what answers is another
        machine than the token's.
        """
        self._task = asyncio.get_running_loop().create_task(self._keep())
        welcomed = asyncio.ensure_future(self._welcomed.wait())
        await asyncio.wait((self._task, welcomed), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        welcomed.cancel()
        if self._task.done():
            self._task.result()
        if not self._welcomed.is_set():
            await self.end()
            why = self._why or TimeoutError()
            raise LinkLost(str(why) if isinstance(why, TokenRefused | LinkLost) else reason(why, seconds)) from why

    def send(self, frame: Frame, urgent: bool) -> None:
        """Say it, or keep it until it can be said where it declares something."""
        if frame.kind in _DECLARES:
            self._declared.append(frame)
        if self._line is None:
            sent, answer = False, Frame(FrameKind.NOBODY, frame.number)
        else:
            sent = self._line.send(packed(frame), urgent=urgent)
            answer = Frame(FrameKind.REFUSAL, frame.number, payload=b"later")
        if frame.kind == FrameKind.ASK and not sent:
            self._heard(answer, True)

    async def end(self) -> None:
        """Be gone, once what was said has left."""
        line, task = self._line, self._task
        if line is not None:
            await line.close()
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _keep(self) -> None:
        pause = _AGAIN
        while True:
            try:
                streams = await dial(*self.where, SILENCE, self._token)
                pause = _AGAIN
                await self._attend(Connection(*streams, SILENCE, longest=LONGEST, most=_WAITING))
            except BROKEN as error:
                is_another = isinstance(error, TokenRefused) and not isinstance(error, SecretRefused)
                if is_another and not self._welcomed.is_set():
                    raise
                self._why = error
            await asyncio.sleep(pause)
            pause = min(2 * pause, _SELDOM)

    async def _attend(self, line: Connection) -> None:
        def heard(word: bytes | bytearray, urgent: bool) -> None:
            frame = frame_of(word)
            if frame.kind != FrameKind.WELCOME:
                self._heard(frame, urgent)
                return
            self.name, self.is_local = frame.key, line.here == line.there
            line.silence.seconds = frame.milliseconds / 1000
            for one in self._declared:
                line.send(packed(one), urgent=True)
            self._line = line
            self._welcomed.set()

        try:
            await line.run(heard)
        finally:
            line.abort()
            if self._line is not None:
                self._line = None
                self._lost()
