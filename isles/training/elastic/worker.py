"""A worker of a member (a single worker, or one of an island), which carries out its leader's decisions."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch

from isles.base.parsing import parse_json
from isles.comm.errors import Malformed
from isles.comm.group import Group
from isles.comm.layout import grid_of
from isles.comm.mesh import Mesh
from isles.data import Corpus
from isles.data.order import rows, spare_rows
from isles.membership.data_ledger import Batch
from isles.membership.messages import MOST, read_paths
from isles.membership.p2p.stream import CARRIED
from isles.membership.p2p.transport import ElasticTransport
from isles.membership.rounds import Decision, DecisionKind, ElasticRoster, IslandGroup, RoundLeader
from isles.membership.session import Rejections, merge_rejections, read_rejections
from isles.membership.state_transfer import StateRejected, StateTransfer, StateUnavailable, server_name
from isles.models import build
from isles.replicas.loop.outer import OuterSync, enter
from isles.training.config.sections import Config
from isles.training.elastic.states import WARM_UP, CatchUpLog, States, catch_up
from isles.training.elastic.support import lands_together, sync_every
from isles.training.records.saved_run import load_weights
from isles.training.records.summary import by_channel
from isles.training.step import draws_seed, model_losses
from isles.training.worker import trainer_of

T = TypeVar("T")
_TRIES = 5  # for the workers of an island to get states of one round: a donor's newest changes meanwhile
_MEANS = ("bytes_sent", "bytes_received", "compute_seconds", "blocked_seconds")  # counters averaged over an island
Decisions = Generator[Decision, Any, T]
"""A sequence of decisions; each `yield` returns the decision's result, or raises `StateUnavailable`."""


class ElasticWorker:
    """One worker of a member.

    alone: the group of this member only, on the transport between members. island: the workers of its island. leader:
    decides rounds; None at a follower. folder: for temporary files. report: called with the trainer's events. last: the
    run's last round, as far as it is known.

    paced: called with the mean seconds of an inner step: before the last step of each round, and after the very first
    step, from which workers that join in a long first round estimate its end. watched: the context of each inner step.
    refusals: the messages that this worker's
    session has refused.
    """

    def __init__(
        self,
        config: Config,
        alone: Group,
        leader: RoundLeader | None,
        island: IslandGroup,
        transfers: StateTransfer,
        corpus: Corpus,
        folder: Path,
        *,
        report: Callable[[Any], None],
        last: Callable[[], int],
    ) -> None:
        self._config, self._alone, self._corpus, self.folder = config, alone, corpus, folder
        world = Mesh(world=alone, layout=grid_of(1), report=report)
        if island.mesh is not None:
            world = replace(island.mesh, layout=grid_of(island.size, inner=island.size), report=report)
        self.reader = world.reader
        self.member = alone.transport.rank
        reader_index, workers = self.reader
        torch.manual_seed(draws_seed(config.run.seed, self.member * workers + reader_index))
        self._world, self._roster = world, ElasticRoster(alone, island, leader)
        self.trainer = trainer_of(config, world, corpus, self._roster)
        assert isinstance(self.trainer.optimizer, OuterSync) and self.trainer.text is not None
        self.optimizer, self._text = self.trainer.optimizer, self.trainer.text
        self.catch_up_log = CatchUpLog(self.optimizer, transfers, folder)
        self.states = States(
            self.optimizer, transfers, folder, config.world.elastic.join_state, last, island_rank=reader_index
        )
        self._transfers, self._island = transfers, island
        self.watched: Callable[[], AbstractContextManager[None]] = nullcontext
        self.paced: Callable[[float], None] = lambda seconds: None
        self._paced = False
        self.refusals = Rejections()
        self._began_at: int | None = None  # inner steps, where this worker began without moments
        self._does: dict[DecisionKind, Callable[[Decision], Any]] = {
            "idle": lambda decision: None,
            "load": self.load,
            "draw": self.draw,
            "catch up": self.catch_up,
            "enter": self.enter,
            "forget": self.forget,
            "train": self.train,
            "keep": self.keep,
            "over": lambda decision: cast(Any, alone.transport).over("outer", decision.round),  # of pairs or groups
            "validate": lambda decision: self.trainer.validate(),
            "report": self.counted,
            "conclude": self.conclude,
        }

    def obey(self, decisions: Decisions[Any] | None = None) -> None:
        """Carry out the leader's decisions until one is "end". decisions: the leader's own; None at a follower.
        Malformed for a kind that is not allowed between rounds.
        """
        came, why = None, None
        while (decision := self._island.next_decision(partial(_next, decisions, came, why))).kind != "end":
            came, why = None, None
            if decision.kind not in self._does:
                raise Malformed(-1, f"the leader of this island sent the decision {decision.kind} between rounds")
            try:
                came = self._does[decision.kind](decision)
            except StateUnavailable as reason:
                why = reason  # raised in the leader's `decisions`, which decide how to go on

    def load(self, decision: Decision) -> tuple[int, dict[int, int]]:
        """Load the state of `donor` (`States.fetch`); returns its round, and the members that the donor knew to be left
        out. All workers of an island load states of one round. StateUnavailable for all if one could not fetch it, and
        none is changed; StateRejected if it was fetched but not loaded.
        """
        mismatch = "the workers of this island got states of different rounds"
        fetch = partial(self.states.fetch, decision.donor, decision.seconds, after=decision.round, wait=decision.wait)
        for _ in range(_TRIES):
            if self._same(fetch) is not None:
                break
        else:
            raise StateUnavailable(mismatch)
        try:
            round = self._same(self.states.adopt)
        except StateUnavailable as why:
            raise StateRejected(str(why)) from why
        if round is None:
            raise StateRejected(mismatch)
        return round, self.states.left_out

    def _same(self, call: Callable[[], int]) -> int | None:
        """The result of `call` (0 or more) if it is equal at all workers of the island, else None. StateUnavailable for
        all if one raises it.
        """
        number, why = -1, StateUnavailable("")
        try:
            number = call()
        except StateUnavailable as reason:
            why = reason
        numbers = [gathered[0] for gathered in self._island.gather(number)]
        if min(numbers) < 0:
            raise why if str(why) else StateUnavailable(f"worker {numbers.index(min(numbers))} of this island got none")
        return number if min(numbers) == max(numbers) else None

    def draw(self, decision: Decision) -> None:
        """Reset to the initial weights, equal everywhere, when there is no state of the run."""
        if not self.states.are_drawn:
            trainer = trainer_of(self._config, self._world, self._corpus, self._roster)
            assert isinstance(trainer.optimizer, OuterSync)
            self.states.become(trainer.optimizer)
            trainer.memory.close()

    def catch_up(self, decision: Decision) -> dict[int, int]:
        """Land the means of rounds `round` to `until - 1`, fetched from `donor`; returns the members left out meanwhile
        (see `MissedMean`). StateUnavailable for all workers of the island if one could not within `seconds`.
        """
        state_server, rounds = server_name(decision.donor, self.reader[0]), range(decision.round, decision.until)
        path, why, left_out = self.folder / "taken.safetensors", "", dict[int, int]()
        try:
            left_out = catch_up(self.optimizer, self._transfers, state_server, rounds, path, decision.seconds)
        except StateUnavailable as reason:
            why = str(reason)
        if not all(gathered[0] for gathered in self._island.gather(int(not why))):
            raise StateUnavailable(why or "another worker of this island could not land them")
        return left_out

    def enter(self, decision: Decision) -> None:
        """Start with `round`, after `steps` inner steps."""
        self._began_at = decision.began_at
        # Before `enter`, which may send anchors: the groups cached so far are those of the former state.
        self._roster.begin_anew()
        self.catch_up_log.begins(decision.round)
        enter(self.optimizer, decision.round, decision.steps)
        self.schedule_at(decision.steps)

    def forget(self, decision: Decision) -> None:
        """This worker's state is obsolete: do not serve it."""
        self.states.forget()
        self.catch_up_log.forget()

    def schedule_at(self, steps: int) -> None:
        """Set the learning rates of the inner step after `steps` steps."""
        schedule = self.trainer.schedule
        schedule.last_epoch = steps
        warmth = 1.0
        if self._began_at is not None:
            warmth = min(1.0, (steps + 1 - self._began_at) / (WARM_UP * sync_every(self._config)))
        for group, base, factor in zip(
            self.optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True
        ):
            group["lr"] = base * factor(steps) * warmth

    def train(self, decision: Decision) -> None:
        """Do one inner step per slice, after `steps` inner steps; the last one exchanges."""
        count = len(decision.slices) or sync_every(self._config)
        self.states.are_drawn = False
        self._text.positions = positions(self._config, self.member, decision.slices, decision.spare, self.reader)
        self.optimizer.steps = decision.steps
        self.schedule_at(decision.steps)
        clock, began = self.trainer.step_clock, self.trainer.step_clock.reading()
        for left in reversed(range(count)):
            with self.watched():
                self.trainer.step()
            if left == 1 or (left and not self._paced):  # not after the last step, whose time includes the exchange
                self._paced = True
                self.paced((clock.reading() - began) / (count - left))

    def keep(self, decision: Decision) -> None:
        """Right after `round`: save its mean, and copy the state if requested (`CatchUpLog`, `States`)."""
        if lands_together(self._config):
            self.catch_up_log.landed(decision.round, decision.left_out)
        self.copy(decision.round, decision.left_out)

    def copy(self, round: int, left_out: Mapping[int, int]) -> None:
        gathered = self._island.gather(*map(int, self.states.wanted()))
        wanted = [any(each) for each in zip(*gathered, strict=True)]
        if self.states.landed(round, dict(left_out), wanted):
            self.catch_up_log.copied(round)

    def conclude(self, decision: Decision) -> dict[str, Any]:
        """See `Trainer.conclude`; in an island the tokens of all its workers, and the means of their counters."""
        for fragment in self.optimizer.fragments:
            fragment.ahead = None  # sent ahead for a round after the last one
        result = self.trainer.conclude(self.folder)
        if self._island.size == 1:
            return result
        counted = json.dumps({key: result[key] for key in ("tokens", "channels", *_MEANS)}).encode("ascii")
        gathered = [parse_json(one) for one in self._island.gather_text(counted)]
        result |= {key: sum(one[key] for one in gathered) / len(gathered) for key in _MEANS}
        return result | {"tokens": sum(one["tokens"] for one in gathered), "channels": by_channel(gathered)}

    def counted(self, decision: Decision) -> dict[str, Any]:
        """The counters of all workers of the island. carried: bytes sent to other members, by kind of path. refused:
        rejections. paths: of each worker.
        """
        transport = self._alone.transport
        assert isinstance(transport, ElasticTransport)
        gathered = self._island.gather(*(transport.carried[way] for way in CARRIED))
        carried = {way: sum(numbers) for way, numbers in zip(CARRIED, zip(*gathered, strict=True), strict=True)}
        rows = [self.refusals.rows(), transport.paths()]
        gathered = [parse_json(one) for one in self._island.gather_text(json.dumps(rows).encode("ascii"))]
        paths = [row for _, one in gathered for row in read_paths(one)]
        refused = merge_rejections(read_rejections(one) for one, _ in gathered)
        return {"carried": carried, "refused": refused, "paths": sorted(paths, key=lambda row: -row[3])[:MOST]}

    def evaluate(self, file: Path) -> float | None:
        """Validation loss, in nats, of the run's model in `file`. ValueError if it does not fit this run."""
        trainer, config = self.trainer, self._config
        if trainer.text is None or not trainer.validates:
            return None
        model = build(config.model, config.run.seed, trainer.world.local_rank, isolates=config.data.isolate_documents)
        load_weights(model, file, "the lighthouse")
        return model_losses(model, trainer.text, trainer.autocast)["val_loss"]

    def close(self) -> None:
        self.trainer.memory.close()


def _next(decisions: Decisions[Any] | None, came: Any, why: StateUnavailable | None) -> Decision:
    """The next decision, after the last one returned `came` or raised `why`."""
    assert decisions is not None, "only the leader decides"
    try:
        return decisions.send(came) if why is None else decisions.throw(why)
    except StopIteration:
        return Decision(kind="end")


def positions(
    config: Config, member: int, batches: Iterable[Batch], spare: int, reader: tuple[int, int] = (0, 1)
) -> Iterator[np.ndarray]:
    """The sequences that `member` reads: (b,) positions in the data's order for each backward pass.

    batches: one per inner step. If there are none, it reads a round's batches from the range that is reserved for it
    outside of all data slices, of which it has read `spare`. reader: see `isles.data.loader.rows`.
    """
    size, accumulation = config.data.batch_size_per_worker(1), config.inner.accumulation
    steps = [rows(*batch, batch_size=size * accumulation, reader=reader) for batch in batches]
    if not steps:
        stretch = range(spare, spare + sync_every(config))
        steps = [spare_rows(member, number, batch_size=size * accumulation, reader=reader) for number in stretch]
    for step in steps:
        yield from np.split(step, accumulation)
