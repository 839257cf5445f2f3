"""Real worlds on the fake GPU: two processes over gloo, forked, for it is installed in them then. A process that has
run a backward pass cannot be forked any more: worlds come first.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _world

import isles
from isles.comm import mesh
from isles.comm.errors import PeerLost
from isles.comm.gloo import transport
from tests.device import fake_cuda, workers

Found = dict[str, Any]
_PATIENCE = 600.0  # seconds for processes that compute for a few


def found(work: Callable[[], Found], heard: int = 2) -> list[Found]:
    """What two workers find; of the first `heard` of them."""
    context, port, started = multiprocessing.get_context("fork"), _free_port(), []
    for rank in range(2):
        ours, theirs = context.Pipe()
        process = context.Process(target=_live, args=(theirs, work, rank, port), daemon=True)
        process.start()
        theirs.close()
        started.append((ours, process))
    told = [pipe.recv() if pipe.poll(_PATIENCE) else {"error": "no answer in time"} for pipe, _ in started[:heard]]
    for pipe, process in started:
        with contextlib.suppress(OSError):  # one was killed
            pipe.send("over")
        process.join(10)
        process.kill()
    if errors := [one["error"] for one in told if "error" in one]:
        raise RuntimeError("\n".join(errors))
    return told


def _live(pipe: Any, work: Callable[[], Found], rank: int, port: str) -> None:
    """A worker as torchrun starts it."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    torch.set_num_threads(1)  # makes the pool anew, which autograd's threads would do all at once
    try:
        pipe.send(work())
    except BaseException:
        pipe.send({"error": traceback.format_exc()})
    pipe.poll(_PATIENCE)  # the other one may need this one until it is over
    os._exit(0)  # threads of a stand-in may wait for ever


def _free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def load(name: str) -> None:
    """What both processes would load: a step without a backward pass."""

    def step(world: isles.Mesh) -> None:
        optimizer = workers.made(world, name, torch.device("cuda", 1))
        for parameter in optimizer.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()

    isles.run_virtual(step, 1)


def trained(name: str) -> Found:
    """Of a method's run."""
    told = workers.train(isles.init(), name, "cuda")
    mesh.leave()
    del told["weights"], told["file"]  # a tensor would be fetched from this process, which ends
    return told


def compared(name: str) -> Found:
    """Of a run with `StandIn`, of going on from its checkpoint, and of the same on the CPU."""
    StandIn.install()
    idle, world = fake_cuda.counts(0), isles.init()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        on_gpu = workers.train(world, name, "cuda")
        untouched = not any(fake_cuda.since(idle, 0).values())
        again = workers.train(world, name, "cuda", [on_gpu["file"]] * 2)
    on_cpu = workers.train(world, name, "cpu")
    mesh.leave()
    same = torch.equal(on_gpu.pop("weights"), again["weights"])
    del on_gpu["file"], on_cpu["weights"], on_cpu["file"]
    return {"cuda": on_gpu, "cpu": on_cpu, "untouched": untouched, "same_bits": same}


def killed() -> Found:
    """Of worker 0 with native sums, while worker 1 is killed after three steps."""
    StandIn.install()
    world, losses, began = isles.init(), list[float](), 0.0
    device = torch.device("cuda", world.rank + 1)
    optimizer = workers.made(world, "ddp", device, {"reduction": "native"})
    try:
        for step in range(1, 5):
            if step == 4 and world.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            loss = optimizer.model(workers.batch(world.rank, step, device)).loss
            loss.backward()
            losses, began = [*losses, float(loss)], time.monotonic()
            optimizer.step()
            optimizer.zero_grad()
    except PeerLost as lost:
        seconds = time.monotonic() - began
        (group,) = StandIn.made
        while not group.aborted and time.monotonic() < began + 60:
            time.sleep(0.01)  # another thread does it
        return {"losses": losses, "lost": lost.rank, "seconds": seconds, "aborted": group.aborted}
    raise RuntimeError("nobody was missed")


class StandIn(dist.ProcessGroup):
    """In NCCL's place: gloo's sums and gathers of the fake GPUs' own memory, one after the other, which neither copy
    anything nor make the host wait, behind messages that never end where a member is lost.
    """

    made: ClassVar[list[StandIn]] = []

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._gloo, self._stream = dist.ProcessGroupGloo(store, rank, size, timeout), ThreadPoolExecutor(1)
        self.aborted = 0
        self.made.append(self)

    @classmethod
    def install(cls) -> None:
        """Isles' groups of GPUs are such ones from now on."""
        usual = transport._new_group
        dist.Backend.register_backend("standin", cls, devices=["cuda"])

        def new_group(join: float, **how: Any) -> Any:
            return usual(join, **{**how, "backend": {"nccl": "standin"}.get(how["backend"], how["backend"])})

        transport._new_group = new_group

    @property
    def group_name(self) -> str:
        return _world.pg_names[self]

    def allreduce(self, tensors: list[Tensor], options: Any) -> Any:
        return self._queue(lambda: self._gloo.allreduce([fake_cuda.memory(one) for one in tensors], options).wait())

    def all_gather_single(self, output: Tensor, own: Tensor, options: Any) -> Any:
        def gather() -> None:
            parts = fake_cuda.memory(output).chunk(self.size())
            self._gloo.allgather([list(parts)], [fake_cuda.memory(own)]).wait()

        return self._queue(gather)

    def reduce_scatter_single(self, output: Tensor, everything: Tensor, options: Any) -> Any:
        def scatter() -> None:
            total = fake_cuda.memory(everything).clone()
            self._gloo.allreduce([total]).wait()
            own = total.chunk(self.size())[self.rank()]
            fake_cuda.memory(output).copy_(own / self.size() if options.reduceOp == dist.ReduceOp.AVG else own)

        return self._queue(scatter)

    def _queue(self, collective: Callable[[], object]) -> Any:
        over = threading.Event()

        def run() -> None:
            with contextlib.suppress(RuntimeError):  # a member is lost
                collective()
                over.set()

        self._stream.submit(run)
        return SimpleNamespace(is_completed=over.is_set, wait=over.wait)

    def abort(self) -> None:
        self.aborted += 1
