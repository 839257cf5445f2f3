"""Code that a configuration names: whose word it takes to import it.

    model.factory = "package.module:function"     replicas.method = "package.module:Class"

A CONFIG.toml that somebody gives to a command is that person's word. A run directory is data, and may come from
anywhere: its names are imported where its own record says that they were typed here,

    RUN/typed.json    {"names": {key: name}, "mac": HMAC-SHA256 of them under HOME/key}

or where a person says `--trust`, which makes that record. HOME/key is 32 random bytes that never leave this user's
home.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from isles.comm.credentials import write_private
from isles.durable import write_text
from isles.errors import printable
from isles.home import home
from isles.parsing import parse_json
from isles.tables import read_toml

TYPED = "typed.json"
_OF_A_RUN = (TYPED, "metrics.jsonl", "summary.json", "model.safetensors", "checkpoints")


def names_in(tables: Mapping[str, Any]) -> dict[str, Any]:
    """What of a configuration's tables would be imported, and with which arguments it would be called."""
    model, replicas = (table if isinstance(table := tables.get(key), Mapping) else {} for key in ("model", "replicas"))
    found: dict[str, Any] = {}
    if ":" in str(replicas.get("method", "")):
        found["replicas.method"] = replicas["method"]
    if model.get("factory") is not None:
        found["model.factory"] = model["factory"]
        if model.get("options"):
            found["model.options"] = model["options"]
    return found


def check(path: Path, tables: Mapping[str, Any], *, trust: bool) -> None:
    """ValueError where the file at `path`, of these tables, is a run's and names what was not typed here. trust: it is
    imported all the same, from now on.
    """
    names, run = names_in(tables), path.parent
    if not names or not any((run / name).exists() for name in _OF_A_RUN) or _was_typed(run, names):
        return
    if not trust:
        told = ", ".join(f"{key} = {value!r}" for key, value in names.items())
        raise ValueError(
            f"{path}: would import and run {printable(told, 300)}, and this run was not made here: look at it, and if "
            "you trust it add --trust (of isles eval, generate, export, resume, train, experts)"
        )
    vouch(run, names)


def take_word(runs: Iterable[Path]) -> None:
    """`--trust` for several runs at once: what their config.toml names is imported from now on."""
    for run in runs:
        path = run / "config.toml"
        if path.is_file():
            check(path, read_toml(str(path)), trust=True)


def vouch(run: Path, names: Mapping[str, Any]) -> None:
    """Note in the run directory that somebody here wants these names imported. Where it cannot be noted, they will be
    asked for again.
    """
    if names:
        with contextlib.suppress(OSError):
            write_text(run / TYPED, json.dumps({"names": names, "mac": _mac(names)}) + "\n")


def _was_typed(run: Path, names: Mapping[str, Any]) -> bool:
    try:
        record = parse_json((run / TYPED).read_text(encoding="utf-8"))
        return record["names"] == names and hmac.compare_digest(str(record["mac"]), _mac(names))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _mac(names: Mapping[str, Any]) -> str:
    said = json.dumps(names, sort_keys=True).encode()
    return hmac.new(_key(), b"isles typed\0" + said, hashlib.sha256).hexdigest()


def _key() -> bytes:
    """This user's, made when it is first needed. OSError where it cannot be kept."""
    path = home() / "key"
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(path, secrets.token_bytes(32))
    return path.read_bytes()
