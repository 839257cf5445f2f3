"""Somebody who has the token of an elastic run, a member of it, and bad intentions; and one who has neither."""

from __future__ import annotations

import json
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from isles.comm import credentials
from isles.comm.credentials import Credentials, Token
from isles.comm.sockets.connection import HEAD, MARK, URGENT, LinkLost
from isles.comm.tags import Tag
from isles.membership.hub import Frame, FrameKind, pack
from isles.membership.keys import HELLO, NOTIFY, RELAY_TICKETS, REQUESTS, authenticate, signature, state_key
from isles.membership.messages import Entry, Hello, Lookup, PeerAddress, decode, encode
from isles.membership.p2p.stream import TICKET_SIZE, Head, PairHello, Stream, as_dialler, show
from isles.membership.tls_session import Session, open_session
from tests.membership.sessions import free_port
from tests.strangers.callers import call, prove, read, say

Answer = tuple[bytes | None, bytes | None]
NEVER: Answer = (None, b"never")
Sign = Callable[[str, bytes], bytes]  # of an address and what is said there
UNASKED = Tag("outer", 1 << 50)


class Attacker:
    """folder: its own. victim: a member that trains."""

    def __init__(self, address: str, token: Token, folder: Path, *, version: str, corpus: str, victim: int) -> None:
        self.address, self.token, self.folder, self.victim = address, token, folder, victim
        self.host, self.port = address.rpartition(":")[0], int(address.rpartition(":")[2])
        self.version, self.corpus = version, corpus
        self.own = credentials.own(token.secret, folder / "own")
        self.session = open_session(token, address)
        self.entry: Any = self.hello()
        assert isinstance(self.entry, Entry)
        self.word: Sign = partial(signature, self.entry.member, self.entry.key)
        self.session.present(f"isles/member/{self.entry.member}")
        found = decode(self.ask(REQUESTS, encode(Lookup(victim)), self.word)[0] or b"")
        assert isinstance(found, PeerAddress)
        self.peer_key, (self.certificate,) = bytes.fromhex(found.peer_key), found.certificates

    def hello(self) -> Any:
        """The answer to a greeting as it should be."""
        said = encode(Hello(self.version, self.corpus, self.session.name(), (self.own.token.fingerprint,)))
        return decode(self.ask(HELLO, said)[0] or b"")

    def ask(self, key: str, said: bytes, word: bytes | Sign | None = None) -> Answer:
        """The answer, asked again while nobody takes it."""
        for _ in range(100):
            (answer,) = self.flood(key, [said], word)
            if answer != (None, None):
                return answer
            time.sleep(0.05)
        return None, None

    def flood(
        self, key: str, said: list[bytes], word: bytes | Sign | None = None, seconds: float = 5.0
    ) -> list[Answer]:
        """All at once; the answers, in the order in which they came."""
        answers, over = list[Answer](), threading.Semaphore(0)

        def answered(reply: bytes | None, refusal: bytes | None) -> None:
            answers.append((reply, refusal))
            over.release()

        for one in said:
            attachment = word(key, one) if callable(word) else word
            self.session.ask(key, one, answered, attachment=attachment, seconds=seconds)
        for _ in said:
            assert over.acquire(timeout=seconds + 10.0)
        return answers

    @contextmanager
    def overhearing(self, *keys: str) -> Iterator[list[tuple[bytes, bytes]]]:
        """(word, proof) of what is said at those addresses meanwhile, as far as anybody says it to a member."""
        heard, ear = list[tuple[bytes, bytes]](), open_session(self.token, self.address)
        try:
            for key in keys:
                ear.serve(key, lambda query: heard.append((query.payload, query.attachment)))
            yield heard
        finally:
            ear.close()

    def told(self, message: Any, word: bytes | Sign | None) -> Answer:
        """An order to the victim."""
        return self.ask(f"{NOTIFY}/{self.victim}", encode(message), word)

    def call(self, said: bytes, word: bytes | None) -> Answer:
        """Ask the victim to dial somebody."""
        return self.ask(f"isles/dial/{self.victim}", said, word)

    def called(self, member: int, island_rank: int = 0, ticket: bytes = bytes(TICKET_SIZE)) -> tuple[bytes, bytes]:
        """What one says to be dialled, in the name of a member, and the proof that this one can make."""
        said = struct.pack("<qHBq24s", member, island_rank, 0, -1, ticket)
        return said, authenticate(self.peer_key, b"isles dials\0", said)

    @contextmanager
    def paired(
        self, *, member: int | None = None, word: bytes | None = None, shows: Credentials | None = None
    ) -> Iterator[Stream]:
        """A connection to the victim, over the lighthouse. member: whose name it says; word: in place of the
        introduction; shows: the certificate, and the key, in place of its own. LinkLost where it is not let in.
        """
        ticket = self.session.answer(RELAY_TICKETS, b"", seconds=5.0)[0]
        assert ticket is not None
        said, proof = self.called(self.entry.member, ticket=ticket)
        assert self.call(said, proof) == (b"", None)
        token = Token(self.certificate, (self.peer_key if word is None else word).hex())
        hello = PairHello(self.entry.member if member is None else member, 0, True)
        talk = as_dialler(self.session.connect_by_ticket(ticket, 5.0), token, hello)
        shows = shows or self.own
        show(talk, shows, (shows.token.fingerprint,), self.certificate)
        stream = Stream(talk, "relayed", 3.0)
        try:
            yield stream
        finally:
            stream.close()

    def flooded(self, heads: list[Head], seconds: float) -> tuple[int, list[tuple[int, int]]]:
        """Pieces for the victim for as long as it takes them, `seconds` at most: how many left whole, and what was said
        of them.
        """
        left, said = 0, list[tuple[int, int]]()
        with self.paired() as stream:
            over = threading.Timer(seconds, stream.cut)
            over.start()
            with suppress(LinkLost):
                for head in heads:
                    stream.send(head, bytes(head.size), lambda *reply: said.append(reply))
                    left += 1
            over.cancel()
        return left, said

    def mail(self, *heads: Head, seconds: float = 2.0) -> list[tuple[int, int]]:
        """Pieces for the victim, of zeros; what it says of them within `seconds`."""
        with self.paired() as stream:
            said = list[tuple[int, int]]()
            for head in heads:
                stream.send(head, bytes(head.size), lambda *reply: said.append(reply))
            until = time.monotonic() + seconds
            while len(said) < len(heads) and time.monotonic() < until:
                stream.wait(0.1, lambda *reply: said.append(reply))
            return said

    def gift(self, said: Any) -> Answer:
        """A request for a file of the victim's."""
        return self.ask(state_key(str(self.victim)), said if isinstance(said, bytes) else json.dumps(said).encode())

    def close(self) -> None:
        """Be gone."""
        self.session.close()

    # Without the token

    def raw(self, said: bytes) -> None:
        """To the port, before TLS; what it answers is read for a moment."""
        with call(self.port, said, self.host) as line:
            line.settimeout(0.3)
            read(line, 64)

    def inside_tls(self, said: bytes) -> None:
        """To whoever answers in TLS."""
        try:
            with (
                socket.create_connection((self.host, self.port), 10.0) as line,
                credentials.unverified_context().wrap_socket(line) as talk,
            ):
                talk.settimeout(0.3)
                say(talk, said)
                read(talk, 64)
        except (ssl.SSLError, ConnectionError, TimeoutError):
            return  # it was shown the door

    def enters(self, *, secret: str | None = None, speaker: str = "node", tls: bool = True) -> bool:
        """Whether a session opens. secret: that it proves to know; "": it says at once what it wants. speaker: in whose
        name. tls: whether it speaks TLS.
        """
        token = Token(self.token.fingerprint, self.token.secret if secret is None else secret)
        try:
            with socket.create_connection((self.host, self.port), 10.0) as line:
                talk: socket.socket = credentials.unverified_context().wrap_socket(line) if tls else line
                talk.settimeout(2.0)
                if secret == "":
                    word = pack(Frame(FrameKind.WATCH, 1))
                    say(talk, HEAD.pack(MARK, URGENT | len(word)) + word)
                    return read(talk, 64)[:4] == MARK
                return prove(talk, token, speaker) and read(talk, 4) == MARK
        except (ssl.SSLError, ConnectionError, TimeoutError):
            return False

    def overheard(self) -> bytes:
        """What somebody who joins says on the line, encrypted, as one in between sees it."""
        with Overhearing(self.host, self.port) as between:
            there = open_session(self.token, f"127.0.0.1:{between.port}", patience=5.0)
            there.close()
            return between.heard()


class Overhearing:
    """A line in between, which writes down what goes to the lighthouse."""

    def __init__(self, host: str, port: int) -> None:
        self.port, self._there, self._said = free_port(), (host, port), bytearray()
        self._door = socket.create_server(("127.0.0.1", self.port))
        self._threads: list[threading.Thread] = []
        self._start(self._serve)

    def __enter__(self) -> Overhearing:
        return self

    def __exit__(self, *_: object) -> None:
        self._door.close()
        for thread in self._threads:
            thread.join(5.0)

    def heard(self) -> bytes:
        """All so far."""
        return bytes(self._said)

    def _start(self, work: Callable[..., None], *arguments: Any) -> None:
        self._threads.append(threading.Thread(target=work, args=arguments, daemon=True))
        self._threads[-1].start()

    def _serve(self) -> None:
        try:
            near, _ = self._door.accept()
        except OSError:
            return
        far = socket.create_connection(self._there)
        self._start(self._pass_on, near, far, self._said)
        self._start(self._pass_on, far, near, bytearray())

    @staticmethod
    def _pass_on(source: socket.socket, target: socket.socket, noted: bytearray) -> None:
        try:
            while data := source.recv(1 << 16):
                noted.extend(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            source.close()


def other_run(folder: Path) -> Credentials:
    """Of a run that this is not."""
    return credentials.found(folder)


def session_of(attacker: Attacker) -> Session:
    """Another session of its own."""
    return open_session(attacker.token, attacker.address)
