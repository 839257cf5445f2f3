"""Measure this machine's rates as a `Machine`, so that plans can predict its runs.

    products    large matrix products, in bfloat16 on a GPU and float32 on a CPU; the share that a decoder reaches
    host        fused AdamW, with as many threads as a run's updates have; a copy in the memory of the device
    disk        whole slots past the page cache, as the disk tier moves them, with reads and writes at once
    link        pinned memory, each direction alone and both at once

    units       forward and backward passes of a model's blocks, for a profile

Every rate is the best of a few laps: other load can only make a lap slower, never faster.
"""

from __future__ import annotations

import mmap
import os
import platform
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isles.base.modes import torch_threads
from isles.memory.costs import Profile, UnitProfile
from isles.memory.disk import DiskFile, check_folder, pages
from isles.memory.engines.base import DEADLINE
from isles.memory.profile import Loss, own_loss
from isles.memory.units import edge, forwards, units_of
from isles.models.decoder import Decoder
from isles.models.sizes import Shape, flops_per_token
from isles.network.machines import Machine

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # control groups, v2 and v1


@dataclass(frozen=True, kw_only=True)
class MeasuringEffort:
    """The amount of work per measurement.

    product: rows and columns of the matrices. shape: of the decoder. tokens: of each of its two sequences. params:
    parameters that AdamW updates. copied, filed: bytes of a copy, and bytes written to disk. laps: the best one counts.
    """

    product: int
    shape: Shape
    tokens: int
    params: int = 1 << 24
    copied: int = 1 << 28
    filed: int = 1 << 28
    laps: int = 3


def _decoder(width: int, layers: int, tokens: int) -> Shape:
    return Shape(
        d_model=width, layers=layers, heads=width // 64, ffn=3 * width, vocab=1024, context=tokens, tie_embeddings=True
    )


def usual_effort(cuda: bool) -> MeasuringEffort:
    """The usual effort, which takes some seconds."""
    if cuda:
        return MeasuringEffort(product=8192, shape=_decoder(2048, 4, 1024), tokens=1024, params=1 << 26)
    return MeasuringEffort(product=1024, shape=_decoder(512, 2, 256), tokens=256)


@dataclass(frozen=True, kw_only=True)
class MeasuredMachine:
    """The measured machine. notes: what it lacks, and how reliable the numbers are; one line each."""

    machine: Machine
    notes: tuple[str, ...]


def measure_machine(folder: str, effort: MeasuringEffort | None = None) -> MeasuredMachine:
    """Measure this machine, with the disk of `folder`. ValueError, one line, if the folder is not writable.

    The device is the first GPU's memory. Without a GPU, the device is the RAM, and the disk is the far tier.
    """
    cuda = torch.cuda.is_available()
    device = torch.device("cuda:0" if cuda else "cpu")
    effort_used = usual_effort(cuda) if effort is None else effort
    notes = check_folder(folder, effort_used.filed)
    peak = _products(effort_used, device)
    mfu = min(_decoder_rate(effort_used, device) / peak, 1.0)
    threads = torch.get_num_threads()
    with torch_threads(threads if cuda else 1):  # as many as the lane of the updates has
        host_update = _adamw_rate(effort_used)
    ram, limited = _ram()
    links = _links(effort_used, device) if cuda else dict.fromkeys(("up", "down", "up_both", "down_both"), 0.0)
    disk, direct = _disk(folder, effort_used)
    if not cuda:
        notes.append("no GPU: the RAM is the device, with no host and no link beside it; the disk is the far tier")
        notes.append(f"products by {threads} threads, updates by one, as the lane of a run has")
    if limited:
        notes.append("the control group of this process allows less memory than the machine has: that was taken")
    if not direct:
        notes.append(f"{folder} has no way past the page cache: its rates are those of writing it out")
    machine = Machine(
        name=torch.cuda.get_device_name(device) if cuda else platform.node() or "this machine",
        device_bytes=float(torch.cuda.get_device_properties(device).total_memory) if cuda else ram,
        peak=peak,
        mfu=mfu,
        device_rate=_copy_rate(effort_used, device),
        host_bytes=ram if cuda else 0.0,
        host_update=host_update,
        **links,
        **disk,
    )
    return MeasuredMachine(machine=_readable(machine), notes=tuple(notes))


def _readable(machine: Machine) -> Machine:
    """Round every rate to four digits; further digits are noise."""
    rates = ("peak", "mfu", "device_rate", "up", "down", "up_both", "down_both")
    rates += ("host_update", "disk_read", "disk_write")
    short: dict[str, Any] = {name: float(f"{getattr(machine, name):.4g}") for name in rates}
    return replace(machine, **short)


def _ram() -> tuple[float, bool]:
    """Bytes that this process may use, and whether its control group allows less than the machine has."""
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    allowed = installed
    for path in _LIMITS:
        try:
            allowed = min(allowed, int(Path(path).read_text(encoding="ascii")))
        except (OSError, ValueError):  # no such group, or its limit is "max"
            continue
    return float(allowed), allowed < installed


def _best(run: Callable[[], Any], laps: int, device: torch.device) -> float:
    """Seconds of the fastest of `laps`, after a warm-up lap."""
    least = float("inf")
    for lap in range(laps + 1):
        start = _now(device)
        run()
        seconds = _now(device) - start
        least = min(least, seconds) if lap else least
    return least


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _products(work: MeasuringEffort, device: torch.device) -> float:
    """FLOP/s of large matrix products."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a = torch.randn(work.product, work.product, device=device, dtype=dtype)
    b, out = torch.randn_like(a), torch.empty_like(a)
    return 2 * work.product**3 / _best(lambda: torch.mm(a, b, out=out), work.laps, device)


def _decoder_rate(work: MeasuringEffort, device: torch.device) -> float:
    """FLOP/s of a decoder's forward and backward passes, in the format of the products."""
    model = Decoder(work.shape).to(device)
    batch = torch.zeros(2, work.tokens + 1, dtype=torch.int64, device=device)

    def step() -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(batch).loss
        loss.backward()
        model.zero_grad()

    flops = 2 * work.tokens * flops_per_token(work.shape, sequence=work.tokens)
    return flops / _best(step, work.laps, device)


def _copy_rate(work: MeasuringEffort, device: torch.device) -> float:
    """Bytes per second of the device's memory; reads and writes both count."""
    source = torch.zeros(work.copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * work.copied / _best(lambda: target.copy_(source), work.laps, device)


def _adamw_rate(work: MeasuringEffort) -> float:
    """Parameters per second of the host's fused AdamW."""
    parts = [torch.nn.Parameter(torch.zeros(work.params // 4, dtype=torch.float32, device="cpu")) for _ in range(4)]
    for part in parts:
        part.grad = torch.full_like(part, 1e-3)
    return work.params / _best(torch.optim.AdamW(parts, fused=True).step, work.laps, torch.device("cpu"))


# The link


def _links(work: MeasuringEffort, device: torch.device) -> dict[str, float]:
    near = [torch.zeros(work.copied, dtype=torch.uint8, device=device) for _ in range(2)]
    far = [torch.zeros(work.copied, dtype=torch.uint8, pin_memory=True, device="cpu") for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]

    def rates(*directions: int) -> dict[int, float]:
        """Bytes per second of each direction, 0 up and 1 down, while all of `directions` are busy."""
        best = dict.fromkeys(directions, 0.0)
        for _ in range(work.laps + 1):
            torch.cuda.synchronize(device)
            began, ended = (
                {direction: torch.cuda.Event(enable_timing=True) for direction in directions} for _ in range(2)
            )
            for direction in directions:
                with torch.cuda.stream(streams[direction]):
                    began[direction].record()
                    source, target = (far[0], near[0]) if direction == 0 else (near[1], far[1])
                    for _ in range(4):  # long enough for both to begin and end nearly together
                        target.copy_(source, non_blocking=True)
                    ended[direction].record()
            torch.cuda.synchronize(device)
            for direction in directions:
                best[direction] = max(
                    best[direction], 4e3 * work.copied / began[direction].elapsed_time(ended[direction])
                )
        return best

    up, down, both = rates(0)[0], rates(1)[1], rates(0, 1)
    return {"up": up, "down": down, "up_both": min(both[0], up), "down_both": min(both[1], down)}


# The disk


def _disk(folder: str, work: MeasuringEffort) -> tuple[dict[str, float], bool]:
    """Rates of both directions while both are busy, as in a plan's updates; whether they bypass the page cache."""
    file = DiskFile(folder)
    half = 8 * pages(work.filed // 16)
    try:
        begins = [file.extend(half) for _ in range(2)]
        slots = [torch.frombuffer(mmap.mmap(-1, half // 8), dtype=torch.uint8) for _ in range(2)]
        slots[0].fill_(1)
        _rate(file.write, begins[1], half, slots[0], file.sync)  # data for the reads below
        rates = {"disk_read": 0.0, "disk_write": 0.0}
        for _ in range(work.laps):
            file.forget()
            reading = threading.Thread(
                target=lambda: rates.update(
                    disk_read=max(rates["disk_read"], _rate(file.read, begins[1], half, slots[1]))
                )
            )
            reading.start()
            rates["disk_write"] = max(rates["disk_write"], _rate(file.write, begins[0], half, slots[0], file.sync))
            reading.join(DEADLINE)
        return rates | {"disk_bytes": float(shutil.disk_usage(folder).free)}, file.direct
    finally:
        file.close()


def _rate(
    move: Callable[[int, Tensor], Any], begin: int, nbytes: int, slot: Tensor, end: Callable[[], Any] = lambda: None
) -> float:
    """Bytes per second, slot by slot, including the call of `end`."""
    start = time.perf_counter()
    for at in range(0, nbytes, len(slot)):
        move(begin + at, slot[: nbytes - at])
    end()
    return nbytes / (time.perf_counter() - start)


# Units


def measured(made: Profile, model: nn.Module, batch: Any, *, loss: Loss = own_loss, laps: int = 3) -> Profile:
    """Add measured seconds of the units to the profile `made`: the least of `laps` steps of a real model on its device.
    Units that are alike get the mean of their seconds. The bytes stay unchanged.
    """
    units = units_of(model)
    device = next(model.parameters()).device
    forward, backward = [float("inf")] * len(units), [float("inf")] * len(units)

    def around(index: int, run: Callable[..., Any]) -> Callable[..., Any]:
        began = [0.0]

        def begins() -> None:
            began[0] = _now(device)

        def ends() -> None:
            backward[index] = min(backward[index], _now(device) - began[0])

        def timed(*args: Any, **named: Any) -> Any:
            args, named = edge(ends, (args, named), always=True)
            start = _now(device)
            value = run(*args, **named)
            forward[index] = min(forward[index], _now(device) - start)
            return edge(begins, value)

        return timed

    cast: AbstractContextManager[Any] = (
        torch.autocast(device.type, dtype=torch.bfloat16) if made.autocast == "bf16" else nullcontext()
    )
    with forwards(units, around):
        for _ in range(laps):
            with cast:
                value = loss(model, batch)
            value.backward()
            model.zero_grad()
    alike: dict[UnitProfile, list[int]] = {}
    for index, unit in enumerate(made.units):
        alike.setdefault(replace(unit, name=""), []).append(index)
    timed_units = list(made.units)
    for members in alike.values():
        seconds = [sum(times[index] for index in members) / len(members) for times in (forward, backward)]
        for index in members:
            timed_units[index] = replace(made.units[index], forward=seconds[0], backward=seconds[1])
    return replace(made, units=tuple(timed_units))
