"""What a user does to a model behind its optimizer's back, looked at in each step: parameters that are frozen or
thawed, weights that are loaded, formats that change, a DistributedDataParallel around it.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Collection, Sequence
from itertools import chain
from operator import is_, methodcaller
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from isles.comm.group import Group
from isles.replicas.guarded import WeakHook
from isles.replicas.island.sharded import is_sharded, own_rows
from isles.replicas.start import hash_of
from isles.wrapping import each_of, innermost

_VALUES = methodcaller("values")


class ModelWatch:
    """Of the parameters that are exchanged, in their order."""

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter], group: Group) -> None:
        self._group, self._looked_around = group, False
        self.parameters = list(parameters)
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._known = set(map(id, self.parameters))
        self._dtypes = [parameter.dtype for parameter in self.parameters]
        self._since: dict[int, int] = {}  # by number, of what is frozen now: the first inner step that found it so
        self._is_restored = False  # the optimizer's state was loaded since the last step
        self._before: int | None = None
        """Hash of the weights that the next step must find: some were loaded that nobody told of yet. Restored: of
        those that it must not find, for the state is of others.
        """
        self._model = model
        self._take_places()
        hook = WeakHook(self, "loading")
        for module in model.modules():
            module.register_load_state_dict_pre_hook(hook)

    def look(self, step: int, groups: Sequence[dict[str, Any]]) -> None:
        """Called in inner step `step`, with gradients in place. groups: the inner optimizer's. ValueError, in one line
        with the mend, for what would be trained without being exchanged, or exchanged without having been trained.
        """
        if not self._looked_around:  # not before: whoever drives the model may have put something around it since
            self._looked_around = True
            warn_of_torchs_means(self._model, self.parameters, self._group)
        placed = [*chain.from_iterable(map(_VALUES, self._places))]
        if len(placed) != len(self._placed) or not all(map(is_, placed, self._placed)):
            self._refuse_new()
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

    def _take_places(self) -> None:
        """Note what the modules' parameters and parts are, which is compared in every step. A sharded model changes
        them by itself.
        """
        modules = () if is_sharded(self._model) else self._model.modules()
        self._places = [own for one in modules for own in (one._parameters, one._modules)]
        self._placed = [*chain.from_iterable(map(_VALUES, self._places))]

    def _refuse_new(self) -> None:
        """Something was put in another's place, or taken away. What is frozen may come, but not for what is trained."""
        trained = {self.name(parameter) for parameter in self.parameters}
        for name, parameter in self._model.named_parameters():
            if (parameter.requires_grad or name in trained) and id(parameter) not in self._names:
                raise ValueError(
                    f"{name} is another parameter than when the optimizer was made (a new layer, or load_state_dict("
                    "assign=True)), so it would never be exchanged: make the optimizers anew, or load without assign"
                )
        self._take_places()

    def at_rest(self, numbers: Collection[int], since: int) -> tuple[int, ...]:
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
        """Continue from `state_dict`."""
        self._since = {int(number): step for number, step in state.items()}

    def digest(self) -> int:
        """Hash of the weights that this worker holds; 0 without numbers."""
        return 0 if self.parameters[0].is_meta else hash_of(map(own_rows, self.parameters))

    def name(self, parameter: Tensor) -> str:
        """As the model calls it."""
        return self._names.get(id(parameter), f"a parameter of shape {tuple(parameter.shape)}")


def refuse_unfit(model: nn.Module, parameters: Sequence[nn.Parameter], inner: Optimizer) -> None:
    """ValueError, with the mend, for what no method can exchange, or step."""
    sharded = any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules())  # FSDP1
    if sharded or (any(hasattr(parameter, "to_local") for parameter in parameters) and not is_sharded(model)):
        raise ValueError(
            "the model is sharded by torch (fully_shard, or a tensor parallel plan), which sends what Isles does not "
            "know: shard the plain model with isles.shard(model, world.inner) instead"
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            continue  # told of below, or never trained
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


def warn_of_torchs_means(model: nn.Module, parameters: Sequence[Tensor], group: Group) -> None:
    """Warnings on the group's first worker where torch averages over several of its workers too: in layers of the
    model, or in a DistributedDataParallel that is alive, as transformers' Trainer and accelerate's `prepare(model)` put
    one around a model. That one may have been made at any time, and its model knows nothing of it, so all objects are
    looked through: some 50 ms.
    """
    if group.rank > 0 or group.size == 1 or not (dist.is_available() and dist.is_initialized()):
        return

    def meets(processes: Any) -> bool:
        return len(set(dist.get_process_group_ranks(processes)) & set(group.ranks)) > 1

    own = set(map(id, parameters))
    if any(own.intersection(map(id, one.parameters())) and meets(one.process_group) for one in _wrapped_by_torch()):
        warnings.warn(
            "the model is inside a DistributedDataParallel: torch averages all gradients over these workers in every "
            "backward pass, outside of what is counted, and this method exchanges on top of it. Give accelerate's "
            "prepare() the optimizer and the loader alone, and call the model itself",
            stacklevel=4,
        )
    norms = ((name, one) for name, one in model.named_modules() if isinstance(one, nn.SyncBatchNorm))
    name = next((name for name, norm in norms if meets(norm.process_group or dist.group.WORLD)), None)
    if name is not None:
        warnings.warn(
            f"{name} is a SyncBatchNorm: torch averages over these workers in every forward pass, outside of what is "
            "counted, and waits for all. Use BatchNorm, whose buffers consolidate() averages, or give it a "
            "process_group of the workers of an island",
            stacklevel=4,
        )


def _wrapped_by_torch() -> list[DistributedDataParallel]:
    """All that are alive. Asking every object whether it is one takes seconds, for the class is an abstract one: so
    their types are asked, a few thousand.
    """
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if DistributedDataParallel in type.mro(kind)}
    return [found for found in objects if type(found) in kinds] if kinds else []
