"""Moves between the stages of a swarm under preemptions: throughput as a share of the best, by who moves when.

    python -m benchmarks.swarm [--seeds 10] [--hours 32] [--gift 0 --gift 60] [--write] [--json]

A made-up fleet: 32 peers of unequal speed (log-normal, sigma 0.5) serve 4 stages of equal work. Each is preempted once
in 4 hours on average, and another one comes after half an hour on average. Throughput is that of the slowest stage; the
best is the sum of all rates divided by the stages, which no arrangement exceeds. Who comes or moves needs `--gift`
seconds for the weights of its stage, in which it serves nobody. Queues are those of an open network (rate / (1 - rate)
of each stage's utilisation) with 4 microbatches a peer under way. --write puts the table into docs/swarm.md.

Beside it stand the figures of SWARM (arXiv 2301.11913), over a real log of preemptions that we do not have.
"""

from __future__ import annotations

import argparse
import heapq
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from statistics import mean

from benchmarks._measure import Row, report
from benchmarks._pages import written
from isles.network.churn import Poisson
from isles.network.noise import lognormal, uniform
from isles.pipeline.swarm.placement import PeerLoad, Rebalancer, stage_for_joiner

STAGES, PEERS, UNDER_WAY = 4, 32, 4
LIFE, REPAIR, SPREAD = 4 * 3600.0, 1800.0, 0.5
_SPEED, _STAGE = 0x737065, 0x737461
POLICIES: dict[str, Callable[[], Rebalancer | None]] = {
    "none": lambda: None,
    "every 300 s": lambda: Rebalancer("queue", [1.0] * STAGES, period=300, hysteresis=0.0),
    "every 60 s": lambda: Rebalancer("queue", [1.0] * STAGES, period=60, hysteresis=0.0),
    "hysteresis": lambda: Rebalancer("throughput", [1.0] * STAGES, period=60, hysteresis=0.05),
}


@dataclass
class Fleet:
    """Who serves which stage, and what comes of it. gift: seconds from a move to the first microbatch."""

    seed: int
    gift: float
    directed: bool
    """Whether who comes goes where it is wanted, or anywhere."""
    stages: dict[int, int] = field(default_factory=dict)
    ready: dict[int, float] = field(default_factory=dict)
    moves: int = 0

    def speed(self, peer: int) -> float:
        return lognormal(SPREAD, self.seed, peer, _SPEED)

    def rates(self, now: float) -> list[float]:
        """Of the stages, by who serves them at second `now`."""
        rates = [0.0] * STAGES
        for peer, stage in self.stages.items():
            if self.ready[peer] <= now:
                rates[stage] += self.speed(peer)
        return rates

    def best(self) -> float:
        return sum(self.speed(peer) for peer in self.stages) / STAGES

    def table(self) -> dict[int, PeerLoad]:
        """What the peers tell of themselves, those that are on their way as if they were there."""
        queues = queues_of(self.rates(inf), UNDER_WAY * len(self.stages))
        count = Counter(self.stages.values())
        return {
            peer: PeerLoad(stage, queues[stage] / count[stage], self.speed(peer)) for peer, stage in self.stages.items()
        }

    def come(self, peer: int, now: float) -> None:
        known = self.table()
        drawn = int(STAGES * uniform(self.seed, peer, _STAGE))
        self._go(peer, stage_for_joiner(known, STAGES) if self.directed else drawn, now)

    def move(self, peer: int, to: int, now: float) -> None:
        self.moves += 1
        self._go(peer, to, now)

    def _go(self, peer: int, stage: int, now: float) -> None:
        self.stages[peer], self.ready[peer] = stage, now + self.gift


def queues_of(rates: Sequence[float], under_way: int) -> list[float]:
    """Microbatches at each stage, so many in all: u / (1 - u) of a stage's utilisation u at the rate for which they
    add up.
    """
    able = [rate for rate in rates if rate > 0]
    low, high = 0.0, min(able)
    for _ in range(60):
        middle = (low + high) / 2
        total = sum(middle / (rate - middle) for rate in able)
        low, high = (middle, high) if total < under_way else (low, middle)
    return [low / (rate - low) if rate > low else 0.0 for rate in rates]


def share(policy: str, seed: int, hours: float, gift: float) -> tuple[float, int]:
    """(throughput as a share of the best, moves) over one log."""
    run, fleet = POLICIES[policy](), Fleet(seed, gift, directed=policy != "none")
    for peer in range(PEERS):
        fleet.stages[peer], fleet.ready[peer] = peer % STAGES, 0.0
    end = hours * 3600.0
    log = Poisson(per_second=1 / LIFE, repair=REPAIR).events(PEERS, end, seed)
    ticks = [run.period * number for number in range(1, int(end / run.period) + 1)] if run else []
    agenda = [(event.at, 0, event.kind, int(event.number)) for event in log] + [(at, 1, "look", 0) for at in ticks]
    heapq.heapify(agenda)
    done = best = now = 0.0
    coming = PEERS
    while agenda:
        at, _, kind, number = heapq.heappop(agenda)
        done += min(fleet.rates(now)) * (at - now)
        best += fleet.best() * (at - now)
        now = at
        if kind == "kill":
            del fleet.stages[number], fleet.ready[number]
        elif kind == "join":
            fleet.come(coming, now)
            coming += 1
            heapq.heappush(agenda, (now + gift, 2, "ready", 0))
        elif run and kind == "look" and (move := run.move(now, fleet.table())) is not None:
            fleet.move(*move, now)
            heapq.heappush(agenda, (now + gift, 2, "ready", 0))
    return done / best, fleet.moves


def table(gifts: Sequence[float], seeds: int, hours: float) -> tuple[str, list[Row]]:
    """The shares in percent for every policy and gift, as Markdown, and with the order that they must have."""
    lines = [
        "| moves | " + " | ".join(f"gift {gift:g} s: % of the best (least, most) | moves" for gift in gifts) + " |",
        "| --- |" + " ---: | ---: |" * len(gifts),
    ]
    means: dict[tuple[str, float], float] = {}
    for policy in POLICIES:
        cells = []
        for gift in gifts:
            runs = [share(policy, seed, hours, gift) for seed in range(seeds)]
            shares = [100 * each for each, _ in runs]
            means[policy, gift] = mean(shares)
            cells.append(f"{mean(shares):.1f} ({min(shares):.1f}, {max(shares):.1f})")
            cells.append(f"{mean(moves for _, moves in runs):.0f}")
        lines.append(f"| {policy} | {' | '.join(cells)} |")
    rows = []
    for gift in gifts:
        none, slow, fast, best = (means[policy, gift] for policy in POLICIES)
        rows.append(Row(f"gift {gift:g} s: queues every 300 s - none", slow - none, "points", (">=", 10.0)))
        note = "moving more often must pay for its gifts"
        bound = (">=", 0.0) if gift == 0 else None
        rows.append(Row(f"gift {gift:g} s: every 60 s - every 300 s", fast - slow, "points", bound, note))
        rows.append(Row(f"gift {gift:g} s: hysteresis - best of queues", best - max(slow, fast), "points", (">=", 0.0)))
    return "\n".join(lines), rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--hours", type=float, default=32.0)
    parser.add_argument("--gift", type=float, action="append", help="may be given several times; 0 and 60")
    parser.add_argument("--write", action="store_true", help="put the table into docs/swarm.md")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each row")
    options = parser.parse_args(argv)
    text, rows = table(options.gift or [0.0, 60.0], options.seeds, options.hours)
    if options.write:
        written("swarm.md", "python -m benchmarks.swarm", text)
    if not options.json:
        print(text)
    return report(rows, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
