"""A method's state as its user saves and loads it, in a form in which torch's tools find an optimizer's too."""

from __future__ import annotations

from dataclasses import fields
from io import BytesIO
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from isles.base.modes import OwnModes
from isles.replicas.config import refuse_other_run
from isles.replicas.flat import clean_names, copied
from isles.replicas.plannable import Foretold
from isles.replicas.step_guards import asked_by_torch
from isles.replicas.watch import ModelWatch, WeightCopies, copies_of

_OWN = "isles"  # in a group, as bytes, which torch leaves as they are: what its tools would leave behind


class Saved(OwnModes, Foretold):
    """The part of `ReplicaSync`, whose attributes these are, that a checkpoint sees."""

    config: Any
    watch: ModelWatch
    copies: list[WeightCopies]
    steps: int
    is_loaded: bool
    level: ClassVar[Any]
    keeps_flat: ClassVar[bool] = False
    """Whether stages can be cut anew: each tensor of `outer_state` as long as the trained entries is a flat vector of
    them.
    """

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
        state = {**self.copied_state(), "names": clean_names(self.model, self.parameters), "worker": self._place()}
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
        here = self._place()
        whose = state.get("worker", here)  # not in what is handed on between workers
        alike = self.level == "gradient" and bool(self.shares) and not state["outer"]  # on all workers, as weights are
        if whose != here and not alike:
            raise ValueError(
                f"the state is of worker {whose[0]} in a group of {whose[1]}, this is worker {here[0]} in one of "
                f"{here[1]}: save and load a file for each worker, with as many workers"
            )
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
        """The inner optimizer's part of `state_dict`."""
        return self.replica.inner_state()

    def load_inner_state(self, state: Any) -> None:
        """Restore `inner_state`."""
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
        if isinstance(self.inner, Saved):
            self.inner.take_in()

    def _place(self) -> list[Any]:
        return [self.group.transport.rank, list(self.group.ranks)]


def _from_torch(state: dict[str, Any], method: str) -> dict[str, Any]:
    """If need be, from what torch's tools have left. ValueError where that is not all."""
    if "method" in state:
        return state
    groups = [dict(group) for group in state.get("param_groups", [{}])]
    own = groups[0].pop(_OWN, None)
    if own is None and (asking := asked_by_torch("_load_optim_state_dict")) is not None:
        flat, first = asking.f_locals["state_dict"], next(iter(groups[0].get("params", ())), None)
        own = flat.get(f"param_groups.{first}.{_OWN}")
    if own is None:
        raise ValueError(
            f"the state is a plain optimizer's, without what {method} keeps: load one that its state_dict() gave"
        )
    return _with_inner(torch.load(BytesIO(own), weights_only=True), {**state, "param_groups": groups})


def _with_inner(state: dict[str, Any], innermost: Any) -> dict[str, Any]:
    """A copy of a method's state with that of its innermost optimizer replaced."""
    inner = state["inner"]
    is_method = isinstance(inner, dict) and "method" in inner
    return {**state, "inner": _with_inner(inner, innermost) if is_method else innermost}
