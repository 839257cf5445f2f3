"""The part that all lighthouses of a run share, on top of `membership.lighthouse`: run directory and workers' reports.

RUN/config.toml         at the start
RUN/members.jsonl       the journal
RUN/metrics.jsonl       the workers' metrics, by member
RUN/lighthouse.json     its address and the number of workers that it has started, for `isles resume`
RUN/summary.json        at the end: its presence means that the run is complete

A lighthouse that is started again on its directory continues the run: workers reconnect by themselves. No torch: models
and states are only files here.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from isles.base.durable import appending, no_room, write_text
from isles.base.parsing import Int, Port, Str, Unfit, integer, parse_json, read, table
from isles.base.version import __version__
from isles.comm.tcp import room_for
from isles.membership.effects import Append, Coordinator
from isles.membership.keys import LIGHTHOUSE, STATUS, MemberKeys
from isles.membership.lighthouse import GRACE, Journal, Lighthouse
from isles.membership.messages import MemberPaths, News, PathRow, RunStatus, encode, read_paths
from isles.membership.p2p.stream import CARRIED
from isles.membership.run_log import JOURNAL
from isles.membership.session import RejectionRow, Rejections, read_rejections
from isles.membership.state_transfer import BESIDE, COPIES, FetchRequest, StateServer, StateUnavailable, fetch_state
from isles.membership.tls_session import open_router
from isles.training.config.inner import most_moments
from isles.training.config.reading import for_members, to_toml
from isles.training.config.sections import Config
from isles.training.elastic.support import rules
from isles.training.lighthouse.judge import Judgement, judge
from isles.training.records.events import Schema
from isles.training.records.rundir import CONFIG, METRICS, SUMMARY, as_json, lock_run, save_config
from isles.training.records.summary import SummaryTable
from isles.training.records.tokens import CREDENTIALS, forget, host_credentials

MODEL_FILE = "model.safetensors"
_DESCRIPTORS, _SPARE = 3, 512  # open files of a lighthouse: per member, and in addition
LOOK = 1.0
"""Seconds between two checks of what is due."""
_SILENCE = 1.5  # seconds: workers send something each second
_PAIR = ("by", "to", "way", "round_trip", "sent", "taken")  # of a path in the summary
_SHOWN = 1000  # most paths in an answer to `isles status`
_MOST = 1 << 40  # most bytes of a fetched file if the model's size is unknown
_ADDRESS = "lighthouse.json"


@dataclass(frozen=True, kw_only=True)
class LighthouseAddress:
    """The address of a lighthouse. host, port: as workers reach it. workers: number started on its machine too."""

    host: Str
    port: Port
    workers: Annotated[Int, Field(ge=0)]

    def write(self, out: Path) -> None:
        write_text(out / _ADDRESS, as_json(asdict(self)) + "\n")


def read_address(out: Path) -> LighthouseAddress:
    """Read the lighthouse's address of the run in `out`. ValueError, in one line, if its file is missing or damaged."""
    hint = f"start it with: isles lighthouse {out} --host HOST --port PORT"
    try:
        return read(LighthouseAddress, parse_json((out / _ADDRESS).read_bytes()))
    except OSError:
        raise ValueError(f"{out / _ADDRESS}: is missing, so the lighthouse's address is unknown; {hint}") from None
    except ValueError:
        raise ValueError(f"{out / _ADDRESS}: is damaged; {hint}") from None


class LighthouseServer(ABC):
    """The lighthouse of the run `config` in the directory `out`, at `address`.

    on_ready: called with the join token once workers can join. on_metrics, on_notice: as in `isles.running.run.launch`.
    """

    joins_with: ClassVar[str]
    """The command that workers join with, up to the lighthouse's address."""
    vectors: ClassVar[int]
    """Vectors of the model's size in a state, besides weights and moments."""

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
        self.rules = rules(config)
        self.on_ready, self.on_metrics, self.on_notice = on_ready, on_metrics, on_notice
        self.stopping = threading.Event()
        self.judged: dict[str, float] = {}  # the run's model: its `Losses` by this machine
        self.results: dict[int, dict[str, Any]] = {}
        self.carried: dict[int, dict[str, int]] = {}
        self._paths: dict[int, list[PathRow]] = {}
        self._gone = set[int]()  # members that have left, or that ended with the run
        self.exchanged: dict[int, tuple[int, float]] = {}
        """By member of a run of whole replicas, the newest round in which it exchanged with others, and when."""
        self.schema = Schema(config)

    def run(self) -> SummaryTable | None:
        """Serve the run until it ends; returns its summary, or None if it was stopped (`stopping`).

        ValueError if the directory holds another kind of run, or the address is not available. PeerLost if no worker of
        the last view can send its model. OSError, with a remedy, for a full disk.
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
                self.out.rmdir()  # fails unless it is empty: the run never started

    @property
    def disk(self) -> int:
        """Bytes of a saved state, at most about; 0: none are saved, or the model's size is not known."""
        moments = most_moments(self.config.inner, "adamw")
        whole = self.rules.weights * (1 + moments + self.vectors) * self.config.world.inner
        return whole if self.config.run.checkpoint_every else 0

    def _run(self) -> SummaryTable | None:
        with lock_run(self.out), contextlib.ExitStack() as stack:
            if (self.out / SUMMARY).exists() and (self.out / JOURNAL).exists():
                raise ValueError(f"{self.out}: this run is complete; name another directory with --out")
            if (self.out / SUMMARY).exists() or ((self.out / METRICS).exists() and not (self.out / JOURNAL).exists()):
                raise ValueError(f"--out {self.out}: holds a run already; name another directory")
            credentials, is_new = host_credentials(self.out, None)
            room_for(_DESCRIPTORS * self.config.world.elastic.max_members + _SPARE)
            try:
                self.session = open_router(credentials, self.address, self.config.world.elastic.lease)
            except (ValueError, OSError):
                if is_new:
                    forget(self.out)
                raise
            stack.callback(self.session.close)
            journal = Journal(self.out)
            stack.callback(journal.close)
            self.began = min([time.time(), *(entry.get("at", math.inf) for entry in journal.entries[:1])])
            if not (self.out / CONFIG).exists():
                save_config(to_toml(self.config), self.out)
            self._lines = stack.enter_context(appending(self.out / METRICS))
            self.keys = MemberKeys(self.out / CREDENTIALS)
            self.state_server = StateServer(self.session, LIGHTHOUSE, self.on_notice, comes=lambda what: False)
            self.coordinator = self._assembled(journal, stack)
            self.lighthouse = Lighthouse(
                self.session,
                self.coordinator,
                journal,
                self.keys,
                config=for_members(self.config),
                version=__version__,
                on_report=self._on_report,
                on_entry=lambda entry: self._show(entry, len(self.coordinator.alive())),
                island_size=self.config.world.inner,
            )
            stack.callback(self.lighthouse.close)
            self.refused = RejectionLog(self.lighthouse.refused, self.on_notice)
            self.lighthouse.open()
            self.session.serve(STATUS, lambda query: query.reply(encode(self._status())))
            if is_new and journal.entries:
                self.on_notice("its credentials were missing: all workers must join again, with the new token")
            self.on_ready(str(credentials.token))
            summary = None
            with contextlib.suppress(InterruptedError):  # `fetch` raises it when `stopping` is set
                summary = self.serve()
        if summary is not None:
            forget(self.out)
        return summary

    def _assembled(self, journal: Journal, stack: ExitStack) -> Coordinator:
        try:
            return self.assembly(journal, time.monotonic() + GRACE, stack)
        except (LookupError, TypeError, AttributeError) as error:
            why = "its lines are inconsistent; restore the file, or start a new run"
            raise ValueError(f"{journal.path}: {why}") from error

    @abstractmethod
    def assembly(self, journal: Journal, until: float, stack: ExitStack) -> Coordinator:
        """Create the state machine of this kind of run, which waits until `until` for former members to reconnect; also
        this kind's other resources, until `stack` ends.
        """

    @abstractmethod
    def serve(self) -> SummaryTable | None:
        """Serve this kind of run until its end, or until `stopping`."""

    @abstractmethod
    def saved(self) -> int:
        """The newest step of which all states are saved; 0: none."""

    @abstractmethod
    def on_event(self, member: int, kind: str, value: Any) -> bool:
        """Handle an event that only this kind of run has; False if it is none. ValueError refuses it."""

    def members(self) -> list[int]:
        """The current members."""
        return self.lighthouse.look(lambda now: [*self.coordinator.alive()])

    def conclude(self, summary: SummaryTable) -> SummaryTable:
        """Write the run's summary, with what every lighthouse counts."""
        self.lighthouse.act(lambda now: [Append({"event": "end"})])
        summary |= {"links": self.links(), "refused": self.refused.table()}
        write_text(self.out / SUMMARY, as_json(summary, indent=2) + "\n")
        return summary

    def fetch(
        self, state_server: str, what: str, path: Path, seconds: float, copies: int = COPIES, newest: int = 1 << 53
    ) -> dict[str, Any]:
        """`fetch_state` of at most `copies` times the first model's bytes. InterruptedError if the lighthouse stops."""
        weights, keys, stops = self.rules.weights, self.keys.peer_key, self.stopping.is_set
        most = copies * weights + BESIDE if weights else _MOST
        try:
            asked = FetchRequest(source=state_server, what=what, most=most, seconds=seconds, newest=newest)
            total = self.config.world.elastic.state_deadline
            return fetch_state(self.session, asked, path, peer_key=keys, lost=stops, total=total, notice=self.on_notice)
        except StateUnavailable as why:
            raise InterruptedError if stops() else why from None

    def judge(self, files: Sequence[Path]) -> Judgement:
        """Judge files that may be the run's model, see `isles.training.lighthouse.judge`."""
        seconds, stops = self.config.world.eval_deadline, self.stopping.is_set
        return judge(self.out, str(self.lighthouse.corpus), files, seconds, stops)

    def links(self) -> dict[str, Any]:
        ways = {way: sum(one[way] for one in self.carried.values()) for way in CARRIED}
        pairs = [dict(zip(_PAIR, row, strict=True)) for row in self.paths()]
        return {**ways, "relayed_here": self.lighthouse.relayed, "pairs": pairs}

    def _status(self) -> RunStatus:
        refused, at, members = self.refused.rows(), time.time(), []
        now = self.lighthouse.look(lambda now: self.coordinator.now(now, refused))
        for one in now.members:
            machine, address, since = self.lighthouse.machines[one.member]
            one = replace(one, machine=machine, address=address, since=round(at - since, 1))
            if one.member in self.exchanged:
                number, then = self.exchanged[one.member]
                one = replace(one, exchanged=number, ago=round(at - then, 1))
            members.append(one)
        return replace(now, paths=self.paths()[:_SHOWN], members=tuple(members), saved=self.saved())

    def paths(self) -> MemberPaths:
        """The paths that workers have reported, by bytes, descending."""
        reported = [(member, *row) for member, rows in sorted(self._paths.items()) for row in rows]
        return tuple(sorted(reported, key=lambda row: -row[4]))

    def _show(self, entry: Mapping[str, Any], going_on: int) -> None:
        """Show an entry of the journal to the user as a line, if it is about a member. In the session's thread."""
        event, member = entry["event"], entry.get("member", -1)
        if event == "begin":
            step, reached = entry["step"], entry["reached"]
            none = "" if step else ", as no states were saved yet (run.checkpoint_every)"
            again = (
                f"{entry['why']} at step {reached}: begins again from step {step}, {reached - step} steps lost{none}"
            )
            self._tell(again if entry["epoch"] > 1 else f"+ it begins with {len(entry['members'])} members")
        if event == "end":
            self._gone.update(self.lighthouse.machines)
        if member < 0 or member in self._gone:
            return
        self._gone |= {member} if event == "leave" else set()
        who, silence = self.lighthouse.machines[member][0] or "a machine without a name", entry.get("silence", 0.0)
        why = f" after {silence:.1f} s of silence" if silence >= _SILENCE else " as its connection broke"
        shown = {
            "join": ("+", f" ({entry.get('seen') or 'here'})", f" joined as member {member}"),
            "back": ("+", "", f" is connected again (member {member})"),
            "leave": ("-", "", f" leaves (member {member})"),
            "lost": ("-", f" lost{why}", f" (member {member}); {going_on} {'goes' if going_on == 1 else 'go'} on"),
            "ban": ("-", "", f" shut out (member {member}): {entry.get('why')}"),
            "call": ("-", "", f" left out (member {member}): {entry.get('why')}"),
        }
        if event in shown:
            sign, only_here, more = shown[event]
            self._tell(f"{sign} {who}{only_here}{more}", f"{sign} {who}{' lost' * (event == 'lost')}{more}", member)

    def _tell(self, line: str, short: str = "", about: int = -1) -> None:
        """Show `line` here, and `short` (or it) to all members that train, except for the one that it is about. In the
        session's thread.
        """
        self.on_notice(line)
        # Later: the journal's entry must be on the disk first.
        audience = [member for member in self.coordinator.alive() if member != about]
        self.session.later(lambda: self.lighthouse.notify(audience, News(short or line)))

    def _on_report(self, member: int, event: Any) -> None:
        """Handle a worker's report, in the session's thread. ValueError refuses it."""
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
_NAMED = 100  # most notices: a member may refuse others for ever new reasons


class RejectionLog:
    """Rejections of the lighthouse and of all workers. own: the lighthouse's, updated elsewhere. notice: called with a
    line of text for each new (refusing member, refused member, reason).
    """

    def __init__(self, own: Rejections, notice: Callable[[str], None]) -> None:
        self._own, self._notice = own, notice
        self._reported: dict[int, list[RejectionRow]] = {}  # by the member that refuses
        self._named: set[tuple[int, int, str]] = set()

    def update(self, by: int, rows: Any) -> None:
        """Record the rejections that worker `by` reports. ValueError if `rows` is no such list."""
        self._reported[by] = read_rejections(rows)
        self._name(by, self._reported[by])

    def look(self) -> None:
        """Report the lighthouse's own new rejections."""
        self._name(_BY_LIGHTHOUSE, self._own.rows())

    def rows(self) -> list[tuple[int, int, str, int]]:
        """(refusing member, refused member, reason, count). -1 as the refusing member: the lighthouse; as the refused
        one: a client that is not authenticated as a member.
        """
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
