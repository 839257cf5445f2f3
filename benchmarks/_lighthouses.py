"""Two small lighthouses that do the same, on `grpc.aio` and on asyncio's TLS: see `words_by_grpc`."""

from __future__ import annotations

import asyncio
import json
import os
import random
import ssl
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

BEAT, LONGEST = 200, 1 << 20  # bytes of a beat, and of a frame at most
HELLO = 5.0  # seconds that a stranger has until its stream must be there
ENGINES = ("grpc", "tls")
_LENGTH, _TIME = struct.Struct(">I"), struct.Struct(">d")


class Stream(NamedTuple):
    """One end, of either engine. `receive` has None at the end; `send` waits while the other side does not read."""

    receive: Callable[[], Awaitable[bytes | None]]
    send: Callable[[bytes], Awaitable[None]]
    close: Callable[[], Awaitable[None]] | None = None


class Lighthouse:
    """What both lighthouses do, whatever carries it."""

    def __init__(self) -> None:
        self.streams: set[Stream] = set()
        self.changes, self.deaf = 0, False

    async def attend(self, stream: Stream) -> None:
        """Echo each beat of one member, from its first word, which has to come soon, to its end."""
        if self.deaf:
            return await asyncio.sleep(2 * HELLO)
        async with asyncio.timeout(HELLO):
            word = await stream.receive()
        self.streams.add(stream)
        try:
            while word is not None:
                await stream.send(word)
                word = await stream.receive()
        finally:
            self.streams.discard(stream)
        return None

    async def change(self) -> None:
        """Tell all a new view. Encoded once."""
        self.changes += 1
        entries = [{"member": n, "key": f"{n:064x}", "at": f"203.0.113.7:{n}"} for n in range(len(self.streams))]
        body = b"v" + json.dumps({"view": self.changes, "began": time.monotonic(), "members": entries}).encode()
        await asyncio.gather(*(stream.send(body) for stream in self.streams), return_exceptions=True)

    async def flood(self) -> int:
        """Send to all until nobody takes anything more for 2 s. Bytes that those who read least have taken."""

        async def fill(stream: Stream) -> int:
            taken, piece = 0, b"f" + bytes(32 << 10)
            with suppress(Exception):  # TimeoutError: it takes no more; or its stream has come to an end
                while taken < 64 << 20:
                    async with asyncio.timeout(2.0):
                        await stream.send(piece)
                    taken += len(piece)
            return taken

        return min(await asyncio.gather(*map(fill, list(self.streams))))


def contexts(folder: Path, server: bool, who: str = "member") -> ssl.SSLContext:
    """Mutual TLS 1.3 for asyncio's end: each side trusts the other's certificate and no other."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    tls.minimum_version, tls.check_hostname, tls.verify_mode = ssl.TLSVersion.TLSv1_3, False, ssl.CERT_REQUIRED
    mine, theirs = ("house", "member") if server else (who, "house")
    tls.load_cert_chain(folder / mine / "certificate.pem", folder / mine / "key.pem")
    tls.load_verify_locations(folder / theirs / "certificate.pem")
    return tls


def framed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Stream:
    """A stream of frames on a connection."""

    async def receive() -> bytes | None:
        try:
            (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
            return await reader.readexactly(length) if length <= LONGEST else None
        except EOFError:
            return None

    async def send(data: bytes) -> None:
        writer.write(_LENGTH.pack(len(data)) + data)
        await writer.drain()

    async def close() -> None:
        writer.transport.abort()

    return Stream(receive, send, close)


async def serve_tls(house: Lighthouse, folder: Path, host: str) -> int:
    """Listen. The port."""

    async def met(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):  # TimeoutError is one
            await house.attend(framed(reader, writer))
        writer.transport.abort()

    server = await asyncio.start_server(
        met, host, 0, ssl=contexts(folder, True), ssl_handshake_timeout=HELLO, backlog=1024
    )
    house.server = server  # type: ignore[attr-defined]  # or it is collected
    return int(server.sockets[0].getsockname()[1])


async def open_tls(folder: Path, host: str, port: int, who: str = "member") -> Stream:
    """A member's end."""
    return framed(*await asyncio.open_connection(host, port, ssl=contexts(folder, False, who)))


async def serve_grpc(house: Lighthouse, folder: Path, host: str) -> int:
    """Listen. The port."""
    import grpc.aio

    async def met(_: Any, context: Any) -> None:
        one_at_a_time = asyncio.Lock()  # a second write while one is under way is an error of gRPC

        async def receive() -> bytes | None:
            word = await context.read()
            return None if word is grpc.aio.EOF else word

        async def send(data: bytes) -> None:
            async with one_at_a_time:
                await context.write(data)

        await house.attend(Stream(receive, send))

    class Handler(grpc.GenericRpcHandler):
        def service(self, _: Any) -> Any:
            return grpc.stream_stream_rpc_method_handler(met)

    bounds = [  # without them each of the streams that a stranger opens at will holds 4 MB that nobody has read
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", 1 << 16),
        ("grpc.max_receive_message_length", LONGEST),
        ("grpc.max_concurrent_streams", 1),
    ]
    pair, theirs = pems(folder, "house"), pems(folder, "member")[1]
    server = grpc.aio.server(options=[*bounds, ("grpc.server_handshake_timeout_ms", int(HELLO * 1000))])
    server.add_generic_rpc_handlers((Handler(),))
    port = server.add_secure_port(
        f"[{host}]:0" if ":" in host else f"{host}:0", grpc.ssl_server_credentials([pair], theirs, True)
    )
    await server.start()
    house.server = server  # type: ignore[attr-defined]
    return int(port)


def channel_of(folder: Path, host: str, port: int, who: str = "member") -> Any:
    """A connection of gRPC's."""
    import grpc.aio

    credentials = grpc.ssl_channel_credentials(pems(folder, "house")[1], *pems(folder, who))
    options = [("grpc.ssl_target_name_override", "isles"), ("grpc.use_local_subchannel_pool", 1)]  # shared with nobody
    return grpc.aio.secure_channel(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", credentials, options)


def on_channel(channel: Any) -> Stream:
    """A new stream on a connection."""
    import grpc.aio

    call = channel.stream_stream("/isles/words")()

    async def receive() -> bytes | None:
        word = await call.read()
        return None if word is grpc.aio.EOF else word

    async def send(data: bytes) -> None:
        await call.write(data)

    return Stream(receive, send, channel.close)


async def open_grpc(folder: Path, host: str, port: int, who: str = "member") -> Stream:
    """A member's end."""
    return on_channel(channel_of(folder, host, port, who))


SERVE = {"grpc": serve_grpc, "tls": serve_tls}
OPEN = {"grpc": open_grpc, "tls": open_tls}


def pems(folder: Path, who: str) -> tuple[bytes, bytes]:
    """Key and certificate."""
    return (folder / who / "key.pem").read_bytes(), (folder / who / "certificate.pem").read_bytes()


def usage() -> dict[str, Any]:
    """CPU seconds of this process and MB that it has in memory."""
    status = Path("/proc/self/status").read_text()
    return {"cpu": time.process_time(), "rss": int(status.partition("VmRSS:")[2].split()[0]) / 1024}


async def orders(obey: Callable[[str], Awaitable[dict[str, Any]]]) -> None:
    """Answer each line of the standard input with one of JSON, until it ends."""
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps({**await obey(line.strip()), **usage()}), flush=True)


async def run_lighthouse(engine: str, folder: Path, host: str) -> None:
    """A process of its own: the port, then orders."""
    os.sched_setaffinity(0, {0})
    house = Lighthouse()
    print(json.dumps({"port": await SERVE[engine](house, folder, host), **usage()}), flush=True)

    async def obey(order: str) -> dict[str, Any]:
        house.deaf = house.deaf or order == "deaf"
        if order == "change":
            await house.change()
        if order == "fork" and os.fork() == 0:
            time.sleep(2 * HELLO)
            os._exit(0)
        return {"members": len(house.streams), "taken": await house.flood() if order == "flood" else 0}

    await orders(obey)


async def run_members(engine: str, folder: Path, port: int, count: int) -> None:
    """A process of many light members."""
    os.sched_setaffinity(0, {1})
    joined, trips, views = [], [], {}

    async def live(draw: random.Random) -> None:
        stream = await OPEN[engine](folder, "127.0.0.1", port)
        beating = None
        await stream.send(beat())
        while (word := await stream.receive()) is not None:
            now = time.monotonic()
            if word[:1] == b"v":
                view = json.loads(word[1:])
                views.setdefault(view["view"], []).append(now - view["began"])
            elif beating is None:
                joined.append(now)
                beating = asyncio.create_task(_beats(stream, draw.random()))
            else:
                trips.append(now - _TIME.unpack_from(word, 1)[0])

    lives = [asyncio.create_task(live(random.Random(n))) for n in range(count)]

    async def obey(order: str) -> dict[str, Any]:
        beats, trips[:] = trips[:], []
        return {"joined": len(joined), "last": max(joined, default=0), "trips": beats, "views": views}

    await orders(obey)
    for one in lives:
        one.cancel()
    os._exit(0)


def beat() -> bytes:
    """What a member says once a second, with the time."""
    return (b"b" + _TIME.pack(time.monotonic())).ljust(BEAT, b".")


async def _beats(stream: Stream, phase: float) -> None:
    await asyncio.sleep(phase)
    while True:
        await stream.send(beat())
        await asyncio.sleep(1.0)


class Child:
    """A process of this program that takes orders."""

    def __init__(self, *words: object) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks._lighthouses", *map(str, words)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip

    def hear(self) -> dict[str, Any]:
        """Its next answer."""
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())  # type: ignore[no-any-return]

    def ask(self, order: str = "report") -> dict[str, Any]:
        """Order, and its answer."""
        assert self._process.stdin is not None
        print(order, file=self._process.stdin, flush=True)
        return self.hear()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def certificates() -> Iterator[Path]:
    """A folder with keys and certificates of the lighthouse, a member and a stranger."""
    from isles.comm.credentials import own  # cryptography stays out of the processes that are measured

    with tempfile.TemporaryDirectory() as folder:
        for who in ("house", "member", "stranger"):
            own("0" * 32, Path(folder) / who)
        yield Path(folder)


if __name__ == "__main__":
    what, engine, folder, *rest = sys.argv[1:]
    if what == "lighthouse":
        asyncio.run(run_lighthouse(engine, Path(folder), rest[0]))
    else:
        asyncio.run(run_members(engine, Path(folder), *map(int, rest)))
