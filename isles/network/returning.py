"""Who stands still for longer than its line is kept, in worlds where nobody comes back into its old place: it is gone
for the others then, and comes again as somebody else once it goes on. Pure; for the virtual clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from isles.network.churn import ChurnEvent


@dataclass(frozen=True)
class Returns:
    """events: in which who stood still for too long is killed, and what happens to it later happens to who it is then.
    begins: by worker, when it comes (s), those who come again behind all others. machines: by worker, the number of the
    first one on its machine.
    """

    events: tuple[ChurnEvent, ...]
    begins: tuple[float, ...]
    machines: tuple[int, ...]


def returns(trace: Iterable[ChurnEvent], begins: Sequence[float], lease: float) -> Returns:
    """Of a trace whose workers come at `begins`. lease: seconds that a line is kept for one that stands still."""
    events: list[ChurnEvent] = []
    came, machines = list(begins), list(range(len(begins)))
    who = list(machines)  # by the trace's number, who it is now
    paused: dict[int, float] = {}
    for event in trace:
        if event.kind in ("join", "lighthouse"):
            events.append(event)
            continue
        number = int(event.number)
        own = replace(event, number=who[number])
        if event.kind != "resume":
            events.append(own)
            if event.kind == "pause":
                paused[number] = event.at
            continue
        end = paused.pop(number) + lease
        if event.at <= end:
            events.append(own)
            continue
        events += _given_up(who[number], end)
        who[number] = len(came)
        came.append(event.at)
        machines.append(number)
    for number, since in paused.items():
        events += _given_up(who[number], since + lease)
    return Returns(tuple(sorted(events, key=lambda event: event.at)), tuple(came), tuple(machines))


def _given_up(number: int, at: float) -> list[ChurnEvent]:
    """Its pause ends there, and so does it."""
    return [ChurnEvent(at, "resume", number), ChurnEvent(at, "kill", number)]
