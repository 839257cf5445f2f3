"""Amounts as people write them: rates "200Mbit/s", "1.5 Gbps", times "40ms", counts "1.3B", "500k", memory "12GiB",
"24GB", memory's rates "22GB/s". Plain numbers are seconds, pieces, bytes, bytes per second; rates and latencies of a
line want a unit.
"""

from __future__ import annotations

import math
import re

_AMOUNT = re.compile(r"([0-9.eE+-]+|inf)\s*([a-zA-Z/]*)")
_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_RATES = {f"{prefix}{form}": size for prefix, size in _PREFIXES.items() for form in ("bit/s", "bps", "bits/s")}
_COUNTS = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0, "h": 3600.0}
_BYTES = {f"{prefix}b": size for prefix, size in _PREFIXES.items()} | {
    f"{prefix}ib": 1024.0**power for power, prefix in enumerate("kmgt", start=1)
}
_BYTE_RATES = {f"{unit}/s": size for unit, size in _BYTES.items()}


def parse_rate(name: str, raw: float | str) -> float:
    """Bits per second, finite and above 0, with a unit of bits in any case; ValueError that begins with `name`."""
    size = _in_bytes(raw)
    if size:
        raise ValueError(f"{name} = {raw!r}: rates of a line are in bits: that is {8 * size / 1e6:g}Mbit/s")
    value = _parse(name, raw, _RATES, "200Mbit/s")
    if not 0 < value < math.inf:
        raise ValueError(f"{name} = {raw}: a rate must be above 0 bits per second, such as 200Mbit/s, and finite")
    if _is_bare(raw):
        raise ValueError(f"{name} = {raw}: has no unit: write {value:g}Mbit/s or {value:g}bit/s, whichever is meant")
    return value


def parse_latency(name: str, raw: float | str) -> float:
    """As `parse_seconds`, with a unit for all but 0."""
    value = parse_seconds(name, raw)
    if value and _is_bare(raw):
        raise ValueError(f"{name} = {raw}: has no unit: write {value:g}ms or {value:g}s, whichever is meant")
    return value


def parse_seconds(name: str, raw: float | str) -> float:
    """Seconds, 0 or more and finite; ValueError that begins with `name`."""
    value = _parse(name, raw, _TIMES, "40ms")
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} = {raw}: a time must be 0 s or more and finite, such as 40ms")
    return value


def parse_count(name: str, raw: float | str) -> float:
    """A number above 0 and finite: B is 10^9, T 10^12; ValueError that begins with `name`."""
    value = _parse(name, raw, _COUNTS, "1.3B")
    if not 0 < value < math.inf:
        raise ValueError(f"{name} = {raw}: choose a number above 0, such as 1.3B")
    return value


def parse_bytes(name: str, raw: float | str) -> float:
    """Bytes, 0 or more: GB is 10^9, GiB 2^30; ValueError that begins with `name`."""
    value = _parse(name, raw, _BYTES, "12GiB")
    if not value >= 0:
        raise ValueError(f"{name} = {raw}: memory is 0 bytes or more, such as 12GiB")
    return value


def parse_sized_bytes(name: str, raw: float | str) -> float:
    """As `parse_bytes`, with a unit for all but 0."""
    value = parse_bytes(name, raw)
    if value and _is_bare(raw):
        raise ValueError(f"{name} = {raw}: has no unit: write {value:g}B, or {value:g}MB, whichever is meant")
    return value


def parse_byte_rate(name: str, raw: float | str) -> float:
    """Bytes per second, 0 or more, `inf` too; ValueError that begins with `name`."""
    value = _parse(name, raw, _BYTE_RATES, "22GB/s")
    if not value >= 0:
        raise ValueError(f"{name} = {raw}: a rate is 0 bytes per second or more, such as 22GB/s")
    return value


def parse_amount(name: str, raw: float | str) -> float:
    """A number with k, M, B or G, T for its thousands; ValueError that begins with `name`."""
    return _parse(name, raw, _COUNTS | {"g": 1e9}, "165T")


def _is_bare(raw: float | str) -> bool:
    return not isinstance(raw, str) or raw.strip()[-1:].isdigit() or raw.strip()[-1:] == "."


def _in_bytes(raw: float | str) -> float:
    """Bytes per second, where that is what was written; else 0."""
    found = _AMOUNT.fullmatch(raw.strip()) if isinstance(raw, str) else None
    if found is None or found[2].lower() not in _BYTE_RATES:
        return 0.0
    try:
        size = float(found[1]) * _BYTE_RATES[found[2].lower()]
    except ValueError:
        return 0.0
    return size if math.isfinite(size) else 0.0


def _parse(name: str, raw: float | str, units: dict[str, float], example: str) -> float:
    if not isinstance(raw, str):
        return float(raw)
    found = _AMOUNT.fullmatch(raw.strip())
    unit = found.group(2).lower() if found else ""
    try:
        number = float(found.group(1)) if found else None
    except ValueError:
        number = None
    if number is None or (unit and unit not in units):
        raise ValueError(f"{name} = {raw!r}: write a number and a unit, such as {example}")
    return number * units.get(unit, 1.0)
