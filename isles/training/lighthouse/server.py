"""What every lighthouse of a run does beside `membership.lighthouse`: its run directory, and what workers report.

RUN/config.toml         at once
RUN/members.jsonl       the assembly's journal: the lighthouse's memory
RUN/metrics.jsonl       what the workers report, by member
RUN/lighthouse.json     where it stands and how many workers it has started, for `isles resume`
RUN/summary.json        at the end: its presence means that the run is complete

Started again on its directory it goes on: workers come back by themselves. No torch: models and states are files here.
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from isles.base.durable import no_room, write_text
from isles.base.parsing import Int, Port, Str, Unfit, integer, parse_json, read, table
from isles.base.version import __version__
from isles.comm.tcp import room_for
from isles.membership.effects import Coordinator
from isles.membership.keys import LIGHTHOUSE, STATUS, MemberKeys
from isles.membership.lighthouse import GRACE, Journal, Lighthouse
from isles.membership.messages import MemberPaths, PathRow, encode, read_paths
from isles.membership.p2p.stream import CARRIED
from isles.membership.run_log import JOURNAL
from isles.membership.session import RejectionRow, Rejections, read_rejections
from isles.membership.state_transfer import BESIDE, COPIES, FetchRequest, StateServer, StateUnavailable, fetch_state
from isles.membership.tls_session import open_router
from isles.training.config.reading import to_toml
from isles.training.config.sections import Config
from isles.training.elastic.support import rules
from isles.training.records.events import Schema
from isles.training.records.rundir import CONFIG, METRICS, SUMMARY, as_json, lock_run, save_config
from isles.training.records.summary import SummaryTable
from isles.training.records.tokens import CREDENTIALS, forget, host_credentials

MODEL_FILE = "model.safetensors"
_DESCRIPTORS, _SPARE = 3, 512  # open files of a lighthouse: for each member, and beside
LOOK = 1.0
"""Seconds between looks at what is due."""
_PAIR = ("by", "to", "way", "round_trip", "sent", "taken")  # of a path in the summary
_SHOWN = 1000  # paths
_MOST = 1 << 40  # bytes of a file where the model's are not known
_STAND = "lighthouse.json"


@dataclass(frozen=True, kw_only=True)
class Stand:
    """host, port: as workers reach it. workers: started on this machine too."""

    host: Str
    port: Port
    workers: Annotated[Int, Field(ge=0)]

    def write(self, out: Path) -> None:
        write_text(out / _STAND, as_json(asdict(self)) + "\n")


def read_stand(out: Path) -> Stand:
    """Read the stand of the run in `out`. ValueError, in one line, where its file is missing or damaged."""
    hint = f"start it with: isles lighthouse {out} --host HOST --port PORT"
    try:
        return read(Stand, parse_json((out / _STAND).read_bytes()))
    except OSError:
        raise ValueError(f"{out / _STAND}: is missing, so the lighthouse's address is not known; {hint}") from None
    except ValueError:
        raise ValueError(f"{out / _STAND}: is damaged; {hint}") from None


class LighthouseServer(ABC):
    """The lighthouse of the run `config` in the directory `out`, at `address`.

    on_ready: called once it can be joined, with its token. on_metrics, on_notice: as in `isles.running.run.launch`.
    """

    joins_with: ClassVar[str]
    """The command that workers join with, up to the lighthouse's address."""

    def __init__(
        self,
        config: Config,
        out: Path,
        address: str,
        on_ready: Callable[[str], None],
        on_metrics: Callable[[dict[str, Any]], None],
        on_notice: Callable[[str], None],
    ) -> None:
        self.config, self.out, self.address = config, out, address
        self.rules, self.text = rules(config), to_toml(config)  # what workers who join get
        self.on_ready, self.on_metrics, self.on_notice = on_ready, on_metrics, on_notice
        self.stopping = threading.Event()
        self.results: dict[int, dict[str, Any]] = {}
        self.carried: dict[int, dict[str, int]] = {}
        self._paths: dict[int, list[PathRow]] = {}
        self.schema = Schema(config)

    def run(self) -> SummaryTable | None:
        """Serve it until the run ends; its summary, or None where it was stopped (`stopping`).

        ValueError where the directory holds another kind of run, or the address cannot be had. PeerLost where nobody
        is left to tell what the run came to. OSError, with the mend, for a full disk.
        """
        try:
            return self._run()
        except OSError as error:
            if no_room(error):
                hint = f"make room and go on with: isles resume {self.out}"
                raise OSError(f"{self.out}: {no_room(error)} ({error.strerror}); {hint}") from error
            raise
        finally:
            with contextlib.suppress(OSError):
                self.out.rmdir()  # where it never was a run, nothing is in it

    def _run(self) -> SummaryTable | None:
        with lock_run(self.out), contextlib.ExitStack() as stack:
            if (self.out / SUMMARY).exists() and (self.out / JOURNAL).exists():
                raise ValueError(f"{self.out}: this run is complete; name another directory with --out")
            if (self.out / SUMMARY).exists() or ((self.out / METRICS).exists() and not (self.out / JOURNAL).exists()):
                raise ValueError(f"--out {self.out}: holds a run already; name another directory")
            mine, is_new = host_credentials(self.out, None)
            room_for(_DESCRIPTORS * self.config.world.elastic.max_members + _SPARE)
            try:
                self.session = open_router(mine, self.address, self.config.world.elastic.lease)
            except (ValueError, OSError):
                if is_new:
                    forget(self.out)
                raise
            stack.callback(self.session.close)
            journal = Journal(self.out)
            stack.callback(journal.close)
            if not (self.out / CONFIG).exists():
                save_config(self.text, self.out)
            self._lines = stack.enter_context((self.out / METRICS).open("a", encoding="utf-8"))
            self.keys = MemberKeys(self.out / CREDENTIALS)
            self.state_server = StateServer(self.session, LIGHTHOUSE, self.on_notice, comes=lambda what: False)
            self.lighthouse = Lighthouse(
                self.session,
                self._assembled(journal, stack),
                journal,
                self.keys,
                config=self.text,
                version=__version__,
                on_report=self._on_report,
                island_size=self.config.world.inner,
            )
            stack.callback(self.lighthouse.close)
            self.refused = RejectionLog(self.lighthouse.refused, self.on_notice)
            self.session.serve(
                STATUS, lambda query: query.reply(encode(replace(self.now(), paths=self.paths()[:_SHOWN])))
            )
            if is_new and journal.entries:
                self.on_notice("its credentials were missing: all workers must join again, with the new token")
            self.on_ready(str(mine.token))
            summary = None
            with contextlib.suppress(InterruptedError):
                summary = self.serve()
        if summary is not None:
            forget(self.out)
        return summary

    def _assembled(self, journal: Journal, stack: ExitStack) -> Coordinator:
        try:
            return self.assembly(journal, time.monotonic() + GRACE, stack)
        except (LookupError, TypeError, AttributeError) as error:
            why = "its lines do not follow from each other; restore the file, or start a new run"
            raise ValueError(f"{journal.path}: {why}") from error

    @abstractmethod
    def assembly(self, journal: Journal, until: float, stack: ExitStack) -> Coordinator:
        """The state machine of this kind of run, which gives those a while who were there before. What else it needs is
        made here, until `stack` ends.
        """

    @abstractmethod
    def members(self) -> list[int]:
        """Members that take part now."""

    @abstractmethod
    def serve(self) -> SummaryTable | None:
        """What there is to do until the end, or until `stopping`."""

    @abstractmethod
    def now(self) -> Any:
        """How the run stands: the message for whoever asks."""

    @abstractmethod
    def on_event(self, member: int, kind: str, value: Any) -> bool:
        """An event of one key that is of this kind of run alone; False where it is none. ValueError refuses it."""

    def fetch(
        self, state_server: str, what: str, path: Path, seconds: float, copies: int = COPIES, newest: int = 1 << 53
    ) -> dict[str, Any]:
        """`fetch_state`, of no more than so many copies of the first model. InterruptedError where the lighthouse
        stops.
        """
        weights, keys, stops = self.rules.weights, self.keys.peer_key, self.stopping.is_set
        most = copies * weights + BESIDE if weights else _MOST
        try:
            asked = FetchRequest(source=state_server, what=what, most=most, seconds=seconds, newest=newest)
            return fetch_state(self.session, asked, path, peer_key=keys, lost=stops)
        except StateUnavailable as why:
            raise InterruptedError if stops() else why from None

    def links(self) -> dict[str, Any]:
        ways = {way: sum(one[way] for one in self.carried.values()) for way in CARRIED}
        pairs = [dict(zip(_PAIR, row, strict=True)) for row in self.paths()]
        return {**ways, "relayed_here": self.lighthouse.relayed, "pairs": pairs}

    def paths(self) -> MemberPaths:
        """What workers have told; those with the most bytes first."""
        reported = [(member, *row) for member, rows in sorted(self._paths.items()) for row in rows]
        return tuple(sorted(reported, key=lambda row: -row[4]))

    def _on_report(self, member: int, event: Any) -> None:
        """What a worker reports, in the session's thread. ValueError refuses it."""
        try:
            if isinstance(event, dict) and len(event) == 1 and self._on_event(member, *next(iter(event.items()))):
                return
            row = self.schema("event", event, {member})
            if set(row) == {"notice"}:
                self.on_notice(f"worker {member}: {row['notice']}")
                return
            self._lines.write(as_json({key: value for key, value in row.items() if value is not None}) + "\n")
            self._lines.flush()
            self.on_metrics(row)
        except Unfit as error:
            raise ValueError(str(error)) from None

    def _on_event(self, member: int, kind: str, value: Any) -> bool:
        if kind == "result":
            self.results[member] = self.schema("done", value, {member})
        elif kind == "carried":
            carried = table(value, "carried")
            self.carried[member] = {way: integer(carried, way, 0, 1 << 62) for way in CARRIED}
        elif kind == "paths":
            self._paths[member] = read_paths(value)
        elif kind == "refused":
            self.refused.update(member, value)
        else:
            return self.on_event(member, kind, value)
        return True


_BY_LIGHTHOUSE = -1
_NAMED = 100  # lines for a person


class RejectionLog:
    """own: the lighthouse's, as it grows. notice: called with a line for each (by whom, of whom, why) that is new."""

    def __init__(self, own: Rejections, notice: Callable[[str], None]) -> None:
        self._own, self._notice = own, notice
        self._reported: dict[int, list[RejectionRow]] = {}  # by the member that refuses
        self._named: set[tuple[int, int, str]] = set()

    def update(self, by: int, rows: Any) -> None:
        """What worker `by` says that it has refused so far. ValueError where that is no such list."""
        self._reported[by] = read_rejections(rows)
        self._name(by, self._reported[by])

    def look(self) -> None:
        """Name what is new of the lighthouse's."""
        self._name(_BY_LIGHTHOUSE, self._own.rows())

    def rows(self) -> list[tuple[int, int, str, int]]:
        """(by whom, of whom, why, how often). -1: the lighthouse; somebody without a member, or in another's name."""
        every = {_BY_LIGHTHOUSE: self._own.rows(), **self._reported}
        return [(by, *row) for by, rows in sorted(every.items()) for row in rows]

    def table(self) -> list[dict[str, Any]]:
        """`rows`, for the summary."""
        return [dict(zip(("by", "member", "reason", "times"), row, strict=True)) for row in self.rows()]

    def _name(self, by: int, rows: Iterable[RejectionRow]) -> None:
        for member, why, _ in rows:
            if (by, member, why) in self._named or len(self._named) >= _NAMED:
                continue
            self._named.add((by, member, why))
            where = "the lighthouse" if by == _BY_LIGHTHOUSE else f"worker {by}"
            whom = "somebody" if member < 0 else f"worker {member}"
            self._notice(f"{where} refuses {whom}: {why}")
