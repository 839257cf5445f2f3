"""`ReplicaSync`: an optimizer that keeps replicas of a model together.

It wraps the user's inner optimizer and is used like one:

    optimizer = isles.DiLoCo(model, torch.optim.AdamW(model.parameters(), lr=4e-4), world.outer, sync_every=500)
    model(batch).loss.backward()
    optimizer.step()          # reduce gradients, clip, inner step, outer step when due
    optimizer.zero_grad()

Order inside `step`: `reduce_gradients` (methods at gradient level), clipping on what was reduced, `before_inner_step`
(at optimizer level), the inner optimizer's step, `after_inner_step` (at parameter level). A method has a `Config`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, Literal

from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from isles.base.wrapping import evaluated
from isles.comm.group import Group
from isles.comm.roster import FixedRoster, Roster, as_roster
from isles.network.exchange_plan import Rhythm
from isles.replicas import start
from isles.replicas.config import MethodConfig, own_config, with_options
from isles.replicas.exchange_schedule import Outline, outline
from isles.replicas.finish import EndsAsOne
from isles.replicas.flat import VectorMaker, all_names, warn_if_not_held
from isles.replicas.replica import Replica, as_replica, largest
from isles.replicas.step_guards import Guarded, Scaled, TakesScalers
from isles.replicas.watch import ModelWatch, copies_of, refuse_unfit


class ReplicaSync(TakesScalers, Guarded, EndsAsOne):
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
            if self.watch.has_heard:
                self.replica.apply(scaled)
            else:
                self.watch.hear(partial(self.replica.apply, scaled), self.inner)
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
        """The model with the weights that should be judged (the anchor where there is one), the live ones restored
        after.
        """
        with self.replica.judged() as model:
            yield model

    # What all methods have.

    def replica_std(self) -> float:
        """Spread of the survivors' live weights that all hold: sqrt(sum over replicas and parameters of (p - mean p)^2
        / (replicas * parameters)). Costs one mean over the group; the weights are not touched.
        """
        self.catch_up()
        return start.replica_std(self.shares, self.together, lambda sums: self.replica.total(sums, "eval"))

    def charge(self, share: float) -> None:
        """Charge `share` of an inner step's computation to a virtual clock, unless somebody else does."""
        if self.replica.charged:
            return
        self._charged += share
        self.group.transport.compute(share * self.group.transport.step_seconds)

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
            places = {id(parameter): place for place, parameter in enumerate(self.parameters)}
            held = [sorted(places.get(id(own), -1) for own in group["params"]) for group in self.param_groups]
            inner = [type(self.inner).__name__, start.settings_of(self.param_groups), held]
        shapes = [(tuple(t.shape), str(t.dtype), t.requires_grad) for t in self._shared()]
        return f"{type(self).__name__} {self.config} {self.max_norm} {shapes} {inner}"


def unwrap(optimizer: Any) -> ReplicaSync:
    """The method below what others wrap around an optimizer and give as its `.optimizer` (accelerate's `prepare` does):
    for `consolidate`, `finish`, `evaluation_weights` and what else they do not pass on. ValueError where there is none.
    """
    found = optimizer
    while not isinstance(found, ReplicaSync):
        found = getattr(found, "optimizer", None)
        if found is None:
            raise ValueError(f"there is no method of Isles below this {type(optimizer).__name__}")
    return found


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
