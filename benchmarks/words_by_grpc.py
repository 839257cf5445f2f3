"""What could carry the control plane of an elastic world: `grpc.aio`, or asyncio's TLS with frames of a length and bytes.

    python -m benchmarks.words_by_grpc times [--members 64,256] [--turns 5] [--seconds 12]     needs: pip install grpcio
    python -m benchmarks.words_by_grpc questions

Two small lighthouses do the same: mutual TLS 1.3, a stream a member, which beats once a second with 200 bytes and has
them back; now and then a view (JSON, an entry a member) goes to all. Bytes are decoded by neither. The lighthouse has
one core to itself, its members (each a connection, in two processes) another one.

    times        both in turns, medians of the turns: import, start, joins, CPU seconds, beats, views, memory
    questions    forks, strangers, refusals, members that do not read, IPv6, sockets that are there already
"""

from __future__ import annotations

import argparse
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
from statistics import median, quantiles
from typing import Any, NamedTuple

BEAT, LONGEST, VIEWS = 200, 1 << 20, 5  # bytes of a beat, bytes of a frame at most, view changes a turn
HELLO = 5.0  # seconds that a stranger has until its stream must be there
ENGINES = ("grpc", "tls")
_LENGTH, _TIME = struct.Struct(">I"), struct.Struct(">d")


class Stream(NamedTuple):
    """One end, of either engine. `receive` has None at the end; `send` waits while the other side does not read."""

    receive: Callable[[], Awaitable[bytes | None]]
    send: Callable[[bytes], Awaitable[None]]


class Lighthouse:
    """What both lighthouses do, whatever carries it."""

    def __init__(self) -> None:
        self.streams: set[Stream] = set()
        self.changes = 0

    async def attend(self, stream: Stream) -> None:
        """Echo each beat of one member, from its first word, which has to come soon, to its end."""
        async with asyncio.timeout(HELLO):
            beat = await stream.receive()
        self.streams.add(stream)
        try:
            while beat is not None:
                await stream.send(beat)
                beat = await stream.receive()
        finally:
            self.streams.discard(stream)

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
        except (OSError, EOFError):
            return None

    async def send(data: bytes) -> None:
        writer.write(_LENGTH.pack(len(data)) + data)
        await writer.drain()

    return Stream(receive, send)


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

    pair, theirs = _pems(folder, "house"), _pems(folder, "member")[1]
    server = grpc.aio.server(options=[("grpc.server_handshake_timeout_ms", int(HELLO * 1000))])
    server.add_generic_rpc_handlers((Handler(),))
    port = server.add_secure_port(
        f"[{host}]:0" if ":" in host else f"{host}:0", grpc.ssl_server_credentials([pair], theirs, True)
    )
    await server.start()
    house.server = server  # type: ignore[attr-defined]
    return int(port)


async def open_grpc(folder: Path, host: str, port: int, who: str = "member") -> Stream:
    """A member's end."""
    import grpc.aio

    credentials = grpc.ssl_channel_credentials(_pems(folder, "house")[1], *_pems(folder, who))
    options = [("grpc.ssl_target_name_override", "isles"), ("grpc.use_local_subchannel_pool", 1)]  # own connection
    channel = grpc.aio.secure_channel(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", credentials, options)
    call = channel.stream_stream("/isles/words")()

    async def receive() -> bytes | None:
        word = await call.read()
        return None if word is grpc.aio.EOF else word

    async def send(data: bytes, _: Any = channel) -> None:  # the channel lives as long as its stream
        await call.write(data)

    return Stream(receive, send)


SERVE = {"grpc": serve_grpc, "tls": serve_tls}
OPEN = {"grpc": open_grpc, "tls": open_tls}


def _pems(folder: Path, who: str) -> tuple[bytes, bytes]:
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
        if order == "change":
            await house.change()
        return {"members": len(house.streams), "taken": await house.flood() if order == "flood" else 0}

    await orders(obey)


async def run_members(engine: str, folder: Path, port: int, count: int) -> None:
    """A process of many light members."""
    os.sched_setaffinity(0, {1})
    joined, trips, views = [], [], {}

    async def live(draw: random.Random) -> None:
        stream = await OPEN[engine](folder, "127.0.0.1", port)
        beating = None
        await stream.send(_beat())
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


def _beat() -> bytes:
    return (b"b" + _TIME.pack(time.monotonic())).ljust(BEAT, b".")


async def _beats(stream: Stream, phase: float) -> None:
    await asyncio.sleep(phase)
    while True:
        await stream.send(_beat())
        await asyncio.sleep(1.0)


class Child:
    """A process of this program that takes orders."""

    def __init__(self, *words: object) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.words_by_grpc", *map(str, words)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
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


def turn(engine: str, folder: Path, members: int, seconds: float) -> dict[str, float]:
    """Figures of one lighthouse, from its start to its end."""
    began = time.monotonic()
    with Child("lighthouse", engine, folder, "127.0.0.1") as house:
        start = house.hear()
        found = {"start s": time.monotonic() - began, "start CPU s": start["cpu"], "MB empty": start["rss"]}
        began = time.monotonic()
        crowd = [Child("members", engine, folder, start["port"], members // 2) for _ in range(2)]
        try:
            while sum(one.ask()["joined"] for one in crowd) < members:
                assert time.monotonic() - began < 60, "they do not join"
                time.sleep(0.1)
            found["all joined s"] = max(one.ask()["last"] for one in crowd) - began
            before = house.ask()
            found["joins CPU s"] = before["cpu"] - start["cpu"]
            time.sleep(1.0)
            began, before, theirs = time.monotonic(), house.ask(), [one.ask()["cpu"] for one in crowd]
            time.sleep(seconds)
            after, told = house.ask(), [one.ask() for one in crowd]
            minutes = (time.monotonic() - began) / 60
            cuts = quantiles([trip for one in told for trip in one["trips"]], n=100)
            found["CPU s a minute"] = (after["cpu"] - before["cpu"]) / minutes
            found["CPU s a minute, members"] = (sum(one["cpu"] for one in told) - sum(theirs)) / minutes
            found["beat p50 ms"], found["beat p99 ms"] = cuts[49] * 1e3, cuts[98] * 1e3
            for _ in range(VIEWS):
                house.ask("change")
                time.sleep(1.0)
            lasting = house.ask()
            seen = [one.ask()["views"] for one in crowd]
            last = [max(max(one[n]) for one in seen) for n in seen[0]]
            assert all(sum(len(one[n]) for one in seen) == members for n in seen[0]), "a view did not reach all"
            found["view to all ms"], found["MB with members"] = median(last) * 1e3, lasting["rss"]
        finally:
            for one in crowd:
                one.__exit__()
    return found


def times(members: list[int], turns: int, seconds: float) -> None:
    """Print the medians of the turns, with their least and most."""
    print(f"load at the begin: {os.getloadavg()[0]:.1f}; {turns} turns of {seconds:g} s; median (least to most)")
    for module in ("grpc.aio", "asyncio, ssl"):
        code = f"import time; a = time.process_time(); import {module}; print(time.process_time() - a)"
        costs = [float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(turns)]
        print(f"import {module}: {median(costs):.3f} ({min(costs):.3f} to {max(costs):.3f}) CPU s")
    with certificates() as folder:
        for count in members:
            rows: dict[str, list[dict[str, float]]] = {engine: [] for engine in ENGINES}
            for n in range(turns):
                for engine in ENGINES if n % 2 else ENGINES[::-1]:
                    rows[engine].append(turn(engine, folder, count, seconds))
                    print(engine, count, rows[engine][-1], file=sys.stderr, flush=True)
            for name in rows["tls"][0]:
                words = []
                for engine in ENGINES:
                    got = [row[name] for row in rows[engine]]
                    words.append(f"{engine} {median(got):.4g} ({min(got):.4g} to {max(got):.4g})")
                print(f"{count} members, {name}: {'; '.join(words)}", flush=True)


def main() -> None:
    """The words of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["times", "questions", "lighthouse", "members"])
    parser.add_argument("words", nargs="*")
    parser.add_argument("--members", default="64,256")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=12.0)
    given = parser.parse_args()
    if given.what == "lighthouse":
        asyncio.run(run_lighthouse(given.words[0], Path(given.words[1]), given.words[2]))
    elif given.what == "members":
        asyncio.run(run_members(given.words[0], Path(given.words[1]), int(given.words[2]), int(given.words[3])))
    elif given.what == "times":
        times([int(one) for one in given.members.split(",")], given.turns, given.seconds)


if __name__ == "__main__":
    main()
