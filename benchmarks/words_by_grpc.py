"""What could carry the words of an elastic world: `grpc.aio`, or asyncio's TLS with frames of a length and bytes.

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
import importlib.util
import json
import multiprocessing
import os
import random
import signal
import socket
import ssl
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks._lighthouses import (
    ENGINES,
    HELLO,
    OPEN,
    Child,
    Lighthouse,
    Stream,
    beat,
    certificates,
    channel_of,
    contexts,
    framed,
    on_channel,
    pems,
)

VIEWS = 5  # changes a turn


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
            found["joins CPU s"] = house.ask()["cpu"] - start["cpu"]
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
                time.sleep(max(1.0, members / 200))
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


async def joins(engine: str, folder: Path, port: int, host: str = "127.0.0.1", who: str = "member") -> str:
    """Seconds until the lighthouse has answered a first beat, or why it has not."""
    began = time.monotonic()
    try:
        async with asyncio.timeout(3 * HELLO):
            stream = await OPEN[engine](folder, host, port, who)
            await stream.send(beat())
            word = await stream.receive()
            assert stream.close is not None
            await stream.close()
            return "closed without a word" if word is None else f"{time.monotonic() - began:.2f} s"
    except Exception as error:  # the words are what is asked for
        details = getattr(error, "details", None)
        return f"{type(error).__name__}: {details() if details else error}"


def asked(question: str, engine: str, answer: object) -> None:
    """Print a line."""
    print(f"{question} | {engine}: {answer}", flush=True)


def ask_addresses(engine: str, folder: Path) -> None:
    """IPv6 numbers, and what strangers read."""
    with Child("lighthouse", engine, folder, "::1") as house:
        asked("IPv6 numbers", engine, asyncio.run(joins(engine, folder, house.hear()["port"], "::1")))
    with Child("lighthouse", engine, folder, "127.0.0.1") as house:
        port = house.hear()["port"]
        words = asyncio.run(joins(engine, folder, port, who="stranger"))
        asked("a certificate that the lighthouse does not know", engine, words)
        with socket.create_connection(("127.0.0.1", port), 2 * HELLO) as plain, suppress(OSError):
            plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
            asked("no TLS", engine, plain.recv(1000))


def ask_forks(engine: str, folder: Path) -> None:
    """Children of a member with an open stream, and of a lighthouse."""
    with Child("lighthouse", engine, folder, "127.0.0.1") as house:
        port = house.hear()["port"]
        for how in ("idle child", "child that opens a stream", "forkserver child that opens a stream"):
            command = [sys.executable, "-m", "benchmarks.words_by_grpc", "fork", engine, str(folder), str(port), how]
            done = subprocess.run(command, capture_output=True, text=True, timeout=90)
            asked(f"fork, {how}", engine, done.stdout.strip() or f"exit code {done.returncode}: {done.stderr[-300:]}")
        house.ask("fork")
        asked("a lighthouse that has forked; a member joins", engine, asyncio.run(joins(engine, folder, port)))


async def fork(engine: str, folder: Path, port: int, how: str) -> None:
    """In a process of its own: a stream, then a child, then the stream again."""
    stream = await OPEN[engine](folder, "127.0.0.1", port)
    await stream.send(beat())
    await stream.receive()
    if how.startswith("forkserver"):
        spawn = multiprocessing.get_context("forkserver")
        spawn.set_forkserver_preload(["grpc.aio", "benchmarks.words_by_grpc"])
        child = spawn.Process(target=_joins_or_fails, args=(engine, folder, port))
        child.start()
        await asyncio.to_thread(child.join)
        code = child.exitcode or 0
    else:
        pid = os.fork()
        if pid == 0:
            if how.startswith("child"):
                _joins_or_fails(engine, folder, port)
            os._exit(0)
        code = os.waitstatus_to_exitcode((await asyncio.to_thread(os.waitpid, pid, 0))[1])
    again = "goes on"
    try:
        async with asyncio.timeout(HELLO):
            await stream.send(beat())
            await stream.receive()
    except Exception as error:  # the words are what is asked for
        again = f"breaks ({type(error).__name__})"
    print(f"the child {'is well' if code == 0 else f'ends with {code}'}; its parent's stream {again}", flush=True)
    os._exit(0)


def _joins_or_fails(engine: str, folder: Path, port: int) -> None:
    signal.alarm(10)  # its end is signal 14 where it hangs
    os._exit(0 if asyncio.run(joins(engine, folder, port)).endswith(" s") else 1)


def ask_sieges(engine: str, folder: Path) -> None:
    """Strangers, by hundreds. What they cost, how long a member then takes to join, when they are cut off."""
    tls = contexts(folder, False)
    tls.set_alpn_protocols(["h2"])

    def connected(port: int, inside: bytes | None = None) -> socket.socket:
        plain = socket.create_connection(("127.0.0.1", port), 2 * HELLO)
        if inside is None:
            return plain
        line = tls.wrap_socket(plain)
        with suppress(OSError):
            line.sendall(inside)
        return line

    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
    for kind, count, inside in (
        ("half-open", 500, None),
        ("slow hellos", 200, None),
        ("silent inside TLS", 200, b""),
        ("garbage inside TLS", 200, random.Random(0).randbytes(64 << 10)),
        ("garbage behind a good beginning inside TLS", 200, preface + random.Random(0).randbytes(64 << 10)),
    ):
        with Child("lighthouse", engine, folder, "127.0.0.1") as house:
            port = house.hear()["port"]
            asyncio.run(joins(engine, folder, port))
            before = house.ask()
            strangers = [connected(port, inside) for _ in range(count)]
            joined, during = asyncio.run(joins(engine, folder, port)), house.ask()
            for n in range(int(2 * HELLO + 4)):
                for one in strangers if kind == "slow hellos" else ():
                    with suppress(OSError):
                        one.send(b"\x16\x03\x01\x02\x00"[n : n + 1] or b"\x01")
                time.sleep(0.5)
            left, after = sum(map(_is_open, strangers)), house.ask()
            asked(
                f"{count} x {kind}", engine,
                f"a member joins in {joined}; +{during['rss'] - before['rss']:.1f} MB, CPU "
                f"{after['cpu'] - before['cpu']:.2f} s; {left} open after {HELLO + 2:g} s",
            )  # fmt: skip
            for one in strangers:
                one.close()


def _is_open(connection: socket.socket) -> bool:
    connection.settimeout(0.01)
    try:
        while connection.recv(1 << 16):
            pass
    except TimeoutError:
        return True
    except OSError:
        pass
    return False


def ask_memory(engine: str, folder: Path) -> None:
    """Members that do not read, and strangers to whom the lighthouse does not listen."""

    async def unread(port: int) -> tuple[dict[str, Any], list[Stream]]:
        streams = [await OPEN[engine](folder, "127.0.0.1", port) for _ in range(20)]
        for one in streams:
            await one.send(beat())
            await one.receive()
        return await asyncio.to_thread(house.ask, "flood"), streams

    async def unheard(port: int, shared: bool) -> str:
        async def push(stream: Stream) -> int:
            sent = 0
            with suppress(Exception):  # TimeoutError: it takes no more
                while sent < 64 << 20:
                    async with asyncio.timeout(2.0):
                        await stream.send(bytes(32 << 10))
                    sent += 32 << 10
            return sent

        before = await asyncio.to_thread(house.ask, "deaf")
        if shared:
            channel = channel_of(folder, "127.0.0.1", port)
            streams = [on_channel(channel) for _ in range(50)]
        else:
            streams = [await OPEN[engine](folder, "127.0.0.1", port) for _ in range(50)]
        sent = await asyncio.gather(*map(push, streams))
        after = await asyncio.to_thread(house.ask)
        return f"{sum(sent) >> 10} kB left; +{after['rss'] - before['rss']:.1f} MB here"

    with Child("lighthouse", engine, folder, "127.0.0.1") as house:
        port, before = house.hear()["port"], house.ask()
        told, _ = asyncio.run(unread(port))
        took = f"each took {told['taken'] >> 10} kB; +{told['rss'] - before['rss']:.1f} MB here"
        asked("20 members never read", engine, took)
        asked("... a member joins then", engine, asyncio.run(joins(engine, folder, port)))
    for shared in (False, True) if engine == "grpc" else (False,):
        with Child("lighthouse", engine, folder, "127.0.0.1") as house:
            which = "50 streams of one connection" if shared else "50 connections"
            port = house.hear()["port"]
            asked(f"nobody listens to {which}", engine, asyncio.run(unheard(port, shared)))


async def ask_sockets(folder: Path) -> None:
    """Whether the one who has dialled can be the one who serves."""
    import grpc.aio

    takes = [name for name in dir(grpc.aio.Server) if not name.startswith("_")]
    asked("a socket that is there already", "grpc", f"none of its server's methods takes one: {', '.join(takes)}")
    listening = socket.create_server(("127.0.0.1", 0))
    dialled, (accepted, _) = socket.create_connection(listening.getsockname()), listening.accept()
    house, loop, reader = Lighthouse(), asyncio.get_running_loop(), asyncio.StreamReader()
    serving = asyncio.StreamReaderProtocol(reader, lambda *ends: house.attend(framed(*ends)))
    ready = loop.connect_accepted_socket(lambda: serving, dialled, ssl=contexts(folder, True))
    opened = asyncio.open_connection(sock=accepted, ssl=contexts(folder, False), server_hostname="isles")
    stream = framed(*(await asyncio.gather(ready, opened))[1])
    await stream.send(beat())
    asked("a socket that is there already", "tls", f"the dialler serves: {len(await stream.receive() or b'')} bytes")
    await stream.close()  # type: ignore[misc]
    await asyncio.sleep(0.1)


async def ask_keys(folder: Path) -> None:
    """What a server learns of a client's certificate that no authority knows."""
    import grpc.aio

    class Handler(grpc.GenericRpcHandler):
        def service(self, _: Any) -> Any:
            async def met(_: Any, context: Any) -> bytes:
                return json.dumps(sorted(context.auth_context())).encode()

            return grpc.unary_unary_rpc_method_handler(met)

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Handler(),))
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pems(folder, "house")]))
    await server.start()
    credentials = grpc.ssl_channel_credentials(pems(folder, "house")[1], *pems(folder, "stranger"))
    options = [("grpc.ssl_target_name_override", "isles")]
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options) as channel:
        known = await channel.unary_unary("/isles/who")(b"")
    asked("a client's key that no authority knows", "grpc", f"the server is told {known.decode()}")
    await server.stop(None)
    tls = contexts(folder, True)
    tls.verify_mode, got = ssl.CERT_OPTIONAL, asyncio.get_running_loop().create_future()
    tls_server = await asyncio.start_server(
        lambda _, writer: got.set_result(writer.get_extra_info("peercert")), "127.0.0.1", 0, ssl=tls
    )
    port = tls_server.sockets[0].getsockname()[1]
    reader, _ = await asyncio.open_connection("127.0.0.1", port, ssl=contexts(folder, False, "stranger"))
    answer = (await asyncio.gather(reader.read(1), return_exceptions=True))[0]
    asked("a client's key that no authority knows", "tls", f"{answer!r}; the server has met it: {got.done()}")


def questions() -> None:
    """Each with a small experiment."""
    with certificates() as folder:
        for question in (ask_addresses, ask_forks, ask_sieges, ask_memory):
            for engine in ENGINES:
                question(engine, folder)
        asyncio.run(ask_keys(folder))
        asyncio.run(ask_sockets(folder))


def main() -> None:
    """The words of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["times", "questions", "fork"])
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--members", default="64,256")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=12.0, help="of beats, each turn")
    given = parser.parse_args()
    if importlib.util.find_spec("grpc") is None:
        sys.exit("words_by_grpc: skipped, grpcio is absent; pip install grpcio")
    if given.what == "times":
        times([int(one) for one in given.members.split(",")], given.turns, given.seconds)
    elif given.what == "questions":
        questions()
    else:
        engine, folder, port, how = given.words
        asyncio.run(fork(engine, Path(folder), int(port), how))


if __name__ == "__main__":
    main()
