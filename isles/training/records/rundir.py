"""The run directory: the names of its files, how the first ones are written, whose it is. Loads no torch."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from isles.durable import write_text
from isles.parsing import parse_toml
from isles.training.config.trust import names_in, vouch
from isles.training.records.lock import RunLock, locked

CONFIG, METRICS, TIMELINE, SUMMARY, LOGS = "config.toml", "metrics.jsonl", "timeline.jsonl", "summary.json", "logs"


@contextlib.contextmanager
def held(out: Path) -> Iterator[RunLock]:
    """`out`, made where it is missing, as this run's alone. ValueError where it is another's or cannot be made."""
    with contextlib.ExitStack() as stack:
        try:
            out.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(locked(out))
        except OSError as error:
            raise ValueError(f"--out {out}: cannot be written to ({error.strerror}); name another directory") from error
        yield lock


def keep_config(text: str, out: Path) -> None:
    """RUN/config.toml, with a record that what it names was typed here."""
    write_text(out / CONFIG, text)
    vouch(out, names_in(parse_toml(text)))


def as_json(record: dict[str, Any], indent: int | None = None) -> str:
    """JSON of a flat record; a loss that is no number any more (nan, inf) becomes null: JSON has no such numbers."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    return json.dumps(finite, indent=indent)
