"""Methods on the fake GPU under the vector clocks of `tests.memory.streams`: who waits for whom."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import isles
from isles.base.modes import HostCopies
from isles.comm.collectives.mean import native_mean
from isles.models import Shape
from tests.device import workers
from tests.memory.streams import HOST, KERNELS, Event, Stream, Watch, Watched, _Piece

METHODS = ("diloco", "streaming-diloco", "dilocox", "ddp", "demo", "ist")
"""One of each way to the host and back."""
_SHAPE = Shape(d_model=16, layers=1, heads=2, ffn=24, vocab=32, context=4, tie_embeddings=False)


class DeviceWatch(Watch):
    """Tensors say themselves where they are. All workers' kernels are on one stream: they share no memory."""

    mixing = ("copy_", "_to_copy", "_foreach_copy_")

    def new(self, tensor: Tensor, actor: str, written: tuple[str, int]) -> _Piece:
        home = (KERNELS if actor == HOST else actor) if tensor.is_cuda else HOST
        pinned = not tensor.is_cuda and tensor.is_pinned()
        return _Piece(device=tensor.is_cuda, home=home, written=written, pinned=pinned)

    def makes_on_device(self, fresh: Tensor) -> bool:
        return fresh.is_cuda


@contextmanager
def _watching() -> Iterator[DeviceWatch]:
    watch, numbers = DeviceWatch(), itertools.count()
    patched: dict[str, Any] = {
        "current_stream": lambda device=None: Stream(watch, watch.current),
        "stream": watch.within,
        "Stream": lambda device=None: Stream(watch, f"side {next(numbers)}"),
        "Event": lambda **_: Event(watch),
    }
    with mock.patch.multiple(torch.cuda, **patched), mock.patch("isles.base.modes._STREAMS", {}):
        yield watch


def races(name: str) -> dict[str, Any]:
    """Of a method's whole run; the copies that were called on other streams than the kernels."""

    def train(world: isles.Mesh) -> None:
        with Watched(watch):
            workers.train(world, name, "cuda")

    with _watching() as watch, mock.patch.multiple(workers, SHAPE=_SHAPE, STEPS=4):
        isles.run_virtual(train, 2)
    return {"races": watch.races[:3], "copies": watch.copies, "kernels": watch.kernels}


def native() -> dict[str, Any]:
    """The races of a sum by torch's own collective that is asked for on a stream of the caller's, while the transfers'
    thread is on another one.
    """
    transport = SimpleNamespace(native_sum=lambda buffer, ranks: None)
    traffic = SimpleNamespace(sent=_nothing, received=_nothing)
    group = SimpleNamespace(traffic=traffic, size=2, ranks=(0, 1), transport=transport)
    call: Any = SimpleNamespace(channel="inner", group=group)
    with (
        _watching() as watch,
        Watched(watch),
        mock.patch("isles.comm.collectives.mean.native_collectives", lambda own: own),
    ):
        own = torch.cuda.Stream()
        with torch.cuda.stream(own):
            buffer = torch.ones(4, device="cuda:1")
            steps = native_mean(call, buffer)
            next(steps)
        assert next(steps, "over") == "over"
        with torch.cuda.stream(own):
            buffer.add_(1)
    return {"races": watch.races, "sum": buffer.tolist()}


def _nothing(*_: Any) -> None:
    """A wait that is forgotten."""


MUTANTS: Mapping[str, tuple[str, Callable[[], Any]]] = {
    "the next kernels do not wait": ("diloco", lambda: mock.patch.object(Stream, "wait_event", _nothing)),
    "copies do not wait for kernels": ("diloco", lambda: mock.patch.object(Stream, "wait_stream", _nothing)),
    "the host does not wait": ("streaming-diloco", lambda: mock.patch.object(Event, "synchronize", _nothing)),
    "the host writes too soon": ("diloco", lambda: mock.patch.object(HostCopies, "settle", _nothing)),
}
"""(method, what is left out)."""


def mutant(name: str) -> dict[str, Any]:
    """The races of a method without one of its waits."""
    method, left_out = MUTANTS[name]
    with left_out():
        return races(method)
