"""Independent Subnetwork Training (Yuan et al., PVLDB 2022): every worker trains a narrow model of its own.

    every H inner steps (a round):
        up        the units of each worker go back to their servers, with their share of the inner optimizer's state
        average   what all workers hold (embeddings, norms, head) becomes its mean
        down      the units are divided anew, and go to the workers that train them next

Units are attention heads (query, key and value rows, output columns) and hidden units of the MLP (gate and up rows,
down columns); the residual width is whole everywhere. With n workers each trains 1/n of the units, so its weights,
gradients, optimizer state and computing shrink with them: the divided parameters of `model` are **physically narrower**
while it trains (`Subnet`, made in place), always of the same widths, and have their full ones again inside
`evaluation_weights` and after `consolidate`. Subnets are disjoint, so the merge is an exchange of pieces, not a mean.

The full model sums n times as many units as any subnet did. So where it is evaluated, and in the model of the run, the
columns that read divided units are multiplied by 1/n (`eval_scale`; without it the paper's networks need BatchNorm).

Bytes of a worker and round each way, to and from a central server: b (divided entries that it trains) (1 + moments that
travel); a partitioned server spares the share that a worker stores itself. The mean of the rest comes on top.
Deviations: heads and MLP units of a transformer (the paper: neurons); the rest is averaged in two shots whatever the
server is; the last, partial round is not lost; the workers read different data. A lost worker ends the run (PeerLost
names it). The inner state of what all hold stays each worker's own. Permutations and exchange: `store`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from isles.base.modes import HostCopies, arena, is_away, pinned_bytes, to_host
from isles.base.wrapping import SeveralOptimizers
from isles.comm.codecs import codec
from isles.comm.collectives.basic import Stamp, packed
from isles.comm.collectives.mean import pattern, working_bytes
from isles.comm.errors import WorkerFailed
from isles.comm.tags import Channel
from isles.models.decoder import Decoder
from isles.models.sizes import like_size
from isles.models.subnet import fit, put, reads, split_axes, take
from isles.network.exchange_plan import PINNED, Cross, MemoryItem, PlannedExchange, Rhythm, by_size
from isles.replicas.exchange_schedule import everyone
from isles.replicas.flat import FlatParameters, all_finite
from isles.replicas.methods.config import ISTConfig
from isles.replicas.methods.ist.store import WEIGHT, Division, Key, Store
from isles.replicas.start import OTHER_STATE, among_even
from isles.replicas.sync import ReplicaSync
from isles.replicas.watch import Scaled


class Subnet:
    """The divided parameters of `model`, by name; of full width until `begin`."""

    def __init__(self, model: nn.Module, division: Division) -> None:
        self.model, self.division = model, division
        named = dict(model.named_parameters())
        self.parameters = {name: named[name] for name in division.axes}

    @property
    def full_bytes(self) -> int:
        """Of all divided parameters at full width."""
        shapes = self.division.shapes
        return sum(torch.Size(shapes[name]).numel() * p.itemsize for name, p in self.parameters.items())

    @property
    def undivided(self) -> list[Tensor]:
        """The trained parameters that all workers hold."""
        apart = set(map(id, self.parameters.values()))
        return [p for p in self.model.parameters() if p.requires_grad and id(p) not in apart]

    def begin(self, worker: int) -> None:
        """Become the subnet of `worker` in the first round. ValueError where torch still needs the full widths."""
        axes = self.division.axes
        self.set_values(
            {
                name: take(parameter.detach(), axes[name], self.division.trained_units(name, worker, 0))
                for name, parameter in self.parameters.items()
            }
        )
        trained = [p for p in self.parameters.values() if p.requires_grad and not p.is_meta]
        with torch.enable_grad():
            try:
                torch.autograd.grad([parameter.sum() for parameter in trained], trained) if trained else None
            except RuntimeError as error:  # of shapes
                raise ValueError(
                    "a loss or an output of the model from before is still there, and its graph holds the parameters "
                    "to their full widths: wrap the model first, or delete it (or compute it in torch.no_grad())"
                ) from error

    def set_values(self, tensors: Mapping[str, Tensor]) -> None:
        """Give the parameters these values, of whatever widths, and no gradients."""
        for name, tensor in tensors.items():
            self.parameters[name].grad = None
            self.parameters[name].data = tensor
        fit(self.model)

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """The parameters may be given other values inside: the subnet, gradients included, is back after. Nothing
        computed inside has gradients of the divided ones, whose graph would expect other widths than they have later.
        """
        before = {name: (p.data, p.grad, p.requires_grad) for name, p in self.parameters.items()}
        for parameter in self.parameters.values():
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            self.set_values({name: data for name, (data, _, _) in before.items()})
            for name, (_, gradient, is_trained) in before.items():
                self.parameters[name].requires_grad_(is_trained)
                self.parameters[name].grad = gradient

    def live(self, inner: Optimizer, keys: Sequence[Key]) -> dict[Key, Tensor]:
        """The tensors behind `keys`, as they are used in training. ValueError for a moment that is not there."""
        found = {}
        for key in keys:
            parameter = self.parameters[key.name]
            state = {WEIGHT: parameter.data} if key.slot == WEIGHT else inner.state[parameter]
            if key.slot not in state:
                raise ValueError(
                    f"{key.name} had no gradient for a whole round, so it has no {key.slot} that could travel: set "
                    'optimizer_state = "reset"'
                )
            found[key] = state[key.slot]
        return found


_SKETCHED = {"AdamW": ("exp_avg", "exp_avg_sq"), "SGD": (), "Muon": ("momentum_buffer",)}  # as `isles train` makes them
_SIDE = 2  # entries a dimension of the stand-ins
_HINT = 'set optimizer_state = "reset", or take another inner optimizer'


def moments_of(inner: Optimizer) -> dict[int, dict[str, torch.dtype]]:
    """By parameter (its id), the names and dtypes of the state tensors that have its shape: Adam's two moments, SGD's
    momentum, nothing for plain SGD or for a frozen parameter. Found by one step of a copy of `inner` on small
    stand-ins; `inner` is not touched. ValueError: it cannot be copied, or has state of whole rows or columns.
    """
    if isinstance(inner, SeveralOptimizers):
        return {own: slots for one in inner.optimizers for own, slots in moments_of(one).items()}
    owners = [parameter for group in inner.param_groups for parameter in group["params"]]
    if type(inner).__name__ in _SKETCHED and all(parameter.is_meta for parameter in owners):
        return {id(own): dict.fromkeys(_SKETCHED[type(inner).__name__], own.dtype) for own in owners}
    stand_ins = {id(parameter): _stand_in(parameter) for parameter in owners}
    memo = {**stand_ins, id(inner.state): defaultdict(dict)}
    name = type(inner).__name__
    try:
        copy = deepcopy(inner, memo)
        copy.step()
    except Exception as error:  # an optimizer of the user's own may do anything here
        raise ValueError(
            f"what of {name}'s state could travel is found by a step of a copy of it, which failed "
            f"({type(error).__name__}: {error}): {_HINT}"
        ) from error
    return {own: _slots(copy.state[small], small, name) for own, small in stand_ins.items()}


def _slots(state: Mapping[str, Any], small: Tensor, name: str) -> dict[str, torch.dtype]:
    tensors = {slot: value for slot, value in state.items() if isinstance(value, Tensor) and value.numel() > 1}
    for slot, value in tensors.items():
        if value.shape != small.shape:
            raise ValueError(f"{name}'s {slot} is of whole rows or columns and cannot travel with units: {_HINT}")
    return {slot: value.dtype for slot, value in tensors.items()}


def _stand_in(parameter: Tensor) -> nn.Parameter:
    device = "cpu" if parameter.is_meta else parameter.device
    small = nn.Parameter(torch.zeros((_SIDE,) * max(parameter.ndim, 1), dtype=parameter.dtype, device=device))
    small.grad = torch.zeros_like(small) if parameter.requires_grad else None
    return small


_OTHER_DIVISION = "its units are divided otherwise: it is in another round, or has another seed"
_FEW = 64  # units of an MLP: below it subnets are poor; one head each will do


class IST(ReplicaSync):
    """One worker alone trains to the bit as without it. The inner optimizer must not have stepped yet;
    after `consolidate` there is nothing narrow left to step.
    """

    Config = ISTConfig
    config: ISTConfig
    level = "parameter"
    needs_whole = True
    agrees = True  # on what all hold, after each round

    def _begin(self) -> None:
        if self.inner.state:
            raise ValueError(
                "the inner optimizer has state of the full model already: wrap it before its first step "
                "(Adagrad, which has it from the start, does not go with IST)"
            )
        axes = split_axes(self.model, self.config.split)
        self.division = Division(
            axes=axes,
            shapes={name: tuple(p.shape) for name, p in self.model.named_parameters() if name in axes},
            workers=self.group.size,
            sampler=self.config.sampler,
            server=self.config.server,
            seed=self.config.seed,
        )
        super()._begin()
        self._opening = super().opening_exchanges()  # of the full model, which all start from
        self.subnet = Subnet(self.model, self.division)
        divided = self.subnet.parameters
        travels = moments_of(self.inner) if self.config.optimizer_state == "travel" else {}
        moments = {name: travels.get(id(parameter), {}) for name, parameter in divided.items()}
        self.store = Store(self.division, self.group.rank, divided, moments)
        self.subnet.begin(self.group.rank)
        self.shares = list(self.subnet.undivided)
        self._shared, self._staging = FlatParameters(self.shares, pinned=True), HostCopies(())
        self.round = 0
        self.merged = 0  # inner steps done at the last merge
        self._consolidated = False

    @override
    def take_step(self, scaled: Scaled | None) -> None:
        """ValueError after `consolidate`."""
        if self._consolidated:
            raise ValueError("the model was consolidated and is no subnet any more: wrap it anew to train on")
        super().take_step(scaled)

    @override
    def after_inner_step(self) -> None:
        if self.steps % self.config.sync_every == 0:
            self._next_round()

    @override
    def rounds_done(self) -> str:
        return str(self.round)

    @override
    def land_all(self) -> None:
        if self.merged < self.steps:
            self._next_round()

    @override
    def consolidate(self) -> nn.Module:
        """The full model, in place of the subnet, scaled as `eval_scale` says."""
        if not self._consolidated:
            super().consolidate()
            self.subnet.set_values(self._full("control"))
            self._consolidated = True
            self._prove(dict(self.subnet.parameters))
        return self.model

    @contextmanager
    @override
    def evaluation_weights(self) -> Iterator[nn.Module]:
        """The full model of now, scaled as `eval_scale` says. All workers call it together: the parts travel."""
        if self._consolidated:
            yield self.model
            return
        shared = [parameter.detach().clone() for parameter in self.shares]
        with self.subnet.set_aside():
            try:
                self.subnet.set_values(self._full("eval"))
                yield self.model
            finally:
                for parameter, before in zip(self.shares, shared, strict=True):
                    parameter.data.copy_(before)

    @override
    def opening_exchanges(self) -> list[PlannedExchange]:
        return self._opening

    @override
    def schedule(self, steps: int) -> list[PlannedExchange]:
        """Merge: units to their servers; average: what all hold; divide: units to their next trainers."""
        size, every = self.group.size, self.config.sync_every
        ends = [*range(every, steps + 1, every), *([steps + 1] if steps % every else [])]
        groups, flat = everyone(size), FlatParameters(self.shares)
        averaged = by_size(groups, partial(pattern, flat.numel, flat.dtype, codec("none")))
        planned, before = [], self._units(0)
        for round, step in enumerate(ends):
            trainers = before if self.division.steady else self._units(round + 1)
            up = by_size(groups, lambda _, units=before: Cross(units))
            down = by_size(groups, lambda _, units=trainers: Cross(tuple(zip(*units, strict=True))))
            planned.append(PlannedExchange(step, step, 0, "merge", groups, up, 2 * round))
            if flat.numel:
                planned.append(PlannedExchange(step, step, 1, "average", groups, averaged, 2 * round))
            planned.append(PlannedExchange(step, step, 2, "divide", groups, down, 2 * round + 1))
            before = trainers
        return planned

    def _units(self, round: int) -> tuple[tuple[int, ...], ...]:
        return tuple(map(tuple, self.store.messages(round).fill_diagonal_(0).tolist()))

    @override
    def rhythm(self, steps: int) -> Rhythm:
        """One round sends about as much as another."""
        return Rhythm(0, self.config.sync_every)

    @override
    def memory(self) -> list[MemoryItem]:
        flat, size, rank = FlatParameters(self.shares), self.group.size, self.group.rank
        between = self.store.messages(0)
        pieces = int(between[rank].sum() + between[:, rank].sum())
        averaging = flat.numel * flat.dtype.itemsize + working_bytes(flat.numel, flat.dtype, codec("none"), size)
        units = [self.subnet.parameters[key.name] for key in self.store.keys(moments=True)]  # moments are as large
        return [
            MemoryItem(PINNED, pinned_bytes(units) + pinned_bytes(self.shares), "pinned"),
            MemoryItem("units kept between rounds", self.store.nbytes(), "always"),
            MemoryItem("messages under way", pieces + averaging, "exchange"),
            MemoryItem("the full model and its parts", 2 * self.subnet.full_bytes, "end"),
        ]

    @override
    def gauges(self) -> dict[str, float]:
        """The round, and 32 bits of the hash of who holds what: equal on all workers."""
        return {"round": self.round, "division": self.division.digest(self.round) % 2**32}

    @override
    def advise(self, steps: int) -> list[str]:
        if self.config.sync_every > steps:
            mend = f"choose sync_every <= {steps} (--set replicas.sync_every={steps})"
            raise ValueError(f"sync_every: no exchange falls into a run of {steps} steps; {mend}")
        return [*super().advise(steps), *advice(self.model, self.division)]

    @override
    def outer_state(self) -> dict[str, Any]:
        return {"run": self.run, "round": self.round, "merged": self.merged, "kept": self.store.state_dict()}

    @override
    def load_outer_state(self, state: dict[str, Any]) -> None:
        self.run = state["run"]
        self.round, self.merged = state["round"], state["merged"]
        self.store.load_state_dict(state["kept"])

    @classmethod
    @override
    def regrouped(cls, outer: dict[str, Any]) -> dict[str, Any]:
        raise ValueError(
            "a subnet of IST is as narrow as there are workers, so another number of them changes every shape: resume "
            "with as many, or begin a new run with run.start = a finished one"
        )

    # One round.

    @among_even()
    def _next_round(self) -> None:
        """Merge, average, divide anew. All of it is waited for: the next step needs the other units."""
        live = self.subnet.live(self.inner, self.store.keys(moments=True))
        self._refuse_not_finite()
        own, hosted = list(live.values()), live
        if is_away(own):
            if not self._staging.fits(own):
                self._staging = HostCopies(arena(own))
            self._staging.settle()
            self._staging.down(own)
            hosted = dict(zip(live, self._staging.hosts, strict=True))
        sent_up, sent_down = (each[self.group.rank] for each in self.store.sent_bytes(self.round))
        up = self.store.up(self.group.call(), hosted, self.store.stored, self.round)
        merging = self.group.start(up, nbytes=sent_up)
        digest = packed(self.division.digest(self.round), self.run)
        shared = set(map(id, self.shares))
        with self.landing([index for index, own in enumerate(self.parameters) if id(own) in shared]):
            self._average("outer", Stamp(self.steps, digest, parts=(_OTHER_DIVISION, OTHER_STATE)))
        merging.wait()
        self.round += 1
        down = self.store.down(self.group.call(), hosted, self.round)
        self.group.start(down, nbytes=sent_down).wait()
        if hosted is not live:
            self._staging.up(own)
        if self.config.optimizer_state == "reset":
            self.inner.state.clear()
        self.merged = self.steps

    def _refuse_not_finite(self) -> None:
        """Nothing is kept that a broken subnet could go back to."""
        if not all_finite(self.parameters):
            reason = f"its weights are not finite at inner step {self.steps}: lower the learning rate, or set max_norm"
            raise WorkerFailed(self.group.transport.rank, reason)

    def _average(self, channel: Channel, stamp: Stamp | None = None) -> None:
        if self._shared.numel:
            flat = self._shared.read(self._shared.new())
            self.group.mean(flat, codec("none"), channel, stamp)
            self._shared.write(flat)

    def _full(self, channel: Channel) -> dict[str, Tensor]:
        """The divided parameters with all units, as all workers hold them now; what all hold is averaged in place."""
        stored = self.store.weights()
        if self.merged < self.steps:
            live = self.subnet.live(self.inner, list(stored))
            live = dict(zip(live, to_host(list(live.values())), strict=True))
            up = self.store.up(self.group.call(channel), live, stored, self.round)
            self.group.start(up, channel, nbytes=sum(tensor.nbytes for tensor in live.values())).wait()
            self._average(channel)
        share = 1 / self.group.size if self.config.eval_scale == "keep_fraction" else 1.0
        full = {}
        for name, parameter in self.subnet.parameters.items():
            axes = self.division.axes[name]
            whole = torch.empty(self.division.shapes[name], dtype=parameter.dtype, device="cpu")
            for server in range(self.group.size):
                units = self.division.stored_units(name, server)
                part = stored[Key(name)] if server == self.group.rank else torch.empty_like(take(whole, axes, units))
                if part.numel():
                    self.group.broadcast(part, server, channel)
                    put(whole, axes, units, part)
            full[name] = (whole * share if reads(axes) else whole).to(parameter.device)
        return full


def advice(model: nn.Module, division: Division) -> list[str]:
    """Whether a division is too fine, and what to compare it with: notices, a line each."""
    workers = division.workers
    if workers == 1:
        return ["one worker holds all units: nothing is divided"]
    notices = []
    thin = {layer.rpartition(".")[2]: units // workers for layer, units in division.layers.items()}
    thin = {kind: least for kind, least in thin.items() if kind != "heads" and least < _FEW}
    for kind, least in thin.items():
        notices.append(
            f"a subnet has {least} {kind} units a layer: {_FEW} or more learn better; widen it or divide less"
        )
    twice = any(sum(axis is not None for axis in axes) > 1 for axes in division.axes.values())
    if twice and division.sampler == "rolling":
        notices.append('sampler = "rolling": units far from each other in two layers never meet; "random" mixes all')
    if isinstance(model, Decoder):
        notices.append(_baseline(model, division))
    return notices


def _baseline(model: Decoder, division: Division) -> str:
    """The dense model that IST has to beat."""
    kinds = {layer.rpartition(".")[2] for layer in division.layers}
    if kinds == {"ffn"}:
        dense, how = replace(model.shape, ffn=model.shape.ffn // division.workers), "is a subnet's shape"
    else:
        rest = sum(p.numel() for name, p in model.named_parameters() if name not in division.axes)
        count = rest + sum(division.trained_numel(name, worker=0) for name in division.axes)
        dense, how = like_size(model.shape, count), "has a subnet's size"
    changed = [key for key in ("d_model", "heads", "ffn") if getattr(dense, key) != getattr(model.shape, key)]
    settings = " ".join(f"--set model.{key}={getattr(dense, key)}" for key in changed)
    return f"compare with a small dense model: --method ddp {settings} {how}, and may do as well"
