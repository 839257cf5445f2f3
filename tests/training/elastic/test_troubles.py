"""One member whose line is slow, dead, behind a router or elsewhere, among others on fast ones: real training, each
worker on a machine of its own.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks._machines import Machine, machines, unavailable
from isles.comm.tcp import written
from isles.membership.run_log import WHOLE
from isles.training.config.world import ElasticConfig
from tests.training.elastic.processes import Processes
from tests.training.elastic.test_runs import events
from tests.training.elastic.warm import Worker

LASTS, AFTER, ROUND = 10.0, 10.0, 1.5  # seconds: the trouble, what is watched after it, the pause of a round
FAST = 1e9  # bits per second


@dataclass(frozen=True)
class Trouble:
    """begin, end: what is done to the machine in trouble (behind a NAT: to its router), or to the worker on it. gone:
    whether it may be lost meanwhile. ipv6, nat: what kind of line it has all the time.
    """

    begin: Callable[[Machine, Worker], object]
    end: Callable[[Machine, Worker], object] = lambda place, worker: place.carry()
    gone: bool = True
    ipv6: bool = False
    nat: bool = False


def _slow(up: float, down: float | None = None) -> Trouble:
    # Afterwards what waits in the queues leaves at once: to take the limit away would drop it.
    return Trouble(
        lambda place, worker: place.limit(1e6 * up, 1e6 * (down or up)),
        lambda place, worker: place.limit(FAST),
        gone=False,
    )


def _attach(place: Machine, worker: Worker) -> None:
    place.attach()


def _detach(place: Machine, worker: Worker) -> None:
    place.detach()


def _moved(place: Machine, worker: Worker) -> None:
    network, _, number = place.address.rpartition(".")
    place.move(f"{network}.{100 + int(number)}")


TROUBLES = {
    "0.5 Mbit/s": _slow(0.5),
    "1 Mbit/s": _slow(1.0),
    "5 Mbit/s": _slow(5.0),
    "100 Mbit/s in, 0.5 out": _slow(0.5, 100.0),
    "cut": Trouble(_detach, _attach),
    "cut, IPv6": Trouble(_detach, _attach, ipv6=True),
    "cut, NAT": Trouble(_detach, _attach, nat=True),
    "nothing comes in": Trouble(lambda place, worker: place.drop("in")),
    "nothing goes out": Trouble(lambda place, worker: place.drop("out")),
    "another address": Trouble(_moved, lambda place, worker: None),
    "stopped": Trouble(
        lambda place, worker: worker.send_signal(signal.SIGSTOP),
        lambda place, worker: worker.send_signal(signal.SIGCONT),
    ),
}
EVERY_WAY = ("0.5 Mbit/s", "cut", "cut, NAT", "nothing goes out", "another address")
"""Where it makes a difference whether others reach a worker directly; the rest is tried directly."""
CASES = [(name, direct) for name in TROUBLES for direct in (True, *([False] if name in EVERY_WAY else []))]


@pytest.mark.long(cases=2)
@pytest.mark.parametrize(("name", "direct"), CASES, ids=[f"{name}, {'direct' * d or 'relayed'}" for name, d in CASES])
def test_one_among_fast_ones(tmp_path: Path, name: str, direct: bool) -> None:
    """Nobody waits for it longer than a lease, nobody else is taken for lost, and it itself only where nothing came
    from it; once its line is free it is whole again, after a cut within three rounds.
    """
    trouble = TROUBLES[name]
    if reason := unavailable(*(["nft"] if trouble.nat else [])):
        pytest.skip(reason)
    if trouble.ipv6 and not Path("/proc/net/if_inet6").exists():
        pytest.skip("no IPv6 here")
    with ExitStack() as stack:
        light, router, *places = stack.enter_context(machines(6, ipv6=trouble.ipv6))
        if trouble.nat:
            places[3].put_behind(router)
        world = Processes(tmp_path, "model.d_model=64", founders=4, host=light.address, on=light.enter)
        stack.callback(world.end)
        workers = []
        for number, place in enumerate(places):
            listens = direct and not (trouble.nat and number == 3)
            listen = ["--listen", written(place.address, 29500)] if listens else []
            workers.append(world.warm_join(*listen, pause=ROUND, on=place))
        one, others, cable = workers[3], workers[:3], router if trouble.nat else places[3]
        world.until(lambda: min(len(worker.rounds()) for worker in workers) > 7, 60.0)
        began, earlier = time.monotonic(), len(events(world.out, "lost"))  # on a busy machine somebody may start late
        settled = max(worker.rounds()[-5]["at"] for worker in workers)
        usual = max(gap for worker in workers for gap in worker.gaps(settled, began))
        member = one.rounds()[-1]["member"]
        trouble.begin(cable, one)
        time.sleep(LASTS)
        trouble.end(cable, one)
        free = time.monotonic()
        time.sleep(AFTER)
        over = time.monotonic()
        lost = {entry["member"] for entry in events(world.out, "lost")[earlier:]}
        gaps = sorted(gap for worker in others for gap in worker.gaps(began - ROUND, over))

        def since() -> list[str]:
            return [line["outcome"] for line in one.rounds() if line["at"] > free]

        world.until(lambda: WHOLE in since(), 30.0)
        outcomes = since()
        back = outcomes.index(WHOLE)
        took = next(line["at"] for line in one.rounds() if line["at"] > free and line["outcome"] == WHOLE) - free
        meanwhile = [line["outcome"] for line in one.rounds() if began < line["at"] <= free]
        load = os.getloadavg()[0]
        print(
            f"{name}, {'direct' if direct else 'relayed'}: lost {lost}, usual {usual:.2f} s, longest {gaps[-4:]}, "
            f"back in round {back + 1}, {took:.1f} s; {meanwhile} then {outcomes}; load {load:.1f}"
        )
        assert lost <= ({member} if trouble.gone else set()), world.logs()
        assert gaps[-1] <= usual + ElasticConfig.lease + 0.5  # for a machine that has other work, too
        assert back < 3 or not trouble.gone  # a slow line leaves it rounds behind the others, which takes longer
