"""Speed and error of the codecs against bitsandbytes' blockwise quantisers on the CPU.

    python -m benchmarks.codecs [--json]            needs: pip install '.[bench]'

    int8          against its dynamic 8-bit code, both in blocks of 256
    int4, fp4     against its FP4, blocks of 64 (fp4 here has blocks of 256); NF4 for information

4 Mi normal numbers, float32, one thread; parties take turns, a number is the median over the turns. encode + decode is
from float32 to float32; ours into ready memory, as the mean of a group decodes, theirs into memory of its own, for it
knows no other way on the CPU (the note says what ours is then). bytes/s are of the float32 input, beside a copy of it
in memory. Exit code 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks._measure import Row, interleaved, report
from isles.comm.codecs import codec

ELEMENTS = 1 << 22
TURNS = 7


class Theirs:
    """A blockwise quantiser of bitsandbytes."""

    def __init__(self, library: Any, name: str, block: int) -> None:
        self.library, self.name, self.block = library, name, block

    def encode(self, x: Tensor) -> Any:
        if self.name == "8bit":
            return self.library.quantize_blockwise(x, blocksize=self.block)
        return self.library.quantize_4bit(x, blocksize=self.block, quant_type=self.name)

    def decode(self, coded: Any) -> Tensor:
        code, state = coded
        if self.name == "8bit":
            return self.library.dequantize_blockwise(code, state)
        return self.library.dequantize_4bit(code, state)


class Ours:
    """A codec of the library."""

    def __init__(self, name: str) -> None:
        self.form = codec(name)

    def encode(self, x: Tensor) -> Tensor:
        return self.form.encode(x)

    def decode(self, coded: Tensor) -> Tensor:
        return self.form.decode(coded, ELEMENTS, torch.float32)


def compare(x: Tensor, ours: Ours, theirs: Theirs, bounded_error: bool) -> list[Row]:
    """Ratios of seconds, theirs / ours, and errors."""
    mine, other = ours.encode(x), theirs.encode(x)
    copy = torch.empty_like(x)
    parties: dict[str, Callable[[], object]] = {
        "encode": lambda: ours.encode(x),
        "their encode": lambda: theirs.encode(x),
        "decode": lambda: ours.form.decode_into(mine, copy),
        "decode, fresh": lambda: ours.decode(mine),
        "their decode": lambda: theirs.decode(other),
        "copy": lambda: copy.copy_(x),
    }
    times = interleaved(parties, TURNS)
    cpu = {name: sorted(t.cpu)[TURNS // 2] for name, t in times.items()}
    rates = ", ".join(f"{part} {x.nbytes / cpu[part] / 1e9:.2f}" for part in ("encode", "decode", "copy"))
    both = (cpu["their encode"] + cpu["their decode"]) / (cpu["encode"] + cpu["decode"])
    fresh = (cpu["their encode"] + cpu["their decode"]) / (cpu["encode"] + cpu["decode, fresh"])
    errors = [float((form.decode(form.encode(x)) - x).norm() / x.norm()) for form in (ours, theirs)]
    name = f"{ours.form.name} against {theirs.name}"
    return [
        Row(f"{name}: encode", times["their encode"].per(times["encode"]), "x faster", (">=", 5.0), f"GB/s: {rates}"),
        Row(f"{name}: encode + decode", both, "x faster", (">=", 4.0), f"into fresh memory {fresh:.2f}"),
        Row(f"{name}: decode alone", times["their decode"].per(times["decode"]), "x faster", None, ""),
        Row(
            f"{name}: error",
            errors[0] / errors[1],
            "of theirs",
            ("<=", 1.0) if bounded_error else None,
            f"{errors[0]:.4f} against {errors[1]:.4f}",
        ),
    ]


def main() -> int:
    """Run all comparisons."""
    parser = argparse.ArgumentParser(description="Codecs against bitsandbytes on the CPU.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    try:
        library = importlib.import_module("bitsandbytes.functional")
    except ImportError:
        print("codecs: skipped, bitsandbytes is absent; pip install '.[bench]'", file=sys.stderr)
        return 0
    torch.set_num_threads(1)
    x = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(0))
    rows = compare(x, Ours("int8"), Theirs(library, "8bit", 256), True)
    rows += compare(x, Ours("int4"), Theirs(library, "fp4", 64), True)
    rows += compare(x, Ours("fp4"), Theirs(library, "fp4", 64), False)
    rows += [
        Row(row.name, row.value, row.unit, None, row.note)
        for row in compare(x, Ours("int4"), Theirs(library, "nf4", 64), False)
    ]
    return report(rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
