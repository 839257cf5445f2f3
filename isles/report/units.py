"""Numbers as people read them: bytes in decimal units, seconds as time, counts with separators, ratios in words."""

from __future__ import annotations

import math

_BYTE_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def format_bytes(count: float, trim: bool = False) -> str:
    """Bytes in powers of 1000 with three digits: 12_402_112 gives "12.4 MB". `trim` makes "10.0 MB" "10 MB"."""
    value, unit = float(count), 0
    # 999.5 would be printed as 1000; it belongs to the next unit.
    while abs(value) >= 999.5 and unit < len(_BYTE_UNITS) - 1:
        value /= 1000
        unit += 1
    digits = f"{value:.0f}" if unit == 0 else _three_digits(value)
    if trim and "." in digits:
        digits = digits.rstrip("0").rstrip(".")
    return f"{digits} {_BYTE_UNITS[unit]}"


def format_seconds(seconds: float) -> str:
    """Seconds as time: "0 s", "42.0 ms", "8.31 s", "4 min 12 s", "2 h 3 min", "3 d 4 h"."""
    if not math.isfinite(seconds):
        return str(seconds)
    if seconds < 0:
        return "-" + format_seconds(-seconds)
    if seconds == 0:
        return "0 s"
    if seconds < 0.9995:
        return f"{_three_digits(seconds * 1000)} ms"
    if seconds < 99.95:
        return f"{_three_digits(seconds)} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    minutes = round(seconds / 60)
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24} h"


def time_unit(seconds: float) -> tuple[float, str]:
    """The unit for an axis that reaches `seconds`: (its seconds, its name)."""
    for size, name in ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds")):
        if seconds >= 3 * size:
            return size, name
    return (1.0, "seconds") if seconds >= 0.5 else (1e-3, "milliseconds")


def format_count(count: float) -> str:
    """A whole number with thousands separators: 1234567 gives "1,234,567"."""
    return f"{round(count):,}" if math.isfinite(count) else str(count)


def format_short(count: float) -> str:
    """A count with three digits and a word for the size: 1_234_567 gives "1.23 million"."""
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if abs(count) >= size * 0.9995:
            return f"{_three_digits(count / size)} {word}"
    return format_count(count)


def format_number(value: float) -> str:
    """A plain quantity such as a loss, with four digits after the point; very small ones keep four digits."""
    if value != 0 and abs(value) < 0.001:
        return f"{value:.3e}"
    return f"{value:.4f}"


def format_percent(fraction: float) -> str:
    """0.9312 gives "93.1 %"."""
    return f"{100 * fraction:.1f} %"


def compare(amount: float, reference: float) -> str:
    """How one positive amount compares with another: "38.2 times less than", "1.50 times more than", "as much as"."""
    ratio = reference / amount
    if 0.995 < ratio < 1.005:
        return "as much as"
    return f"{_three_digits(ratio)} times less than" if ratio > 1 else f"{_three_digits(1 / ratio)} times more than"


def _three_digits(value: float) -> str:
    magnitude = abs(value)
    decimals = 2 if magnitude < 9.995 else 1 if magnitude < 99.95 else 0
    return f"{value:,.{decimals}f}"


def format_perplexity(value: float | None) -> str:
    """Three decimals, which is what perplexities and shares are compared by; "-" where there is none."""
    return "-" if value is None else f"{value:.3f}"


def format_seeds(count: int) -> str:
    """Of so many seeds' numbers."""
    return f"mean of {count} seeds" if count > 1 else "one seed"
