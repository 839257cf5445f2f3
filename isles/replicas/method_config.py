"""The settings of a method."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """What every method takes; a method's own config adds its hyper-parameters."""

    @property
    def survives(self) -> bool:
        """True if the workers that are left go on to the end of the run when others fail."""
        return False
