"""The transport over real sessions on loopback: all through the lighthouse, and directly."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from queue import Queue

import pytest
import torch

import isles
from isles.comm import credentials
from isles.comm.collectives.basic import all_done
from isles.comm.credentials import Token
from isles.comm.errors import DeadlinePassed, PeerLost, PeerSilent, RoundClosed
from isles.comm.sockets.connection import LinkLost
from isles.comm.sockets.proof import TokenRefused
from isles.comm.tags import Tag
from isles.comm.transport import Transport
from isles.membership.messages import read_paths
from isles.membership.p2p.inbox import UNEXPECTED
from isles.membership.p2p.stream import CHUNK, Stream
from isles.membership.p2p.stream import TAKEN as TAKEN_KIND
from isles.membership.p2p.transport import ElasticTransport
from isles.membership.session import Query
from isles.membership.tls_session import open_router, open_session
from tests.membership.sessions import router, run_elastic, settled, vanish, workers
from tests.replicas.workers import RUNS, train_all

TAKEN = [name for name, (method, _) in RUNS.items() if method in ("localsgd", "diloco", "noloco", "fedavg", "slowmo")]


def within(seconds: float, true: Callable[[], bool]) -> bool:
    """Whether it becomes true in that time."""
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.01)
    return true()


def random_bytes(size: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("direct", "connections"), [(False, 1), (True, 1), (False, 3), (True, 3)])
def test_pairs_of_all_sizes_at_once(tmp_path: Path, direct: bool, connections: int) -> None:
    """Both ways at the same time, receives posted before and after; nothing is sent twice on a whole line."""
    sizes = [0, 1, CHUNK, 3 * CHUNK + 5]
    with workers(tmp_path, 2, direct=direct, connections=connections) as pair:
        assert within(10.0, lambda: all(len(one._seen) == 1 for one in pair))
        works, checks = [], []
        for number, size in enumerate(sizes):
            for me, other in ((0, 1), (1, 0)):
                sent, got = random_bytes(size, 10 * number + me), torch.zeros(size, dtype=torch.uint8)
                tag = Tag("outer", 1, number)
                if number % 2:
                    works.append(pair[other].recv(me, got, tag))
                works.append(pair[me].send(other, sent, tag))
                if not number % 2:
                    works.append(pair[other].recv(me, got, tag))
                checks.append((sent, got))
        settled(*works)
        assert [work.error for work in works] == [None] * len(works)
        assert all(torch.equal(sent, got) for sent, got in checks)
        assert all(
            {stream.lane for stream in one._alive[1 - me]} == {*range(connections)} for me, one in enumerate(pair)
        )
        way = "direct" if direct else "relayed"
        assert all(one.carried == Counter({way: sum(sizes), "relayed": sum(sizes) * (not direct)}) for one in pair)
        assert within(10.0, lambda: all(one.paths()[0][2] for one in pair))  # a quarter of a lease later
        for me, one in enumerate(pair):
            ((peer, told, round_trip, *counts),) = read_paths(json.loads(json.dumps(one.paths())))
            assert (peer, told, counts) == (1 - me, way, [sum(sizes), sum(sizes)]) and 0 < round_trip < 3.0  # the lease


def test_an_answer_that_does_not_come_is_no_refusal(tmp_path: Path) -> None:
    with router(tmp_path) as (mine, address, light):
        held: list[Query] = []
        light.serve("silent", held.append)
        light.serve("refuses", lambda asked: asked.refuse(b"later"))
        session = open_session(mine.token, address)
        try:

            def answer(key: str) -> tuple[bytes | None, bytes | None]:
                answers = Queue[tuple[bytes | None, bytes | None]]()
                session.ask(key, b"", lambda *answer: answers.put(answer), seconds=0.5)
                return answers.get(timeout=10.0)

            assert within(10.0, lambda: answer("refuses") == (None, b"later"))  # its way is known soon
            assert answer("silent") == (None, None) and held
        finally:
            session.close()


@pytest.mark.parametrize(("direct", "connections"), [(False, 1), (True, 1), (True, 2)])
def test_a_connection_that_breaks_is_made_anew(tmp_path: Path, direct: bool, connections: int) -> None:
    """In the middle of a message, again and again: it is sent once more, and taken once."""
    with workers(tmp_path, 2, direct=direct, connections=connections) as (one, two):
        sent = [random_bytes(8 * CHUNK + seed, seed) for seed in range(8)]
        got = [torch.zeros_like(data) for data in sent]
        works = [one.send(1, data, Tag("outer", 1, number)) for number, data in enumerate(sent)]
        for number, out in enumerate(got):
            work = two.recv(0, out, Tag("outer", 1, number))
            assert within(10.0, lambda: one._alive.get(1))
            for stream in [*one._alive[1]] if number % 2 else ():
                stream.cut()
            settled(work, seconds=20.0)
            assert work.error is None
        settled(*works)
        assert not any(work.error for work in works)
        assert all(torch.equal(a, b) for a, b in zip(sent, got, strict=True)) and one.resent >= 1
        assert not one.lost and not two.lost and two._inboxes[0].held() == 0


def test_who_waits_for_a_round_that_is_over_is_told(tmp_path: Path) -> None:
    """At once, whether it came before the round was over or comes after; later rounds and others' are untouched."""
    with workers(tmp_path, 3) as (one, two, three):
        assert within(10.0, lambda: all(len(end._seen) == 2 for end in (one, two, three)))
        buffers = [torch.zeros(8, dtype=torch.uint8) for _ in range(5)]
        waits = [two.recv(0, buffers[round], Tag("outer", round, 0, 1)) for round in range(4)]
        sends = [two.send(0, buffers[0], Tag("outer", round)) for round in range(4)]
        other = three.recv(0, buffers[4], Tag("outer", 2))
        settled(*sends)
        assert not any(work.done() for work in waits)
        one.over("outer", 2)
        settled(*waits[:3])
        assert (
            [type(work.error) for work in waits[:3]] == [RoundClosed] * 3 and not waits[3].done() and not other.done()
        )
        late, asks = (
            two.send(0, random_bytes(3 * CHUNK, 1), Tag("outer", 2, 1)),
            two.recv(0, buffers[0], Tag("outer", 2)),
        )
        settled(late, asks)
        assert isinstance(late.error, RoundClosed) and isinstance(asks.error, RoundClosed)
        after = [one.recv(1, buffers[1], Tag("outer", 3)), two.send(0, buffers[2], Tag("outer", 3, 1))]
        after += [one.send(1, buffers[3], Tag("outer", 3, 0, 1)), waits[3]]
        settled(*after)
        assert [work.error for work in after] == [None] * 4
        one.over("outer", 0)  # it begins anew with an earlier round
        settled(two.send(0, buffers[2], Tag("outer", 1, 7)), one.recv(1, buffers[1], Tag("outer", 1, 7)))
        assert buffers[2].equal(buffers[1])


def test_the_same_bits_and_bytes_as_on_the_virtual_clock(tmp_path: Path) -> None:
    names = ["diloco, int8", "noloco", "noloco, single vector"]
    real = run_elastic(tmp_path, train_all, 3, names, 8)
    assert real == isles.run_virtual(train_all, 3, args=(names, 8))


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_method_that_is_taken_gives_the_same_bits(tmp_path: Path, size: int) -> None:
    real = run_elastic(tmp_path, train_all, size, TAKEN, 11, direct=True)
    virtual = isles.run_virtual(train_all, size, args=(TAKEN, 11))
    for rank in range(size):
        for name in TAKEN:
            assert real[rank][name] == virtual[rank][name], (rank, name)


@pytest.mark.parametrize(("messages", "late"), [(12, 0.0), (40, 1.5)])
def test_what_nobody_asked_for_waits_and_is_delivered_when_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: int, late: float
) -> None:
    """late: seconds until the sender hears that the last message for which there is room is taken. By then it cannot
    send any more: the connections hold back what comes behind.
    """
    say, taken = Stream.say, count(1)

    def slowly(stream: Stream, kind: int, number: int = 0) -> None:
        if kind == TAKEN_KIND and next(taken) == UNEXPECTED // (2 * CHUNK):
            time.sleep(late)
        say(stream, kind, number)

    monkeypatch.setattr(Stream, "say", slowly)
    with workers(tmp_path, 2) as (one, two):
        sent = [random_bytes(2 * CHUNK, seed) for seed in range(messages)]
        works = [one.send(1, data, Tag("outer", 1, number)) for number, data in enumerate(sent)]

        def kept() -> bool:
            return two._inboxes[0].held() == UNEXPECTED and sum(work.done() for work in works) == UNEXPECTED // (
                2 * CHUNK
            )

        assert within(10.0, kept)
        time.sleep(0.3)
        assert kept()
        got = [torch.zeros_like(data) for data in sent]
        settled(*works, *(two.recv(0, out, Tag("outer", 1, number)) for number, out in enumerate(got)))
        assert all(torch.equal(a, b) for a, b in zip(sent, got, strict=True))
        assert set(two.refused) == {(0, "more unexpected messages than are buffered")}


def test_a_call_that_was_overheard_brings_nobody_in(tmp_path: Path) -> None:
    """A member may listen in where another one is asked to dial: what it hears opens nothing for itself."""
    with workers(tmp_path, 2) as pair, pair.guest() as thief:
        (one, two), heard, out = pair, list[tuple[bytes, bytes]](), torch.zeros(8, dtype=torch.uint8)
        thief.serve("isles/dial/1", lambda query: heard.append((query.payload, query.attachment)))
        work = two.recv(0, out, Tag("outer", 1))
        settled(one.send(1, random_bytes(8, 1), Tag("outer", 2)), seconds=20.0)
        assert within(5.0, lambda: heard)
        said, proof = heard[0]
        for what, beside in ((said[:-1] + bytes([said[-1] ^ 1]), proof), (said, proof[:-1] + bytes([proof[-1] ^ 1]))):
            assert thief.answer("isles/dial/1", what, attachment=beside, seconds=5.0) == (None, b"never")
        assert two.refused[-1, "a message in another's name"] == 2
        thief.answer("isles/dial/1", said, attachment=proof, seconds=5.0)  # said again: its ticket is used up
        time.sleep(0.5)
        assert not work.done()
        settled(work, one.send(1, data := random_bytes(8, 1), Tag("outer", 1)))
        assert torch.equal(out, data)


def test_who_has_another_certificate_or_introduction_is_not_let_in(tmp_path: Path) -> None:
    """Swapped pairs: neither whom the lighthouse does not vouch for, nor who does not know the introduction."""
    with workers(tmp_path, 3, direct=True) as trio:
        assert within(10.0, lambda: trio[0].way(1) == "direct")
        found = trio.pairs[2]._find(0)
        assert found is not None
        other = tuple(one[::-1] for one in found.certificates)
        line = trio.pairs[2]
        forged = type(found)(found.member, found.host, found.port, other, found.peer_key)
        unknown = type(found)(found.member, found.host, found.port, found.certificates, "0" * 32)
        for wrong, why in ((forged, "not the machine"), (unknown, "does not take this token")):
            with pytest.raises(LinkLost, match=why):
                line._dial(0, wrong, sends=True)
        line._dial(0, found, sends=True).close()


def test_another_length_is_refused_on_both_sides(tmp_path: Path) -> None:
    with workers(tmp_path, 2) as (one, two):
        out = torch.zeros(5, dtype=torch.uint8)
        receive = two.recv(0, out, Tag("outer", 1))
        wrong = one.send(1, random_bytes(6, 0), Tag("outer", 1))
        settled(wrong)
        assert isinstance(wrong.error, PeerLost) and "refused" in str(wrong.error) and not receive.done()
        assert two.refused == {(0, "another length than the receive's"): 1}
        right = random_bytes(5, 1)
        settled(one.send(1, right, Tag("outer", 1)), receive)
        assert torch.equal(out, right)


def test_whoever_ends_fails_its_own_works_alone(tmp_path: Path) -> None:
    with workers(tmp_path, 3) as (one, two, three):
        gone: list[int] = []
        one._on_lost = gone.append
        out = torch.zeros(5, dtype=torch.uint8)
        receive, other = one.recv(2, out, Tag("outer", 1)), one.recv(1, out, Tag("outer", 2))
        send = one.send(2, random_bytes(UNEXPECTED + CHUNK, 0), Tag("outer", 3))
        began = time.monotonic()
        vanish(three)
        settled(receive, send)
        assert time.monotonic() - began < 2.0
        assert isinstance(receive.error, PeerLost) and receive.error.rank == 2 and isinstance(send.error, PeerLost)
        assert within(5.0, lambda: gone == [2]) and 2 in one.lost
        late = one.send(2, out, Tag("outer", 4)), one.recv(2, out, Tag("outer", 4))
        assert all(isinstance(work.error, PeerLost) for work in late)
        assert not other.done()
        settled(two.send(0, random_bytes(5, 1), Tag("outer", 2)), other)
        assert other.error is None


def test_direct_links_outlive_the_lighthouse(tmp_path: Path) -> None:
    with workers(tmp_path, 2, direct=True) as pair:
        assert within(10.0, lambda: all(one.way(1 - one.rank) == "direct" for one in pair))
        for round in range(1, 4):
            if round == 2:
                pair.router.close()
            sent, got = random_bytes(3 * CHUNK, round), torch.zeros(3 * CHUNK, dtype=torch.uint8)
            settled(pair[0].send(1, sent, Tag("outer", round)), pair[1].recv(0, got, Tag("outer", round)))
            assert torch.equal(sent, got) and not pair[0].lost


def test_a_worker_that_is_not_reached_any_more_is_relayed(tmp_path: Path) -> None:
    """Nothing is lost in between, and nobody is; where the lighthouse is gone too, the other one is."""
    with workers(tmp_path, 2, direct=True) as pair:
        one, two = pair
        assert within(10.0, lambda: all(end.way(1 - end.rank) == "direct" for end in pair))
        listener = pair.pairs[0]._listener
        assert listener is not None
        listener.close()
        for end in pair:
            for stream in [*end._alive[1 - end.rank]]:
                stream.cut()
        sent, got = random_bytes(3 * CHUNK, 0), torch.zeros(3 * CHUNK, dtype=torch.uint8)
        settled(two.send(0, sent, Tag("outer", 1)), one.recv(1, got, Tag("outer", 1)), seconds=20.0)
        assert torch.equal(sent, got) and not one.lost and two.carried["relayed"] >= len(sent)
        pair.router.close()
        assert within(10.0, lambda: 1 in one.lost)


def test_strangers_get_no_session(tmp_path: Path) -> None:
    """Another run's certificate, another secret, a port that is taken, a worker that has no key to listen with."""
    with router(tmp_path) as (mine, address, _):
        other = credentials.found(tmp_path / "other").token
        with pytest.raises(TokenRefused, match="is not the machine of this token"):
            open_session(other, address, patience=1.5)
        with pytest.raises(TokenRefused, match="does not take this token"):
            open_session(Token(mine.token.fingerprint, "0" * 32), address, patience=1.5)
        with pytest.raises(ValueError, match="the port is taken"):
            open_router(mine, address)
        with pytest.raises(ValueError, match="needs the run's key"):
            open_router(replace(mine, key=None), "127.0.0.1:29400")
        open_session(mine.token, address).close()
    with pytest.raises(LinkLost, match="connection refused"):
        open_session(mine.token, address, patience=0.5)


def test_it_is_a_transport_and_ends_its_threads(tmp_path: Path) -> None:
    before = {thread.name for thread in threading.enumerate()}
    with workers(tmp_path, 2) as (one, two):
        transport: Transport = one
        assert transport.rank == 0 and transport.size == 2
        with pytest.raises(ValueError, match="name the member"):
            two.recv(None, torch.zeros(1, dtype=torch.uint8), Tag("outer", 1))
        settled(one.send(1, random_bytes(3, 0), Tag("outer", 1)))
    assert within(5.0, lambda: {t.name for t in threading.enumerate() if t.name.startswith("isles")} <= before)


STANDING = """
import sys, time
from pathlib import Path
from isles.comm import credentials
from isles.comm.credentials import Token
from isles.membership.tls_session import open_session
from isles.membership.p2p.transport import ElasticTransport
session = open_session(credentials.read(Path(sys.argv[1])).token, sys.argv[2])
transport = ElasticTransport(session, 1, 2)
print("here", flush=True)
time.sleep(60)
"""


@pytest.mark.long
@pytest.mark.parametrize(("how", "longest"), [(signal.SIGKILL, 1.0), (signal.SIGSTOP, 4.5)])
def test_who_is_killed_or_stands_still_is_told(tmp_path: Path, how: signal.Signals, longest: float) -> None:
    """A killed process within a second, a stopped one within the lease of 3 s + 1.5 s; it is back when it goes on."""
    with router(tmp_path) as (mine, address, _):
        told: list[tuple[str, float]] = []
        session = open_session(mine.token, address)
        began = time.monotonic()
        transport = ElasticTransport(
            session,
            0,
            2,
            on_lost=lambda member: told.append(("gone", time.monotonic() - began)),
            on_back=lambda member: told.append(("back", time.monotonic() - began)),
        )
        folder = str(mine.certificate.parent)
        child = subprocess.Popen([sys.executable, "-c", STANDING, folder, address], stdout=subprocess.PIPE, text=True)
        try:
            assert child.stdout is not None and child.stdout.readline() == "here\n"
            time.sleep(1.0)
            began = time.monotonic()
            os.kill(child.pid, how)
            receive = transport.recv(1, torch.zeros(1, dtype=torch.uint8), Tag("outer", 1))
            settled(receive, seconds=10.0)
            assert isinstance(receive.error, PeerLost) and told[-1][0] == "gone" and told[-1][1] <= longest
            if how == signal.SIGSTOP:
                os.kill(child.pid, signal.SIGCONT)
                assert within(10.0, lambda: told[-1][0] == "back" and 1 not in transport.lost)
        finally:
            child.kill()
            child.wait()
            transport.close()
            session.close()


def test_who_falls_silent_ends_what_waits_for_it_alone(tmp_path: Path) -> None:
    """At once and by name; the works with others go on, and so do later ones with the silent one."""
    with workers(tmp_path, 3) as trio:
        buffers = [torch.zeros(8, dtype=torch.uint8) for _ in range(3)]
        silent = trio[0].recv(1, buffers[0], Tag("outer", 1)), trio[0].send(2, random_bytes(8, 1), Tag("outer", 1))
        other = trio[0].recv(2, buffers[1], Tag("outer", 1))
        trio[0].give_up(1, PeerSilent(1))
        assert silent[0].done() and isinstance(silent[0].error, PeerSilent) and silent[0].error.rank == 1
        later = trio[0].recv(1, buffers[2], Tag("outer", 2))
        sent = [
            trio[2].send(0, random_bytes(8, 2), Tag("outer", 1)),
            trio[1].send(0, random_bytes(8, 1), Tag("outer", 2)),
        ]
        taken = trio[2].recv(0, torch.zeros(8, dtype=torch.uint8), Tag("outer", 1))
        settled(silent[1], other, later, taken, *sent)
        assert not any(work.error for work in (silent[1], other, later, taken, *sent))
        assert buffers[1].equal(random_bytes(8, 2)) and buffers[2].equal(random_bytes(8, 1))


def test_whoever_stands_still_for_somebody_doubts(tmp_path: Path) -> None:
    """By itself, not while it computes with the exchange under way behind it."""
    doubted = list[int]()
    with workers(tmp_path, 2) as pair:
        pair[0].liveness._ask = doubted.append
        work = pair[0].recv(1, torch.zeros(8, dtype=torch.uint8), Tag("outer", 1))
        transfer = pair[0].run(all_done([work]), "outer", 1.4)
        time.sleep(0.2)
        assert not doubted
        with pytest.raises(DeadlinePassed):
            transfer.wait()
        assert doubted and set(doubted) == {1}


def test_a_report_of_paths_holds_up_no_loss(tmp_path: Path) -> None:
    """Whoever waits for the table of connections must not hold the lock that ends transfers, which is taken inside."""
    with workers(tmp_path, 2) as (one, _):
        reports = threading.Thread(target=one.paths)
        with one._peers_lock:
            reports.start()
            reports.join(0.2)
            assert one._lock.acquire(timeout=1.0)
            one._lock.release()
        reports.join(5.0)
        assert not reports.is_alive()
