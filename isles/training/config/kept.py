"""The files that a run by a plan needs beside its config.toml: copied into the run directory, so that resume needs
nothing else, also where the run was moved.

    RUN/config.toml      pipeline.plan = "plan.json", world.links = "links.toml"
    RUN/plan.json        RUN/links.toml

A relative name in a configuration file is looked for beside that file first. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from isles.durable import write_text
from isles.training.config.sections import Config

SettingKey = tuple[str, str]
"""Section and key."""
_NAMES: dict[SettingKey, str] = {("pipeline", "plan"): "plan.json", ("world", "links"): "links.toml"}
KEPT = tuple(_NAMES.values())


def kept_files(config: Config) -> dict[SettingKey, Path]:
    """Those of a run, by the setting that names them."""
    if config.pipeline.routing != "skippipe":
        return {}
    files = {("pipeline", "plan"): Path(config.pipeline.plan)}
    if config.world.is_simulated and config.world.links.endswith(".toml"):
        files["world", "links"] = Path(config.world.links)
    return files


def kept_names(config: Config) -> dict[SettingKey, str]:
    """What the run's own config.toml says for these settings."""
    return {place: _NAMES[place] for place in kept_files(config)}


@contextmanager
def settled(config: Config, out: Path) -> Iterator[Config]:
    """The run that `config` says, by files of its own: those that it names are copied into `out`, which is there, and
    what happens to them afterwards is no matter. A run that ends before it has written anything leaves no copies.
    """
    names, copied, values = kept_names(config), [], {}
    for (section, key), file in kept_files(config).items():
        copy = out / names[section, key]
        if not (copy.exists() and copy.samefile(file)):
            write_text(copy, file.read_text(encoding="utf-8"))
            copied.append(copy)
        values[section] = replace(getattr(config, section), **{key: str(copy)})
    try:
        yield replace(config, **values) if values else config
    except BaseException:
        if not (out / "config.toml").exists():
            for copy in copied:
                copy.unlink(missing_ok=True)
        raise


def beside(tables: Mapping[str, Any], folder: Path) -> None:
    """Name the files that lie in `folder`, where the tables of its configuration file name one of them."""
    for (section, key), usual in _NAMES.items():
        table = tables.get(section)
        if not isinstance(table, dict):
            continue
        name = table.get(key)
        if isinstance(name, str) and Path(name).suffix == Path(usual).suffix and (folder / name).is_file():
            table[key] = str(folder / name)
