"""Workers that are killed, frozen, told to leave and joined at random moments, a lighthouse that is killed and frozen,
and disks that fill up; and what must be true afterwards.
"""

from __future__ import annotations

import functools
import json
import math
import operator
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from isles.data.order import rows
from isles.membership.coordinator import RoundsCoordinator
from isles.membership.data_ledger import DataLedger, range_batches
from isles.membership.effects import Rules
from isles.membership.run_log import ALONE, WHOLE
from tests.training.elastic.disks import Disk
from tests.training.elastic.mapped import ended, ledger
from tests.training.elastic.processes import Processes, connected
from tests.training.elastic.recovery import LASTING, Trouble, false_losses, recoveries
from tests.training.elastic.test_runs import EVERY, events
from tests.training.elastic.warm import Worker

FROZEN = 5.0  # seconds, at most
CALM = ["kill", "kill", "kill", "leave", "join", "join", "join", "join"]
WORKERS = ["kill", "leave", "join", "freeze"]
LIGHTHOUSE = ["lighthouse killed", "lighthouse frozen"]
DISKS = ["disk full", "lighthouse's disk full"]
ROOM = 64 << 20  # bytes of the lighthouse's disk
_SCRATCH = 4 << 20  # bytes of a worker's
_BEHIND = 3  # rounds
_LEFT = (0, 143, -15)  # 143, -15: it was not in yet


class Soak:
    """least, most: workers at any time, those that leave not counted. waits: seconds between
    two events, at the least and at the most; times to leave go by beside them. pause: see `Worker`. disks: by
    place: the run's folder, and one is added for each worker.
    """

    def __init__(
        self,
        world: Processes,
        least: int,
        most: int,
        waits: tuple[float, float],
        pause: float = 0.25,
        disks: dict[Path, Disk] | None = None,
    ) -> None:
        self.pause, self._disks = pause, disks
        self.world, self.least, self.most, self.waits = world, least, most, waits
        self.draw, self.done = random.Random(7), Counter[str]()
        self.troubles: list[Trouble] = []
        self._held: dict[Worker | None, tuple[float, Trouble, Callable[[], None]]] = {}
        """Who is in trouble for a while (None: the lighthouse), until when, and what ends it."""
        self.living: list[Worker] = []
        self.leaving: list[Worker] = []
        self._entries: list[dict[str, Any]] = []  # of the journal, once all have settled
        self._diary = (world.folder / "soak.jsonl").open("a", buffering=1)
        for _ in range(least):
            self._start()
        world.until(lambda: events(world.out, "view") and min(len(one.rounds()) for one in self.living) > _BEHIND)

    def events(self, each: int) -> Iterator[int]:
        """So many of each kind, shuffled, and what joins are needed besides; yields how many are done."""
        deck = [*WORKERS, *LIGHTHOUSE, *(DISKS if self._disks is not None else ())] * each
        for done in range(len(deck)):
            yield done
            what = self.draw.choice([one for one in deck if None not in self._held or not _of_lighthouse(one)] or deck)
            deck.remove(what)
            self.event([what])

    def event(self, kinds: list[str]) -> None:
        """Wait, and do one of `kinds`."""
        self._wait(self.draw.uniform(*self.waits))
        what = self.draw.choice(kinds)
        if _of_lighthouse(what):
            while None in self._held:
                self._wait(0.1)
            self._disturb(what)
            return
        free = [worker for worker in self.living if worker not in self._held]
        trained = self._in_step(free)
        if len(trained) <= 2:  # whose state the run would end with
            free = [worker for worker in free if worker not in trained]
        if what == "disk full":
            free = [worker for worker in free if worker.rounds()]  # others would not join
        has_room = len(self.living) < self.most
        if has_room and (what == "join" or len(self.living) <= self.least or not free):
            self._start()
            if what == "join":
                return
        if not free:
            self.event([what])  # later
            return
        self._disturb(what if what != "join" else self.draw.choice(["kill", "leave"]), self.draw.choice(free))
        if what == "join":
            self._start()

    def _start(self) -> None:
        """One joins."""
        scratch = None
        if self._disks is not None:
            scratch = self.world.folder / "scratch" / f"warm-{len(self.world.warm)}"
            self._disks[scratch] = Disk(scratch, _SCRATCH)
        listen = ["--listen", "127.0.0.1:0"] if len(self.world.warm) % 2 else []  # half of them are relayed
        self.living.append(self.world.warm_join(*listen, pause=self.pause, scratch=scratch))
        self._note("join", self.living[-1])

    def _start_again(self, worker: Worker) -> None:
        """A joiner that had no answer of the lighthouse, which is there now; or that had no room for the state."""
        said = self._said(worker)
        assert "isles: in: member" not in said or "make room there" in said, self.world.logs()
        self._held.pop(worker, None)
        self.living.remove(worker)
        # It has ended since its last trouble, a full disk, or never was in; what was done to it before stays.
        own, now = [one for one in self.troubles if one.worker == worker.name and one.what != "join"], time.monotonic()
        self.troubles = [one for one in self.troubles if one.worker != worker.name or one in own]
        if own:
            self.troubles.append(Trouble("leave", worker.name, max(one.at for one in own), now))
        self._start()

    def _said(self, worker: Worker) -> str:
        log = self.world.folder / f"{worker.name}.log"
        return log.read_text() if log.exists() else ""  # it ended before it wrote any

    def _disk(self, worker: Worker | None) -> Disk:
        assert self._disks is not None
        return self._disks[self.world.out if worker is None else self.world.folder / "scratch" / worker.name]

    def _disturb(self, what: str, worker: Worker | None = None) -> None:
        """Do it, now, and see to its end where it has one."""
        trouble = self._note(what, worker)
        process = self.world.light if worker is None else worker
        match what:
            case "kill":
                process.kill()
            case "leave":
                process.send_signal(signal.SIGTERM)
            case "freeze" | "lighthouse frozen":
                process.send_signal(signal.SIGSTOP)
                end = functools.partial(process.send_signal, signal.SIGCONT)
            case "lighthouse killed":
                process.kill()
                process.wait()
                end = self.world.light_again
            case "lighthouse's disk full":
                self._disk(None).fill()
                end = self._room_again
            case "disk full":
                self._disk(worker).fill()
                end = self._disk(worker).free
        if what in LASTING:
            assert worker is not None
            self.living.remove(worker)
            if what == "leave":
                self.leaving.append(worker)
            return
        trouble.free = math.inf
        self._held[worker] = time.monotonic() + self.draw.uniform(1.0, FROZEN), trouble, end

    def _room_again(self) -> None:
        """The lighthouse has ended, and said why; with room on its disk it goes on."""
        self.world.until(lambda: self.world.light.poll() is not None)
        assert f"make room and go on with: isles resume {self.world.out}" in self.world.logs()
        self._disk(None).free()
        self.world.light_again()

    def _in_step(self, free: Sequence[Worker]) -> list[Worker]:
        """Those that have the run's state: they are in its newest rounds."""
        last = {worker: max((one["round"] for one in worker.rounds()[-1:]), default=0) for worker in self.living}
        return [worker for worker in free if last[worker] > max(*last.values(), _BEHIND) - _BEHIND]

    def _note(self, what: str, worker: Worker | None) -> Trouble:
        now = time.monotonic()
        self.done[what] += 1
        self.troubles.append(Trouble(what, "" if worker is None else worker.name, now, now))
        self._diary.write(json.dumps(asdict(self.troubles[-1])) + "\n")
        return self.troubles[-1]

    def _wait(self, seconds: float) -> None:
        """Whoever has been in trouble long enough meanwhile is free."""
        until = time.monotonic() + seconds
        while (now := time.monotonic()) < until:
            for held in [one for one, (end, *_) in self._held.items() if end <= now]:
                _, trouble, free = self._held.pop(held)
                trouble.free = now
                free()
            for refused in [one for one in self.living if one.poll() is not None and None not in self._held]:
                self._start_again(refused)
            ends = (end for end, *_ in self._held.values())
            time.sleep(max(min(until, *ends, until) - time.monotonic(), 0.0))

    def fill(self) -> None:
        """As many as there may be, all settled."""
        while len(self.living) < self.most:
            self._start()
        self.settle()

    def settle(self) -> None:
        """The last view is the living, and they train; those who were told to leave have left."""
        world, living, lines = self.world, self.living, dict[Worker, int]()

        def all_train() -> bool:
            self._wait(0.2)  # a joiner whose lighthouse was killed gives up after a minute: another one takes its place
            trains = [len(worker.rounds()) > lines.setdefault(worker, len(worker.rounds())) + 2 for worker in living]
            return all(trains) and not self._held

        world.until(all_train, 240.0)
        wanted = {worker.rounds()[-1]["member"] for worker in living}
        world.until(lambda: connected(world.out) == wanted)
        world.until(lambda: set(events(world.out, "view")[-1]["view"]["members"]) == wanted)
        self._entries = self._journal()
        since = events(world.out, "view")[-1]["view"]["since"]
        world.until(lambda: all(worker.rounds()[-1]["round"] > since for worker in living))
        assert all(process.poll() is None for process in living), world.logs()
        codes = {worker.wait(60.0) for worker in self.leaving if "isles: in: member" in self._said(worker)}
        assert codes <= {*_LEFT}, world.logs()  # another one may have found no lighthouse

    def end(self) -> None:
        """All leave, and nobody is left."""
        world = self.world
        for process in self.living:
            process.send_signal(signal.SIGTERM)
        assert [process.wait(60.0) for process in self.living] == [0] * len(self.living), world.logs()
        world.put_out()
        assert all(process.poll() is not None for process in world.warm)
        assert not [process.pid for process in world.warm if process.is_there()]
        assert not any("Traceback" in path.read_text() for path in world.folder.glob("*.log")), world.logs()

    # Accounts

    def _journal(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.world.out / "members.jsonl").read_text().splitlines()]

    def batches(self, *, agrees: bool) -> str:
        """Of every batch before the view in which all settled the work is in the weights of who is there, or it is
        owed; of at most a cell a loss it is there twice.
        """
        losses, forgo = list[int](), DataLedger.forgo  # of members whose work was given up

        def noted(ledger: DataLedger, member: int) -> None:
            losses.append(member)
            forgo(ledger, member)

        with patch.object(DataLedger, "forgo", noted):
            kept = RoundsCoordinator(Rules(founders=self.least, sync_every=EVERY, agrees=agrees), self._entries).ledger
        view = kept.newest
        assert view is not None
        backlog = {
            int(rows(*one, batch_size=1)[0])
            for sample_range in view.backlog
            for one in range_batches(kept.views[sample_range.view], sample_range)
        }
        held = Counter(work_of(self.world.warm, view.members, agrees=agrees))
        never, twice = {*range(view.start)} - held.keys() - backlog, sum(held.values()) - len(held)
        assert not never, f"{len(never)} batches are in nobody's weights, the first {sorted(never)[:20]}"
        assert twice <= EVERY * len(losses), f"{twice} batches twice, {len(losses)} losses"
        done = sum(len(worker.reads()) for worker in self.world.warm)
        return (
            f"{done} batches read, {len(held)} in the weights, {twice} twice, {len(backlog)} owed, {len(losses)} losses"
        )

    def messages(self) -> str:
        """What was sent was received, or there is what ended it."""
        last: dict[int, int] = {}  # round that a worker has told of, by member
        for worker in self.world.warm:
            if len(book := worker.book()):
                last[int(book["member"][0])] = max((line["round"] for line in worker.rounds()), default=0)
        told = ledger([worker.book() for worker in self.world.warm], last)
        assert told["unexplained"] == 0, told
        assert told["sent"] == sum(told.values()) - told["sent"]
        assert told["received"] > 0.8 * told["sent"]
        return f"bytes {dict(told)}"

    def recovered(self) -> tuple[dict[str, list[float]], list[tuple[float, str]]]:
        """(see `recoveries`, see `false_losses`), until all had settled."""
        whole, numbers = dict[str, list[float]](), dict[int, str]()
        for worker in self.world.warm:
            rounds = worker.rounds()
            whole[worker.name] = [one["at"] for one in rounds if one["outcome"] == WHOLE]
            numbers |= dict.fromkeys({one["member"] for one in rounds}, worker.name)
        ahead = time.time() - time.monotonic()  # of the journal's clock
        entries = [{**one, "at": one["at"] - ahead} for one in self._entries]
        return recoveries(self.troubles, whole), false_losses(entries, numbers, self.troubles)

    def exchanges(self) -> tuple[Counter[str], int]:
        """(how rounds with others ended, exchanges that their deadline ended, each attempt counted)."""
        did = Counter(one["outcome"] for worker in self.world.warm for one in worker.rounds())
        del did[ALONE]
        late = ended(np.concatenate([worker.book() for worker in self.world.warm]))["DeadlinePassed"]
        return did, late


def _of_lighthouse(what: str) -> bool:
    return what.startswith("lighthouse")


def work_of(workers: Sequence[Worker], members: Sequence[int], *, agrees: bool) -> list[int]:
    """The batches whose work is in the weights of `members` at the end, each as often as it was read by somebody whose
    work came there: at its own reading, in a whole exchange, or with the state that somebody began with.
    """
    numbers: list[int] = []  # of each reading
    reads: dict[int, dict[int, int]] = {}  # by round and member, as bits
    whole: dict[int, dict[int, list[int]]] = {}
    starts: dict[int, list[dict[str, int]]] = {}
    for worker in workers:
        if not (lines := worker.starts()):
            continue
        for line in lines:
            starts.setdefault(line["first"], []).append(line)
        member = lines[0]["member"]
        for round, number in worker.reads():
            own = reads.setdefault(round, {})
            own[member] = own.get(member, 0) | 1 << len(numbers)
            numbers.append(number)
        for line in worker.rounds():
            if line["outcome"] == WHOLE:
                whole.setdefault(line["round"], {})[member] = line["members"]
    copies = {(line["donor"], line["has" if agrees else "copied"]) for lines in starts.values() for line in lines}
    held: dict[int, int] = {}
    copied: dict[tuple[int, int], int] = {}
    for round in range(max(reads) + 1):
        for line in starts.get(round, ()):
            held[line["member"]] = copied.get((line["donor"], line["has" if agrees else "copied"]), 0)
        for member, read in reads.get(round, {}).items():
            held[member] = held.get(member, 0) | read
        before = dict(held)
        for member, others in whole.get(round, {}).items():
            for other in others:
                held[member] |= before.get(other, 0)
        copied |= {(member, round): mask for member, mask in held.items() if (member, round) in copies}
    there = f"{functools.reduce(operator.or_, (held.get(member, 0) for member in members)):b}"[::-1]
    return [number for number, bit in zip(numbers, there, strict=False) if bit == "1"]


def longest_gaps(workers: list[Worker]) -> tuple[float, float]:
    """(median, longest) seconds between two rounds of one worker."""
    gaps = sorted(gap for worker in workers for gap in worker.gaps())
    return gaps[len(gaps) // 2], gaps[-1]
