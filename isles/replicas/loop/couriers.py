"""Which courier an outer method has."""

from __future__ import annotations

from collections.abc import Callable

from isles.comm.elastic.quorum.delivery import Deliveries
from isles.comm.roster import Roster
from isles.replicas.loop.agreed import AgreedCourier
from isles.replicas.loop.config import WeightedConfig
from isles.replicas.loop.courier import Courier
from isles.replicas.loop.fragment import Flight
from isles.replicas.loop.quorum import QuorumCourier
from isles.replicas.parts.interfaces import Composition
from isles.replicas.sync import MethodConfig


def courier_of(
    roster: Roster, parts: Composition, config: MethodConfig, land: Callable[[Flight, None], None], *, agrees: bool
) -> Courier:
    """For a fragment's rounds: of those that all land together, where workers come and go, or of any other. ValueError
    for late ones that cannot be left to the next round.
    """
    takes_quorum = isinstance(config, WeightedConfig) and config.on_late == "quorum"
    if not (roster.grows and agrees):
        if takes_quorum:
            raise ValueError(
                'on_late = "quorum": where nobody comes and goes all are waited for; choose "wait", or use isles '
                "lighthouse, or isles simulate --churn"
            )
        return Courier(roster, parts)
    if not takes_quorum:
        return AgreedCourier(roster, parts)
    deliveries = getattr(roster, "deliveries", None)
    assert isinstance(deliveries, Deliveries), "a roster that grows knows of deliveries"
    why = None
    if parts.landing.moves_reference or parts.rule.keeps_left:
        why = "what was learned meanwhile is added to weights that land on the anchor"
    elif parts.feedback is not None or parts.codec.name.startswith("powersgd"):
        why = "what a codec keeps from round to round is not kept of shares that come late"
    if why is not None:
        raise ValueError(f'on_late = "quorum": {why}; choose "wait", or other parts')
    return QuorumCourier(roster, parts, deliveries, land)
