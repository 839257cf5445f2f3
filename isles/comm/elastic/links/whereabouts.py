"""The lighthouse's knowledge of where workers can be reached directly: it tries each address itself, once it is told.

An address that the lighthouse reaches may still be out of another worker's reach: then those two go over the
lighthouse, as everybody does who does not listen.
"""

from __future__ import annotations

import base64
import binascii
import socket
import ssl
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from isles.comm import credentials
from isles.comm.elastic.keys import SeatKeys, introduction
from isles.comm.elastic.messages import Find, Found, Listening, Reached

_PATIENCE = 5.0  # seconds that an address is tried for
_AT_ONCE = 8  # addresses that are tried at the same time
_PLACES = 1024  # of an island

SeatPlace = tuple[int, int]
"""A seat, and a worker's place in its island."""


class Whereabouts:
    """keys: of all seats. seen(session): the address from which a session comes, "" for an unknown one."""

    def __init__(self, keys: SeatKeys, seen: Callable[[str], str]) -> None:
        self._keys, self._seen = keys, seen
        self._known: dict[SeatPlace, Listening] = {}
        self._trying = threading.Semaphore(_AT_ONCE)
        self._busy: set[SeatPlace] = set()

    def find(self, asker: int, find: Find) -> Found:
        """The way from a worker of the seat `asker` to another one."""
        there = self._known.get((find.seat, find.place), Listening("", 0, "", ""))
        word = introduction(self._keys.of(find.seat), asker).hex()
        return Found(find.seat, there.host, there.port, there.certificate, word)

    def forget(self, seat: int, place: int) -> None:
        """Forget where that worker listens, for it may not any more."""
        self._known.pop((seat, place), None)

    def listening(self, seat: int, said: Listening, answer: Callable[[Reached], None]) -> None:
        """Try the address of `seat` (-1: of somebody without one); answer(what came of it), in another thread.
        ValueError for what is no address, and where one of this seat's is being tried.
        """
        host, place = said.host or self._seen(said.session), (seat, said.place)
        if not host or not 0 < said.port < 65536 or not 0 <= said.place < _PLACES:
            raise ValueError("an address that is none")
        try:
            der = base64.b64decode(said.certificate, validate=True)
        except binascii.Error:
            raise ValueError("a certificate that is none") from None
        if place in self._busy:
            raise ValueError("an address while another one is being tried")
        self._busy.add(place)

        def work() -> None:
            with self._trying:
                why = unreachable(host, said.port, der)
            if not why and seat >= 0:
                self._known[place] = Listening(host, said.port, "", said.certificate)
            self._busy.discard(place)
            answer(Reached(host, said.port, why))

        threading.Thread(target=work, name=f"isles-try-{seat}", daemon=True).start()


def unreachable(host: str, port: int, der: bytes, seconds: float = _PATIENCE) -> str:
    """Why nobody with the certificate `der` answers at host:port, in some words; "" where somebody does."""
    try:
        with tempfile.TemporaryDirectory(prefix="isles-") as folder:
            theirs = credentials.trusting(der, "0" * 32, Path(folder) / "credentials")
            context = credentials.client_context(theirs)
        with socket.create_connection((host, port), timeout=seconds) as line:
            line.settimeout(seconds)
            context.wrap_socket(line, server_hostname=credentials.NAME).close()
    except ssl.SSLError:
        return "somebody else answers there"
    except TimeoutError:
        return f"no answer within {seconds:g} s"
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or "it is no address"
    return ""
