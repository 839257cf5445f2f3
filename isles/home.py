"""The one folder in which Isles keeps things of its user's own: for this user's eyes alone, never part of a run."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """$ISLES_HOME; else `isles` where the system keeps what programs remember, such as ~/.local/state."""
    if own := os.environ.get("ISLES_HOME"):
        return Path(own).expanduser()
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "isles"
