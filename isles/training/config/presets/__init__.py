"""Named configurations that come with Isles: one TOML file each beside this one, whose first line says what it is.

A preset stands where a CONFIG.toml would, so nothing embedded lies under it.
"""

from __future__ import annotations

from pathlib import Path

from isles.base.errors import unknown_name

FOLDER = Path(__file__).parent


def presets() -> dict[str, str]:
    """What each preset is, by name, in one line."""
    found = {}
    for file in sorted(FOLDER.glob("*.toml")):
        found[file.stem] = file.read_text(encoding="utf-8").splitlines()[0].removeprefix("#").strip()
    return found


def preset_file(name: str) -> Path:
    """The TOML file of the preset `name`. ValueError with the nearest name, and all names, where there is none."""
    known = presets()
    if name not in known:
        raise ValueError(unknown_name("preset", name, known))
    return FOLDER / f"{name}.toml"
