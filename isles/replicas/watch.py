"""What a user may do beside an optimizer, checked around each step.

`ModelWatch`: what is done to the model without the optimizer knowing: parameters that are frozen or thawed, weights
that are loaded, formats that change, a DistributedDataParallel around it.

`Guarded`: only the newest method around some parameters may step them. `Scaled`: a loss that a torch.amp.GradScaler has
scaled is unscaled once, whether the user calls `optimizer.step(scaler=scaler)` or torch's `scaler.step(optimizer)`.
Torch's way calls `step` whatever the gradients are (`_step_supports_amp_scaling`), so that workers never come apart by
a step; gradients are divided here, and what the scaler's `update` reads is what all workers agree on.

`WeightCopies` are copies of the weights that an inner optimizer holds in its state: its next step would write them over
what a round has landed. They are found by value, before the weights are landed on:

    master      equals its parameter, rounded to the parameter's format, wherever there is one (and is not all zero):
                it becomes what has landed
    near copy   within half of the weights' norm of them, as Lookahead's slow weights, or schedule-free's z: it moves by
                as much as the weights

An optimizer whose copy is elsewhere can have `after_landing(parameters)`, a method that is called instead of all this.
Where it has none, its next step shows it, and it is refused. torch's own optimizers have no copies.
"""

from __future__ import annotations

import gc
import sys
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from inspect import unwrap
from itertools import chain
from operator import is_
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from isles.base.wrapping import Deferred, Wrapping, call_of, each_of, innermost
from isles.comm.group import Group
from isles.replicas.flat import views
from isles.replicas.island.fsdp import is_sharded, own_rows
from isles.replicas.start import hash_of

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


_TALK = {"all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor", "broadcast"}
_MADE = [0]  # DistributedDataParallels, since this file was loaded


def _count(module: nn.Module, *_: object) -> None:
    _MADE[0] += isinstance(module, DistributedDataParallel)


register_module_module_registration_hook(_count)  # a model knows nothing of what is put around it


class ModelWatch:
    """Of the parameters that are exchanged, in their order."""

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter], group: Group) -> None:
        self._group, self._made = group, -1  # DistributedDataParallels that there were at the last look around
        self.parameters = list(parameters)
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._known = set(map(id, self.parameters))
        self._dtypes = [parameter.dtype for parameter in self.parameters]
        self._since: dict[int, int] = {}  # by number, of what is frozen now: the first inner step that found it so
        self.is_profiled = False  # whether an inner step was listened to
        self.is_inside = False  # of an island whose workers step as one: a norm over them is as it should be
        self._is_restored = False  # the optimizer's state was loaded since the last step
        self._before: int | None = None
        """Hash of the weights that the next step must find, because others may be loaded without the optimizer's state.
        If `_is_restored`: of those that it must not find, because the loaded state belongs to other weights.
        """
        self._model = model
        self._note_modules()
        hook = WeakHook(self, "loading")
        for module in model.modules():
            module.register_load_state_dict_pre_hook(hook)

    def look(self, step: int, groups: Sequence[dict[str, Any]]) -> None:
        """Called in inner step `step`, with gradients in place. groups: the inner optimizer's. ValueError, in one line
        with the mend, for what would be trained without being exchanged, or exchanged without having been trained.
        """
        occupants = [*chain.from_iterable(map(dict.values, self._slots))]
        is_other = len(occupants) != len(self._occupants) or not all(map(is_, occupants, self._occupants))
        if is_other:
            self._refuse_new()
        if is_other or self._made != _MADE[0]:  # whoever drives the model may have put something into it, or around it
            around, self._made = self._made != _MADE[0], _MADE[0]
            norms = () if self.is_inside else self._model.named_modules()
            warn_of_torchs_means(norms, self.parameters, self._group, around=around)
        for group in groups:
            for parameter in group["params"]:
                if parameter.requires_grad and id(parameter) not in self._known:
                    raise ValueError(
                        f"{self.name(parameter)} was frozen when the optimizer was made, so it would be trained and "
                        "never exchanged: make the optimizer anew after requires_grad_(True), or freeze it again"
                    )
        for number, (parameter, dtype) in enumerate(zip(self.parameters, self._dtypes, strict=True)):
            if parameter.dtype != dtype:
                now, before = (str(one).removeprefix("torch.") for one in (parameter.dtype, dtype))
                raise ValueError(
                    f"{self.name(parameter)} is {now} now and was {before} when the "
                    "optimizer was made, so rounding would count as progress: convert the model before"
                )
            if parameter.requires_grad or parameter.grad is not None:
                self._since.pop(number, None)
            else:
                self._since.setdefault(number, step)
        self.refuse_forgotten()
        if self._before is not None and self._before != self.digest():
            raise ValueError(
                "weights were loaded into the model after its optimizer was made, and would count as progress: load "
                "them before, or load the optimizer's state_dict() of the same moment too"
            )
        self._before, self._is_restored = None, False

    def _note_modules(self) -> None:
        """Note the modules' parameters and parts, compared in every step; a sharded model changes them by itself."""
        modules = () if is_sharded(self._model) else self._model.modules()
        self._slots: list[dict[str, Any]] = [own for one in modules for own in (one._parameters, one._modules)]
        self._occupants = [*chain.from_iterable(map(dict.values, self._slots))]

    def _refuse_new(self) -> None:
        """Something was put in another's place, or taken away. What is frozen may come, but not for what is trained."""
        refuse_sharded(self._model)
        trained = {self.name(parameter) for parameter in self.parameters}
        for name, parameter in self._model.named_parameters():
            if (parameter.requires_grad or name in trained) and id(parameter) not in self._names:
                raise ValueError(
                    f"{name} is another parameter than when the optimizer was made (a new layer, or load_state_dict("
                    "assign=True)), so it would never be exchanged: make the optimizers anew, or load without assign"
                )
        self._note_modules()

    def profile(self, step: Callable[[], object], optimizer: Optimizer) -> None:
        """Take the first inner step, with a warning where the optimizer talks to other workers of the group in it."""
        calls, self.is_profiled = list[str](), True
        # A thread has one profile function: a user's own stays.
        listens = _should_warn(self._group) and sys.getprofile() is None

        def called(frame: FrameType, event: str, _: object) -> None:
            code = frame.f_code
            if event == "call" and code.co_name in _TALK and code.co_filename.endswith("distributed_c10d.py"):
                calls.extend([code.co_name] * _meets(self._group, frame.f_locals.get("group")))

        if listens:
            sys.setprofile(called)
        try:
            step()
        finally:
            if listens:
                sys.setprofile(None)
        if calls:
            names = " and ".join(type(one).__name__ for one in each_of(innermost(optimizer)))
            warnings.warn(
                f"{names} calls torch.distributed.{calls[0]}: it talks to these workers in every inner step, outside "
                "of what is counted, and this method exchanges on top of it. Give an optimizer for one process; to "
                "divide its state, isles.shard(model, world.inner)",
                stacklevel=4,
            )

    def frozen(self, numbers: Collection[int], since: int) -> tuple[int, ...]:
        """Those of the parameters `numbers` that stood still in all inner steps after step `since`, being frozen."""
        return tuple(number for number in numbers if self._since.get(number, since + 2) <= since + 1)

    def loading(self) -> None:
        """Weights are about to be loaded, if they are others."""
        if self._before is None and not self._is_restored:
            self._before = self.digest()

    def loaded(self) -> None:
        """Something of the optimizer's own state was loaded: weights of the same moment were, or are to come."""
        self._before, self._is_restored = None, True

    def awaits(self, weights: int) -> None:
        """The state that was loaded is of weights with this hash: if these are others, they are to be loaded yet."""
        self._before = None if weights == (now := self.digest()) else now
        self._is_restored = self._before is not None  # else whatever is loaded from now on are others

    def refuse_forgotten(self) -> None:
        """ValueError where the weights are still those that `awaits` has found to be others."""
        if self._is_restored and self._before is not None:
            if self._before == self.digest():
                raise ValueError(
                    "the optimizer's state was loaded, but the model does not have the weights of that moment: load "
                    "the model's state_dict() of the same checkpoint too, before or after"
                )
            self._before = None

    def state_dict(self) -> dict[str, int]:
        """JSON-able: what is frozen, and since when."""
        return {str(number): step for number, step in self._since.items()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._since = {int(number): step for number, step in state.items()}

    def digest(self) -> int:
        """Hash of the weights that this worker holds; 0 without numbers."""
        return 0 if self.parameters[0].is_meta else hash_of(map(own_rows, self.parameters))

    def name(self, parameter: Tensor) -> str:
        return self._names.get(id(parameter), f"a parameter of shape {tuple(parameter.shape)}")


def refuse_sharded(model: nn.Module) -> None:
    """ValueError for a model that somebody else than `shard` has cut."""
    sharded = any(_is_called(module, "FullyShardedDataParallel") for module in model.modules())  # FSDP1
    if sharded or (any(hasattr(own, "to_local") for own in model.parameters()) and not is_sharded(model)):
        raise ValueError(
            "the model is sharded by torch (fully_shard, or a tensor parallel plan), which sends what Isles does not "
            "know: shard the plain model with isles.shard(model, world.inner) instead"
        )


def refuse_unfit(model: nn.Module, parameters: Sequence[nn.Parameter], inner: Optimizer) -> None:
    """ValueError, with the mend, for what no method can exchange, or step."""
    refuse_sharded(model)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            continue  # reported below, or never trained
        if tensor.layout != torch.strided:
            raise ValueError(f"{name} is sparse, and is exchanged entry by entry: make it with .to_dense()")
        if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
            raise ValueError(f"{name} is expanded, and several of its entries are one: make it with .contiguous()")
    if any(is_lazy(parameter) for parameter in parameters):
        raise ValueError("the model has lazy parameters without a shape: run one batch through it before wrapping")
    odd = next((parameter for parameter in parameters if parameter.is_complex()), None)
    if odd is not None:
        raise ValueError(
            f"a parameter of shape {tuple(odd.shape)} is complex, and would lose its imaginary part: keep two real "
            "numbers an entry (torch.view_as_real), and see them as complex in forward"
        )
    kinds = [kind.__name__ for one in each_of(innermost(inner)) for kind in type(one).__mro__]
    talks = next((kind for kind in kinds if kind in ("ZeroRedundancyOptimizer", "PostLocalSGDOptimizer")), None)
    if talks is not None:
        raise ValueError(
            f"{talks} sends weights to all workers in its steps: give the optimizer inside it; to divide its state, "
            "isles.shard(model, world.inner)"
        )
    if "LBFGS" in kinds:
        raise ValueError(
            "LBFGS evaluates its closure several times a step, each with gradients of its own, of which only one could "
            "be exchanged: use an optimizer of one gradient a step, such as AdamW or SGD"
        )


def warn_of_torchs_means(
    modules: Iterable[tuple[str, nn.Module]], parameters: Sequence[Tensor], group: Group, *, around: bool
) -> None:
    """Warnings on the group's first worker where torch averages over several of its workers too: in `modules`, or
    `around` them, in a DistributedDataParallel that is alive, as transformers' Trainer and accelerate's
    `prepare(model)` put one there. To find it all objects are looked through: some 50 ms.
    """
    if not _should_warn(group):
        return
    meets = partial(_meets, group)
    own, wrapped = set(map(id, parameters)), _wrapped_by_torch() if around else []
    if any(own.intersection(map(id, one.parameters())) and meets(one.process_group) for one in wrapped):
        warnings.warn(
            "the model is inside a DistributedDataParallel: torch averages all gradients over these workers in every "
            "backward pass, outside of what is counted, and this method exchanges on top of it. Give accelerate's "
            "prepare() the optimizer and the loader alone, and call the model itself",
            stacklevel=4,
        )
    norms = ((name, one) for name, one in modules if _is_called(one, "SyncBatchNorm"))
    name = next((name for name, one in norms if meets(getattr(one, "process_group", None))), None)
    if name is not None:
        warnings.warn(
            f"{name} is a SyncBatchNorm: torch averages over these workers in every forward pass, outside of what is "
            "counted, and waits for all. Use BatchNorm, whose buffers consolidate() averages, or give it a "
            "process_group of the workers of an island",
            stacklevel=4,
        )


def _should_warn(group: Group) -> bool:
    """Whether torch may talk past Isles, and this is the worker that is told."""
    return group.rank == 0 and group.size > 1 and dist.is_available() and dist.is_initialized()


def _meets(group: Group, processes: Any) -> bool:
    """Whether several of the group's workers are in a process group of torch's; None: its default one."""
    return len(set(dist.get_process_group_ranks(processes or dist.group.WORLD)) & set(group.ranks)) > 1


def _is_called(thing: object, name: str) -> bool:
    """Whether a class of it has that in its name: others write such ones too."""
    return any(name in kind.__name__ for kind in type(thing).__mro__)


def _wrapped_by_torch() -> list[DistributedDataParallel]:
    """All that are alive. Asking every object whether it is one takes seconds, for the class is an abstract one: so
    their types are asked, a few thousand.
    """
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if DistributedDataParallel in type.mro(kind)}
    return [one for one in objects if type(one) in kinds] if kinds else []


_NEAR = 0.25  # share of the weights' squared norm: a copy is at most half of their norm away
_FEWEST = 3  # inner steps of a round: after fewer, an honest step may lead as far back as the landing has led
_LOOKED_AT = 512  # entries of each parameter that are compared: all of them would cost a copy of the weights


def copies_of(inner: Optimizer, parameters: Sequence[nn.Parameter]) -> list[WeightCopies]:
    """Of each optimizer below `inner` that may keep some. A plan of memory keeps what torch's own do."""
    each = [one for one in each_of(innermost(inner)) if not isinstance(one, Deferred)]
    return [WeightCopies(one, parameters) for one in each if not f"{type(one).__module__}.".startswith("torch.optim.")]


class WeightCopies:
    """In the state of `inner`, of those of `parameters` that it steps."""

    def __init__(self, inner: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        self._inner, self._all = inner, list(parameters)
        self._parameters: dict[int, nn.Parameter] = {}  # its own, by number
        self._renews = getattr(inner, "after_landing", None)
        self._keys: set[str] = set()
        self._before: dict[int, Tensor] | None = None  # the weights, where there are copies
        self._start: list[Tensor] | None = None  # some of them, where there may be some out of reach
        self._landed: tuple[list[Tensor], list[Tensor]] | None = None  # the same after a landing, and how they moved
        self._steps, self._last = 0, dict[int, int]()  # inner steps; at the last landing, by number of the parameter
        self._round = 0  # inner steps of the round that has just landed
        self._undone = 0  # landings in succession that the next inner step took back
        self._probes = 2  # landings whose next step is still looked at: two, because the second one undone is refused

    def stepped(self) -> None:
        """After an inner step. ValueError where it has taken back a landing, for the second time in succession."""
        self._steps += 1
        if self._landed is None:
            return
        (landed, moved), self._landed = self._landed, None
        back = _product([then - now for now, then in zip(self._some(), landed, strict=True)], moved)
        # Where each worker pulls its own way, an honest step leads back by as much as one step of the round had led.
        self._undone = self._undone + 1 if back > (1 + 1 / self._round) / 2 * _product(moved, moved) else 0
        self._probes = max(self._probes - 1, int(self._undone > 0))
        if self._undone == 2:
            raise ValueError(
                f"{type(self._inner).__name__} takes back what rounds have landed, for it keeps a copy of the weights "
                "that is not in its state: give it a method after_landing(parameters) that renews the copy, or choose "
                "an optimizer without one"
            )

    def before_landing(self) -> None:
        """The weights are as the inner step has left them."""
        self._parameters = self._stepped()
        if self._renews is not None:
            return
        states = (self._inner.state.get(parameter, {}) for parameter in self._parameters.values())
        known = {"z"} if "train_mode" in self._inner.param_groups[0] else set()  # schedule-free's, how far it may be
        self._keys = {key for key in {key for state in states for key in state} if key in known or self._is_copy(key)}
        self._start, self._landed = self._some() if self._probes and not self._keys else None, None
        own = {index: own_rows(parameter.detach()) for index, parameter in self._parameters.items()}
        self._before = {index: weights.clone() for index, weights in own.items()} if self._keys else None

    def landed(self, indices: Sequence[int], exact: Mapping[int, Tensor]) -> None:
        """The parameters at `indices` were written to. exact: what they were rounded from, by index, where known."""
        indices = [index for index in indices if index in self._parameters]
        if not indices:
            return
        if self._renews is not None:
            self._renews([self._parameters[index] for index in indices])
        elif self._before is not None:
            for index in indices:
                self._renew(index, exact.get(index))
            self._before = None
        elif self._start is not None:
            now = self._some()
            moved = [after - then for after, then in zip(now, self._start, strict=True)]
            self._round = self._steps - self._last.get(indices[0], 0)
            if self._round >= _FEWEST and _product(moved, moved) > 0:
                self._landed = (now, moved)
        self._last |= dict.fromkeys(indices, self._steps)

    def averages(self) -> dict[str, Tensor]:
        """Of a schedule-free optimizer what its average is made from, live, by number of the parameter."""
        stepped = self._stepped().items() if "train_mode" in self._inner.param_groups[0] else ()
        states = ((index, own, self._inner.state.get(own, {})) for index, own in stepped)
        return {f"z {index}": own_rows(state.get("z", own.detach().clone())) for index, own, state in states}

    def _stepped(self) -> dict[int, nn.Parameter]:
        stepped = {id(parameter) for group in self._inner.param_groups for parameter in group["params"]}
        return {index: own for index, own in enumerate(self._all) if id(own) in stepped}

    def _renew(self, index: int, exact: Tensor | None) -> None:
        assert self._before is not None
        parameter, before = own_rows(self._parameters[index].detach()), self._before[index]
        state = self._inner.state.get(self._parameters[index], {})
        for key in self._keys & state.keys():
            copy = own_rows(state[key])
            if torch.equal(copy.to(before), before):
                full = parameter.to(copy.dtype)
                if exact is not None:
                    full = torch.where(exact.to(parameter) == parameter, exact.to(full), full)
                copy.copy_(full)
            else:
                copy.add_((parameter.to(copy.dtype) - before.to(copy.dtype)).to(copy.device))

    def _is_copy(self, key: str) -> bool:
        """Near all parameters that have it, and no zeros throughout."""
        apart, size, has_state = 0.0, 0.0, False
        for parameter in self._parameters.values():
            own: Any = self._inner.state.get(parameter, {}).get(key)
            if own is None:
                continue
            if not (isinstance(own, Tensor) and own.shape == parameter.shape and own.is_floating_point()):
                return False
            weights = own_rows(parameter.detach()).double()
            apart += float((own_rows(own.detach()).to(weights) - weights).square().sum())
            size += float(weights.square().sum())
            has_state = True
        return has_state and size > 0 and apart <= _NEAR * size

    def _some(self) -> list[Tensor]:
        """Copies of the first entries of each parameter, in float64: their differences are small against them."""
        own = (own_rows(parameter.detach()) for parameter in self._parameters.values())
        some = ([view.reshape(-1) for view in views(one, 0, min(one.numel(), _LOOKED_AT))] for one in own)
        return [torch.cat(parts).to(torch.float64) for parts in some]


def _product(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    return sum(float((mine * theirs).sum()) for mine, theirs in zip(one, other, strict=True))
