"""How a worker joins an elastic run: certificate, session, configuration, data, member id.

It joins as one worker, or as the workers of an island: the leader of the island has the member id, and the others
follow it. A joiner accepts no path and no code from a lighthouse, nor settings of its own machine: for those it uses
what its user typed (`--set`), or the defaults.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import tomlkit
import torch

from isles.base.durable import no_room
from isles.base.errors import as_typed, printable
from isles.base.parsing import parse_toml
from isles.base.scratch import scratch
from isles.base.tables import table_of
from isles.base.version import __version__
from isles.comm import credentials
from isles.comm.call import Ledger
from isles.comm.credentials import Credentials, Token
from isles.comm.errors import CommError, Malformed, RendezvousFailed
from isles.comm.group import Group
from isles.comm.mesh import Mesh
from isles.comm.sockets.connection import LinkLost
from isles.comm.tcp import parse_address, refuse_unknown, written
from isles.data import Corpus, load_corpus
from isles.data.config import IDS
from isles.data.sources import check_sample
from isles.launch.workers import LocalWorkers, raise_first
from isles.membership.client import FollowerClient, MembershipClient, failure_notifier
from isles.membership.keys import CONFIG, HELLO, UP
from isles.membership.messages import (
    MACHINE,
    MESSAGES,
    Entry,
    Hello,
    Later,
    Over,
    Refusal,
    decode,
    encode,
    identity_of,
    spoken,
)
from isles.membership.p2p.pairs import PeerConnections
from isles.membership.p2p.transport import ElasticTransport
from isles.membership.requests import LighthouseClient, ask
from isles.membership.rounds import Decision, IslandGroup
from isles.membership.state_transfer import StateServer, server_name
from isles.membership.tls_session import Session, open_session
from isles.network.clusters import ClusterNode
from isles.training.config.reading import Tables, over, resolve
from isles.training.config.sections import Config
from isles.training.config.trust import names_in
from isles.training.elastic.leader import Participant
from isles.training.elastic.needs import refuse_beyond, shown
from isles.training.elastic.stall import StallWatch, cut_off
from isles.training.elastic.support import in_rounds
from isles.training.elastic.worker import ElasticWorker
from isles.training.interrupts import first_interrupt, notify_in_handler
from isles.training.worker import deadlines

_NEEDED = ("model.hf", "model.factory", "data.path", "data.source", "data.validation_path", "data.tokenizer")  # alike
_OWN = (*_NEEDED, "model.options", "model.device", "data.cache", "pipeline.skippipe.plan", "memory.disk")
_OWN += ("memory.machine", "memory.plan", "world.threads", "world.virtual.links", "world.virtual.inner_links")
_OWN += ("run.start", "run.loggers")


def with_own(theirs: Tables, own: Tables, lacks: Tables | None = None) -> Tables:
    """The run's configuration for this machine. ValueError if `own` lacks a needed setting, or has one that only the
    lighthouse may set. lacks: takes what is lacking, with the run's values, so that it is no error.
    """
    for name in _names(own):
        if name not in _OWN:
            raise ValueError(f"--set {name}: only the lighthouse sets this; a joiner may set {', '.join(_OWN)}")
    for name in _OWN:
        table, key = table_of(theirs, name)
        if (name, table.get(key)) == ("data.tokenizer", IDS):
            continue  # no path
        value = table.pop(key, None)
        if name in _NEEDED and value not in (None, "", "bytes") and key not in table_of(own, name)[0]:
            if lacks is None:
                raise ValueError(
                    f"the run has {name} = {printable(as_typed(value), 100)}, and a joiner takes no path and no code "
                    f"from a lighthouse: say what it is on this machine, --set {name}=..."
                )
            lacks[name] = value
    return over(theirs, own)


def _names(tables: Tables, prefix: str = "") -> Iterator[str]:
    for key, value in tables.items():
        is_table = isinstance(value, dict) and prefix + key not in _OWN
        yield from _names(value, f"{prefix}{key}.") if is_table else [prefix + key]


def as_arguments(tables: Tables) -> list[str]:
    """The machine's own settings of `tables`, as arguments of a command."""
    arguments = []
    for name in _OWN:
        table, key = table_of(tables, name)
        if value := table.get(key):
            arguments += ["--set", f"{name}={tomlkit.item([[], value]).as_string()[5:-1]}"]  # a table in one line, too
    return arguments


_PATIENCE = 60.0  # seconds to connect: unauthenticated clients may occupy all connections for a while
_MOMENT = 5.0  # seconds of these until the user is told
_SOON = 1.0  # seconds between two tries
_CROWDED = 600.0  # seconds to get a member id when too many workers join
_SELDOM = 60.0  # seconds between lines for the user
_LONGEST = 1 << 20  # most bytes of a configuration


@dataclass(frozen=True, kw_only=True)
class LocalSettings:
    """This machine's own settings.

    own: of the configuration, see `with_own`. listen: (host, port) at which other workers connect to this one; port 0:
    any. announced: the address that they are sent; "": the one that the lighthouse sees. apart: difference between the
    ports of an island's workers. relays: whether to relay for others. node: a cluster node's resources. machine: its
    name for people; None: its host name.
    """

    own: Tables = field(default_factory=dict)
    listen: tuple[str, int] | None = None
    announced: str = ""
    apart: int = 1
    relays: bool = False
    node: ClusterNode | None = None
    machine: str | None = None


def train(worker: Participant, address: str, notify: Callable[[str], None]) -> str:
    """Train until the run ends, or this worker leaves it; returns how it ended, as a line of text. OSError as in
    `take_part`.
    """
    notify(f"in: member {worker.client.member} of {worker.config.method} at {address}, on {worker.trainer.device}")
    end_reason, ended = worker.run(), worker.client.ended
    if end_reason == "left":
        return f"left the run after inner step {worker.optimizer.steps}; the others go on"
    if isinstance(ended, Over) and ended.reason:
        raise OSError(f"the run goes on without this worker: {printable(ended.reason, 300)}")
    return f"the run is over; its model and report are at the lighthouse ({address})"


@dataclass(frozen=True, kw_only=True)
class RunConnection:
    """An admitted worker: its session with the lighthouse, and the run's configuration for this machine."""

    session: Session
    token: Token
    config: Config
    here: LocalSettings
    folder: Path

    @cached_property
    def corpus(self) -> Corpus:
        """This machine's training text. ValueError if it cannot be read."""
        check_sample(self.config.data)
        return load_corpus(self.config.data)

    @cached_property
    def own(self) -> Credentials:
        """This worker's key and certificate."""
        return credentials.own(self.token.secret, self.folder / "own")

    def shown(self, island: IslandGroup) -> tuple[str, ...]:
        """Fingerprints of the certificates of this worker's island; all of its workers call this together."""
        return tuple(text.decode("ascii") for text in island.gather_text(self.own.token.fingerprint.encode("ascii")))


def admit(
    stack: ExitStack,
    address: str,
    token: Token,
    here: LocalSettings,
    *,
    notify: Callable[[str], None],
    fit: Callable[[Config], Config] = in_rounds,
    again: bool = False,
    lacks: Tables | None = None,
) -> RunConnection:
    """Connect to the lighthouse, until `stack` ends. fit: checks and adapts the run's configuration; ValueError if it
    is not for such workers. notify: called with lines of text for the user. again: this worker was in the run before.
    lacks: as in `with_own`.

    ValueError, in one line, for what the user can fix; OSError if the lighthouse does not answer.
    """
    host, port = parse_address(address, "HOST:PORT")
    refuse_unknown(host)
    folder = stack.enter_context(_own_scratch())
    session = _opened(token, written(host, port), notify, again=again)
    stack.callback(session.close)
    config = fit(resolve(with_own(_configuration(_asked(session, CONFIG, b"")), here.own, lacks)))
    return RunConnection(session=session, token=token, config=config, here=here, folder=folder)


@contextmanager
def _own_scratch() -> Iterator[Path]:
    """As `scratch`; a full disk, the only one that a worker writes to, is said with its mend."""
    with scratch() as folder:
        try:
            yield folder
        except OSError as error:
            if not no_room(error):
                raise
            mend = "make room there, or set TMPDIR to another folder, and join again"
            raise OSError(f"{folder.parent}: {no_room(error)}; {mend}") from error


@contextmanager
def with_member(
    connection: RunConnection, island: IslandGroup, *, notify: Callable[[str], None]
) -> Iterator[Participant]:
    """Context: a worker that is a member of the run, and leads the island `island`. Errors as in `admit`."""
    session, config = connection.session, connection.config
    is_down, shown_next = False, 0.0

    def seen(_: str, there: bool) -> None:
        """Notify the user when the lighthouse stops answering and when it is back. In the session's thread."""
        nonlocal is_down
        if client.ended is None and there == is_down:
            message = "the lighthouse does not answer: going on without it until it does"
            notify("the lighthouse is back" if there else message)
            is_down = not there

    def show(line: Mapping[str, Any]) -> None:
        nonlocal shown_next
        if time.monotonic() >= shown_next:
            shown_next = time.monotonic() + _SELDOM
            notify(f"step {line['step']}/{config.run.steps}  loss {line['loss']:.3f}")

    with ExitStack() as stack:
        certificates = connection.shown(island)
        entry = member_of(session, connection.corpus.sha256, certificates, connection.here.machine, notify)
        island.next_decision(lambda: Decision(kind="member", member=entry.member, key=entry.key))
        client = MembershipClient(session, entry)
        size = config.replicas_in_all
        transport, transfers = connect(stack, connection, client, island, certificates, size=size, notify=notify)
        worker = Participant(
            config,
            client,
            transport,
            transfers,
            connection.corpus,
            connection.folder,
            notify,
            island=island,
            shown=show,
        )
        worker.worker.refusals, transfers.stops = session.refused, worker.stops_fetching
        waits, least = island.transports(transport), config.world.elastic.stall
        worker.worker.watched = StallWatch(stack, client, waits, least, notify, client.hangs).step
        session.watch(UP, seen)
        stack.callback(worker.worker.close)
        yield worker


def connect(
    stack: ExitStack,
    connection: RunConnection,
    client: LighthouseClient,
    island: IslandGroup,
    certificates: Sequence[str],
    *,
    size: int,
    notify: Callable[[str], None],
) -> tuple[ElasticTransport, StateServer]:
    """Connect a worker with those of other members, until `stack` ends; returns the transport to them, and the server
    of this worker's states.

    client: of the lighthouse. island: its island, with these `certificates`. size: workers of the world at the
    start. ValueError if the address to listen at is not available.
    """
    session, entry, here, island_rank = connection.session, client.entry, connection.here, island.island_rank
    torch.set_num_threads(connection.config.world.start_threads)
    # Closed in the reverse order: files, messages between workers, their connections, and the client last.
    stack.callback(client.close)
    pairs = PeerConnections(
        session,
        entry,
        LighthouseClient(session, entry).ask,
        connection.own,
        lease=connection.config.world.elastic.lease,
        notice=notify,
        island_rank=island_rank,
        certificates=certificates,
    )
    stack.callback(pairs.close)
    if here.listen is not None:
        host, port = here.listen
        port = port + island_rank * here.apart if port else 0
        pairs.listen(host, port, announced=here.announced, relays=here.relays)
    transport = ElasticTransport(
        session,
        entry.member,
        size,
        on_lost=lambda member: client.connection(member, broken=True),
        on_back=lambda member: client.connection(member, broken=False),
        suspect=client.suspect,
        peers=pairs,
        island_rank=island_rank,
        beside=None if island.mesh is None else island.mesh.transport,
        connections=connection.config.world.elastic.connections,
    )
    stack.callback(transport.close)
    # Before `start`: from then on others see this worker, and notifications cancel its waits.
    client.transfers, client.meets = transport, pairs.meet
    island.failed = failure_notifier(client, island_rank, island.size)
    pairs.start(transport)
    if not island_rank:
        client.news = notify
        seen = f"; the lighthouse sees it at {pairs.seen}" if pairs.seen else ""
        notify(f"this worker's fingerprint: {spoken(identity_of(certificates))}{seen}")

    def lost(state_server: str) -> bool:
        return state_server.isdecimal() and client.lost(int(state_server))

    transfers = StateServer(
        session,
        server_name(entry.member, island_rank),
        notify,
        lost=lost,
        changed=client.changed,
        peer_keys=pairs,
        total=connection.config.world.elastic.state_deadline,
    )
    stack.callback(transfers.close)
    return transport, transfers


def _opened(token: Token, address: str, notify: Callable[[str], None], *, again: bool) -> Session:
    """A session with the lighthouse, which may be busy with unauthenticated clients, or restarting if this worker joins
    `again`. ValueError if nothing listens there; OSError, in one line, if it does not accept this machine.
    """
    until, patience = time.monotonic() + _PATIENCE, _MOMENT
    while True:
        try:
            return open_session(token, address, patience)
        except LinkLost as error:
            is_closed = isinstance(error.__cause__, ConnectionRefusedError)
            if is_closed and not again:
                why = "nothing listens there (connection refused)"
                mend = "start the lighthouse, or check address and port; or the run is over"
                raise ValueError(f"{address}: {why}; {mend}") from None
            if time.monotonic() > until:
                why = f"cannot connect to the run at {address} within {_PATIENCE:g} s ({error})"
                raise OSError(f"{why}: is it a lighthouse, and its port open?") from None
            if patience == _MOMENT:
                notify(f"cannot connect to the run at {address} yet ({error}); trying for {_PATIENCE:g} s")
            time.sleep(_SOON if is_closed else 0.0)
            patience = max(until - time.monotonic(), _SOON)


def _asked(session: Session, key: str, value: bytes) -> bytes:
    """The lighthouse's answer. RendezvousFailed if there is none."""
    answer = ask(session, key, value)
    if answer is None:
        raise RendezvousFailed("the lighthouse accepted this worker, but does not answer; look at what it prints")
    return answer


def _configuration(text: bytes) -> Tables:
    """The run's configuration. ValueError for one that is damaged, or that names code: nothing that another machine
    sends is imported.
    """
    if len(text) > _LONGEST:
        raise ValueError("the lighthouse's configuration is too long to be one")
    try:
        tables = parse_toml(text.decode("utf-8"))
        if not all(isinstance(table, dict) for table in tables.values()):
            raise ValueError("a key outside of all sections")
    except ValueError as error:
        raise ValueError(f"the lighthouse's configuration is damaged: {printable(str(error), 100)}") from None
    for key, value in names_in(tables).items():
        if not key.startswith(("model.", "data.")):  # `with_own` takes these only from this machine
            raise ValueError(
                f"the run's {key.rpartition('.')[2]} is code of its own, {printable(str(value), 100)}, and a worker "
                "that joins imports nothing of that kind: use isles train --nodes"
            )
    return tables


def show(
    address: str, token: Token, here: LocalSettings, *, notify: Callable[[str], None], fit: Callable[[Config], Config]
) -> str:
    """What a worker would run here, as lines of text; no member id is taken. Arguments and errors as in `admit`."""
    lacks: Tables = {}
    with ExitStack() as stack:
        connection = admit(stack, address, token, here, notify=notify, fit=fit, lacks=lacks)
        return shown(connection.config, connection.folder, lacks)


def member_of(
    session: Session, corpus: str, certificates: tuple[str, ...], machine: str | None, notify: Callable[[str], None]
) -> Entry:
    """Request a member id, and wait while too many workers do. corpus: SHA-256 of this machine's training text.
    certificates: see `Hello`. machine: see `LocalSettings`.

    ValueError, in one line, if this worker is refused; OSError if it has waited too long.
    """
    name = socket.gethostname() if machine is None else machine
    name = "".join(one if one.isascii() and one.isprintable() else "?" for one in name)[:MACHINE]
    hello = encode(Hello(__version__, corpus, session.name(), certificates, MESSAGES, name))
    until = time.monotonic() + _CROWDED
    answer = decode(_asked(session, HELLO, hello))
    while isinstance(answer, Later) and time.monotonic() < until:
        pause = min(max(answer.seconds, 0.1), 60.0)  # bounded: the number is another machine's
        notify(f"the lighthouse: {printable(answer.reason, 200)}; asking again in {pause:.0f} s")
        time.sleep(pause)
        answer = decode(_asked(session, HELLO, hello))
    if isinstance(answer, Later):
        raise OSError(f"no member within {_CROWDED:.0f} s: {printable(answer.reason, 200)}")
    if isinstance(answer, Refusal):
        raise ValueError(printable(answer.reason, 300))
    if not isinstance(answer, Entry):
        raise ValueError("the lighthouse does not speak as this version does: install the same isles on both machines")
    return answer


_FAR = 1 << 40  # a follower's last round: only the leader knows the real one


def take_part(address: str, token: Token, here: LocalSettings, *, notify: Callable[[str], None]) -> str:
    """Join the run at `address`, and train until it ends or this worker is asked to leave; returns how it ended, as a
    line of text. In a run of islands this starts all workers of one island, in processes of their own.

    Arguments and errors as in `admit`; OSError also if the run goes on without this worker.
    """
    with ExitStack() as stack:
        connection = admit(stack, address, token, here, notify=notify)
        refuse_beyond(connection.config, connection.folder)
        if connection.config.world.inner == 1:
            with (
                with_member(connection, IslandGroup(), notify=notify) as worker,
                first_interrupt(partial(_leave, worker)),
            ):
                return train(worker, address, notify)
        config = connection.config
    return _as_island(config, (address, token, here))


def _leave(worker: Participant) -> None:
    worker.leaving.set()
    notify_in_handler("leaving once the others have a plan without this worker; Ctrl-C again ends it at once")


def _as_island(config: Config, where: tuple[str, Token, LocalSettings]) -> str:
    """Run all workers of an island, in processes of their own; returns how it ended. OSError if one of them is lost:
    the island then leaves the run.
    """
    inner, threads = config.world.inner, config.world.start_threads
    pool = LocalWorkers(island_worker, inner, args=where, threads=threads, deadlines=deadlines(config))
    try:
        with first_interrupt(pool.stop):
            results = pool.join()
        raise_first(results, pool.failures)
    except CommError as error:
        raise OSError(f"this island has left the run, for it lost a worker: {printable(str(error), 300)}") from None
    return results[0]


def island_worker(world: Mesh, address: str, token: Token, here: LocalSettings) -> str:
    """The main function of each process of an island; the leader returns how it ended."""
    if world.rank == 0:
        with leading(world, address, token, here) as worker:
            return train(worker, address, _notify)
    follow(world, address, token, here)
    return ""


@contextmanager
def leading(world: Mesh, address: str, token: Token, here: LocalSettings) -> Iterator[Participant]:
    """Context: the leader of an island, as a member of the run. Errors as in `admit`."""
    with ExitStack() as stack:
        connection = admit(stack, address, token, here, notify=_notify)
        island = IslandGroup(world, connection.config.world.outer_deadline)
        yield stack.enter_context(with_member(connection, island, notify=_notify))


def follow(world: Mesh, address: str, token: Token, here: LocalSettings) -> None:
    """Run another worker of an island, until its leader ends. Errors as in `admit`."""
    with ExitStack() as stack:
        connection = admit(stack, address, token, here, notify=_notify)
        island = IslandGroup(world, connection.config.world.outer_deadline)
        config, session = connection.config, connection.session
        certificates = connection.shown(island)
        decision = island.next_decision(lambda: Decision(kind="end"))  # the argument is used at the leader only
        if decision.kind != "member":
            raise Malformed(0, "the leader of this island has no member")
        client = FollowerClient(session, Entry(decision.member, decision.key), island.island_rank)

        def notify(line: str) -> None:
            _notify(f"island rank {island.island_rank}: {line}")

        size = config.replicas_in_all
        transport, transfers = connect(stack, connection, client, island, certificates, size=size, notify=notify)
        worker = ElasticWorker(
            config,
            Group(transport, (decision.member,), "outer", deadlines(config), Ledger()),
            None,
            island,
            transfers,
            connection.corpus,
            connection.folder,
            report=lambda event: None,
            last=lambda: _FAR,
        )
        worker.refusals = session.refused

        def hangs(stalls: bool) -> None:
            if stalls:
                cut_off(client, transport, session)

        waits, least = island.transports(transport), config.world.elastic.stall
        worker.watched = StallWatch(stack, client, waits, least, notify, hangs).step
        stack.callback(worker.close)
        worker.obey()


def _notify(line: str) -> None:
    print(f"isles: {line}", file=sys.stderr, flush=True)
