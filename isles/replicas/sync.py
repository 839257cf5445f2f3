"""`ReplicaSync`: an optimizer that keeps replicas of a model together.

It wraps the user's inner optimizer and is used like one:

    optimizer = isles.DiLoCo(model, torch.optim.AdamW(model.parameters(), lr=4e-4), world.outer, sync_every=500)
    model(batch).loss.backward()
    optimizer.step()          # reduce gradients, clip, inner step, outer step when due
    optimizer.zero_grad()

Order inside `step`: `reduce_gradients` (methods at gradient level), clipping on what was reduced, the inner optimizer's
step, `after_inner_step` (methods at parameter level). A method is a subclass with a `Config`.
"""

from __future__ import annotations

import hashlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from isles.comm.codecs import codec
from isles.comm.errors import Diverged
from isles.comm.group import Group
from isles.errors import unknown_name
from isles.replicas.flat import FlatParameters
from isles.replicas.planned import Held, Outline, Planned, opening_bytes, outline


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """What every method takes; a method's own config adds its hyper-parameters."""

    @property
    def survives(self) -> bool:
        """True if the workers that are left go on to the end of the run when others fail."""
        return False


class ReplicaSync(Optimizer):
    """Base of all methods. Guarantee: after construction every worker holds rank 0's weights, verified by a hash.

    model: its trainable parameters are exchanged; tied ones once. inner: the user's optimizer over them; its state
    stays local. `param_groups` is shared, so schedulers work. group: the replicas, usually `world.outer`. max_norm:
    clip the gradient to this 2-norm after the reduction. options: the fields of the method's `Config`.
    """

    Config: ClassVar[type[MethodConfig]] = MethodConfig
    level: ClassVar[Literal["gradient", "parameter", "optimizer"]]
    agrees: bool
    """True if all workers hold equal anchors (or weights, without anchors) after each landing."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = list(inspect.signature(ReplicaSync.__init__).parameters.values())[1:-1]
        theirs = [
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
            for field in fields(cls.Config)
        ]
        cls.__signature__ = inspect.Signature([*own, *theirs])  # type: ignore[attr-defined]  # what help() shows

    def __init__(
        self,
        model: nn.Module,
        inner: Optimizer,
        group: Group,
        config: MethodConfig | None = None,
        *,
        max_norm: float | None = None,
        **options: Any,
    ) -> None:
        known = [field.name for field in fields(self.Config)]
        for name in options:
            if name not in known:
                raise ValueError(unknown_name(f"option of {type(self).__name__}", name, [*known, "max_norm"]))
        if not isinstance(group, Group):
            raise ValueError(f"group is a {type(group).__name__}: pass a group of workers, such as world.outer")
        if config is not None and not isinstance(config, self.Config):
            raise ValueError(f"{type(self).__name__} takes a {self.Config.__name__}, not a {type(config).__name__}")
        if config is not None and options:
            raise ValueError(f"give {type(self).__name__} a config or options ({', '.join(options)}), not both")
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"max_norm = {max_norm}: choose a positive norm, or None for no clipping")
        self.inner = inner  # first: param_groups and state below are the inner optimizer's
        super().__init__(inner.param_groups, inner.defaults)
        self.model, self.group, self.max_norm = model, group, max_norm
        self.config = config if config is not None else self.Config(**options)
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not self.parameters:
            raise ValueError("the model has no trainable parameter: set requires_grad before wrapping the optimizer")
        self._refuse_strangers(inner.param_groups)
        self.shares = list(self.parameters)
        """The parameters that all workers hold copies of."""
        self.steps = 0
        """Inner steps done."""
        self.gradient_norm: Tensor | None = None
        """2-norm of the last reduced gradient before clipping, where `max_norm` is set."""
        self._charged = 0.0
        self._begin()

    # The optimizer's face.

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The inner optimizer's, shared."""
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.inner.param_groups = groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The inner optimizer's, shared."""
        return self.inner.state

    @state.setter
    def state(self, state: Any) -> None:
        if state:
            self.inner.state = state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the inner optimizer's. ValueError for parameters that are not exchanged: those that were no trainable ones
        of the model when it was wrapped.
        """
        if not hasattr(self, "parameters"):  # called by Optimizer.__init__, with the inner optimizer's own groups
            super().add_param_group(param_group)
            return
        self.inner.add_param_group(param_group)
        try:
            self._refuse_strangers(self.param_groups[-1:])
        except ValueError:
            self.param_groups.pop()
            raise

    def _refuse_strangers(self, groups: Sequence[dict[str, Any]]) -> None:
        own = set(map(id, self.parameters))
        strange = sum(p.requires_grad and id(p) not in own for group in groups for p in group["params"])
        if strange:
            raise ValueError(
                f"{strange} parameters of the inner optimizer are not trainable parameters of the model and would "
                "never be exchanged: wrap the module that holds them all, after setting requires_grad"
            )

    def step(self, closure: Callable[[], Any] | None = None, *, scaler: Any = None) -> Any:
        """One inner step and whatever is due after it.

        closure: re-evaluates the model and returns the loss, as in torch.optim. scaler: a torch.amp.GradScaler whose
        scaled loss was back-propagated; it is unscaled before clipping, and updated.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.reduce_gradients()
        self.charge(max(1.0 - self._charged, 0.0))  # the shares charged so far may add up to a little over 1
        self._charged = 0.0
        if scaler is not None:
            scaler.unscale_(self.inner)
        if self.max_norm is not None:
            self.gradient_norm = nn.utils.clip_grad_norm_(self.parameters, self.max_norm)
        if scaler is not None:
            scaler.step(self.inner)
            scaler.update()
        else:
            self.inner.step()
        self.steps += 1
        self.after_inner_step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the inner optimizer's."""
        self.inner.zero_grad(set_to_none)

    # What a method fills in.

    @classmethod
    def local_part(cls, model: nn.Module, group: Group, config: MethodConfig) -> nn.Module:
        """What this worker holds of `model`, the same on all of them: `model` itself, unless the method cuts it. Made
        before the inner optimizer, which is to hold no more than that.
        """
        return model

    def reduce_gradients(self) -> None:
        """Gradient level: make `.grad` the mean over the replicas."""

    def after_inner_step(self) -> None:
        """Parameter level: exchange what is due after inner step `self.steps`."""

    def finish(self) -> None:
        """Land everything that is in flight, and the inner steps since the last exchange. Call it once, at the end."""

    def settle(self) -> None:
        """Wait for transfers under way **without** landing them: what a checkpoint calls."""

    def schedule(self, steps: int) -> list[Planned]:
        """Who sends what to whom when in a run of `steps` inner steps. Sends nothing."""
        return []

    def outline(self, steps: int) -> Outline:
        """`schedule(steps)` in short, with the bytes sent before the first step: what the counters will show."""
        return outline(self.schedule(steps), steps, self.opening(), per_step=False)

    def opening(self) -> tuple[int, ...]:
        """Bytes that each position sends while the optimizer is made."""
        totals = Counter[torch.dtype]()
        for tensor in self._shared():
            totals[tensor.dtype] += tensor.nbytes
        return opening_bytes(list(totals.values()), self.group.size)

    def memory(self) -> list[Held]:
        """What this method holds in the host's memory, beside weights, gradients and the inner optimizer's state."""
        flat = FlatParameters(self.parameters)
        return [Held("weights and their mean", 2 * flat.numel * flat.dtype.itemsize, "end")]

    def gauges(self) -> dict[str, float]:
        """Numbers of the method's own that go into each line of metrics: feedback_ratio, rank, ..."""
        return {}

    def advise(self, steps: int) -> list[str]:
        """Warnings about these settings for a run of `steps`; ValueError if the run cannot mean what they say."""
        return []

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around all backward passes of a step but the last, with gradient accumulation: they only accumulate."""
        yield

    @contextmanager
    def evaluation_weights(self) -> Iterator[nn.Module]:
        """The model with the weights that should be judged (the anchor where there is one), the live ones restored
        after.
        """
        yield self.model

    def survivors(self) -> Group:
        """The workers that are still there; all of them must ask together. `group` itself, unless the method goes on
        without those it lost.
        """
        return self.group

    # What all methods have.

    @torch.no_grad()
    def consolidate(self) -> nn.Module:
        """Finish, then give every worker the one model of the run and return it.

        Methods whose workers agree have it already; else it is the mean of the survivors' weights. Floating-point
        buffers that belong to the state are averaged.
        """
        self.finish()
        averaged = [] if self.agrees else list(self.parameters)
        kept = self.model.state_dict()  # buffers outside of it are derived, and equal everywhere
        averaged += [b for name, b in self.model.named_buffers() if name in kept and b.is_floating_point()]
        if averaged:
            flat = FlatParameters(averaged)
            total = flat.read(flat.new())
            self.survivors().mean(total, codec("none"))
            flat.write(total)
        return self.model

    @torch.no_grad()
    def replica_std(self) -> float:
        """Spread of the survivors' live weights: sqrt(sum over replicas and parameters of (p - mean p)^2 / (replicas *
        parameters)), of those that all of them hold.

        Costs one mean over the group; the weights are not touched.
        """
        flat, group = FlatParameters(self.shares), self.survivors()
        if not flat.numel:
            return 0.0
        own = flat.read(flat.new())
        average = own.clone()
        group.mean(average, codec("none"), channel="eval")
        apart = [mine.sub_(mean) for mine, mean in zip(flat.parts(own), flat.parts(average), strict=True)]  # in place
        total = torch.stack([part.square_().sum(dtype=torch.float64) for part in apart]).sum()
        squares = group.all_gather(total.reshape(1), channel="eval")
        return float(torch.cat(squares).sum() / (group.size * flat.numel)) ** 0.5

    def charge(self, share: float) -> None:
        """Charge `share` of an inner step's computation to a virtual clock."""
        self._charged += share
        self.group.transport.compute(share * self.group.transport.step_seconds)

    def state_dict(self) -> dict[str, Any]:
        """Everything but the model's weights: inner optimizer, outer state, transfers (settled), counters, virtual
        clock.

        Saved and loaded **per worker**. Tensors, numbers and strings only: `torch.load(weights_only=True)` reads it.
        """
        self.settle()
        return {
            "method": type(self).__name__,
            "config": {field.name: getattr(self.config, field.name) for field in fields(self.config)},
            "shapes": self._shapes(),
            "steps": self.steps,
            "inner": self.inner.state_dict(),
            "outer": self.outer_state(),
            "traffic": self.group.traffic.state_dict(),
            "transport": self.group.transport.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue exactly from `state_dict`, given the model's weights of that moment. ValueError for another method
        or config.
        """
        if state_dict["method"] != type(self).__name__:
            saved, here = state_dict["method"], type(self).__name__
            raise ValueError(f"the state is of {saved}, this is {here}: use the method it was saved with")
        for field in fields(self.config):
            here, saved = getattr(self.config, field.name), state_dict["config"].get(field.name)
            if here != saved:
                raise ValueError(f"{field.name} = {here!r}, but the state was saved with {saved!r}: set it back")
        if state_dict["shapes"] != self._shapes():
            raise ValueError("the state is of a model with other parameter shapes: load it into its own model")
        self.settle()
        self.steps = state_dict["steps"]
        self.inner.load_state_dict(state_dict["inner"])
        self.load_outer_state(state_dict["outer"])
        self.group.traffic.load_state_dict(state_dict["traffic"])
        self.group.transport.load_state_dict(state_dict["transport"])

    def _shapes(self) -> list[list[int]]:
        return [list(parameter.shape) for parameter in self.parameters]

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

    # The common start.

    @torch.no_grad()
    def _begin(self) -> None:
        """Same settings everywhere, then rank 0's weights everywhere, then proof."""
        if self.is_sketch:
            return
        tensors = self._shared()
        inner = _settings(self.inner) if self.level == "gradient" else []  # equal gradients want equal steps
        shapes = [(tuple(t.shape), str(t.dtype), t.requires_grad) for t in tensors]
        self._compare(
            _fingerprint(f"{type(self).__name__} {self.config} {self.max_norm} {shapes} {inner}"),
            "its method, settings or model shapes differ; start all workers with the same ones",
        )
        for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
            same = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.detach().reshape(-1).cpu() for tensor in same])
            self.group.broadcast(flat)
            parts = flat.split([tensor.numel() for tensor in same])
            torch._foreach_copy_(same, [part.view(tensor.shape) for part, tensor in zip(parts, same, strict=True)])
        weights = FlatParameters(self.parameters)
        held = weights.read(weights.new())
        self._compare(
            weights.digest(held),
            "its weights differ after the broadcast; check memory and versions",
        )

    @property
    def is_sketch(self) -> bool:
        """True for a model on the meta device: it can be planned with (`schedule`, `memory`), not trained."""
        return self.parameters[0].is_meta

    def _shared(self) -> Sequence[Tensor]:
        return [*self.model.parameters(), *self.model.buffers()]

    def _compare(self, value: int, detail: str) -> None:
        values = [int(theirs) for theirs in self.group.all_gather(torch.tensor([value]))]
        usual = Counter(values).most_common(1)[0][0]  # so that all name the odd one; of two, rank 0 is right
        for position, theirs in enumerate(values):
            if theirs != usual:
                raise Diverged(self.group.ranks[position], 0, detail)


def _settings(inner: Optimizer) -> list[Any]:
    """The hyper-parameters that are plain numbers: objects may print differently on every worker."""
    items = [item for group in inner.param_groups for item in group.items() if item[0] != "params"]
    plain = [(key, float(value) if isinstance(value, Tensor) else value) for key, value in items]
    return [type(inner).__name__, [item for item in plain if isinstance(item[1], int | float | tuple)]]


def _fingerprint(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)
