"""How fast a swarm of real processes is, whose peers sleep instead of computing: as on the virtual clock
(`test_throughput`), 3 stages of 3 peers, one of them 4 times as slow, latency a fifth of a forward pass.

    pytest -m "" -s tests/pipeline/swarm/test_paced.py
"""

from __future__ import annotations

import queue
import threading
import time
from functools import partial
from typing import Any

import pytest
from torch import Tensor
from torch.autograd import Function

import isles
from isles.comm.mesh import Mesh
from isles.pipeline.swarm.balancer import PeerBalancer
from tests.pipeline.swarm import peers, test_throughput
from tests.pipeline.swarm.peers import Setting

FORWARD, SLOW, MICROBATCHES = 0.1, 4.0, 192
SETTING = Setting(microbatches=MICROBATCHES, steps=2, room=9, deadlines=(1e6, 1e6), patience=600.0)


class Sleep(Function):
    """Takes its time, twice as long backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        time.sleep(2 * ctx.seconds)
        return gradients[0], None


class Line(threading.Thread):
    """What is handed over leaves a latency later, in order."""

    def __init__(self, sent: Any) -> None:
        super().__init__(daemon=True)
        self.messages: queue.SimpleQueue[tuple[float, tuple[Any, ...]]] = queue.SimpleQueue()
        self.send, sent.send = sent.send, self.hand_over
        self.start()

    def hand_over(self, *message: Any) -> None:
        self.messages.put((time.monotonic() + FORWARD / 5, message))

    def run(self) -> None:
        while True:
            at, message = self.messages.get()
            time.sleep(max(at - time.monotonic(), 0.0))
            if not message:
                return
            self.send(*message)

    def end(self) -> None:
        """Once all that was handed over has left."""
        self.hand_over()
        self.join()


def fixed(column: int, self: Any, samples: int = 1, *, besides: int | None = None) -> int:
    """Ways that never change."""
    return sorted(self.peers)[column]


def timed(world: Mesh, slow: int, is_fixed: bool) -> list[float]:
    """Seconds that each step takes."""
    swarm = peers.swarm_of(world, SETTING)
    line = Line(swarm.agreement.inbox.queue)
    if is_fixed:
        PeerBalancer.choose = partial(fixed, world.rank % 3, swarm.peer._balancer)  # type: ignore[method-assign]
    seconds = FORWARD * (SLOW if world.rank == slow else 1.0)
    swarm.peer.work.stage.register_forward_hook(lambda stage, args, out: Sleep.apply(out, seconds))
    took = []
    for number in range(1, SETTING.steps + 1):
        swarm.peer.work.text = lambda microbatch, number=number: peers.text(microbatch, number)
        began = time.monotonic()
        swarm.step()
        took.append(time.monotonic() - began)
    line.end()
    return took


def share(slow: int, *, is_fixed: bool = False) -> float:
    """Of the sum of the rates of the slowest stage, what is reached in the second step."""
    took = isles.run_local(timed, 9, args=(slow, is_fixed))
    best = (2 + 1 / SLOW) / (3 * FORWARD)
    reached = MICROBATCHES / best / max(each[1] for each in took)
    print(f"\nworker {slow} slow, {'fixed ways' if is_fixed else 'a swarm'}: {reached:.3f}")
    return reached


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("slow", [0, 3, 6])
def test_paced_processes_come_within_ten_points_of_the_virtual_clock(slow: int) -> None:
    """Where nine tenths of the sum of their rates are reached. A busy machine keeps sleepers waiting."""
    virtual = test_throughput.share(slow)
    assert share(slow) >= virtual - 0.10 and virtual >= 0.90


@pytest.mark.long(cases=0)
def test_paced_processes_on_fixed_ways_wait_for_the_slow_one() -> None:
    """A third of the sum, there and here."""
    assert abs(share(3, is_fixed=True) - 1 / 3) <= 0.10
