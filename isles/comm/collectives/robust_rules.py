"""Names and numbers of the robust means (`replicas.robust`). Loads no torch."""

from __future__ import annotations

from typing import Literal, get_args

Robust = Literal["none", "clip", "trimmed", "median"]
ROBUST = get_args(Robust)
CLIP = "clip"


def trimmed(rule: str, shares: int) -> int:
    """How many of the `shares` values of an entry are dropped at each end: about a quarter, or all but the middle."""
    return {"trimmed": (shares + 1) // 4, "median": (shares - 1) // 2}.get(rule, 0)
