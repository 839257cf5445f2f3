"""docs/recipes.md: its scripts, its files, its commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
SCRIPTS: dict[str, str] = dict(re.findall(r"Save this as `(\w+\.py)`[^\n]*\n\n```python\n(.*?)```", PAGE, re.DOTALL))
TASK: str = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[0]


def commands(heading: str) -> list[str]:
    """Those of the section's blocks, a line each."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    return "".join(text for kind, text in blocks if not kind).replace("\\\n", " ").splitlines()


def call(command: str, folder: Path, **variables: str) -> str:
    """stdout of a command that a user types in `folder`; AssertionError, with stderr, if it fails."""
    own = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    own |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    own |= {"ISLES_HOME": str(folder / "home")}
    environment = {**os.environ, **variables, **own}
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, (command, done.stderr[-3000:])
    return done.stdout
