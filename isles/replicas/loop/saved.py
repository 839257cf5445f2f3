"""What a method of the outer loop keeps in a checkpoint."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from isles.replicas.flat import FlatNames, FlatParameters, recut
from isles.replicas.loop.courier import Courier
from isles.replicas.loop.foretold import OuterForetold
from isles.replicas.loop.fragment import Flight, without_partners

_NORMS = ("progress", "left_ratio")  # of what the last round had to send: gauges, until the next one


def recut_states(
    states: Sequence[dict[str, Any]], before: Sequence[FlatNames], after: Sequence[FlatNames]
) -> list[dict[str, Any]]:
    """States (`OuterSync.outer_state`) of those that held `before`, for those that hold `after`. ValueError where they
    are of several fragments, or of bases that belong to places in the model.
    """
    for state in states:
        if len(state["fragments"]) > 1:
            raise ValueError("fragments are cut from each stage's own blocks: resume with as many stages")
        if any(flight["at_rest"] for flight in state["flights"]):
            raise ValueError("some parameters were frozen while a round was under way: resume with as many stages")
        if any(fragment["averaging"] for fragment in state["fragments"]):
            raise ValueError("bases of low-rank factors belong to each stage's matrices: resume with as many stages")
    made = _recut(states, before, after)
    for state, names in zip(made, after, strict=True):
        for fragment in state["fragments"]:
            if fragment["digest"]:
                fragment["digest"] = _digest(fragment["anchor"], names)
    return made


def _recut(values: Sequence[Any], before: Sequence[FlatNames], after: Sequence[FlatNames]) -> list[Any]:
    """One entry of all states: a vector, what holds vectors, or what is equal in all stages."""
    first = values[0]
    if isinstance(first, Tensor) and [value.numel() for value in values] == [_entries(names) for names in before]:
        return list(recut(values, before, after))
    if isinstance(first, dict):
        made = {
            key: [math.hypot(*(value[key] for value in values))] * len(after)
            if key in _NORMS
            else _recut([value[key] for value in values], before, after)
            for key in first
        }
        return [{key: parts[number] for key, parts in made.items()} for number in range(len(after))]
    if isinstance(first, list) and first and isinstance(first[0], dict):
        rows = [_recut(entries, before, after) for entries in zip(*values, strict=True)]
        return [[row[number] for row in rows] for number in range(len(after))]
    return [first] * len(after)


def _entries(names: FlatNames) -> int:
    return sum(shape.numel() for shape in names.values())


def _digest(vector: Tensor, names: FlatNames) -> int:
    parts = vector.split([shape.numel() for shape in names.values()])
    shaped = [part.view(shape) for part, shape in zip(parts, names.values(), strict=True)]
    return FlatParameters(shaped).digest(torch.cat([part.reshape(-1) for part in shaped]))


class OuterSaved(OuterForetold):
    """The part of `OuterSync`, whose attributes these are, that a checkpoint holds."""

    flights: list[Flight]
    skipped: int
    healed: int

    @abstractmethod
    def new_courier(self) -> Courier:
        """See `OuterSync`."""

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
            held = None if anchors is None else fragment.restored(anchors)
            fragment.latest = fragment.restored(saved["payload"])
            at_rest = tuple(saved["at_rest"])
            self.flights.append(Flight(fragment, saved["lands"], fragment.latest, held, at_rest))
        self.roster.load_state_dict(state["roster"])
        self.courier = self.new_courier()
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

    @classmethod
    @override
    def recut(
        cls, outers: Sequence[dict[str, Any]], before: Sequence[FlatNames], after: Sequence[FlatNames]
    ) -> list[dict[str, Any]]:
        """All flat vectors by name, those under way too."""
        return recut_states(outers, before, after)
