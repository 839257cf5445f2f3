"""What each machine says for itself in a run that it joined. A joiner takes no path and no code from a lighthouse, nor
how its own machine is used: it has what was typed there (`--set`), or the defaults. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Iterator

import tomlkit

from isles.errors import as_typed, printable
from isles.tables import table_of
from isles.training.config.reading import Tables, over

_NEEDED = ("model.hf", "model.factory", "data.path", "data.tokenizer")  # without which it would be another run
_OWN = (*_NEEDED, "model.options", "model.device", "data.cache", "pipeline.skippipe.plan", "memory.disk")
_OWN += ("memory.machine", "memory.plan", "world.threads", "world.virtual.links", "world.virtual.inner_links")
_OWN += ("run.start", "run.loggers")


def with_own(theirs: Tables, own: Tables) -> Tables:
    """The run's configuration for this machine. ValueError where this machine must say more, or says too much."""
    for name in _names(own):
        if name not in _OWN:
            raise ValueError(f"--set {name}: only the lighthouse sets this; a joiner may set {', '.join(_OWN)}")
    for name in _OWN:
        table, key = table_of(theirs, name)
        said = table.pop(key, None)
        if name in _NEEDED and said not in (None, "", "bytes") and key not in table_of(own, name)[0]:
            raise ValueError(
                f"the run has {name} = {printable(as_typed(said), 100)}, and a joiner takes no path and no code from a "
                f"lighthouse: say what it is on this machine, --set {name}=..."
            )
    return over(theirs, own)


def _names(tables: Tables, place: str = "") -> Iterator[str]:
    for key, value in tables.items():
        is_table = isinstance(value, dict) and place + key not in _OWN
        yield from _names(value, f"{place}{key}.") if is_table else [place + key]


def as_words(tables: Tables) -> list[str]:
    """What is a machine's own of `tables`, for the command of another worker on it."""
    found = []
    for name in _OWN:
        table, key = table_of(tables, name)
        if value := table.get(key):
            found += ["--set", f"{name}={tomlkit.item([[], value]).as_string()[5:-1]}"]  # a table in one line, too
    return found
