"""Random lives of workers, as traces for the virtual clock."""

from __future__ import annotations

import random

from isles.network.churn import ChurnEvent

KINDS = {"join": 8, "kill": 5, "leave": 2, "pause": 2, "lighthouse": 1}
LONGEST = 25.0  # seconds of a pause, and of an outage


def random_trace(*, founders: int, most: int, events: int, spacing: float, seed: int) -> list[ChurnEvent]:
    """`events` changes, on average `spacing` seconds apart, and the ends of pauses; never more than `most` workers at
    once, nor fewer than four awake.
    """
    draw, at, coming = random.Random(seed), 4 * spacing, founders
    here, paused, trace = list(range(founders)), dict[int, float](), list[ChurnEvent]()
    while len(trace) < events:
        at += draw.uniform(0.2, 1.8) * spacing
        paused = {member: until for member, until in paused.items() if until > at}
        awake = [member for member in here if member not in paused]
        kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
        if kind == "join" and len(here) < most:
            trace.append(ChurnEvent(at, "join", 1))
            here.append(coming)
            coming += 1
        elif kind == "lighthouse":
            trace.append(ChurnEvent(at, "lighthouse", draw.uniform(0.5, LONGEST)))
        elif len(awake) > 4:
            member = draw.choice(awake)
            if kind == "pause":
                paused[member] = at + draw.uniform(0.5, LONGEST)
                trace += [ChurnEvent(at, "pause", member), ChurnEvent(paused[member], "resume", member)]
            else:
                trace.append(ChurnEvent(at, "leave" if kind == "leave" else "kill", member))
                here.remove(member)
    return sorted(trace, key=lambda event: event.at)
