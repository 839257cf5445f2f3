"""How a worker comes into a run: certificate, session, configuration, text, seat."""

from __future__ import annotations

import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from isles.comm import credentials
from isles.comm.credentials import Credentials, Token
from isles.comm.elastic.company import Company
from isles.comm.elastic.gifts import Giver
from isles.comm.elastic.island import IslandGroup
from isles.comm.elastic.keys import CONFIG, HELLO
from isles.comm.elastic.links.direct import DirectLinks
from isles.comm.elastic.messages import Entry, Hello, Later, Over, Refusal, decode, encode
from isles.comm.elastic.session import Session, open_session, zenoh
from isles.comm.elastic.transport import ElasticTransport
from isles.comm.errors import RendezvousFailed
from isles.data import load_corpus
from isles.errors import printable
from isles.launch.addresses import parse_address
from isles.training.config.reading import resolve
from isles.training.config.sections import LEASE, Config
from isles.training.config.trust import names_in
from isles.training.elastic.joining import Participant
from isles.training.elastic.states import giver_of
from isles.training.elastic.terms import in_rounds
from isles.version import __version__

_PATIENCE = 60.0  # seconds to be let in: failed handshakes of strangers slow the engine down
_ANSWER = 10.0  # seconds
_CROWDED = 600.0  # seconds to be given a seat where too many come
_LONGEST = 1 << 20  # bytes of a configuration


@dataclass(frozen=True, kw_only=True)
class Here:
    """What is this machine's own. data, device: where they differ from the run's. listen: (host, port) of this machine
    at which other workers reach this one, port 0: any; announced: the address that they are told, "" for that under
    which the lighthouse sees this machine.
    """

    data: str | None = None
    device: str | None = None
    listen: tuple[str, int] | None = None
    announced: str = ""


def train(worker: Participant, address: str, tell: Callable[[str], None]) -> str:
    """Until the run ends, or this worker leaves it; how it ended, in a line. OSError as `take_part`."""
    tell(f"in: seat {worker.company.seat} of {worker.config.method} at {address}")
    ending, ended = worker.run(), worker.company.ended
    if ending == "left":
        return f"left the run after inner step {worker.optimizer.steps}; the others go on"
    if isinstance(ended, Over) and ended.reason:
        raise OSError(f"the run goes on without this worker: {printable(ended.reason, 300)}")
    return f"the run is over; its model and report are at the lighthouse ({address})"


@contextmanager
def in_run(address: str, token: Token, here: Here, *, tell: Callable[[str], None]) -> Iterator[Participant]:
    """A worker of the run at `address`, in a seat of it until the block ends. tell: called with lines for a person.

    ValueError, in one line, for what a person can mend; OSError where nobody answers.
    """
    with ExitStack() as stack:
        entrance = admitted(stack, address, token, here, tell=tell)
        yield stack.enter_context(seated(entrance, IslandGroup(), tell=tell))


@dataclass(frozen=True, kw_only=True)
class Entrance:
    """A session with the lighthouse, and what it was asked first."""

    session: Session
    token: Token
    config: Config
    here: Here
    folder: Path


def admitted(stack: ExitStack, address: str, token: Token, here: Here, *, tell: Callable[[str], None]) -> Entrance:
    """Come to the lighthouse, until `stack` ends. Errors as `in_run`."""
    zenoh()  # or what to install, before anything else
    host, port = parse_address(address, "HOST:PORT")
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="isles-")))
    mine = _fetched(host, port, token, folder / "credentials", tell)
    session = stack.enter_context(_opened(mine, address, LEASE))
    config = _configuration(_asked(session, CONFIG, b""), here)
    lease = config.world.lease
    if lease != LEASE:
        session.close()
        session = stack.enter_context(_opened(mine, address, lease))
    return Entrance(session=session, token=token, config=config, here=here, folder=folder)


@contextmanager
def seated(entrance: Entrance, places: IslandGroup, *, tell: Callable[[str], None]) -> Iterator[Participant]:
    """A worker in a seat of the run until the block ends; the leader of the island of `places`. Errors as `in_run`."""
    session, config, here, folder = entrance.session, entrance.config, entrance.here, entrance.folder
    with ExitStack() as stack:
        torch.set_num_threads(config.world.threads)
        corpus = load_corpus(config.data)
        entry = _seat(session, corpus.sha256, tell)
        places.say("seat", seat=entry.seat, key=entry.key)
        company = Company(session, entry)
        stack.callback(company.close)
        links = DirectLinks(
            session, entry, company.ask, entrance.token.secret, folder / "links", lease=config.world.lease, notice=tell
        )
        stack.callback(links.close)
        if here.listen is not None:
            links.listen(*here.listen, announced=here.announced)
        transport = ElasticTransport(
            session,
            company.seat,
            config.replicas_in_all,
            gone=lambda seat: company.connection(seat, broken=True),
            back=lambda seat: company.connection(seat, broken=False),
            guide=links,
        )
        stack.callback(transport.close)
        links.start(transport)

        def lost(giver: str) -> bool:
            return giver.isdecimal() and company.lost(int(giver))

        gifts = Giver(session, giver_of(company.seat, 0), tell, lost=lost)
        stack.callback(gifts.close)

        def tells() -> dict[str, Any]:
            return {"carried": transport.carried, "refused": session.refused.rows()}

        worker = Participant(config, company, transport, gifts, corpus, folder, tell, tells, places)
        stack.callback(worker.close)
        yield worker


@contextmanager
def _opened(mine: Credentials, address: str, lease: float) -> Iterator[Session]:
    session = open_session("client", mine, connect=address, lease=lease, patience=_PATIENCE)
    try:
        yield session
    finally:
        session.close()


def _fetched(host: str, port: int, token: Token, folder: Path, tell: Callable[[str], None]) -> Credentials:
    """The run's certificate, compared with the token. Tried for a while: a lighthouse may be starting again, or busy
    with strangers. OSError, in one line, where nobody answers.
    """
    until, told = time.monotonic() + _PATIENCE, False
    while True:
        try:
            return credentials.fetch(host, port, token, folder, seconds=_ANSWER)
        except OSError as error:
            if time.monotonic() > until:
                raise OSError(
                    f"nobody answers at {host}:{port} within {_PATIENCE:g} s ({error.strerror or error}); is the "
                    "lighthouse running, at this address, and is its port open?"
                ) from None
            if not told:
                tell(f"nobody answers at {host}:{port} yet ({error.strerror or error}); trying for {_PATIENCE:g} s")
            told = True
            time.sleep(1.0)


def _asked(session: Session, key: str, said: bytes) -> bytes:
    """The lighthouse's answer. OSError where there is none."""
    done, answers = threading.Event(), list[bytes | None]()
    until = 6  # a fresh session does not know at once who serves what
    for _ in range(until):
        done.clear()
        answers.clear()

        def answered(reply: bytes | None, refusal: bytes | None) -> None:
            answers.append(reply)
            done.set()

        session.ask(key, said, answered, seconds=_ANSWER)
        if done.wait(_ANSWER + 1.0) and answers and answers[0] is not None:
            return answers[0]
        done.wait(0.5) if not done.is_set() else threading.Event().wait(0.5)
    raise RendezvousFailed("the lighthouse let this worker in, and does not answer; look at what it prints")


def _configuration(text: bytes, here: Here) -> Config:
    """The run's, for this machine. What another machine says is data: names of code are not imported."""
    if len(text) > _LONGEST:
        raise ValueError("the lighthouse's configuration is too long to be one")
    try:
        tables: dict[str, Any] = tomllib.loads(text.decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"the lighthouse's configuration is damaged: {printable(str(error), 100)}") from None
    names = names_in(tables)
    if names:
        told = ", ".join(f"{key} = {value!r}" for key, value in names.items())
        raise ValueError(
            f"the run would import and run {printable(told, 300)} here: a worker that joins imports nothing"
        )
    config = in_rounds(resolve(tables))
    if here.data is not None:
        config = replace(config, data=replace(config.data, path=here.data))
    if here.device is not None:
        config = replace(config, model=replace(config.model, device=cast(Any, here.device)))
    return config


def _seat(session: Session, corpus: str, tell: Callable[[str], None]) -> Entry:
    """A seat. ValueError where this worker is refused. Waits where too many come."""
    hello, until = encode(Hello(__version__, corpus, session.name())), time.monotonic() + _CROWDED
    answer = decode(_asked(session, HELLO, hello))
    while isinstance(answer, Later) and time.monotonic() < until:
        pause = min(max(answer.seconds, 0.1), 60.0)
        tell(f"the lighthouse: {printable(answer.reason, 200)}; asking again in {pause:.0f} s")
        time.sleep(pause)
        answer = decode(_asked(session, HELLO, hello))
    if isinstance(answer, Later):
        raise OSError(f"no seat within {_CROWDED:.0f} s: {printable(answer.reason, 200)}")
    if isinstance(answer, Refusal):
        raise ValueError(printable(answer.reason, 300))
    if not isinstance(answer, Entry):
        raise ValueError("the lighthouse does not speak as this version does: install the same isles on both machines")
    return answer
