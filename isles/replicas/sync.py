"""`ReplicaSync`: an optimizer that keeps replicas of a model together.

It wraps the user's inner optimizer and is used like one:

    optimizer = isles.DiLoCo(model, torch.optim.AdamW(model.parameters(), lr=4e-4), world.outer, sync_every=500)
    model(batch).loss.backward()
    optimizer.step()          # reduce gradients, clip, inner step, outer step when due
    optimizer.zero_grad()

Order inside `step`: `reduce_gradients` (methods at gradient level), clipping on what was reduced, `before_inner_step`
(at optimizer level), the inner optimizer's step, `after_inner_step` (at parameter level). A method has a `Config`.

A run ends with `finish`: exchanges in flight land, workers that did other numbers of inner steps end together where
they did as many rounds, and all prove that they hold the same weights. `state_dict` has a form in which torch's tools
find an optimizer's state too. A plan asks `schedule`, `outline` and `memory` before a run. Their numbers are exact,
unless an outline says `about`; tests compare them with what runs send.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from io import BytesIO
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from isles.base.modes import OwnModes
from isles.base.wrapping import evaluated
from isles.comm.group import Group, same_text
from isles.comm.roster import FixedRoster, Roster, as_roster
from isles.network.exchange_plan import COMPARED, MemoryItem, PlannedExchange, Rhythm
from isles.replicas import start
from isles.replicas.config import MethodConfig, own_config, refuse_other_run, with_options
from isles.replicas.exchange_schedule import Outline, bytes_of, opening_exchanges, outline
from isles.replicas.flat import (
    FlatParameters,
    VectorMaker,
    all_names,
    clean_names,
    copied,
    warn_if_not_held,
)
from isles.replicas.replica import PeerQuestion, Replica, as_replica, largest
from isles.replicas.start import T
from isles.replicas.watch import Guarded, ModelWatch, Scaled, TakesScalers, asked_by_torch, copies_of, refuse_unfit

_ROUNDED = 1e-12  # share of the sum of squares: the mean of equal numbers is rounded by less
_OWN = "isles"  # key in a param group: what torch's tools would drop of the state, as bytes, which they pass on


class ReplicaSync(OwnModes, TakesScalers, Guarded):
    """Base of all methods. Guarantee: after construction every worker holds rank 0's weights, verified by a hash.

    model: its trainable parameters are exchanged; tied ones once. inner: the user's optimizer over them, whose state
    stays local, or a list of several; the method that makes an island of workers one replica; or a `Replica`.
    `param_groups` is shared, so schedulers work. group: the replicas, usually `world.outer`, or a roster of them.
    max_norm: clip the gradient to this 2-norm after the reduction. vectors: makes anchors, momenta and staging; None:
    in memory. options: the fields of the method's `Config`.
    """

    Config: ClassVar[type[MethodConfig]] = MethodConfig
    level: ClassVar[Literal["gradient", "parameter", "optimizer"]]
    spans_islands: ClassVar[bool] = False
    """Whether `inner` may be a method that makes several workers one replica, see `isles.replicas.island.island`."""
    follows_roster: ClassVar[bool] = False
    """Whether the workers may change from round to round."""
    needs_whole: ClassVar[bool] = False
    """Whether a worker must hold its whole replica, with an inner optimizer that is never late."""
    is_linear: ClassVar[bool] = False
    """Whether exchanges, without a codec, only scale whole parameters and add them: in a subspace they stay there."""
    keeps_flat: ClassVar[bool] = False
    """Whether stages can be cut anew: tensors of `outer_state` as long as the trained entries are flat vectors."""
    agrees: bool
    """True if all workers hold equal anchors (or weights, without anchors) after each landing."""
    usual_inner: ClassVar[Literal["adamw", "sgd"]] = "adamw"
    """The inner optimizer that a run gives it where the user names none."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__signature__ = with_options(ReplicaSync.__init__, cls.Config)  # type: ignore[attr-defined]  # for help()

    def __init__(
        self,
        model: nn.Module,
        inner: Optimizer | Sequence[Optimizer] | Replica,
        group: Group | Roster,
        config: MethodConfig | None = None,
        *,
        max_norm: float | None = None,
        vectors: VectorMaker | None = None,
        **options: Any,
    ) -> None:
        roster = as_roster(group)
        if not (self.follows_roster or isinstance(roster, FixedRoster)):
            raise ValueError(f"{type(self).__name__} needs the same workers from beginning to end: pass world.outer")
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"max_norm = {max_norm}: choose a positive norm, or None for no clipping")
        self.roster, self.group, self.max_norm, self.vectors = roster, roster.founders, max_norm, vectors
        self.config = own_config(type(self).__name__, self.Config, config, options)
        self.model, self.replica = model, as_replica(model, inner)
        refuse_unfit(model, self.replica.parameters, self.replica.inner)
        self.replica.refuse(self)
        super().__init__(self.replica.inner, self.replica.parameters)
        self.watch = ModelWatch(model, self.replica.parameters, self.group)
        self.copies = copies_of(self.inner, self.parameters)
        self.shares = self.replica.shares
        """What all workers of the group hold copies of: the parameters, or in an island this worker's part of them."""
        self.everything = range(len(self.shares))
        self.steps = 0
        """Inner steps done."""
        self.run = 0
        """What all workers of a run share: a hash of the weights that it began with."""
        self.is_loaded = False
        """Whether the state was loaded since the last step: the next exchange proves that it is the others' too."""
        self.batches = 1
        """Backward passes of a step, which `schedule` and `memory` count with: more where gradients accumulate."""
        self.scales_loss = False
        """Whether a gradient scaler takes part, which `schedule` counts with."""
        self.gradient_norm: Tensor | None = None
        """2-norm of the last reduced gradient before clipping, where `max_norm` is set."""
        self._charged = 0.0
        if isinstance(self.inner, ReplicaSync):
            self.inner.watch.is_inside = True
        elif self.group.rank == 0:
            warn_if_not_held(model, self.parameters, self.inner, type(self).__name__)
        self._begin()
        self._take_over()

    def as_replica(self) -> Replica:
        """What the workers of `group` hold of the one replica that they are. ValueError where they are not one."""
        raise ValueError(f"{type(self).__name__} does not make its workers one replica: inside islands use DDP or FSDP")

    def step(self, closure: Callable[[], Any] | None = None, *, scaler: Any = None) -> Any:
        """One inner step and whatever is due after it.

        closure: re-evaluates the model and returns the loss, as in torch.optim. scaler: a torch.amp.GradScaler whose
        scaled loss was back-propagated; gradients are unscaled before clipping, and it is updated. Torch's order,
        `scaler.step(optimizer)` and `scaler.update()`, does the same.
        """
        if self._makes_state():
            return None
        loss = evaluated(closure)
        scaled = scaler if isinstance(scaler, Scaled) else self.scaled(scaler)  # or that of the method around this one
        self.take_step(scaled)
        if scaler not in (None, scaled):
            scaler.update()
        return loss

    def take_step(self, scaled: Scaled | None) -> None:
        """`step`, with gradients in place. scaled: they are those of a scaled loss."""
        self._refuse_replaced()
        self.replica.gradients()
        self.watch.look(self.steps + 1, self.param_groups)
        self.reduce_gradients()
        self.charge(max(1.0 - self._charged, 0.0))  # the shares charged so far may add up to a little over 1
        self._charged = 0.0
        if scaled is not None:
            self.replica.unscale(scaled)
            self.agree_on_overflow(scaled)
        if self.max_norm is not None:
            self.gradient_norm = self.norm()
            self.replica.clip(self.max_norm, self.gradient_norm)
        if scaled is None or not scaled.overflowed:
            self.before_inner_step()
        self.guards_inner = False
        try:
            if self.watch.is_profiled:
                self.replica.apply(scaled)
            else:
                self.watch.profile(partial(self.replica.apply, scaled), self.inner)
        finally:
            self.guards_inner = True
        for copies in self.copies:
            copies.stepped()
        self.steps += 1
        self.after_inner_step()
        self.is_loaded = False

    # What a method fills in.

    @classmethod
    def local_part(cls, model: nn.Module, group: Group, config: MethodConfig) -> nn.Module:
        """What this worker holds of `model`, the same on all of them: `model` itself, unless the method cuts it. Made
        before the inner optimizer, which is to hold no more than that.
        """
        return model

    def reduce_gradients(self) -> None:
        """Gradient level: make `.grad` the mean over the replicas."""

    def agree_on_overflow(self, scaled: Scaled) -> None:
        """Optimizer level, whose equal steps are of gradients that are each worker's own: all take this step, or none.
        Bytes sent: 8 to each of the others.
        """
        if self.level == "optimizer" and largest(self.group, int(scaled.overflowed)):
            scaled.overflow()

    def norm(self) -> Tensor:
        """2-norm of the reduced gradient of the whole replica."""
        return self.replica.norm()

    def before_inner_step(self) -> None:
        """Optimizer level: make `.grad`, which is clipped, the update that all replicas apply."""

    def after_inner_step(self) -> None:
        """Parameter level: exchange what is due after inner step `self.steps`."""

    def drop_outer(self, share: float, seed: int) -> None:
        """Drop a worker's outer gradient of a round with probability `share`. ValueError: there is none to drop."""
        name = type(self).__name__
        raise ValueError(f"world.drop_outer = {share}: {name} sends no outer gradients; take an outer method, or 0")

    def gauges(self) -> dict[str, float]:
        """Numbers of the method's own that go into each line of metrics: feedback_ratio, rank, ..."""
        return {}

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around all backward passes of a step but the last, with gradient accumulation: they only accumulate."""
        with self.replica.no_sync():
            yield

    @contextmanager
    def evaluation_weights(self) -> Iterator[nn.Module]:
        """The model with the weights to evaluate (the anchor where there is one); the live ones are restored after."""
        with self.replica.for_evaluation() as model:
            yield model

    # What all methods have.

    def replica_std(self) -> float:
        """Spread of the survivors' live weights that all hold: sqrt(sum over replicas and parameters of (p - mean p)^2
        / (replicas * parameters)). Costs one mean over the group; the weights are not touched.
        """
        self.catch_up()
        flat, sums = FlatParameters(self.shares), torch.zeros(2, dtype=torch.float64, device="cpu")
        if flat.numel:
            live = flat.read(flat.new())
            # The hash travels as the bits of a float64, in one message with the square. Squares are summed in float64:
            # float32 sums of millions of entries lose the small ones.
            digest = torch.tensor(flat.digest(live), dtype=torch.int64, device="cpu").view(torch.float64)
            own_square = float(live.square().sum(dtype=torch.float64))
            average = self.together(lambda group: start.mean_over(group, live.clone(), "eval"))
            apart = [mine.sub_(mean) for mine, mean in zip(flat.parts(live), flat.parts(average), strict=True)]
            square = torch.stack([part.square_().sum(dtype=torch.float64) for part in apart]).sum()
            report = torch.stack((square, digest))
            gathered = torch.stack(self.together(lambda group: group.all_gather(report, channel="eval")))
            squares = gathered[:, 0].sum()
            alike = bool((gathered[:, 1].view(torch.int64) == digest.view(torch.int64)).all())
            if alike and squares < _ROUNDED * len(gathered) * own_square:
                squares = torch.zeros((), dtype=torch.float64, device="cpu")  # a mean of equal numbers is rounded
            entries = torch.tensor(len(gathered) * flat.numel, dtype=torch.float64, device="cpu")
            sums = torch.stack([squares, entries])
        squares, count = self.replica.total(sums, "eval")
        return float(squares / count) ** 0.5 if count else 0.0

    def charge(self, share: float) -> None:
        """Charge `share` of an inner step's computation to a virtual clock, unless somebody else does."""
        if self.replica.charged:
            return
        self._charged += share
        self.group.transport.compute(share * self.group.transport.step_seconds)

    # How a run ends.

    @property
    def survives(self) -> bool:
        """True if the workers that are left go on to the end of the run when others fail."""
        return self.config.survives

    def survivors(self) -> Group:
        """The workers that are left; all call it together. `group`, unless the method goes on without lost ones."""
        return self.group

    def together(self, collective: Callable[[Group], T]) -> T:
        """What `collective`, a single one or none, returns over the workers that are left; all call it together."""
        return collective(self.survivors())

    def finish(self) -> None:
        """Land everything that is in flight, and the inner steps since the last exchange. Call it once, at the end, on
        all workers. One that did fewer inner steps since as many rounds counts as having stood still.

        Where workers agree, proves that they do. Bytes sent for both, on "control": at most 16 to each of the others.
        """
        if self.steps and any(group.get("train_mode") is False for group in self.param_groups):
            raise ValueError(
                "the inner optimizer is in eval mode, whose weights are not those that are trained: call "
                "optimizer.train() before finish() and consolidate()"
            )
        self.watch.refuse_forgotten()
        # Before anything lands: what lands depends on the step at which all end.
        rounds = self.rounds_done()
        if rounds and self._is_watched:
            with start.among_even():
                self.steps = self.together(lambda group: start.same_end(group, self.steps, rounds))
        self.land_all()
        if self.level != "parameter" and self._is_watched:
            settings = repr(start.settings_of(self.param_groups, everywhere=True))
            with start.among_even():
                self.together(lambda group: same_text(group, settings, start.OTHER_SETTINGS, self.steps))
        if self.agrees:
            self._prove(self._named_shares())

    def land_all(self) -> None:
        """`finish` without asking the others, for workers that have all done the same number of inner steps."""
        self.catch_up()

    @contextmanager
    def landing(self, indices: Sequence[int]) -> Iterator[None]:
        """Around whatever writes to the parameters of numbers `indices` between two inner steps."""
        for copies in self.copies:
            copies.before_landing()
        yield
        exact = self.anchors() if self.copies else {}
        for copies in self.copies:
            copies.landed(indices, exact)

    def anchors(self) -> Mapping[int, Tensor]:
        """By number of the parameter: what whole ones were rounded from when they were last written to."""
        return {}

    def rounds_done(self) -> str:
        """What must be equal on all workers at the end of the run; "" if nothing must."""
        return ""

    def _named_shares(self) -> dict[str, Tensor]:
        owners = self.parameters if len(self.shares) == len(self.parameters) else self.shares
        return {self.watch.name(owner): own for owner, own in zip(owners, self.shares, strict=True)}

    @property
    def _is_watched(self) -> bool:
        """Whether all workers that began end together."""
        return self.group.size > 1 and not (self.is_sketch or self.survives or self.roster.grows)

    def _prove(self, tensors: Mapping[str, Tensor]) -> None:
        """Diverged unless `tensors`, by name, are the same on all workers."""
        if tensors and self._is_watched:
            with start.among_even():
                self.together(lambda group: start.same_weights(group, tensors, self.steps))

    def _give_mean(self, tensors: Mapping[str, Tensor]) -> None:
        """Give `tensors`, by name, the mean over the survivors, and prove that all have it."""
        if tensors:
            flat, robust = FlatParameters(list(tensors.values())), getattr(self.config, "robust", "none")
            flat.write(self.together(lambda group: start.mean_over(group, flat.read(flat.new()), "control", robust)))
            self._prove(tensors)

    def consolidate(self) -> nn.Module:
        """Finish, then give every worker the one model of the run and return it: where workers agree they have it
        already, else it is the mean of the survivors' weights. Floating-point buffers of the state are averaged.
        """
        self.finish()
        averaged = {} if self.agrees else self._named_shares()
        persistent = self.model.state_dict()  # buffers outside of it are derived, and equal everywhere
        averaged |= {name: b for name, b in self.model.named_buffers() if name in persistent and b.is_floating_point()}
        if averaged:
            with self.landing(() if self.agrees else self.everything):
                self._give_mean(averaged)
                self.replica.spread(self.everything)
        for copies in self.copies if self.level == "parameter" else ():
            self._give_mean(copies.averages())
        # The run is over: the user may step the inner optimizer alone from here on.
        self.guards_inner = False
        return self.replica.whole()

    # What a checkpoint holds.

    def settle(self) -> None:
        """Wait for transfers under way **without** landing them: what a checkpoint calls."""

    def live_state(self) -> dict[str, Any]:
        """`state_dict` without copies and torch's form: what it holds changes with the next step."""
        self.settle()
        return self.shared_state() | {name: getattr(self.group, name).state_dict() for name in ("traffic", "transport")}

    def shared_state(self) -> dict[str, Any]:
        """Of `live_state` what another worker can go on from: nothing of this worker's messages and clock."""
        return {
            "method": type(self).__name__,
            "config": {field.name: getattr(self.config, field.name) for field in fields(self.config)},
            "shapes": [list(parameter.shape) for parameter in self.parameters],
            "steps": self.steps,
            "frozen": self.watch.state_dict(),
            "inner": self.inner_state(),
            "outer": self.outer_state(),
        }

    def copied_state(self) -> dict[str, Any]:
        """`live_state` that stays as it is."""
        live = self.live_state()
        return {**live, "outer": copied(live["outer"])}

    @override
    def state_dict(self) -> dict[str, Any]:
        """Everything but the weights: inner optimizer, outer state, transfers (settled), counters, virtual clock.

        Saved and loaded **per worker**. Tensors, numbers and strings only: `torch.load(weights_only=True)` reads it.
        "state" and "param_groups" are the innermost optimizer's once more, the same tensors, for torch's tools.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state = {**self.copied_state(), "names": clean_names(self.model, self.parameters), "worker": self._position()}
        state["weights"] = self.watch.digest()
        inner: Any = state
        while "method" in inner:
            inner = inner["inner"]
        if {"state", "param_groups"} <= inner.keys():
            groups = [dict(group) for group in inner["param_groups"]]
            if (asking := asked_by_torch("_get_optim_state_dict")) is not None:
                file = BytesIO()
                torch.save(_with_inner(state, None), file)
                own = groups[0]
                if asking.f_locals["info"].flatten_optimizer_state_dict:  # there each parameter has its group's values
                    groups.append(own := {"params": own["params"][:1]})
                own[_OWN] = file.getvalue()
            state |= {"state": dict(inner["state"]), "param_groups": groups}
        for after in self._optimizer_state_dict_post_hooks.values():
            state = after(self, state) or state
        return state

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue exactly, given the model's weights of that moment. ValueError for another method, config, model or
        worker; the next step raises it where those weights have not come.
        """
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        state = _from_torch(state_dict, type(self).__name__)
        shapes = [list(parameter.shape) for parameter in self.parameters]
        refuse_other_run(state, type(self).__name__, self.config, shapes, clean_names(self.model, self.parameters))
        here = self._position()
        whose = state.get("worker", here)  # not in what is handed on between workers
        alike = self.level == "gradient" and bool(self.shares) and not state["outer"]  # on all workers, as weights are
        if whose != here and not alike:
            raise ValueError(
                f"the state is of worker {whose[0]} in a group of {whose[1]}, this is worker {here[0]} in one of "
                f"{here[1]}: save and load a file for each worker, with as many workers"
            )
        # First: transfers under way still write to the buffers that are loaded now.
        self.settle()
        self.steps = state["steps"]
        self.watch.load_state_dict(state["frozen"])
        self.load_inner_state(state["inner"])
        self.load_outer_state(state["outer"])
        if self.steps and "weights" in state:
            self.watch.awaits(state["weights"])
        if whose == here and "transport" in state:  # this worker's own
            self.is_loaded = True
            self.group.traffic.load_state_dict(state["traffic"])
            self.group.transport.load_state_dict(state["transport"])
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def inner_state(self) -> Any:
        return self.replica.inner_state()

    def load_inner_state(self, state: Any) -> None:
        self.watch.loaded()
        self.replica.load_inner_state(state)
        self.copies = copies_of(self.inner, self.parameters)

    def outer_state(self) -> dict[str, Any]:
        """The method's own part of `state_dict`."""
        return {}

    def load_outer_state(self, state: dict[str, Any]) -> None:
        """Restore `outer_state`."""

    @classmethod
    def regrouped(cls, outer: dict[str, Any]) -> dict[str, Any]:
        """What `load_outer_state` gets on every worker where a run goes on with another number of them. outer: worker
        0's `outer_state`, its floating-point tensors replaced by their means over the old workers (bits kept where all
        were equal). ValueError: this method does not say.
        """
        if outer:
            raise ValueError(f"{cls.__name__} does not say how its state is regrouped: resume with as many workers")
        return outer

    def weights(self) -> dict[str, Tensor]:
        """The weights that this worker holds, by name: plain tensors, live."""
        return self.replica.weights()

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Restore `weights`. RuntimeError where they are of another model."""
        self.replica.load_weights(weights)

    def take_in(self) -> None:
        """Weights were loaded past this optimizer on purpose, alike on all workers: the next step does not refuse."""
        self.watch.loaded()
        if isinstance(self.inner, ReplicaSync):
            self.inner.take_in()

    def _position(self) -> list[Any]:
        return [self.group.transport.rank, list(self.group.ranks)]

    # What a plan asks before a run.

    @property
    def is_sketch(self) -> bool:
        """True for a model on the meta device: it can be planned with (`schedule`, `memory`), not trained."""
        return self.parameters[0].is_meta

    def schedule(self, steps: int) -> list[PlannedExchange]:
        """Who sends what to whom when in a run of `steps` inner steps. Sends nothing."""
        return []

    def rhythm(self, steps: int) -> Rhythm:
        """How the exchanges of a run of `steps` inner steps repeat themselves; never, unless a method says so."""
        return Rhythm(0, max(steps, 1))

    def retime(self, sync_every: int) -> None:
        """Plan with rounds of so many inner steps from now on; of a sketch. TypeError where the method has none."""
        self.config = replace(self.config, sync_every=sync_every)  # type: ignore[type-var]

    def outline(self, steps: int) -> Outline:
        """`schedule(steps)` in short, with the bytes sent before the first step: what the counters will show. In an
        island bytes are those of this worker and of those of its island rank in other islands, inside and across.
        """
        short = self.own_outline(steps)
        inside, about = self.replica.sent(steps, self.questions)
        inside += self.spread_bytes(steps)
        sent = tuple(nbytes + inside for nbytes in short.sent)
        return replace(short, sent=sent, inside=inside, about=short.about or about)

    @property
    def questions(self) -> list[PeerQuestion]:
        """What a step asks its replica's other workers."""
        return ["norm"] if self.max_norm is not None else []

    def own_outline(self, steps: int) -> Outline:
        return outline(self.schedule(steps), steps, self.opening(), per_step=False)

    def spread_bytes(self, steps: int) -> int:
        """Bytes that this worker sends inside its replica in `steps` steps for what lands on it."""
        return 0

    def opening(self) -> tuple[int, ...]:
        """Bytes that each position sends while the optimizer is made."""
        inside = self.replica.opening()
        return tuple(inside + own for own in bytes_of(self.opening_exchanges(), self.group.size))

    def opening_exchanges(self) -> list[PlannedExchange]:
        return opening_exchanges(start.bytes_by_format(self._shared()), self.group.size)

    def memory(self) -> list[MemoryItem]:
        """What this method holds in the host's memory, beside weights, gradients and the inner optimizer's state."""
        flat = FlatParameters(self.shares)
        return [MemoryItem(COMPARED, 2 * flat.numel * flat.dtype.itemsize, "end"), *self.replica.memory()]

    def advise(self, steps: int) -> list[str]:
        """Warnings about these settings for a run of `steps`; ValueError if the run cannot mean what they say."""
        return []

    def _shared(self) -> Sequence[Tensor]:
        """What must be equal on all workers of the group at the start."""
        trained = set(map(id, self.parameters))
        frozen = [parameter for parameter in self.model.parameters() if id(parameter) not in trained]
        return [*self.shares, *map(self.replica.own, frozen), *self.model.buffers()]

    # The common start.

    def _begin(self) -> None:
        """Same settings everywhere, then rank 0's weights everywhere, then proof."""
        if self.is_sketch:
            return
        self.replica.begin(f"{type(self).__name__} {self.max_norm}")
        start.same_settings(self.group, self._settings(), all_names(self.model))
        start.spread_from_first(self.group, self._shared())
        self.replica.spread(self.everything)
        self.run = start.same_weights(self.group, self._named_shares())

    def _settings(self) -> str:
        """What must be the same on all workers, beside their weights."""
        inner: list[Any] = []
        if self.level != "parameter":  # equal gradients want equal steps
            indices = {id(parameter): index for index, parameter in enumerate(self.parameters)}
            owned = [sorted(indices.get(id(own), -1) for own in group["params"]) for group in self.param_groups]
            inner = [type(self.inner).__name__, start.settings_of(self.param_groups), owned]
        shapes = [(tuple(t.shape), str(t.dtype), t.requires_grad) for t in self._shared()]
        return f"{type(self).__name__} {self.config} {self.max_norm} {shapes} {inner}"


def unwrap(optimizer: Any) -> ReplicaSync:
    """The method below what others wrap around an optimizer and give as its `.optimizer` (accelerate's `prepare` does):
    for `consolidate`, `finish`, `evaluation_weights` and what else they do not pass on. ValueError where there is none.
    """
    method = optimizer
    while not isinstance(method, ReplicaSync):
        method = getattr(method, "optimizer", None)
        if method is None:
            raise ValueError(f"there is no method of Isles below this {type(optimizer).__name__}")
    return method


class StepsAlike(ReplicaSync):
    """Base of the methods every step of which exchanges the same, as `schedule` says: a run of any length is planned by
    its first two steps.
    """

    @override
    def rhythm(self, steps: int) -> Rhythm:
        return Rhythm(0, 1)

    @override
    def own_outline(self, steps: int) -> Outline:
        return outline(self.schedule(min(steps, 2)), steps, self.opening(), per_step=True)


def _from_torch(state: dict[str, Any], method: str) -> dict[str, Any]:
    """If need be, from what torch's tools have left. ValueError where that is not all."""
    if "method" in state:
        return state
    groups = [dict(group) for group in state.get("param_groups", [{}])]
    saved = groups[0].pop(_OWN, None)
    if saved is None and (asking := asked_by_torch("_load_optim_state_dict")) is not None:
        flat, first = asking.f_locals["state_dict"], next(iter(groups[0].get("params", ())), None)
        saved = flat.get(f"param_groups.{first}.{_OWN}")
    if saved is None:
        raise ValueError(
            f"the state is a plain optimizer's, without what {method} keeps: load one that its state_dict() gave"
        )
    return _with_inner(torch.load(BytesIO(saved), weights_only=True), {**state, "param_groups": groups})


def _with_inner(state: dict[str, Any], innermost: Any) -> dict[str, Any]:
    """A copy of a method's state with that of its innermost optimizer replaced."""
    inner = state["inner"]
    is_method = isinstance(inner, dict) and "method" in inner
    return {**state, "inner": _with_inner(inner, innermost) if is_method else innermost}
