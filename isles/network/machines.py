"""One worker's machine: device memory and speed, the link between device and host, the host's memory and optimizer, the
disk; and the seconds of a step on a GPU of a known name. Numbers only; torch is not imported.

Peaks and sizes are the makers'. Shares reached, links, host rates and disks are what such machines commonly show, not
measurements of one: `isles doctor --memory --write my.toml` measures yours. A machine without an accelerator has its
RAM as the device and no host beside it; its far tier is the disk.

    seconds = 6 x parameters x tokens of the step of one worker / (peak x mfu)

6: a multiplication and an addition for each parameter and token, once forward and twice backward. Attention's own
products, which grow with the sequence, are left out; mfu (model FLOP utilisation) is what such runs reach of the peak,
0.3 to 0.5 with good code on one large GPU, less on consumer cards. One GPU a worker.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

from isles.base.errors import demand, unknown_name
from isles.base.tables import read_toml
from isles.network.units import parse_amount, parse_byte_rate, parse_bytes

_BOTH = 0.85  # share of a link's rate that each direction keeps while the other one is busy too; presets only
_GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One worker's machine.

    device_bytes: memory of the accelerator. peak: its FLOP/s in the format of the products. mfu: share of the peak that
    a decoder's blocks reach. device_rate: bytes a second of its memory, for updates there. up, down: bytes a second
    host to device and back while the other direction rests; up_both, down_both: while both are busy. host_bytes: memory
    of the host, 0 where the RAM is the device. host_update: parameters a second that the host's AdamW updates.
    disk_read, disk_write: bytes a second past the page cache. disk_bytes: free space; 0: no disk is used.

    ValueError that begins with the field's name for a number that cannot be.
    """

    name: str = "own"
    device_bytes: float
    peak: float
    mfu: float
    device_rate: float
    up: float
    down: float
    up_both: float
    down_both: float
    host_bytes: float
    host_update: float
    disk_read: float = 0.0
    disk_write: float = 0.0
    disk_bytes: float = 0.0

    def __post_init__(self) -> None:
        demand(self, "device_bytes peak device_rate host_update", lambda x: x > 0, "choose a number above 0")
        demand(self, "mfu", lambda x: 0 < x <= 1, "choose a share of the peak, above 0 and up to 1, such as 0.4")
        keys = "up down up_both down_both host_bytes disk_read disk_write disk_bytes"
        demand(self, keys, lambda x: x >= 0, "choose 0 or more")
        for key in ("up", "down"):
            if getattr(self, f"{key}_both") > getattr(self, key):
                raise ValueError(
                    f"{key}_both = {getattr(self, f'{key}_both'):g}: choose at most {key} = {getattr(self, key):g}"
                )
        if self.disk_bytes and not (self.disk_read and self.disk_write):
            raise ValueError("disk_bytes: a disk has rates too; give disk_read and disk_write, such as 2GB/s")

    def seconds(self, flops: float) -> float:
        return flops / (self.peak * self.mfu)


# Dense bfloat16 (float16 where there is no bfloat16) with float32 sums, TFLOP/s, as the makers' data sheets state it.
# Beside them the GB of memory, of the largest of that name.
_GPUS = {
    "T4": (65, 16),
    "V100": (125, 32),
    "A10": (125, 24),
    "A100": (312, 80),
    "L4": (121, 24),
    "L40S": (362, 48),
    "H100": (989, 80),
    "H200": (989, 141),
    "B200": (2250, 180),
    "MI250X": (383, 128),
    "MI300X": (1307, 192),
    "RTX 3060": (51, 12),
    "RTX 3090": (71, 24),
    "RTX 4090": (165, 24),
}


def _with_gpu(name: str, gigabytes: float, mfu: float, rate: float, link: float, host: float, update: float) -> Machine:
    """gigabytes: of the GPU. rate: of its memory, link: to the host one way, bytes a second. host: gigabytes."""
    return Machine(
        name=name,
        device_bytes=gigabytes * _GB,
        peak=_GPUS[name.partition("-")[0]][0] * 1e12,
        mfu=mfu,
        device_rate=rate,
        up=link,
        down=link,
        up_both=_BOTH * link,
        down_both=_BOTH * link,
        host_bytes=host * _GB,
        host_update=update,
    )


_LAPTOP = Machine(
    name="laptop-16",
    device_bytes=16 * _GB,
    peak=0.4e12,
    mfu=0.5,
    device_rate=30e9,
    up=0.0,
    down=0.0,
    up_both=0.0,
    down_both=0.0,
    host_bytes=0.0,
    host_update=0.5e9,
    disk_read=2e9,
    disk_write=1.5e9,
    disk_bytes=200 * _GB,
)

MACHINES: dict[str, Machine] = {
    one.name: one
    for one in (
        _with_gpu("A100-40", 40, 0.45, 1.4e12, 22e9, 440, 4e9),
        _with_gpu("A100-80", 80, 0.45, 1.8e12, 22e9, 440, 4e9),
        _with_gpu("H100", 80, 0.40, 3.0e12, 50e9, 512, 6e9),
        _with_gpu("H200", 141, 0.40, 4.3e12, 50e9, 512, 6e9),
        _with_gpu("V100-16", 16, 0.40, 0.8e12, 12e9, 384, 2e9),
        _with_gpu("RTX 3060", 12, 0.40, 0.34e12, 11e9, 64, 1.2e9),
        _with_gpu("RTX 4090", 24, 0.50, 0.95e12, 22e9, 64, 1.8e9),
        _LAPTOP,
    )
}

_BYTES = ("device_bytes", "host_bytes", "disk_bytes")
_BYTE_RATES = ("device_rate", "up", "down", "up_both", "down_both", "disk_read", "disk_write")


def known_gpu(name: str, nbytes: float) -> Machine | None:
    """The GPU that a driver calls `name` and reports with `nbytes`, a little more than the data sheet's; None: an
    unknown GPU, or one with another memory size, as in laptops.
    """
    alike = (one for one in MACHINES.values() if one.up and one.name.partition("-")[0] in name)
    return next((one for one in alike if one.device_bytes <= nbytes < 1.2 * one.device_bytes), None)


def with_gpu(name: str) -> Machine:
    """The machine with the GPU called `name`, or one with a host of any size. ValueError for an unknown GPU."""
    found = {known.casefold(): known for known in _GPUS}.get(name.casefold())
    if found is None:
        raise ValueError(unknown_name("gpu", name, _GPUS) + "; or give the time of a step, such as 800ms")
    peak, gigabytes = _GPUS[found]
    usual = MACHINES["H100"]
    own = replace(usual, name=name, peak=peak * 1e12, device_bytes=gigabytes * _GB, host_bytes=math.inf)
    return MACHINES.get(found, own)


def step_seconds(here: Machine, mfu: float, parameters: float, tokens: float) -> float:
    """Seconds of a step of `tokens` (one worker's). ValueError for an impossible share."""
    return replace(here, mfu=mfu).seconds(6 * parameters * tokens)


def machine(named: str, overrides: Mapping[str, Any] | None = None) -> Machine:
    """The machine called `named`, or that of a TOML file, with fields laid over it.

    A file gives every field, or `base = "H100"` and those that differ: bytes as "24GB" or "12GiB", rates as "22GB/s",
    operations as "165T", or plain numbers. A link's rate given alone stands for both directions at once too.
    ValueError, one line, for an unknown name or field and for what cannot be.
    """
    if named.endswith(".toml"):
        table = read_toml(named)
        made = _over(None, table, named)
        return _over(made, overrides or {}, "machine") if overrides else made
    folded = {name.casefold(): one for name, one in MACHINES.items()}
    if named.casefold() not in folded:
        raise ValueError(unknown_name("machine", named, MACHINES) + ", or the path of a .toml file")
    return _over(folded[named.casefold()], overrides or {}, "machine")


def to_toml(made: Machine) -> str:
    """The machine as a file that `machine` reads back to an equal one."""
    numbers = [field.name for field in fields(Machine) if field.name != "name"]
    return "\n".join([f'name = "{made.name}"', *(f"{key} = {float(getattr(made, key))!r}" for key in numbers)]) + "\n"


def _over(base: Machine | None, table: Mapping[str, Any], source: str) -> Machine:
    known = [field.name for field in fields(Machine)]
    values = dict(table)
    if base is None and "base" in values:
        base = machine(str(values.pop("base")))
    for key in values:
        if key not in known:
            raise ValueError(f"{source}: " + unknown_name("field", key, [*known, "base"]))
    read = {key: _read(source, key, value) for key, value in values.items()}
    for key in ("up", "down"):
        if key in read and f"{key}_both" not in read:
            read[f"{key}_both"] = read[key]
    try:
        if base is not None:
            return replace(base, **read)
        needed = [field.name for field in fields(Machine) if field.default is MISSING]
        missing = [name for name in needed if name not in read]
        if missing:
            raise ValueError(f'{missing[0]} is missing: give it, or base = "H100" to begin from')
        return Machine(**read)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def _read(source: str, key: str, value: Any) -> Any:
    if key == "name":
        return str(value)
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"{source}: {key} = {value!r}: write a number, or one with its unit in quotes")
    try:
        if key in _BYTES:
            read = parse_bytes(key, value)
        elif key in _BYTE_RATES:
            read = parse_byte_rate(key, value)
        else:
            read = parse_amount(key, value)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    if math.isnan(read):
        raise ValueError(f"{source}: {key} = {value!r}: write a number")
    return read
