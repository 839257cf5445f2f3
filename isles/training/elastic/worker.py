"""A worker of a member, be that one worker by itself or an island: it obeys decision after decision."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
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
from isles.membership.messages import MOST, told_paths
from isles.membership.p2p.stream import CARRIED
from isles.membership.p2p.transport import ElasticTransport
from isles.membership.rounds import Decision, DecisionKind, ElasticRoster, IslandGroup, RoundLeader
from isles.membership.session import Refusals, together, told_rows
from isles.membership.state_transfer import Gifts, NotAdopted, NotGiven
from isles.models import build
from isles.replicas.loop.outer import OuterSync, enter
from isles.training.config.sections import Config
from isles.training.elastic.states import WARM_UP, Means, States, giver_of, shadow
from isles.training.elastic.support import lands_together, sync_every
from isles.training.records.saved_run import load_weights
from isles.training.records.summary import by_channel
from isles.training.step import draws_seed, validation_loss
from isles.training.worker import trainer_of

T = TypeVar("T")
_TRIES = 5
_MEANS = ("bytes_sent", "bytes_received", "compute_seconds", "blocked_seconds")  # of what a worker has counted
Decisions = Generator[Decision, Any, T]
"""Decisions one after another; each `yield` comes back with what came of it, or raises `NotGiven`."""


class ElasticWorker:
    """One worker's part in what its member does.

    alone: the group of this member by itself, on the transport between members. places: the workers of its island.
    leader: what decides of rounds; None at a follower. folder: for files on their way. report: called with the
    trainer's events. last: the run's last round, as far as it is known.

    paced: called with the seconds of an inner step, before the last one of a round exchanges, and after the very first:
    who joins amid a long first round waits for its end. refusals: what this worker's session has not taken.
    """

    def __init__(
        self,
        config: Config,
        alone: Group,
        leader: RoundLeader | None,
        places: IslandGroup,
        gifts: Gifts,
        corpus: Corpus,
        folder: Path,
        *,
        report: Callable[[Any], None],
        last: Callable[[], int],
    ) -> None:
        self._config, self._alone, self._corpus, self.folder = config, alone, corpus, folder
        world = Mesh(world=alone, layout=grid_of(1), report=report)
        if places.mesh is not None:
            world = replace(places.mesh, layout=grid_of(places.size, inner=places.size), report=report)
        self.reader = world.reader
        self.seat = alone.transport.rank
        place, workers = self.reader
        torch.manual_seed(draws_seed(config.run.seed, self.seat * workers + place))
        self._world, self._roster = world, ElasticRoster(alone, places, leader)
        self.trainer = trainer_of(config, world, corpus, self._roster)
        assert isinstance(self.trainer.optimizer, OuterSync) and self.trainer.text is not None
        self.optimizer, self._text = self.trainer.optimizer, self.trainer.text
        self.means = Means(self.optimizer, gifts, folder)
        self.states = States(self.optimizer, gifts, folder, config.world.elastic.join_state, last, place=place)
        self._gifts, self._places = gifts, places
        self.paced: Callable[[float], None] = lambda seconds: None
        self._paced = False
        self.refusals = Refusals()
        self._began_at: int | None = None  # inner steps, where this worker began without moments
        self._does: dict[DecisionKind, Callable[[Decision], Any]] = {
            "idle": lambda said: None,
            "load": self.load,
            "draw": self.draw,
            "catch up": self.catch_up,
            "enter": self.enter,
            "forget": self.forget,
            "train": self.train,
            "keep": self.keep,
            "over": lambda said: cast(Any, alone.transport).over("outer", said.round),  # of pairs or groups
            "validate": lambda said: self.trainer.validate(),
            "report": self.counted,
            "conclude": self.conclude,
        }

    def obey(self, decisions: Decisions[Any] | None = None) -> None:
        """Do what the leader decides, until it decides that this is the end. decisions: the leader's own; None at a
        follower. Malformed for what is not to be done between rounds.
        """
        came, why = None, None
        while (said := self._places.next_decision(partial(_next, decisions, came, why))).kind != "end":
            came, why = None, None
            if said.kind not in self._does:
                raise Malformed(-1, f"between rounds the leader of this island decides to {said.kind}")
            try:
                came = self._does[said.kind](said)
            except NotGiven as reason:
                why = reason  # the leader knows, and decides what then

    def load(self, said: Decision) -> tuple[int, dict[int, int]]:
        """Take on the state of `donor`, see `States.fetch`: its round, and whom the donor knew by then to be left out.
        All of an island take states of one round. NotGiven for all where one has none: all are as before, but for
        NotAdopted.
        """
        apart = "the workers of this island got states of different rounds"
        fetch = partial(self.states.fetch, said.donor, said.seconds, after=said.round, wait=said.wait)
        for _ in range(_TRIES):
            if self._same(fetch) is not None:
                break
        else:
            raise NotGiven(apart)
        try:
            round = self._same(self.states.adopt)
        except NotGiven as why:
            raise NotAdopted(str(why)) from why
        if round is None:
            raise NotAdopted(apart)
        return round, self.states.left_out

    def _same(self, call: Callable[[], int]) -> int | None:
        """What `call` comes to at all of the island, 0 or more; None where that differs. NotGiven for all where it is
        that at one.
        """
        number, why = -1, NotGiven("")
        try:
            number = call()
        except NotGiven as reason:
            why = reason
        numbers = [told[0] for told in self._places.gather(number)]
        if min(numbers) < 0:
            raise why if str(why) else NotGiven(f"worker {numbers.index(min(numbers))} of this island got none")
        return number if min(numbers) == max(numbers) else None

    def draw(self, said: Decision) -> None:
        """Go back to the weights as drawn, the same everywhere, for nobody has a state of the run."""
        if not self.states.are_drawn:
            trainer = trainer_of(self._config, self._world, self._corpus, self._roster)
            assert isinstance(trainer.optimizer, OuterSync)
            self.states.become(trainer.optimizer)
            trainer.memory.close()

    def catch_up(self, said: Decision) -> dict[int, int]:
        """Land the means of rounds `round` to `until - 1` as `donor` has; whom the others have left out meanwhile (see
        `Missed`). NotGiven for all where one could not, or none came within `seconds`.
        """
        giver, rounds = giver_of(said.donor, self.reader[0]), range(said.round, said.until)
        path, why, left_out = self.folder / "taken.safetensors", "", dict[int, int]()
        try:
            left_out = shadow(self.optimizer, self._gifts, giver, rounds, path, said.seconds)
        except NotGiven as reason:
            why = str(reason)
        if not all(told[0] for told in self._places.gather(int(not why))):
            raise NotGiven(why or "another worker of this island could not land them")
        return left_out

    def enter(self, said: Decision) -> None:
        """Begin with `round`, after so many inner `steps`."""
        self._began_at = said.began_at
        self._roster.begin_anew()
        self.means.begins(said.round)
        enter(self.optimizer, said.round, said.steps)
        self.schedule_at(said.steps)

    def forget(self, said: Decision) -> None:
        """What this worker has is nobody's any more: nobody begins with it."""
        self.states.forget()
        self.means.forget()

    def schedule_at(self, steps: int) -> None:
        """Set the learning rates of the inner step that follows `steps` of them."""
        schedule = self.trainer.schedule
        schedule.last_epoch = steps
        warmth = 1.0
        if self._began_at is not None:
            warmth = min(1.0, (steps + 1 - self._began_at) / (WARM_UP * sync_every(self._config)))
        for group, base, factor in zip(
            self.optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True
        ):
            group["lr"] = base * factor(steps) * warmth

    def train(self, said: Decision) -> None:
        """Inner steps after so many `steps`, one a slice; the last one exchanges."""
        count = len(said.slices) or sync_every(self._config)
        self.states.are_drawn = False
        self._text.positions = positions(self._config, self.seat, said.slices, said.spare, self.reader)
        self.optimizer.steps = said.steps
        self.schedule_at(said.steps)
        clock, began = self.trainer.step_clock, self.trainer.step_clock.reading()
        for left in reversed(range(count)):
            self.trainer.step()
            if left == 1 or (left and not self._paced):  # the last one exchanges, too, and waits for others
                self._paced = True
                self.paced((clock.reading() - began) / (count - left))

    def keep(self, said: Decision) -> None:
        """Right after `round`: keep its mean, and copy the state for whoever has asked; see `Means` and `States`."""
        if lands_together(self._config):
            self.means.landed(said.round, said.left_out)
        self.copy(said.round, said.left_out)

    def copy(self, round: int, left_out: Mapping[int, int]) -> None:
        """See `States.landed`."""
        told = self._places.gather(*map(int, self.states.wanted()))
        wanted = [any(each) for each in zip(*told, strict=True)]
        if self.states.landed(round, dict(left_out), wanted):
            self.means.copied(round)

    def conclude(self, said: Decision) -> dict[str, Any]:
        """See `Trainer.conclude`; of an island all tokens, and the means of what its workers counted."""
        for fragment in self.optimizer.fragments:
            fragment.ahead = None  # there is no round that it was sent ahead for
        own = self.trainer.conclude(self.folder)
        if self._places.size == 1:
            return own
        counted = json.dumps({key: own[key] for key in ("tokens", "channels", *_MEANS)}).encode("ascii")
        told = [parse_json(one) for one in self._places.gather_text(counted)]
        own |= {key: sum(one[key] for one in told) / len(told) for key in _MEANS}
        return own | {"tokens": sum(one["tokens"] for one in told), "channels": by_channel(told)}

    def counted(self, said: Decision) -> dict[str, Any]:
        """carried: bytes that all of an island have sent to others, by the way that they went. refused: what all of
        them have refused. paths: of each worker of it.
        """
        transport = self._alone.transport
        assert isinstance(transport, ElasticTransport)
        told = self._places.gather(*(transport.carried[way] for way in CARRIED))
        carried = {way: sum(numbers) for way, numbers in zip(CARRIED, zip(*told, strict=True), strict=True)}
        rows = [self.refusals.rows(), transport.paths()]
        told = [parse_json(one) for one in self._places.gather_text(json.dumps(rows).encode("ascii"))]
        paths = [row for _, one in told for row in told_paths(one)]
        refused = together(told_rows(one) for one, _ in told)
        return {"carried": carried, "refused": refused, "paths": sorted(paths, key=lambda row: -row[3])[:MOST]}

    def evaluate(self, file: Path) -> float | None:
        """Validation loss of the one model, which is in `file`. ValueError where it does not fit this run's."""
        trainer, config = self.trainer, self._config
        if trainer.text is None or not trainer.validates:
            return None
        model = build(config.model, seed=config.run.seed, rank=trainer.world.local_rank)
        load_weights(model, file, "the lighthouse")
        return validation_loss(model, trainer.text.validation_batches(), trainer.autocast())

    def close(self) -> None:
        self.trainer.memory.close()


def _next(decisions: Decisions[Any] | None, came: Any, why: NotGiven | None) -> Decision:
    """What comes of `came`, or of why the last decision could not be carried out."""
    assert decisions is not None, "a follower is never asked"
    try:
        return decisions.send(came) if why is None else decisions.throw(why)
    except StopIteration:
        return Decision(kind="end")


def positions(
    config: Config, seat: int, batches: Iterable[Batch], spare: int, reader: tuple[int, int] = (0, 1)
) -> Iterator[np.ndarray]:
    """What `seat` reads: (b,) places of the data's order for each backward pass.

    batches: one an inner step; where there are none, a round's out of turn from its own stretch, of which it has read
    `spare`. reader: see `isles.data.order.rows`.
    """
    size, accumulation = config.data.batch_size_per_worker(1), config.inner.accumulation
    steps = [rows(*batch, batch_size=size * accumulation, reader=reader) for batch in batches]
    if not steps:
        stretch = range(spare, spare + sync_every(config))
        steps = [spare_rows(seat, number, batch_size=size * accumulation, reader=reader) for number in stretch]
    for step in steps:
        yield from np.split(step, accumulation)
