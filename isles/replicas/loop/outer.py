"""The one outer loop: what methods that exchange parameters do after an inner step. No paper's formula stands here.

After inner step t, for the fragments that the cadence names:

    snapshot   write the payload (usually outer gradient = reference - live, in float32) into staging
    receive    wait for the answers that land now; error feedback of their rounds becomes final
    send       encode and start the exchange of the snapshot with this round's group
    land       reading, outer rule on the anchor, landing on the live weights

A worker that is alone in a round does all of it in one sweep over memory (`Sweep`). `reference` is what the live
weights were after their last landing: the anchor, rounded to their dtype where that is coarser than float32. So
rounding never looks like progress. A hash of the anchor rides in the next transfer's header.

A worker that joins a run starts from the state of another one (`donor_state`, `adopt`, `enter`).

How much a worker counts in the mean (DiLoCo, section 2: g = sum_i w_i g_i, with w_i as large as its shard):

    equal      w_i = 1/N
    samples    w_i = n_i / sum n:  a worker scales what it sends by N w_i, before it is encoded, and the mean is theirs

Every worker gives its n_i to `OuterSync.weigh` once, before the first round.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any
from warnings import warn

import torch
from torch import Tensor, nn
from typing_extensions import override

from isles.base.modes import pinned_bytes
from isles.comm.group import Group
from isles.comm.roster import FixedRoster, Roster
from isles.network.exchange_plan import PINNED, MemoryItem, PlannedExchange, Rhythm
from isles.network.noise import uniform
from isles.replicas import start
from isles.replicas.config import MethodConfig, OuterConfig, Weights, not_finite, rounds_for_momentum, uneven_fragments
from isles.replicas.exchange_schedule import (
    idle_low_rank,
    landings,
    opening_exchanges,
    outer_memory,
    planned_rounds,
    rounds_to_leave_behind,
)
from isles.replicas.flat import clean_names
from isles.replicas.loop.fragment import (
    Exchange,
    FiniteCheck,
    Fragment,
    InFlight,
    NoCheck,
    Sweep,
    fragments_of,
    on_anchors,
    show,
    without_partners,
)
from isles.replicas.loop.round_exchange import RoundExchange, round_exchange_for
from isles.replicas.parts.choices import EveryH
from isles.replicas.parts.interfaces import Cadence, Composition
from isles.replicas.parts.legal import warnings
from isles.replicas.start import T
from isles.replicas.sync import ReplicaSync

_DROPPING = 0x64726F70  # keeps these draws apart from others of the same seed


class OuterSync(ReplicaSync):
    """An outer method: a `Composition` run by the one loop.

    A worker whose share is not finite heals itself: its weights become the anchors, the inner optimizer's moments and
    what error feedback held back are forgotten. A warning on all workers of that round names it.
    """

    Config = OuterConfig
    level = "parameter"
    spans_islands = True
    follows_roster = True
    keeps_flat = True

    @abstractmethod
    def compose(self) -> Composition:
        """The method's parts, from `self.config` and, where it cuts the model, `self.model`."""

    def _begin(self) -> None:
        super()._begin()
        self._take_parts()
        parts = self.parts
        self.agrees = parts.mixing.agrees and not (parts.reading.needs_own or parts.rule.needs_residual)
        self.round_exchange = self.new_round_exchange()
        refuse_rows(parts, [share is own for share, own in zip(self.shares, self.parameters, strict=True)])
        names = clean_names(self.model, self.parameters)
        self.fragments = fragments_of(parts, self.parameters, self.shares, names, self.vectors)
        assert len(self.fragments) == parts.cadence.fragments, "the cadence is of another number of fragments"
        self._name_run()
        self.flights: list[InFlight] = []
        self._weighed = counts_alike(self.config, parts, self.roster)
        self._dropping = 0.0, 0  # probability, seed
        self.skipped = 0
        """Rounds of a fragment that were skipped, because somebody's share was not finite."""
        self.healed = 0  # times that this worker healed itself
        if parts.prefetch_anchors:  # anchors are still equal (just verified): the first exchange of them is known
            for fragment in self.fragments:
                fragment.ahead = fragment.swapped(copies_own=parts.cadence.rounds_late > 0)

    def _take_parts(self) -> None:
        parts, config = self.compose(), self.config
        if isinstance(config, OuterConfig):
            parts = replace(parts, on_broken=config.on_broken, robust=config.robust)
        self.parts = parts
        self.cadence = parts.cadence  # the one in force: `adapt` may change it

    @override
    def retime(self, sync_every: int) -> None:
        super().retime(sync_every)
        self._take_parts()

    def new_round_exchange(self) -> RoundExchange:
        """One that has nothing under way."""
        return round_exchange_for(self.roster, self.parts, self.config, self.land, agrees=self.agrees)

    @override
    def after_inner_step(self) -> None:
        sending = self.cadence.sends(self.steps)
        self._moved()
        self.round_exchange.stepped(self.steps, sends=bool(sending))
        self._exchange(sending)

    def adapt(self) -> None:
        """Before a round is sent, when all that lands now has arrived: change its numbers, on all workers alike."""

    @override
    def rounds_done(self) -> str:
        apart = self.parts.choice["mixing"] == "nobody"
        return "" if apart else repr([fragment.rounds for fragment in self.fragments])

    @override
    def land_all(self) -> None:
        """Send the rest in a last, shorter round, and land all in flight; live weights are then the anchors."""
        self.catch_up()
        self._moved()
        late = self.parts.cadence.rounds_late
        if not late:
            self._drain()
        rest = [fragment.index for fragment in self.fragments if fragment.sent < self.steps]
        for index in rest:
            oldest = next((flight for flight in self.flights if flight.fragment.index == index), None)
            if oldest is not None:
                oldest.lands = self.steps
        self._exchange(rest, None if late else self.steps)
        self._drain()
        with self.landing(self.everything):
            show(self.fragments, [fragment.anchor for fragment in self.fragments])
            self.replica.spread(self.everything)
        for fragment in self.fragments:
            if fragment.ahead is not None:
                self.round_exchange.survives(fragment.ahead)  # the partner counts on this worker's half of it

    def weigh(self, samples: float) -> None:
        """With weights = "samples": count this worker in every mean by its number of samples (0 or more, of one unit on
        all workers). All call it together, after wrapping and after each `load_state_dict` into a new optimizer, before
        the next round. Bytes sent: 8 to each of the others.
        """
        if weights_of(self.config) == "equal":
            raise ValueError('weigh() is for weights = "samples": choose that, or leave it out')
        factor, self.round_exchange.leeway = agreed_factor(self.group, samples)
        for fragment in self.fragments:
            fragment.weight = factor
        self._weighed = True

    @override
    def drop_outer(self, share: float, seed: int) -> None:
        """Lose each worker's outer gradient of a round with probability `share` (0 to 1): the mean is of what came, and
        who lost its own goes on from its own weights. Draws depend on `seed`, round, fragment and worker alone. All
        workers call it alike, before the first round. ValueError where this is not defined.
        """
        parts, why = self.parts, self.parts.cannot_leave_out
        if parts.cadence.lands(0) > 0:
            why = "answers that land later would be added to other weights than those that were sent"
        elif parts.feedback is not None:
            why = "error feedback would count what was dropped a second time"
        elif parts.on_peer_failure == "solo" or not isinstance(self.roster, FixedRoster):
            why = "workers that are lost or change are left out by other rules"
        if why is not None:
            raise ValueError(f"world.drop_outer = {share}: {why}; choose 0, or a method such as diloco")
        self.parts = replace(parts, on_broken="leave out")  # so that a mean is of what came
        self._weighed = counts_alike(self.config, self.parts, self.roster)
        self._dropping, self.round_exchange = (share, seed), self.new_round_exchange()

    @override
    def settle(self) -> None:
        for exchange in self._under_way():
            self.round_exchange.survives(exchange)

    @property
    def lost(self) -> set[int]:
        """Positions in `group` whose connection broke."""
        return {position for position, member in enumerate(self.group.ranks) if self.roster.lost(member)}

    @override
    def survivors(self) -> Group:
        return self.round_exchange.survivors()

    @override
    def together(self, collective: Callable[[Group], T]) -> T:
        return self.round_exchange.together(collective)

    def members(self, round: int) -> tuple[int, ...]:
        """Positions that take part in this worker's exchange of `round` (1, 2, ...); known in advance."""
        return self.round_exchange.members(round)

    @override
    def gauges(self) -> dict[str, float]:
        """What error feedback holds back in outer gradients is the largest of the fragments'."""
        refused = self.group.ledger.trust.refused
        values: dict[str, float] = {"skipped_rounds": self.skipped, "healed": self.healed, "refused": refused}
        ratios = (fragment.left_ratio for fragment in self.fragments)
        return values if self.parts.feedback is None else {"feedback_ratio": max(ratios), **values}

    @contextmanager
    @override
    def evaluation_weights(self) -> Iterator[nn.Module]:
        """The anchors."""
        self.catch_up()
        shown = on_anchors(self.fragments, lambda: self.replica.spread(self.everything, "eval"))
        with shown, super().evaluation_weights() as model:
            yield model

    # One step of the loop.

    def _moved(self) -> None:
        """Note that the weights have changed since they were read: the inner optimizer, or the user, wrote to them."""
        for fragment in self.fragments:
            fragment.flat.is_read = False

    def _exchange(self, sending: Sequence[int], lands: int | None = None) -> None:
        """Send the fragments `sending`, and land what lands after this step. lands: when the answers to those sent now
        do; None: when the cadence says.
        """
        landing = [flight for flight in self.flights if flight.lands <= self.steps]
        if not (sending or landing):
            return
        if not self._weighed:
            raise ValueError(
                'weights = "samples": call optimizer.weigh(SAMPLES) on every worker, before the first round'
            )
        self.catch_up()
        # Snapshots before anything lands: what is sent is the progress of the inner steps alone.
        leaving = self._snapshots(sending)
        if not all(usable for *_, usable in leaving):
            self._heal()
            for fragment, payload, usable in leaving:
                if not usable:
                    Sweep(fragment, self.parts, self.agrees).snapshot(payload, NoCheck())  # of no progress
        for flight in landing:
            self.round_exchange.receive(flight, self._snapshot)
        if sending:
            self.adapt()
        moment = self.cadence.lands(self.steps) if lands is None else lands
        fresh: dict[int, Tensor | None] = {}  # own shares that leave now, by fragment, where somebody reads them
        for fragment, payload, usable in leaving:
            flight = self._send(fragment, payload, moment, usable)
            fresh[fragment.index] = flight.payload.own
            landing += self._landing_with(flight, landing)
            self.flights += [] if flight.payload.postponed else [flight]
        for flight in landing:
            self.land(flight, fresh.get(flight.fragment.index))

    def _snapshots(self, sending: Sequence[int]) -> list[tuple[Fragment, Tensor, bool]]:
        """The payloads to send now, by fragment, and whether each is usable; a single member's rounds are done here."""
        leaving = []
        for fragment in (self.fragments[index] for index in sending):
            if self.round_exchange.is_alone(fragment):
                self._alone(fragment)
            else:
                payload = fragment.staging()
                check = NoCheck() if self.round_exchange.is_only_one and self.parts.feedback is None else FiniteCheck()
                Sweep(fragment, self.parts, self.agrees).snapshot(payload, check)
                leaving.append((fragment, payload, check.is_usable and self.replica.is_sound()))
        return leaving

    def _alone(self, fragment: Fragment) -> None:
        """Do a round of a single member, in one sweep."""
        resting = self._resting(fragment)
        fragment.rounds, fragment.sent = fragment.rounds + 1, self.steps
        if self.group.transport.rank in self._dropped(fragment):
            return
        sweep = Sweep(fragment, self.parts, self.agrees)
        if not self.round_exchange.is_only_one and not (sweep.check().is_usable and self.replica.is_sound()):
            self._heal()
            self._skipped(fragment, [self.group.transport.rank])
            return
        with self.landing(fragment.indices):
            with fragment.resting(resting):
                fragment.digest = sweep.alone()
            self.replica.spread(fragment.indices)
        if resting and self.agrees:
            fragment.digest = fragment.flat.digest(fragment.anchor)

    def _heal(self) -> None:
        """Discard what numbers that are not finite have led to: go on from the anchors, with empty moments."""
        with self.landing(self.everything):
            for fragment in self.fragments:
                fragment.skip()
            self.replica.spread(self.everything)
            self.replica.forget_moments()
        self.healed += 1

    def _dropped(self, fragment: Fragment) -> set[int]:
        """The members whose share of the fragment's last round is dropped: all know it without a message."""
        share, seed = self._dropping
        members = enumerate(self.group.ranks) if share else ()
        return {
            member for at, member in members if uniform(seed, _DROPPING, fragment.rounds, fragment.index, at) < share
        }

    def _resting(self, fragment: Fragment) -> tuple[int, ...]:
        """Indices in the fragment of the parameters that have been frozen since before its last round."""
        still = set(self.watch.frozen(fragment.indices, fragment.sent))
        return tuple(index for index, number in enumerate(fragment.indices) if number in still)

    def _landing_with(self, sent: InFlight, landing: Sequence[InFlight]) -> list[InFlight]:
        """What lands because `sent` left: itself, if its answer is awaited at once; an answer of nothing, if answers
        come rounds late and none of its fragment's is among those that land.
        """
        if sent.lands <= self.steps:
            self.round_exchange.receive(sent, self._snapshot)
            return [] if sent.payload.postponed else [sent]
        if self.parts.cadence.rounds_late and all(flight.fragment is not sent.fragment for flight in landing):
            return [self.round_exchange.nothing(sent.fragment, self.steps)]
        return []

    def _drain(self) -> None:
        for flight in list(self.flights):
            self.round_exchange.receive(flight, self._snapshot)
            self.land(flight, None)

    def _snapshot(self, fragment: Fragment, out: Tensor) -> Tensor:
        """Write this worker's present payload of a fragment to `out`."""
        sweep = Sweep(fragment, self.parts, self.agrees)
        if not sweep.snapshot(out, FiniteCheck()).is_usable:
            self._heal()
            sweep.snapshot(out, NoCheck())
        return out

    def _send(self, fragment: Fragment, payload: Tensor, lands: int, usable: bool) -> InFlight:
        resting = self._resting(fragment)
        fragment.rounds, fragment.sent = fragment.rounds + 1, self.steps
        anchors, fragment.ahead = fragment.ahead, None
        if anchors is None and self.parts.rule.shares_anchors:
            anchors = self.round_exchange.send_anchor(fragment, fragment.rounds, self.steps)
        usable = usable and self.group.transport.rank not in self._dropped(fragment)
        sent = self.round_exchange.send(fragment, payload, self.steps, lands, usable)
        return InFlight(fragment, lands, sent, anchors, resting)

    def land(self, flight: InFlight, fresh: Tensor | None) -> None:
        """Land the answer of a flight. fresh: see `Reading.read`."""
        with self.landing(flight.fragment.indices):
            self._land(flight, fresh)

    @override
    def anchors(self) -> Mapping[int, Tensor]:
        return {
            index: fragment.anchor[span].view(self.shares[index].shape)
            for fragment in self.fragments
            for index, span in zip(fragment.indices, fragment.flat.spans(range(len(fragment.indices))), strict=True)
            if self.shares[index] is self.parameters[index]
        }

    def _land(self, flight: InFlight, fresh: Tensor | None) -> None:
        fragment = flight.fragment
        if flight in self.flights:
            self.flights.remove(flight)
        fragment.landed_mean = flight.payload.buffer.clone() if fragment.rounds <= fragment.retain_until else None
        dropped = self._dropped(fragment)
        live = fragment.flat.read(fragment.flat.new()) if self.group.transport.rank in dropped else None
        broken = [member for member in flight.payload.broken if member not in dropped]
        if not flight.payload.whole and (broken or not flight.payload.broken):
            self._skipped(fragment, broken)
        if not flight.payload.whole:
            if not self.parts.reading.needs_own:
                fragment.skip()
                self._landed(flight, live)
                return
            flight.payload.buffer.zero_()  # nothing for all: the own share, which counted as fresh, is taken back
        elif broken:
            self._warn(broken, "the mean is that of the others")
        with fragment.resting(flight.frozen):
            fragment.digest = Sweep(fragment, self.parts, self.agrees, flight.frozen).answered(flight, fresh)
        if flight.frozen and self.agrees:
            fragment.digest = fragment.flat.digest(fragment.anchor)
        self._landed(flight, live)

    def _landed(self, flight: InFlight, live: Tensor | None) -> None:
        fragment = flight.fragment
        if live is not None:  # dropped: the worker goes on from its own weights
            fragment.flat.write(live)
        if flight.payload.learned_meanwhile is not None:
            fragment.flat.write(fragment.flat.read(fragment.flat.new()).add_(flight.payload.learned_meanwhile))
        self.replica.spread(fragment.indices)
        fragment.release(flight)
        if self.parts.prefetch_anchors and fragment.ahead is None:  # several may land at the end
            fragment.ahead = self.round_exchange.send_anchor(fragment, fragment.rounds + 1, self.steps)

    def _skipped(self, fragment: Fragment, broken: Sequence[int]) -> None:
        self.skipped += 1
        self._warn(broken, f"round {fragment.rounds} of fragment {fragment.index} is skipped by all in it")

    def _warn(self, broken: Sequence[int], what: str) -> None:
        warn(not_finite(broken, self.steps, what), stacklevel=2)

    def _under_way(self) -> Iterator[Exchange]:
        for flight in self.flights:
            yield from flight.exchanges()
        yield from (fragment.ahead for fragment in self.fragments if fragment.ahead is not None)

    # What a checkpoint holds.

    @override
    def outer_state(self) -> dict[str, Any]:
        return {
            "fragments": [fragment.state_dict() for fragment in self.fragments],
            "flights": [flight.state_dict() for flight in self.flights],
            "roster": self.roster.state_dict(),
            "run": self.run,
            "skipped": self.skipped,
            "healed": self.healed,
        }

    @override
    def load_outer_state(self, state: dict[str, Any]) -> None:
        self.watch.loaded()
        for fragment, saved in zip(self.fragments, state["fragments"], strict=True):
            fragment.load_state_dict(saved)
        self.flights = []
        for saved in state["flights"]:
            fragment, anchors = self.fragments[saved["fragment"]], saved["anchors"]
            anchor_exchange = None if anchors is None else fragment.restored(anchors)
            fragment.latest = fragment.restored(saved["payload"])
            frozen = tuple(saved["frozen"])
            self.flights.append(InFlight(fragment, saved["lands"], fragment.latest, anchor_exchange, frozen))
        self.roster.load_state_dict(state["roster"])
        self.round_exchange = self.new_round_exchange()
        self.run = state["run"]
        self._name_run()
        self.skipped, self.healed = state["skipped"], state["healed"]

    def _name_run(self) -> None:
        for fragment in self.fragments:
            fragment.run = self.run

    @classmethod
    @override
    def regrouped(cls, outer: dict[str, Any]) -> dict[str, Any]:
        """Anchors, momenta, what is under way as they are, the mean of linear rules' states
        being the state of their mean: a round that has been sent lands with the new workers.
        """
        return {**outer, "fragments": [without_partners(fragment) for fragment in outer["fragments"]], "roster": {}}

    # What a plan asks before a run.

    @override
    def schedule(self, steps: int) -> list[PlannedExchange]:
        return planned_rounds(self.parts, self.fragments, self.group.size, steps)

    @override
    def spread_bytes(self, steps: int) -> int:
        """A fragment after each landing, everything at the end."""
        return sum(self.replica.spread_bytes(indices) for _, indices in self.landings(steps))

    def landings(self, steps: int) -> list[tuple[int, Sequence[int]]]:
        """(moment, numbers of the parameters that are written to) of each landing, that of `finish` too."""
        landed = landings(self.schedule(steps), self.parts.cadence.rounds_late)
        return [*((at, self.fragments[index].indices) for at, index in landed), (steps + 1, self.everything)]

    @override
    def rhythm(self, steps: int) -> Rhythm:
        if not isinstance(self.cadence, EveryH):
            return super().rhythm(steps)
        dense = max(fragment.averaging.starting for fragment in self.fragments)
        return Rhythm(self.cadence.every_step_until + dense * self.cadence.sync_every, self.cadence.sync_every)

    @override
    def memory(self) -> list[MemoryItem]:
        outer = outer_memory(self.parts, self.fragments, self.group.size)
        pinned = sum(pinned_bytes(fragment.flat.parameters) for fragment in self.fragments)
        return [
            *super().memory(),
            *outer,
            MemoryItem(PINNED, pinned, "pinned"),
            *self.round_exchange.extra_memory(self.fragments),
        ]

    @override
    def opening_exchanges(self) -> list[PlannedExchange]:
        hashes = 2 if weights_of(self.config) == "equal" else 3  # numbers of samples are as long as one
        return opening_exchanges(start.bytes_by_format(self._shared()), self.group.size, hashes)

    @override
    def advise(self, steps: int) -> list[str]:
        cadence = self.parts.cadence
        rounds = (_rounds if isinstance(cadence, Hashable) else _rounds.__wrapped__)(cadence, steps)
        if not rounds and self.group.size == 1 and not self.roster.grows:
            return super().advise(steps)  # there is nobody to exchange with
        if not rounds:
            mend = f"choose sync_every <= {steps} (--set replicas.sync_every={steps})"
            raise ValueError(f"sync_every: no exchange falls into a run of {steps} steps; {mend}")
        if self.parts.on_peer_failure == "solo":
            largest = max(fragment.flat.numel for fragment in self.fragments)
            rounds_to_leave_behind(rounds, len(self.fragments), largest)
        notices = super().advise(steps) + warnings(self.parts.choice) + idle_low_rank(self.parts.codec, self.shares)
        robust = self.parts.robust
        if robust != "none" and self.agrees and self.group.size < 3 and not self.roster.grows:
            notices.append(f'robust = "{robust}" with {self.group.size} workers is their mean: it wants 3 or more')
        if isinstance(self.cadence, EveryH):
            notices += uneven_fragments(self.cadence.sync_every, len(self.fragments))
        return notices + rounds_for_momentum(rounds, self.parts.rule.momentum)


def donor_state(optimizer: OuterSync) -> dict[str, Any]:
    """The live state right after a landing, for whoever is to `adopt` it. What has been sent ahead is not waited for:
    its partner may be the very worker that waits for this state before it begins its first round.
    """
    ahead = [fragment.ahead for fragment in optimizer.fragments]
    for fragment in optimizer.fragments:
        fragment.ahead = None
    try:
        return optimizer.shared_state()
    finally:
        for fragment, exchange in zip(optimizer.fragments, ahead, strict=True):
            fragment.ahead = exchange


def adopt(optimizer: OuterSync, state: dict[str, Any]) -> None:
    """Begin with the state of another worker (`donor_state`), whose weights are here already. Its own
    counters and clock stay; its exchanges in flight are dropped. ValueError for another method or config.
    """
    optimizer.flights = []
    for fragment in optimizer.fragments:
        fragment.ahead = None
    optimizer.load_state_dict({name: state[name] for name in state if name not in ("traffic", "transport")})


@torch.no_grad()
def land_missed(optimizer: OuterSync, round: int, mean: Tensor, participants: int, *, whole: bool) -> int:
    """Land the mean (n,) of a round that others landed without this worker; the hash of its anchor then.

    participants: whose mean it is; not whole: the round was skipped by all.
    """
    (fragment,) = optimizer.fragments
    fragment.rounds = round
    answer = Exchange(mean, None, participants=participants, whole=whole)
    optimizer.land(InFlight(fragment, optimizer.steps, answer, None), None)
    return fragment.digest


def enter(optimizer: OuterSync, round: int, steps: int) -> None:
    """Take part from `round` on, after `steps` inner steps: those before went on without this worker, and what it had
    under way with its partners of then is nobody's.
    """
    optimizer.steps, optimizer.flights = steps, []
    optimizer.round_exchange = optimizer.new_round_exchange()
    for fragment in optimizer.fragments:
        fragment.rounds, fragment.sent = round - 1, steps
        fragment.latest = None
        if optimizer.parts.prefetch_anchors and round > 1:
            fragment.ahead = optimizer.round_exchange.send_anchor(fragment, round, steps)


@lru_cache(maxsize=64)
def _rounds(cadence: Cadence, steps: int) -> int:  # which a plan asks again and again
    return sum(0 in cadence.sends(step) for step in range(1, steps + 1))


def weights_of(config: MethodConfig) -> Weights:
    """ "equal" for a method that knows nothing else."""
    return getattr(config, "weights", "equal")


def refuse_rows(parts: Composition, are_whole: Sequence[bool]) -> None:
    """ValueError where a rule needs all of a parameter, and workers of an island hold rows of it."""
    rule = parts.rule
    if rule.mixes_entries and not all(are_whole):
        why = "it takes whole parameters" if rule.whole else f"it keeps scalars ({', '.join(rule.scalars)})"
        raise ValueError(
            f"{type(rule).__name__}: {why}, and workers of an island hold rows of each parameter, whose sums are not "
            "the parameter's: choose another rule, or no islands (world.inner = 1)"
        )


def counts_alike(config: MethodConfig, parts: Composition, roster: Roster) -> bool:
    """Whether workers have equal weights, so that none is exchanged. ValueError if they have not, and a scaled payload
    would not give the weighted mean.
    """
    if weights_of(config) == "equal":
        return True
    if not parts.mixing.agrees:
        why = "it takes no mean over all workers"
    elif parts.rule.needs_residual:
        why = "what does not travel stays a worker's own, and would be scaled too"
    elif parts.on_broken == "leave out":
        why = "a worker that is left out would count in the divisor"
    elif parts.on_peer_failure == "solo" or not isinstance(roster, FixedRoster):
        why = "workers may be lost or change, and weights are of those of the start"
    else:
        return False
    raise ValueError(f'weights = "samples": {why}; choose "equal"')


def agreed_factor(group: Group, samples: float) -> tuple[float, float]:
    """N w of this worker, and the largest number of samples divided by the smallest above 0. All workers of `group`
    call it together. Bytes sent: 8 to each of the others. ValueError for what is no number of samples.
    """
    if not 0 <= samples < math.inf:
        raise ValueError(f"weigh({samples}): give this worker's number of samples, 0 or more")
    values = group.all_gather(torch.tensor([float(samples)], dtype=torch.float64, device="cpu"))
    total = math.fsum(float(each) for each in values)
    if not total > 0:
        raise ValueError("weigh(0) on all workers: at least one must have samples")
    positive = [float(each) for each in values if each > 0]
    return group.size * float(samples) / total, max(positive) / min(positive)
