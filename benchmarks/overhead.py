"""What wrapping an optimizer costs on the worker itself, with nobody on the other end: time and memory.

    steps    a 10 M-parameter model and AdamW, bare against wrapped, blocks of 20 steps with one outer round each
    round    one outer round of 100 M parameters, against one SGD step and against the same round by torch.optim; alone,
             and what it takes beside the exchange where others take part
    memory   resident bytes a parameter that a method adds at its peak, against its `memory()`, alone and in a pair

    python -m benchmarks.overhead [steps|round|memory ...] [--json]

Everything runs on one thread. Exit code 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import isles
from benchmarks._measure import Row, interleaved, report
from benchmarks._models import Weights, byte_model
from isles.comm.mesh import Mesh
from isles.replicas.loop.fragment import Exchange, FiniteCheck, InFlight, Sweep

BLOCK_STEPS = 20
TOKENS = 512  # a step

# Steps.


class Loop:
    """A training loop over random bytes, one block of steps a call."""

    def __init__(self, wrap: Callable[[nn.Module, torch.optim.Optimizer], torch.optim.Optimizer]) -> None:
        self.model = byte_model()
        self.optimizer = wrap(self.model, torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True))
        self.data = torch.randint(256, (2, TOKENS), generator=torch.Generator().manual_seed(0))

    def __call__(self) -> None:
        for _ in range(BLOCK_STEPS):
            loss = nn.functional.cross_entropy(self.model(self.data[0]), self.data[1])
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


def steps(pairs: int = 15) -> list[Row]:
    """CPU seconds of bare blocks per wrapped ones."""
    group = isles.init().outer
    loops = {
        "bare": Loop(lambda model, inner: inner),
        "DiLoCo": Loop(lambda model, inner: isles.DiLoCo(model, inner, group, sync_every=BLOCK_STEPS)),
        "NoLoCo": Loop(lambda model, inner: isles.NoLoCo(model, inner, group, sync_every=BLOCK_STEPS)),
        "DDP": Loop(lambda model, inner: isles.DDP(model, inner, group)),
    }
    times = interleaved(loops, pairs)
    seconds = sorted(times["bare"].cpu)[pairs // 2] / BLOCK_STEPS
    return [
        Row(
            f"steps   bare / {name}",
            times["bare"].per(times[name]),
            "CPU ratio",
            None if name == "DDP" else (">=", 0.98),
            f"{seconds:.3f} s a bare step of {TOKENS} tokens",
        )
        for name in list(loops)[1:]
    ]


# Rounds.


class ByHand:
    """DiLoCo's outer round for a world of one as it is written with torch.optim: two copies of the weights, `.grad`."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.anchor = [parameter.detach().clone() for parameter in parameters]
        self.optimizer = sgd(parameters)

    @torch.no_grad()
    def __call__(self) -> None:
        gradients = torch._foreach_sub(self.anchor, self.parameters)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        torch._foreach_copy_(self.parameters, self.anchor)
        self.optimizer.step()
        torch._foreach_copy_(self.anchor, self.parameters)


class Floor:
    """One SGD step on ready gradients."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.gradients = [torch.full_like(parameter, 1e-5) for parameter in parameters]
        self.optimizer = sgd(parameters)

    def __call__(self) -> None:
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()


class Library:
    """One outer round by the library."""

    def __init__(self, method: type[isles.OuterSync], model: nn.Module) -> None:
        inner = torch.optim.SGD(model.parameters(), lr=1e-3)
        self.sync = method(model, inner, isles.init().outer, sync_every=1)

    @torch.no_grad()
    def __call__(self) -> None:
        self.sync.steps += 1
        self.sync.after_inner_step()


class InCompany:
    """The library's round as it is where others take part, without the exchange: the outer gradients are written to
    memory as a whole before any of them lands.
    """

    def __init__(self, library: Library) -> None:
        self.sync = library.sync
        self.fragment = self.sync.fragments[0]
        self.payload = self.fragment.flat.new().zero_()

    @torch.no_grad()
    def __call__(self) -> None:
        parts, hashed = self.sync.parts, self.sync.agrees
        assert Sweep(self.fragment, parts, hashed).snapshot(self.payload, FiniteCheck()).is_usable
        answer = Exchange(self.payload, None)
        Sweep(self.fragment, parts, hashed).answered(InFlight(self.fragment, 0, answer, None), None)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True, foreach=True)


def rounds(parameters: int = 100_000_000, repeats: int = 9) -> list[Row]:
    """CPU seconds of an outer round per those of the peers, which work on the same live weights in turn."""
    rows = []
    for method in (isles.DiLoCo, isles.NoLoCo, isles.LocalSGD):
        model = Weights(parameters)
        name, ours = method.__name__, list(model.parameters())
        library = Library(method, model)
        parties: dict[str, Callable[[], object]] = {"step": Floor(ours), name: library}
        if method is isles.DiLoCo:
            parties["hand"] = ByHand(ours)
            parties["company"] = InCompany(library)
        times = interleaved(parties, repeats)
        cpu = {party: sorted(t.cpu)[repeats // 2] for party, t in times.items()}
        bounded = method is isles.DiLoCo
        note = f"{cpu[name]:.3f} s against {{:.3f}} s, {model.numel / 1e6:.0f} M parameters"
        rows.append(
            Row(
                f"round   {name} / SGD step",
                times[name].per(times["step"]),
                "CPU ratio",
                ("<=", 1.25) if bounded else None,
                note.format(cpu["step"]),
            )
        )
        if bounded:
            ratio = times[name].per(times["hand"])
            rows.append(Row(f"round   {name} / by hand", ratio, "CPU ratio", ("<=", 0.75), note.format(cpu["hand"])))
            ratio = times["company"].per(times["step"])
            rows.append(
                Row(f"round   {name} in company, without the exchange / SGD step", ratio, "CPU ratio", None, "")
            )
        del parties, library
    return rows


# Memory.

METHODS = ("DiLoCo", "NoLoCo", "LocalSGD")
_M_MMAP_THRESHOLD = -3  # of malloc.h


def resident(key: str) -> int:
    """Bytes from /proc/self/status: VmRSS now, VmHWM since `forget_peak`."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def forget_peak() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def give_back_at_once() -> None:
    """Have glibc return what is freed. By itself it raises the size from which it does so to that of the largest block
    freed so far, and keeps one or two segments (16 MB each) that nobody uses any more: 8 % of a small model's peak.
    """
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 17)


def memory_worker(world: Mesh, name: str, parameters: int) -> tuple[float, float, float]:
    """Bytes a parameter that the method adds: (at the peak of four rounds, between rounds, by its own account)."""

    def run(elements: int) -> tuple[Any, int, int, int]:
        model = Weights(elements)
        before = resident("VmRSS")
        inner = torch.optim.SGD(model.parameters(), lr=1e-3)
        sync = getattr(isles, name)(model, inner, world.outer, sync_every=1)
        forget_peak()
        for _ in range(4):
            sync.step()
        peak, after = resident("VmHWM") - before, resident("VmRSS") - before
        sync.finish()
        said = sum(held.nbytes for held in sync.memory() if held.when not in ("pinned", "end"))
        return model, peak, after, said

    give_back_at_once()
    run(1)  # code and threads that are loaded once
    model, peak, after, said = run(parameters)
    return peak / model.numel, after / model.numel, said / model.numel


def memory(parameters: int = 50_000_000) -> list[Row]:
    """Peak resident bytes a parameter per those that the method's `memory()` says."""
    if not os.path.exists("/proc/self/clear_refs"):
        print("memory: skipped, it reads Linux's /proc", file=sys.stderr)
        return []
    rows = []
    for name in METHODS:
        for workers in (1, 2):
            peak, after, formula = isles.run_local(memory_worker, workers=workers, args=(name, parameters))[0]
            note = f"peak {peak:.2f}, between rounds {after:.2f}, formula {formula:.2f} bytes a parameter"
            where = "alone" if workers == 1 else "a pair"
            rows.append(Row(f"memory  {name}, {where}", abs(peak / formula - 1), "off formula", ("<=", 0.05), note))
    return rows


def main() -> int:
    """Run the parts asked for."""
    parts: dict[str, Callable[[], list[Row]]] = {"steps": steps, "round": rounds, "memory": memory}
    parser = argparse.ArgumentParser(description="What wrapping an optimizer costs on the worker itself.")
    parser.add_argument("parts", nargs="*", help=f"{', '.join(parts)} (default: all)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    for name in options.parts:
        if name not in parts:
            parser.error(f"{name!r}: choose from {', '.join(parts)}")
    torch.set_num_threads(1)
    rows = [row for name in options.parts or parts for row in parts[name]()]
    return report(rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
