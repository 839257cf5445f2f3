"""`isles doctor --join`: checks a worker's connection to its lighthouse, step by step, up to the first failure.

name -> route -> TLS -> token -> session -> version -> clock -> both rates -> whether others reach this machine
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

from isles.base.version import __version__
from isles.cli.terminal import Check
from isles.comm.credentials import Token
from isles.comm.sockets.connection import LinkLost
from isles.comm.sockets.listener import EchoServer
from isles.comm.sockets.proof import SecretRefused, TokenRefused
from isles.comm.tcp import written
from isles.membership.keys import ABOUT, PIECE, REACH
from isles.membership.messages import (
    MESSAGES,
    About,
    AnnounceAddress,
    Reachability,
    Refusal,
    decode,
    encode,
    takes,
    version_text,
)
from isles.membership.requests import ask, measure_lighthouse_link
from isles.membership.tls_session import Session, open_session
from isles.report.units import format_bytes

_PATIENCE = 5.0  # seconds for a connection
_TRIED = 20.0  # seconds for the lighthouse to try an address
_SKEW = 12 * 3600.0  # tolerated seconds between clocks: certificates are valid from a day before they were made


def walk(host: str, port: int, token: Token, listen: tuple[str, int] | None, announced: str) -> Iterator[Check]:
    """The checks, up to the first that fails. listen: (host, port) of this machine at which others are to reach it;
    announced: the address for others, "": the one under which the lighthouse sees this machine.
    """
    for check in _route(host, port):
        yield check
        if not check.good:
            return
    with ExitStack() as stack:
        why: Exception | None = None
        try:
            session = open_session(token, written(host, port), _PATIENCE)
            stack.callback(session.close)
        except (TokenRefused, LinkLost) as error:
            why = error
        if isinstance(why, LinkLost):
            yield Check("tls", False, f"{written(host, port)} is no lighthouse, or busy ({why}): check the port")
            return
        yield Check("tls", True, "1.3, with a certificate")
        is_known = why is None or isinstance(why, SecretRefused)
        yield Check("token", is_known, "the certificate is that of this token" if is_known else str(why))
        if is_known:
            says = "the lighthouse accepts this token"
            if why is not None:
                says = "the lighthouse does not take this token's secret; copy the whole token once more"
            yield Check("session", why is None, says)
        if why is not None:
            return
        about = decode(ask(session, ABOUT, b"") or b"")
        if not isinstance(about, About):
            yield Check("version", False, f"the lighthouse does not report it: install isles {__version__} there too")
            return
        yield from _run(about)
        if takes(about.messages, MESSAGES):
            yield _rates(session)
            yield _direct(session, listen, announced)


def _route(host: str, port: int) -> Iterator[Check]:
    try:
        places = sorted({str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)})
    except OSError as error:
        why = f"{host} is not a name that this machine can resolve ({error.strerror})"
        yield Check("name", False, f"{why}: check its spelling, or give its address")
        return
    yield Check("name", True, f"{host} is {', '.join(places)}")
    began = time.monotonic()
    try:
        socket.create_connection((host, port), _PATIENCE).close()
    except TimeoutError:
        mend = f"open or forward TCP port {port} there, and check the firewalls in between"
        yield Check("route", False, f"no answer from {written(host, port)} within {_PATIENCE:g} s: {mend}")
        return
    except OSError as error:
        mend = "is the lighthouse running, with this --host and --port?"
        yield Check("route", False, f"nobody listens at {written(host, port)} ({error.strerror}): {mend}")
        return
    yield Check("route", True, f"{written(host, port)} answers within {1000 * (time.monotonic() - began):.0f} ms")


def _run(about: About) -> Iterator[Check]:
    fits, here = takes(about.messages, MESSAGES), version_text(__version__, MESSAGES)
    there = f"{version_text(about.version, about.messages)} there, {here} here"
    yield Check("version", fits, there if fits else f"{there}: install {about.version} here")
    ahead = time.time() - about.clock
    close = "" if abs(ahead) <= _SKEW else ": set this machine's clock, or certificates are not valid"
    yield Check(
        "clock", not close, f"{abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} the lighthouse's{close}"
    )
    yield Check("run", True, f"{about.members} workers, round {about.round} of {about.last}")


def _rates(session: Session) -> Check:
    line = measure_lighthouse_link(session)
    if line is None:
        return Check("rate", False, "the lighthouse stopped answering during the measurement: try again")
    up, down = (f"{8 * rate / 1e6:,.{0 if rate > 1e7 else 2}f} Mbit/s" for rate in (line.out, line.back))
    return Check("rate", True, f"{up} to the lighthouse, {down} from it ({format_bytes(PIECE)} at a time)")


def _direct(session: Session, listen: tuple[str, int] | None, announced: str) -> Check:
    if listen is None:
        return Check(
            "direct", True, "not tested: everything is relayed by the lighthouse (--listen PORT tests the direct way)"
        )
    name = secrets.token_hex(16)
    try:
        with EchoServer(*listen, name) as echo:
            said = encode(AnnounceAddress(announced, echo.port, session.name(), name))
            answer = decode(ask(session, REACH, said, _TRIED) or encode(Refusal("")))
    except ValueError as error:
        return Check("direct", False, str(error))
    if isinstance(answer, Reachability) and not answer.refusal:
        return Check("direct", True, f"yes: others reach this machine at {written(answer.host, answer.port)}")
    where = f" ({answer.host}, port {answer.port}: {answer.refusal})" if isinstance(answer, Reachability) else ""
    return Check(
        "direct", True, f"no, relayed: others cannot connect{where}; this works, but a forwarded port is faster"
    )
