"""What a method of the outer loop keeps in a checkpoint."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from typing_extensions import override

from isles.replicas.loop.fragment import InFlight, without_partners
from isles.replicas.loop.plannable import OuterForetold
from isles.replicas.loop.round_exchange import RoundExchange


class OuterSaved(OuterForetold):
    """The part of `OuterSync`, whose attributes these are, that a checkpoint holds."""

    keeps_flat = True
    flights: list[InFlight]
    skipped: int
    healed: int

    @abstractmethod
    def new_round_exchange(self) -> RoundExchange:
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
            frozen = tuple(saved["frozen"])
            self.flights.append(InFlight(fragment, saved["lands"], fragment.latest, held, frozen))
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
