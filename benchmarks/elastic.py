"""What the engine of elastic worlds costs: exchanges on slow lines, processor time, signs of life.

    python -m benchmarks.elastic [line cpu round diloco beats ...] [--turns 5] [--json]

line    a pair exchanges 25 MB, both at once: over a direct link of 200 Mbit/s, and relayed where each end has 100
        Mbit/s; the share of the line's rate that payload gets. Three machines as network namespaces: Linux and root
cpu     a pair exchanges 64 MB on loopback: CPU seconds of both for each GB sent, elastic, beside gloo's and those of
        plain sockets with TLS (Python's ssl, two threads an end)
round   four workers on loopback do rounds of NoLoCo without inner work, of a model of 4 MB (8 MB to the partner):
        seconds, and CPU seconds of all, over those on gloo, in turns; linked directly, as workers of one machine are
diloco  two workers on loopback do rounds of DiLoCo of a model of 110 MB, without inner work: wall and CPU seconds, over
        those of torchft's, which sends in the clear (its faster form, one bucket; needs: pip install '.[bench]')
beats   a worker that only beats each second and is watched: its CPU seconds in a second, which is what an inner loop
        that keeps a core busy gives to them
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks._machines import machines, unavailable
from benchmarks._measure import Row, report
from benchmarks.torchft import under_torchft
from isles.comm import credentials
from isles.comm.call import Ledger
from isles.comm.gloo.transport import DistributedTransport
from isles.comm.group import Group
from isles.comm.tags import Tag
from isles.comm.transport import Deadlines, Transport
from isles.membership.keys import REQUESTS, MemberKeys
from isles.membership.lighthouse import AddressBook
from isles.membership.messages import AnnounceAddress, Entry, Lookup, decode, encode
from isles.membership.p2p.pairs import PeerConnections
from isles.membership.p2p.transport import ElasticTransport
from isles.membership.session import Query
from isles.membership.tls_session import open_router, open_session
from isles.replicas.methods.diloco import DiLoCo
from isles.replicas.methods.noloco import NoLoCo

SLOW, FAST = 25 << 20, 64 << 20  # bytes of an exchange
WORLD, PARAMETERS, ROUNDS = 4, 1 << 20, 20
LARGE, TENSORS, FEW = 27_500_000, 22, 10  # parameters of DiLoCo's model, in so many tensors; rounds
OUTER = 0.7, 0.9  # rate and momentum
BEATS = 15.0  # seconds
Turn = Callable[[int], None]


# What runs in a process of its own


def router(folder: str, address: str) -> None:
    """A lighthouse's session, which says where workers are, until its input ends."""
    session = open_router(credentials.read(Path(folder)), address)
    known = AddressBook(MemberKeys(Path(folder)), session.seen)

    def asked(query: Query) -> None:
        member, message = int(query.attachment), decode(query.payload)
        if isinstance(message, Lookup):
            query.reply(encode(known.find(member, message)))
        elif isinstance(message, AnnounceAddress):
            known.joined(member, [message.certificate])
            known.try_address(member, message, lambda answer: query.reply(encode(answer)))

    session.serve(REQUESTS, asked)
    before = _cpu()
    print("ready", flush=True)
    sys.stdin.read()
    session.close()
    print(json.dumps({"cpu": _cpu() - before}), flush=True)


def connected(stack: ExitStack, folder: str, address: str, member: int, size: int, listen: str) -> ElasticTransport:
    """The transport of a worker. listen: its address, "" for relayed."""
    mine = credentials.read(Path(folder))
    session = open_session(mine.token, address)
    stack.callback(session.close)

    def ask(message: Any, seconds: float = 10.0) -> Any:
        reply, _ = session.answer(REQUESTS, encode(message), attachment=b"%d" % member, seconds=seconds, urgent=True)
        return decode(reply or b"")

    own = credentials.own(mine.token.secret, Path(stack.enter_context(tempfile.TemporaryDirectory())) / "own")
    entry = Entry(member, MemberKeys(Path(folder)).of(member))
    pairs = PeerConnections(session, entry, ask, own, lease=3.0, notice=lambda line: None)
    stack.callback(pairs.close)
    transport = ElasticTransport(session, member, size, peers=pairs)
    stack.callback(transport.close)
    if listen:
        host, _, port = listen.rpartition(":")
        pairs.listen(host, int(port))
    pairs.start(transport)
    return transport


def elastic(folder: str, address: str, member: str, own: str, size: str, turns: str) -> None:
    """One of a pair. own: address that member 0 listens at, "" for relayed."""
    me = int(member)
    with ExitStack() as stack:
        transport = connected(stack, folder, address, me, 2, own if me == 0 else "")
        _pair(transport, me, 1)(1 << 20)
        assert transport.way(1 - me) == ("direct" if own else "relayed")
        _exchange(_pair(transport, me, int(size)), int(turns))
        time.sleep(2.0)  # the other one may still wait for the last word


def _pair(transport: ElasticTransport, me: int, size: int) -> Turn:
    sent, got = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)

    def both(turn: int) -> None:
        works = [transport.recv(1 - me, got, Tag("outer", turn)), transport.send(1 - me, sent, Tag("outer", turn))]
        while not all(work.done() for work in works):
            time.sleep(0.001)
        assert not any(work.error for work in works)

    return both


def gloo(port: str, member: str, size: str, turns: str) -> None:
    """One of a pair over torch.distributed."""
    import torch.distributed as dist

    me = int(member)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=me, world_size=2)
    sent, got = torch.zeros(int(size), dtype=torch.uint8), torch.zeros(int(size), dtype=torch.uint8)

    def both(turn: int) -> None:
        for work in (dist.irecv(got, 1 - me, tag=turn), dist.isend(sent, 1 - me, tag=turn)):
            assert work is not None
            work.wait()

    _exchange(both, int(turns))
    dist.destroy_process_group()


def tls(folder: str, port: str, member: str, size: str, turns: str) -> None:
    """One of a pair over a socket with TLS, a thread for each direction."""
    mine, me, length = credentials.read(Path(folder)), int(member), int(size)
    if me == 0:
        with socket.create_server(("127.0.0.1", int(port))) as door:
            line, _ = door.accept()
        talk = credentials.server_context(mine).wrap_socket(line, server_side=True)
    else:
        while True:
            try:
                line = socket.create_connection(("127.0.0.1", int(port)))
                break
            except ConnectionError:
                time.sleep(0.05)
        talk = credentials.unverified_context().wrap_socket(line, server_hostname=credentials.NAME)
    sent, got = bytes(1 << 20), memoryview(bytearray(1 << 20))

    def send() -> None:
        for _ in range(length >> 20):
            talk.sendall(sent)

    def both(_: int) -> None:
        thread, left = threading.Thread(target=send), length
        thread.start()
        while left:
            left -= talk.recv_into(got[: min(left, 1 << 20)])
        thread.join()

    _exchange(both, int(turns))


def noloco_elastic(folder: str, address: str, member: str, *doors: str) -> None:
    """One of four, each linked directly with each other one. doors: where they listen."""
    me = int(member)
    with ExitStack() as stack:
        transport = connected(stack, folder, address, me, WORLD, doors[me])
        while any(transport.way(peer) != "direct" for peer in range(WORLD) if peer != me):
            time.sleep(0.05)
        _rounds(transport)
        time.sleep(2.0)


def noloco_gloo(port: str, member: str) -> None:
    """One of four over torch.distributed."""
    import torch.distributed as dist

    me = int(member)
    store = dist.TCPStore("127.0.0.1", int(port), WORLD, is_master=me == 0)
    transport = DistributedTransport.join(store, me, WORLD)
    _rounds(transport)
    transport.close()


def _rounds(transport: Transport) -> None:
    """Rounds of NoLoCo with nothing to learn."""
    torch.set_num_threads(1)
    model = torch.nn.Linear(PARAMETERS, 1, bias=False)
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = NoLoCo(
        model, inner, Group(transport, tuple(range(WORLD)), "outer", Deadlines(), Ledger()), sync_every=1
    )
    model.weight.grad = torch.zeros_like(model.weight)
    _exchange(lambda turn: optimizer.step(), ROUNDS)
    optimizer.finish()


def diloco_elastic(folder: str, address: str, member: str, turns: str, *doors: str) -> None:
    """One of two, linked directly."""
    with ExitStack() as stack:
        transport = connected(stack, folder, address, int(member), 2, doors[int(member)])
        while transport.way(1 - int(member)) != "direct":
            time.sleep(0.05)
        model, inner = _large()
        group = Group(transport, (0, 1), "outer", Deadlines(), Ledger())
        optimizer = DiLoCo(model, inner, group, sync_every=1, outer_lr=OUTER[0], outer_momentum=OUTER[1])
        _exchange(lambda turn: optimizer.step(), int(turns))
        optimizer.finish()
        time.sleep(2.0)


def diloco_torchft(lighthouse: str, _: str, member: str, turns: str) -> None:
    """One of two under torchft's."""
    with ExitStack() as stack:
        model, inner = _large()
        stack.enter_context(under_torchft(model, inner, lighthouse, int(member), workers=2, every=1, bucket=True))
        _exchange(lambda turn: inner.step(), int(turns))


def _large() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model with nothing to learn."""
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(LARGE // TENSORS, 1, bias=False) for _ in range(TENSORS)))
    for own in model.parameters():
        own.grad = torch.zeros_like(own)
    return model, torch.optim.SGD(model.parameters(), lr=0.0)


def _exchange(both: Turn, turns: int) -> None:
    """Some exchanges, after one to warm up; prints seconds of each, and CPU seconds of all."""
    both(0)
    seconds, before = list[float](), _cpu()
    for turn in range(1, turns + 1):
        began = time.perf_counter()
        both(turn)
        seconds.append(time.perf_counter() - began)
    print(json.dumps({"seconds": seconds, "cpu": _cpu() - before}), flush=True)


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def beating(folder: str, address: str) -> None:
    """A worker with nothing to do but to beat; prints its CPU seconds in a second."""
    from isles.membership.client import MembershipClient
    from isles.membership.messages import Entry

    session = open_session(credentials.read(Path(folder)).token, address)
    client = MembershipClient(session, Entry(0, "0" * 32))
    transport = ElasticTransport(session, 0, 2)
    client._training = True  # it beats each second
    time.sleep(2.0)
    before = _cpu()
    time.sleep(BEATS)
    print(json.dumps({"share": (_cpu() - before) / BEATS}), flush=True)
    transport.close()
    client.close()
    session.close()


# What starts them


def _start(on: Sequence[str], what: str, *words: object) -> subprocess.Popen[str]:
    command = [*on, sys.executable, "-m", "benchmarks.elastic", "--as", what, *map(str, words)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _answers(*started: subprocess.Popen[str]) -> list[dict[str, Any]]:
    found = []
    for process in started:
        out, _ = process.communicate(timeout=600)
        assert process.returncode == 0, out
        found.append(json.loads(out.splitlines()[-1]))
    return found


def _free(host: str = "127.0.0.1") -> str:
    """An address with a port that nobody has on this machine."""
    with socket.create_server(("", 0)) as probe:
        return f"{host}:{probe.getsockname()[1]}"


def _lit(stack: ExitStack, folder: Path, host: str = "127.0.0.1", on: Sequence[str] = ()) -> tuple[str, str]:
    """The folder of its credentials, and where it listens."""
    credentials.found(folder / "run")
    MemberKeys(folder / "run")
    address = _free(host)
    light = _start(on, "router", folder / "run", address)
    assert light.stdout is not None and light.stdout.readline() == "ready\n"
    stack.callback(light.communicate)
    return str(folder / "run"), address


def line(turns: int) -> list[Row]:
    rows = []
    for name, direct, rate, bound in (("direct", True, 200e6, 0.90), ("relayed", False, 100e6, 0.65)):
        with machines(3) as (light, one, two), ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            run = _lit(stack, folder, light.address, light.enter)
            for place in (one, two):
                place.limit(rate)
            own = _free(one.address) if direct else ""
            pair = [
                _start(place.enter, "elastic", *run, member, own, SLOW, turns)
                for member, place in enumerate((one, two))
            ]
            took = median(max(both) for both in zip(*(one["seconds"] for one in _answers(*pair)), strict=True))
        share = 8 * SLOW / rate / took
        rows.append(Row(f"line, {name}, {rate / 1e6:.0f} Mbit/s", share, "of the rate", (">=", bound), f"{took:.2f} s"))
    return rows


def cpu(turns: int) -> list[Row]:
    gigabytes, used, wall = 2 * turns * FAST / 1e9, dict[str, float](), dict[str, float]()

    def note(name: str, both: list[dict[str, Any]], more: float = 0.0) -> None:
        used[name] = (sum(one["cpu"] for one in both) + more) / gigabytes
        wall[name] = median(max(each) for each in zip(*(one["seconds"] for one in both), strict=True))

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        run = _lit(stack, folder)
        ports = [_free() for _ in range(3)]
        parties: dict[str, Callable[[int], tuple[object, ...]]] = {
            "elastic": lambda member: (*run, member, ports[0], FAST, turns),
            "gloo": lambda member: (ports[1].rpartition(":")[2], member, FAST, turns),
            "tls": lambda member: (run[0], ports[2].rpartition(":")[2], member, FAST, turns),
        }
        for name, words in parties.items():
            note(name, _answers(*(_start((), name, *words(member)) for member in range(2))))
    with tempfile.TemporaryDirectory() as other, ExitStack() as stack:
        folder = Path(other)
        credentials.found(folder / "run")
        MemberKeys(folder / "run")
        address = _free()
        light = _start((), "router", folder / "run", address)
        assert light.stdout is not None and light.stdout.readline() == "ready\n"
        both = _answers(
            *(_start((), "elastic", folder / "run", address, member, "", FAST, turns) for member in range(2))
        )
        (carried,) = _answers(light)
        note("elastic, relayed", both, carried["cpu"] * turns / (turns + 1))
    rows = [Row(f"cpu, {name}", seconds, "CPU s/GB", note=f"{wall[name]:.3f} s") for name, seconds in used.items()]
    rows += [Row(f"cpu, elastic / {name}", used["elastic"] / used[name], "times") for name in ("gloo", "tls")]
    rows.append(Row("wall, elastic / gloo", wall["elastic"] / wall["gloo"], "times"))
    return rows


def round(turns: int) -> list[Row]:
    parties = {"elastic": noloco_elastic, "gloo": noloco_gloo}
    wall: dict[str, list[float]] = {name: [] for name in parties}
    used: dict[str, list[float]] = {name: [] for name in parties}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        run = _lit(stack, folder)
        for _ in range(turns):
            doors = [_free() for _ in range(WORLD)]
            words: dict[str, tuple[object, ...]] = {"elastic": run, "gloo": (doors[0].rpartition(":")[2],)}
            for name, party in parties.items():
                more = doors if name == "elastic" else []
                world = [_start((), party.__name__, *words[name], member, *more) for member in range(WORLD)]
                told = _answers(*world)
                wall[name].append(median(max(each) for each in zip(*(one["seconds"] for one in told), strict=True)))
                used[name].append(sum(one["cpu"] for one in told) / ROUNDS)
    rows = []
    for what, found, unit in (("", wall, "s"), (" CPU", used, "CPU s")):
        ratio = median(mine / theirs for mine, theirs in zip(found["elastic"], found["gloo"], strict=True))
        note = ", ".join(f"{name} {median(each):.3f} {unit}" for name, each in found.items())
        rows.append(Row(f"round of {WORLD},{what} elastic / gloo", ratio, "times", note=note))
    return rows


def diloco(turns: int) -> list[Row]:
    if not find_spec("torchft"):
        print("diloco is skipped: torchft is not there; pip install '.[bench]'", file=sys.stderr)
        return []
    os.environ.setdefault("RUST_LOG", "warn")
    from torchft.coordination import LighthouseServer

    wall, used = {"elastic": list[float](), "torchft": list[float]()}, {"elastic": 0.0, "torchft": 0.0}
    with ExitStack() as stack:
        run = _lit(stack, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        server = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, quorum_tick_ms=10)
        stack.callback(server.shutdown)
        theirs = f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
        for turn in range(turns):
            doors = [_free() for _ in range(2)]
            parties: dict[str, tuple[object, ...]] = {"elastic": (*run, doors), "torchft": (theirs, "", [])}
            for name, (one, other, more) in [*parties.items()][:: 1 if turn % 2 else -1]:
                both = [_start((), f"diloco_{name}", one, other, member, FEW, *more) for member in range(2)]  # type: ignore
                told = _answers(*both)
                wall[name] += [max(each) for each in zip(*(one["seconds"] for one in told), strict=True)]
                used[name] += sum(one["cpu"] for one in told)
    rows = []
    for what, (mine, other), unit in (
        ("", (median(wall["elastic"]), median(wall["torchft"])), "s"),
        (" CPU", (used["elastic"] / turns / FEW, used["torchft"] / turns / FEW), "CPU s"),
    ):
        note = f"elastic {mine:.3f} {unit}, torchft {other:.3f} {unit}"
        rows.append(Row(f"round of DiLoCo, 110 MB,{what} elastic / torchft", mine / other, "times", ("<=", 1.0), note))
    return rows


def beats(_: int) -> list[Row]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        run = _lit(stack, folder)
        (found,) = _answers(_start((), "beating", *run))
    return [Row("beats, one a second", found["share"], "of a core", ("<=", 0.01))]


PARTIES = {
    one.__name__: one
    for one in (router, elastic, gloo, tls, noloco_elastic, noloco_gloo, diloco_elastic, diloco_torchft, beating)
}
TABLES = {one.__name__: one for one in (line, cpu, round, diloco, beats)}


def main() -> int:
    """The exit code: 1 if a bound is missed."""
    if sys.argv[1:2] == ["--as"]:
        PARTIES[sys.argv[2]](*sys.argv[3:])
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", nargs="*", choices=[*TABLES, []], default=[*TABLES], help="default: all")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    reason = unavailable()
    if reason:
        print(f"{parser.prog}: line is skipped, {reason}", file=sys.stderr)
    rows = [row for name in options.what if not (reason and name == "line") for row in TABLES[name](options.turns)]
    return report(rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
