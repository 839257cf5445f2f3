"""Guards around `step`: only the newest method around some parameters may step them (`Guarded`), and a loss that a
torch.amp.GradScaler has scaled is unscaled once (`Scaled`), whether the user calls `optimizer.step(scaler=scaler)` or
torch's `scaler.step(optimizer)`.

Torch's way calls `step` whatever the gradients are (`_step_supports_amp_scaling`), so that workers never come apart by
a step; gradients are divided here, and what the scaler's `update` reads is what all workers agree on.
"""

from __future__ import annotations

import sys
import weakref
from inspect import unwrap
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from isles.base.wrapping import Wrapping, call_of, each_of

_LATEST = WeakIdKeyDictionary()  # by parameter: a weak reference to the method that was made last around it


class Guarded(Wrapping):
    """The part of `ReplicaSync` that minds other steps than its own."""

    guards_inner = False
    """Whether nobody else may step the inner optimizer now."""
    _replaced_by = ""  # the kind of the method that was made later around some of the same parameters

    def _take_over(self) -> None:
        """Called when it is made."""
        for parameter in self.parameters:
            before = _LATEST.get(parameter, lambda: None)()
            while isinstance(before, Guarded) and before is not self.inner:  # an island's method, then the one inside
                before.replace(type(self).__name__)
                before = before.inner
            _LATEST[parameter] = weakref.ref(self)
        for one in each_of(self.inner):
            if hasattr(one, "_optimizer_step_pre_hooks"):  # an optimizer of the user's own may lack what torch's have
                one.register_step_pre_hook(WeakHook(self, "refuse_other_steps"))
        self.guards_inner = True

    def replace(self, by: str) -> None:
        """A method was made around the same parameters, of kind `by`: this one's next step is refused."""
        self._replaced_by, self.guards_inner = by, False

    def refuse_other_steps(self) -> None:
        """Called before each step of the inner optimizer. ValueError for one that somebody else takes."""
        if self.guards_inner:
            name = type(self).__name__
            raise ValueError(
                f"step() of the inner optimizer, which has {name} around it: {name} would not know what was learned; "
                f"call step() of what isles.{name}(...) returned, or consolidate() it before"
            )

    def _refuse_replaced(self) -> None:
        if self._replaced_by:
            name = type(self).__name__
            raise ValueError(
                f"{self._replaced_by} was made around the same parameters after this {name}: step that one alone; "
                f"several optimizers of a model go together, isles.{name}(model, [muon, adamw], ...)"
            )

    def _makes_state(self) -> bool:
        """True after a step that torch.distributed.checkpoint takes, with rates of 0, to have an optimizer make its
        state: the inner one has made it, and no step was done.
        """
        is_asked = not self.state and asked_by_torch("_init_optim_state") is not None
        if is_asked:
            self.guards_inner = False
            self.inner.step()
            self.catch_up()
            self.guards_inner = True
        return is_asked


class WeakHook:
    """Calls a method of `owner` when torch calls it, and does not keep it alive. A copy of it calls nothing."""

    def __init__(self, owner: object = None, method: str = "") -> None:
        self._owner, self._method = None if owner is None else weakref.ref(owner), method

    def __call__(self, *_: object) -> None:
        owner = None if self._owner is None else self._owner()
        if owner is not None:
            getattr(owner, self._method)()

    def __reduce__(self) -> tuple[type[WeakHook], tuple[()]]:
        return WeakHook, ()


def asked_by_torch(function: str) -> FrameType | None:
    """The call of that function of torch.distributed.checkpoint.state_dict that goes on, if one does."""
    module: Any = sys.modules.get("torch.distributed.checkpoint.state_dict")
    called = getattr(module, function, None)  # another torch may name it otherwise: then nobody has asked
    return None if called is None else call_of(unwrap(called).__code__)


class Scaled:
    """Of a step of `optimizer`, whose gradients are those of a scaled loss. scaler: the enabled one that scaled it."""

    def __init__(self, optimizer: Optimizer, scaler: torch.amp.GradScaler) -> None:
        self.scaler, self._optimizer = scaler, optimizer
        self.scale = scaler.get_scale()
        self._overflowed = False

    def unscale(self) -> None:
        """Divide the gradients by the scale, unless `scaler.unscale_` has."""
        factor = getattr(self._optimizer, "grad_scale", None)
        if factor is not None:  # torch's way: it has looked at the gradients, and left them
            inverse = factor.double().reciprocal().float()
            for group in self._optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(inverse.to(parameter.grad.device))
        elif not self._found():
            self.scaler.unscale_(self._optimizer)

    @property
    def overflowed(self) -> bool:
        """Whether a gradient is not finite, so that the step is left out and the scale lowered."""
        return self._overflowed or any(bool(found) for found in self._found().values())

    def overflow(self) -> None:
        """Another worker's gradient is not finite."""
        self._overflowed = True
        for found in self._found().values():
            found.fill_(1.0)

    def _found(self) -> dict[str, Any]:
        """What the scaler has found in these gradients, and reads again in `update`."""
        return self.scaler._found_inf_per_device(self._optimizer)


class TakesScalers:
    """Of an optimizer whose `step` unscales and skips itself, for `scaler.step(optimizer)`."""

    _asking: torch.amp.GradScaler | None = None

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """torch's scaler asks for it, and says nowhere else who it is: it is remembered for the `step` that it calls.
        To others who ask the answer is no: Lightning would refuse to clip, which torch does not.
        """
        asking = sys._getframe(1)
        if asking.f_code is not torch.amp.GradScaler.step.__code__:
            return False
        self._asking = asking.f_locals["self"]
        return True

    def scaled(self, scaler: Any) -> Scaled | None:
        """Of this step, None without a scaler that is enabled. scaler: what `step` was given, if anything."""
        scaler, self._asking = scaler or self._asking, None
        assert isinstance(self, Optimizer)
        return Scaled(self, scaler) if scaler is not None and scaler.is_enabled() else None
