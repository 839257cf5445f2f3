"""What a member is known by: the certificates that its workers make, which views name by their fingerprints.

The lighthouse says where a member is, and vouches for it; that it vouches for the same one to everybody, views show, on
which members agree, and people who compare what their workers print (`spoken`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

Fingerprint = Annotated[str, Field(strict=True, pattern="^[0-9a-f]{32}$")]
"""Of a certificate, or of those of an island."""


def identity_of(certificates: Sequence[str]) -> str:
    """Of a member whose workers, in their order, have certificates with these fingerprints; "" where it has none."""
    if len(certificates) < 2:
        return "".join(certificates)
    return hashlib.sha256("".join(certificates).encode("ascii")).hexdigest()[:32]


def spoken(identity: str) -> str:
    """So much of it as two people compare: four groups of four digits."""
    return "-".join(identity[at : at + 4] for at in range(0, 16, 4))
