"""The decisions of a worker, or of the leader of an island, in a run that workers join and leave.

    bootstrap     load the state that the lighthouse names (the initial weights, equal everywhere, if there is none),
                  and wait for the first round while the others train. With pairs and groups, load a newer state if
                  that one is old; if all land the same mean, land the rounds in between from the donor's log
    rounds        read the round's data slice, do its inner steps, exchange at its end
    called back   the lighthouse names another state: discard the current one, and bootstrap again
    end           publish the model, evaluate the run's model on request, and wait for the end of the run

A worker whose state is requested copies it right after a landing, when no exchange is in flight.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast

from isles.comm.call import Ledger
from isles.comm.errors import RendezvousFailed
from isles.comm.group import Group
from isles.comm.transport import Transport
from isles.data import Corpus
from isles.membership.client import MembershipClient
from isles.membership.data_ledger import batches
from isles.membership.keys import LIGHTHOUSE
from isles.membership.late_shares import MissedMean
from isles.membership.messages import Examine, Finished, Load, Over
from isles.membership.round_commit import RoundDecision
from isles.membership.rounds import Decision, IslandGroup, RoundLeader
from isles.membership.run_log import ALONE, LATE, WHOLE, RoundRecord, StartRecord
from isles.membership.state_transfer import (
    BESIDE,
    COPIES,
    MODEL,
    FetchRequest,
    StateNotFound,
    StateRejected,
    StateTransfer,
    StateUnavailable,
)
from isles.training.config.sections import Config
from isles.training.elastic.states import FRESH, States, missed
from isles.training.elastic.support import is_quorum, lands_together, last_round, sync_every
from isles.training.elastic.worker import Decisions, ElasticWorker
from isles.training.worker import deadlines

SLOW = 60.0
"""Seconds without a part of a state, beyond two rounds of its donor, until another donor is requested."""
_TRIES = 3  # to fetch the lighthouse's state
_MOMENT = 0.25  # seconds for a state to arrive once it is copied
_AHEAD = 2  # rounds before its first one in which a worker of pairs or groups requests a newer state


@dataclass
class Bootstrap:
    """Gets this worker's first state. states: loads it. leaving: set when this worker is asked to leave. agrees:
    whether all land the same mean.
    """

    client: MembershipClient
    transport: Transport
    states: States
    leaving: threading.Event
    notice: Callable[[str], None]
    agrees: bool
    _has: int = 0  # the round of the last loaded state
    _tries: int = 0  # successive failures to fetch the lighthouse's state

    def with_state(self, load: Load) -> Decisions[int | None]:
        """Load the state that the lighthouse names; returns the first round with it, or None if that failed."""
        if not (yield from self._take(load)):
            return None
        round = yield from self._first(ahead=0 if self.agrees else _AHEAD)
        if round is not None and not self.agrees:
            round = (yield from self._first()) if (yield from self._freshens(load, round)) else None
        if round is None or not (yield from self._catches_up(load, round)):
            return None
        round = max(self.client.first(0.0) or round, self._has + 1)  # in step with the donor, not a round behind
        self._report_start(load, round)
        return round

    def _take(self, load: Load) -> Decisions[bool]:
        """Load the state that the lighthouse names; False if the transfer failed."""
        if load.why:
            self.notice(f"left out: {load.why}; loading another state")
        try:
            patience = SLOW + 2 * load.seconds
            self._has, left_out = yield Decision(kind="load", donor=load.donor, seconds=patience)
        except StateUnavailable as why:
            if load.donor >= 0 or not isinstance(why, StateNotFound):
                self._ask_again(load.donor, why)
                return False
            yield Decision(kind="draw")
            self._has, left_out = 0, {}
        self._tries = 0
        self.client.loaded(load, self._has, left_out)
        return True

    def _ask_again(self, donor: int, why: StateUnavailable) -> None:
        """Request another state, unless this worker leaves. RendezvousFailed if the lighthouse's cannot be fetched:
        initial weights in its place would discard the training so far.
        """
        self._tries += donor < 0
        if self.leaving.is_set():
            return
        if self._tries == _TRIES:
            raise RendezvousFailed(
                f"the state that the lighthouse saved could not be loaded ({why}): join again, and if that does not "
                "help look at RUN/states there"
            )
        whose = "that the lighthouse saved" if donor < 0 else f"of worker {donor}"
        self.notice(f"could not fetch the state {whose} ({why}): asking for another")
        self.client.reload()

    def _first(self, ahead: int = 0) -> Decisions[int | None]:
        """Wait until the others are in this worker's first round, or `ahead` rounds before it; returns that round, or
        None if it has none any more.
        """
        round, client = None, self.client
        while round is None and not client.is_called and client.ended is None and not self.leaving.is_set():
            yield Decision(kind="idle")
            round = client.first(_WAIT, ahead)
        return round

    def _freshens(self, load: Load, round: int) -> Decisions[bool]:
        """Load a newer state if the others have gone on while this worker waited for its first round: an exchange with
        an old one would set them back. It is the donor's at the end of the round before. The wait is short, as in the
        first round others wait for this worker, perhaps also the donor, which copies no state meanwhile. False if this
        worker has no valid state any more.
        """
        if load.donor < 0 or round - self._has <= FRESH:
            return True
        slow, wait = SLOW + 2 * load.seconds, 3 * load.seconds + _MOMENT
        try:
            self._has, _ = yield Decision(kind="load", donor=load.donor, seconds=slow, round=round - 2, wait=wait)
        except StateRejected as why:
            self.notice(f"a newer state of worker {load.donor} is invalid ({why}): asking for another")
            self.client.reload()
            return False
        except StateUnavailable as why:
            self.notice(f"could not fetch a newer state of worker {load.donor} ({why}): using the previous one")
        return True

    def _catches_up(self, load: Load, round: int) -> Decisions[bool]:
        """If all land the same mean, land those of the rounds before the first; False if that fails."""
        if load.donor < 0 or not self.agrees:
            return True
        donor, patience = load.donor, SLOW + 2 * load.seconds
        try:
            left_out = yield Decision(kind="catch up", donor=donor, round=self._has + 1, until=round, seconds=patience)
        except StateUnavailable as why:
            self.notice(f"could not fetch the means from worker {donor} ({why}): asking for another state")
            self.client.reload()
            return False
        self.client.leaves_out(left_out)
        self._has = round - 1
        return True

    def _report_start(self, load: Load, round: int) -> None:
        record = StartRecord(
            member=self.client.member,
            first=round,
            donor=load.donor if self._has else -1,
            copied=self.states.of,
            has=self._has,
            size=self.states.taken,
            at=self.transport.now(),
        )
        self.client.report({"start": asdict(record)})


_WAIT = 5.0  # seconds between two checks whether the run has ended
_MOST_PUT_OFF, _LONGEST_OUTAGE = 10, 600.0  # rounds, and seconds, without a landing until a worker gives up

EndReason = Literal["finished", "left", "over", "again"]


class Participant:
    """One worker, or the leader of an island, from its first state to the end of the run: it decides for its member
    (`decisions`), and carries out its own part (`worker`).

    client: of the lighthouse. transport, transfers: between members; the caller closes them. folder: for temporary
    files. notice: called with a line of text for the user. island: the workers of the island that this worker leads;
    their counters are reported with the metrics (`ElasticWorker.counted`); None: on the virtual clock. shown: called
    with each line of metrics.

    leaving: set it to make the worker leave: after the current round, or at once if it waits for its first one.
    """

    def __init__(
        self,
        config: Config,
        client: MembershipClient,
        transport: Transport,
        transfers: StateTransfer,
        corpus: Corpus,
        folder: Path,
        notice: Callable[[str], None],
        *,
        island: IslandGroup | None = None,
        shown: Callable[[Mapping[str, Any]], None] = lambda record: None,
        leaving: threading.Event | None = None,
    ) -> None:
        self._counts, self._shown = island is not None, shown
        self.config, self.client, self.transport, self.transfers = config, client, transport, transfers
        self.folder, self.leaving, self.notice = folder, leaving or threading.Event(), notice
        self._asked_to_leave = self._is_in_rounds = False
        self._unassigned_read = 0  # batches read outside of the data slices
        self._agrees = lands_together(config)
        self._tried = 0  # the newest round whose data slice was read
        self._put_off = 0  # successive postponed rounds
        self._late = 0  # rounds so far for which it was late
        self._landed_at = 0.0
        alone = Group(transport, (client.member,), "outer", deadlines(config), Ledger())
        self._island = island or IslandGroup()
        self.leader = RoundLeader(client, alone)
        self._is_quorum = is_quorum(config)
        self.leader.deliveries.landed, self.leader.deliveries.fetch = self._landed, self._missed
        self.worker = ElasticWorker(
            config,
            alone,
            self.leader,
            self._island,
            transfers,
            corpus,
            folder,
            report=self._report,
            last=lambda: self._last,
        )
        self.worker.paced = client.pace
        self._bootstrap = Bootstrap(client, transport, self.worker.states, self.leaving, notice, agrees=self._agrees)
        self.trainer, self.optimizer = self.worker.trainer, self.worker.optimizer
        self._end_reason: EndReason = "again"

    def run(self) -> EndReason:
        """Train until the run ends, or this worker has left it."""
        self.worker.obey(self.decisions())
        return self._end_reason if self.client.ended is None or self._end_reason != "again" else "over"

    def decisions(self) -> Decisions[None]:
        """The member's decisions, until its end."""
        client = self.client
        while self._end_reason == "again" and client.ended is None:
            if self.leaving.is_set() and not self._asked_to_leave:
                self._end_reason = "left"
                return
            yield Decision(kind="idle")
            instruction = client.next_decision(_WAIT)
            round = (yield from self._bootstrap.with_state(instruction)) if isinstance(instruction, Load) else None
            if round is not None:
                self._is_in_rounds = True
                self._end_reason = yield from self._train(round)
                self._is_in_rounds = False
                if self._end_reason == "again":
                    yield Decision(kind="forget")
        if self._end_reason == "finished":
            yield from self._conclude()

    # Rounds

    def stops_fetching(self) -> bool:
        """Whether this worker was asked to leave while it is in no round."""
        return self.leaving.is_set() and not self._is_in_rounds

    def _train(self, round: int) -> Decisions[EndReason]:
        every, client = sync_every(self.config), self.client
        yield from self._enter(round, (round - 1) * every)
        while not self._is_done(round):
            if client.is_called:
                yield Decision(kind="over", round=client.state.earliest() - 1)  # its exchanges in these are cancelled
                return "again"
            if client.ended is not None:
                return "left" if self.leaving.is_set() else "over"
            if self._leaves(round):
                self.optimizer.round_exchange.progress(blocks=True)
                return "left"
            round += yield from self._round(round, every)
        self.optimizer.round_exchange.progress(blocks=True)
        return "again" if client.is_called else "finished"

    @property
    def _last(self) -> int:
        """The run's last round, as known from the newest view."""
        views = self.client.state.views
        return last_round(self.config, views[max(views)] if views else None)

    def _is_done(self, round: int) -> bool:
        """Whether the run ends before `round`. With run.tokens a coming view may still move its end."""
        if self.config.run.tokens and round > self._last:
            self.client.wait(lambda: self.client.state.group(round).decided or self.client.is_over, _WAIT)
        return round > self._last

    def _enter(self, round: int, steps: int) -> Decisions[None]:
        yield from self._pass(round - 1)
        self._tried, self._put_off, self._landed_at = 0, 0, self.transport.now()
        began_at = steps if self.worker.states.lacks_moments else None
        yield Decision(kind="enter", round=round, steps=steps, began_at=began_at)

    def _round(self, round: int, every: int) -> Decisions[int]:
        """Do the inner steps of a round; the last one exchanges. Returns the number of completed rounds, 0 if the
        exchange is postponed: then more steps follow.
        """
        client, view = self.client, self.client.start_round(round)
        index = None if view is None else view.index(client.member)
        slice_view, spare = None if round == self._tried else view, self._unassigned_read
        self._tried = round
        read = () if slice_view is None else tuple(batches(client.state.views, slice_view, round, cast(int, index)))
        steps = len(read) or every  # on unassigned data slow members, too, do all steps
        done, began = round * every - steps, self._computed()  # all end a round at the same step count
        yield Decision(kind="train", round=round, steps=done, slices=read, spare=spare)
        seconds = max(self._computed() - began, 0.0)
        if slice_view is None:
            self._unassigned_read += every
        if steps == 1:
            client.pace(seconds)
        is_put_off = self._is_put_off(round)
        members, outcome = self._outcome(round, is_put_off=is_put_off)
        record = RoundRecord(
            member=client.member,
            round=round,
            view=-1 if slice_view is None else slice_view.number,
            spare=spare,
            steps=steps,
            seconds=seconds,
            members=members,
            outcome=outcome,
            at=self.transport.now(),
        )
        client.report({"round": asdict(record)})
        if is_put_off:
            return 0
        yield from self._report_metrics(round, is_first=index == 0)
        if self._is_quorum:
            return self._skipped(round)
        yield Decision(kind="keep", round=round, left_out=client.left_out())
        yield from self._pass(round)
        return 1

    def _outcome(self, round: int, *, is_put_off: bool) -> tuple[tuple[int, ...], str]:
        """(members of the exchange of `round`, its outcome), as in a `RoundRecord`."""
        if is_put_off:
            return (self.client.member,), ALONE
        members, outcome = self.leader.outcome(round)
        if self._is_quorum:
            late = self.leader.deliveries.late
            outcome, self._late = WHOLE if late == self._late else LATE, late
        return members, outcome

    def _report_metrics(self, round: int, *, is_first: bool) -> Decisions[None]:
        """Report metrics if they are due. is_first: this worker is the first of its view, which also validates; after
        the last round the run's model is validated instead.
        """
        losses = {}
        if is_first and round < self._last and self._passes(round, self.config.run.validate_every):
            losses = yield Decision(kind="validate")
        if losses or round == self._last or self._passes(round, self.config.run.log_every):
            self.trainer.report(losses)
            yield from self._report_counts()

    def _pass(self, round: int) -> Decisions[None]:
        if not self._agrees:
            yield Decision(kind="over", round=round)

    def _skipped(self, round: int) -> int:
        """Number of completed rounds. More than one if this worker was late: its share went into a later round, and
        those before it are completed too.
        """
        over = self.optimizer.fragments[0].rounds - round + 1
        for other in range(round + 1, round + over):
            self.client.skip(other)
        return over

    def _landed(self, round: int) -> None:
        """Called when a quorum's mean has landed, between two inner steps or at the end of a round."""
        self.worker.catch_up_log.landed(round, self.client.left_out())
        shown = self.optimizer.evaluation_weights() if any(self.worker.states.wanted()) else nullcontext()
        with shown:  # copy the anchors: the inner steps since then are only this worker's
            self.worker.copy(round, self.client.left_out())

    def _missed(self, decision: RoundDecision) -> MissedMean | None:
        """Fetch the mean of a round for which this worker was late."""
        path, seconds = self.folder / "missed.safetensors", SLOW + 4 * self.client.state.seconds
        return missed(self.optimizer, self.transfers, decision, path, seconds, self.client.lost)

    def _is_put_off(self, round: int) -> bool:
        """Whether `round`, which all land together, was postponed because the lighthouse did not answer.
        RendezvousFailed if no round has landed for too long.
        """
        if not self._agrees or self.optimizer.fragments[0].rounds >= round:
            self._put_off, self._landed_at = 0, self.transport.now()
            return False
        self._put_off += 1
        waited = self.transport.now() - self._landed_at
        if self._put_off > _MOST_PUT_OFF and waited > _LONGEST_OUTAGE and not self.client.is_called:
            raise RendezvousFailed(
                f"no round could land for {waited:.0f} s: the lighthouse does not answer; start it again there with "
                "isles resume RUN, then join again with isles join"
            )
        return True

    def _computed(self) -> float:
        """Seconds so far in which this worker neither waited for others nor was paused."""
        seconds = self.trainer.step_clock.reading()
        return seconds - self.transport.traffic.total("blocked_seconds", "outer") - self.client.waited

    def _report_counts(self) -> Decisions[None]:
        if self._counts:
            for name, counts in (yield Decision(kind="report")).items():
                self.client.report({name: counts})

    def _passes(self, round: int, number: int) -> bool:
        """Whether an inner step of `round` is a multiple of `number`; 0: never."""
        every = sync_every(self.config)
        return number > 0 and (round * every) // number > ((round - 1) * every) // number

    def _leaves(self, round: int) -> bool:
        """Whether this worker leaves before `round`: a view from that round on excludes it, or run.grace is over."""
        island = self._island.mesh
        if island is not None and island.stop_here(round - 1):
            self.leaving.set()
        if not self.leaving.is_set():
            return False
        if not self._asked_to_leave:
            self._asked_to_leave = True
            self._leave_by = self.transport.now() + self.config.run.grace
            if not self.client.leave():
                return True
        until = self.client.until()
        return (until is not None and round >= until) or self.transport.now() > self._leave_by

    # The end

    def _conclude(self) -> Decisions[None]:
        """Publish this worker's model, and evaluate the run's model on request, until the run is over."""
        result = yield Decision(kind="conclude")
        # Published before `Finished` is sent: the lighthouse fetches the model of whoever has finished.
        self.transfers.publish(MODEL, self.folder / "model.safetensors", {})
        yield from self._report_counts()
        self.client.report({"result": result})
        answered_at, patience = self.transport.now(), self.config.world.eval_deadline
        was_leaving = self.leaving.is_set()
        while not isinstance(self.client.ended, Over):
            if self.leaving.is_set() and not was_leaving:
                self._end_reason = "left"
                return
            if isinstance(self.client.ended, Examine):
                self._evaluate()
                self.client.ended = None
            if self.client.ask(Finished()) is not None:
                answered_at = self.transport.now()
            elif self.transport.now() - answered_at > patience:
                raise RendezvousFailed(f"the lighthouse has not taken this worker's model within {patience:g} s")
            self.client.wait(lambda: self.client.ended is not None, 1.0)
        self.client.reported(_WAIT)

    def _evaluate(self) -> None:
        path = self.folder / "whole.safetensors"
        try:
            most = COPIES * self.worker.states.weights + BESIDE
            self.transfers.fetch(FetchRequest(source=LIGHTHOUSE, what=MODEL, most=most, seconds=SLOW), path)
        except StateUnavailable as why:
            self.notice(f"could not fetch the run's model ({why}): it is not evaluated")
            return
        self.client.report({"evaluated": self.worker.evaluate(path)})

    def _report(self, event: Any) -> None:
        """Handle the trainer's events: metrics go to the lighthouse, notices to the user."""
        if "notice" in event:
            self.notice(event["notice"])
        elif "step" in event and "loss" in event:
            self.client.report({**event, "worker": self.client.member})
            self._shown(event)
