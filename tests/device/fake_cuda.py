"""CUDA devices that are not there, for a CPU build of torch: `install` them before anything imports torch.

Tensors are really on cuda:0, cuda:1, ...; what mixes them with the host's fails as on CUDA; new memory is filled with
NaN; each device has a generator of its own, and counts kernels, waits of the host and copies. Their numbers are those
of the CPU's kernels. Not modelled: streams (all is over at once), NCCL, CUDA graphs, Triton, speed, memory's limits.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from tests.device import build

COUNTS = (
    "kernels",
    "waits",
    "to_host",
    "to_host_bytes",
    "to_device",
    "to_device_bytes",
    "between",
    "allocated",
    "peak",
)
"""By device, in the order of fake_cuda.h."""

CARDS = (("NVIDIA H100 80GB HBM3", 80 * 2**30, (9, 0)), ("NVIDIA A100-SXM4-40GB", 40 * 2**30, (8, 0)))
"""Of cuda:0, and of all others: what says of a device what is another one's is then seen."""

_library: Any = None


def install(devices: int) -> None:
    """Make torch see that many. ImportError where torch was imported before."""
    import sys

    global _library
    if "torch" in sys.modules:
        raise ImportError("torch was imported before the fake GPU was installed")
    _library = ctypes.CDLL(str(build.library()), mode=ctypes.RTLD_GLOBAL)
    _library.fake_count.restype = _library.fake_pinned_bytes.restype = ctypes.c_int64
    _library.fake_resize.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    _library.fake_default_generator.argtypes = [ctypes.c_int, ctypes.c_void_p]
    _library.fake_devices(devices)
    _patch(devices)


def counts(device: int = 0) -> dict[str, int]:
    """Of one device since the process began; `allocated` now, `peak` since it was reset."""
    return {name: _library.fake_count(device, place) for place, name in enumerate(COUNTS)}


def since(before: dict[str, int], device: int = 0) -> dict[str, int]:
    """What was counted after `before`."""
    return {name: now - before[name] for name, now in counts(device).items()}


def memory(tensor: Any) -> Any:
    """A contiguous tensor of a device as a flat one of the host over the same bytes, as NCCL reads and writes them."""
    import torch

    assert tensor.is_contiguous()
    block = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(block, dtype=tensor.dtype)


def pinned_bytes() -> int:
    """Host memory that is pinned now, each block rounded up to a power of two as torch's allocator does."""
    return _library.fake_pinned_bytes()


def _index(device: Any) -> int:
    import torch

    if isinstance(device, int):
        return device
    found = None if device is None else torch.device(device).index
    return _library.fake_current() if found is None else found


class _Stream:
    """As torch.cuda.Stream. Whatever was called on it is over."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        import torch

        self.device, self.priority = torch.device("cuda", _index(device)), priority
        self.device_index, self.device_type, self.stream_id, self.cuda_stream = self.device.index, 1, 0, 0

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        event = event or _Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        _library.fake_wait(self.device.index)


class _Event:
    """As torch.cuda.Event, of kernels that are over. Between two of them each kernel took a millisecond."""

    def __init__(self, **_: Any) -> None:
        self._device: int | None = None
        self._kernels = 0

    def record(self, stream: Any = None) -> None:
        self._device = _library.fake_current() if stream is None else stream.device.index
        self._kernels = counts(self._device)["kernels"]

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        if self._device is not None:
            _library.fake_wait(self._device)

    def elapsed_time(self, other: Any) -> float:
        return float(other._kernels - self._kernels)


class _Device:
    """As torch.cuda.device."""

    def __init__(self, device: Any) -> None:
        self.index = _index(device)

    def __enter__(self) -> None:
        self._before = _library.fake_current()
        _library.fake_set_current(self.index)

    def __exit__(self, *_: object) -> None:
        _library.fake_set_current(self._before)


_current = threading.local()


def _current_stream(device: Any = None) -> _Stream:
    streams = _current.__dict__.setdefault("streams", {})
    return streams.setdefault(_index(device), _Stream(_index(device)))


@contextmanager
def _stream(stream: Any) -> Iterator[Any]:
    before = _current_stream(stream.device)
    _current.streams[stream.device.index] = stream
    try:
        yield stream
    finally:
        _current.streams[stream.device.index] = before


def _card(device: Any) -> SimpleNamespace:
    name, memory, capability = CARDS[min(_index(device), 1)]
    return SimpleNamespace(
        name=name,
        total_memory=memory,
        major=capability[0],
        minor=capability[1],
        multi_processor_count=132,
        max_threads_per_multi_processor=2048,
        warp_size=32,
        regs_per_multiprocessor=65536,
    )


def _patch(devices: int) -> None:
    """The part of torch.cuda that a CPU build has as stubs which raise."""
    import torch
    from torch.cuda.amp import common

    def allocated(device: Any = None) -> int:
        return counts(_index(device))["allocated"]

    def peak(device: Any = None) -> int:
        return counts(_index(device))["peak"]

    def free(device: Any = None) -> tuple[int, int]:
        memory = _card(device).total_memory
        return memory * 9 // 10, memory

    generators = tuple(torch.Generator(f"cuda:{index}") for index in range(devices))
    for index, generator in enumerate(generators):
        _library.fake_default_generator(index, generator._cdata)
    new = {
        "_initialized": True,
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "is_available": lambda: True,
        "device_count": lambda: devices,
        "default_generators": generators,
        "current_device": lambda: _library.fake_current(),
        "set_device": lambda device: _library.fake_set_current(_index(device)),
        "device": _Device,
        "synchronize": lambda device=None: _library.fake_wait(_index(device)),
        "Stream": _Stream,
        "Event": _Event,
        "stream": _stream,
        "current_stream": _current_stream,
        "default_stream": _Stream,
        "get_device_properties": _card,
        "get_device_name": lambda device=None: _card(device).name,
        "get_device_capability": lambda device=None: (_card(device).major, _card(device).minor),
        "mem_get_info": free,
        "memory_allocated": allocated,
        "memory_reserved": allocated,
        "max_memory_allocated": peak,
        "max_memory_reserved": peak,
        "reset_peak_memory_stats": lambda device=None: _library.fake_reset_peak(_index(device)),
        "empty_cache": lambda: None,
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_current_stream_capturing": lambda: False,
    }
    for name, what in new.items():
        setattr(torch.cuda, name, what)
        if hasattr(torch.cuda.random, name):  # it has them by name
            setattr(torch.cuda.random, name, what)
    common.amp_definitely_not_available = lambda: False  # type: ignore[assignment]
    resize, cloned = torch.UntypedStorage.resize_, torch.UntypedStorage.clone

    def resize_(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return resize(self, size)
        _library.fake_resize(self._cdata, size)
        return self

    def clone(self: Any) -> Any:
        if self.device.type != "cuda":
            return cloned(self)
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(self).clone().untyped_storage()

    def loaded(storage: Any, location: str) -> Any:
        if not location.startswith("cuda"):
            return None
        return torch.empty(0, dtype=torch.uint8).set_(storage).to(location).untyped_storage()

    torch.UntypedStorage.resize_, torch.UntypedStorage.clone = resize_, clone  # type: ignore[method-assign]
    # Before torch's own way (priority 20), which makes a storage by a constructor that knows built-in devices only.
    torch.serialization.register_package(15, lambda storage: None, loaded)
