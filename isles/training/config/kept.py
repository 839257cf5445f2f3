"""The files that a run by a plan needs beside its config.toml: copied into the run directory, so that resume needs
nothing else, also where the run was moved.

    RUN/config.toml      pipeline.skippipe.plan = "plan.json", world.virtual.links = "links.toml"
    RUN/plan.json        RUN/links.toml

A relative name in a configuration file is looked for beside that file first. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from isles.durable import write_text
from isles.tables import changed, table_of
from isles.training.config.sections import Config

_PLAN, _LINKS = "pipeline.skippipe.plan", "world.virtual.links"
_NAMES = {_PLAN: "plan.json", _LINKS: "links.toml"}
KEPT = tuple(_NAMES.values())


def kept_files(config: Config) -> dict[str, Path]:
    """Those of a run, by the setting that names them."""
    if not config.pipeline.skippipe.plan:
        return {}
    files = {_PLAN: Path(config.pipeline.skippipe.plan)}
    if config.world.is_simulated and config.world.virtual.links.endswith(".toml"):
        files[_LINKS] = Path(config.world.virtual.links)
    return files


def kept_names(config: Config) -> dict[str, str]:
    """What the run's own config.toml says for these settings."""
    return {key: _NAMES[key] for key in kept_files(config)}


@contextmanager
def settled(config: Config, out: Path) -> Iterator[Config]:
    """The run that `config` says, by files of its own: those that it names are copied into `out`, which is there, and
    what happens to them afterwards is no matter. A run that ends before it has written anything leaves no copies.
    """
    copied, values = [], {}
    for key, file in kept_files(config).items():
        copy = out / _NAMES[key]
        if not (copy.exists() and copy.samefile(file)):
            write_text(copy, file.read_text(encoding="utf-8"))
            copied.append(copy)
        values[key] = str(copy)
    try:
        yield changed(config, values) if values else config
    except BaseException:
        if not (out / "config.toml").exists():
            for copy in copied:
                copy.unlink(missing_ok=True)
        raise


def beside(tables: Mapping[str, Any], folder: Path) -> None:
    """Name the files that lie in `folder`, where the tables of its configuration file name one of them."""
    for where, usual in _NAMES.items():
        table, key = table_of(tables, where)
        name = table.get(key)
        if isinstance(name, str) and Path(name).suffix == Path(usual).suffix and (folder / name).is_file():
            table[key] = str(folder / name)
