"""A user's settings for an expert system: its own section and [domains.NAME] beside the sections of every run.

hdee.toml, smalltalk.toml (only without a CONFIG.toml)  <  CONFIG.toml  <  --set section.key=value

[model] [data] [inner] [replicas] [world] [run] say how each of its runs is trained: by one worker and no method unless
they say otherwise. OUT/experts.toml saves them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Generic, TypeVar

import tomlkit

from isles.base.durable import write_text
from isles.base.errors import unknown_name
from isles.base.parsing import parse_toml
from isles.base.tables import read_toml, typed
from isles.training.config.reading import Tables, commented, merged_tables, over, resolve
from isles.training.config.sections import ORDER, Config

SETTINGS = "experts.toml"
Own = TypeVar("Own")


@dataclass(frozen=True)
class ExperimentConfig(Generic[Own]):
    """system: "hdee" or "smalltalk". own: its section. domains: [domains], unread. base: what every run shares. tables:
    all of it, for OUT/experts.toml.
    """

    system: str
    own: Own
    domains: Mapping[str, Any]
    base: Config
    tables: Tables


def read(
    system: str, cls: type[Own], path: str | None, assignments: Sequence[str], *, quick: bool = False
) -> ExperimentConfig[Own]:
    """What a user asked for. quick: the small form that takes a minute; without a CONFIG.toml only.

    ValueError: anything that is not as it should be.
    """
    if quick and path is not None:
        raise ValueError(f"--quick is a form of the built-in run: leave out {path}, or --quick")
    tables = merged_tables(path, {}, assignments)
    if path is None:
        built_in = parse_toml(files("isles.experts").joinpath(f"{system}.toml").read_text(encoding="utf-8"))
        small = built_in.pop("quick")
        tables = over(over(built_in, small if quick else {}), tables)
    return checked(system, cls, tables)


def checked(system: str, cls: type[Own], tables: Tables) -> ExperimentConfig[Own]:
    """Tables as a typed request. ValueError as in `read`."""
    sections = {name: table for name, table in tables.items() if name not in (system, "domains")}
    for name in sections:
        if name not in ORDER:
            raise ValueError(unknown_name("section", name, [system, "domains", *ORDER]))
    runs = over({"replicas": {"method": "none"}, "world": {"workers": 1}}, sections)
    for section, key, why in (
        ("data", "path", "the text of experts is that of the domains: list them as [domains.NAME]"),
        ("data", "validation_path", "experts are evaluated on a share of the domains' texts"),
        ("data", "isolate_documents", "experts are evaluated on whole windows"),
        ("data", "mixture", "an expert reads its own share of the domains' texts"),
        ("run", "start", "each run starts from the seed that the system chooses"),
        ("run", "steps", f"the steps of the runs stand in [{system}]"),
        ("run", "seed", f"{system}.seeds says which"),
        ("run", "max_hours", "it limits one run, and these are several"),
    ):
        if key in runs.get(section, {}):
            raise ValueError(f"{section}.{key}: {why}: take it out")
    own = typed(system, cls, tables.get(system, {}))
    domains = tables.get("domains", {})
    for name, table in domains.items():
        if not isinstance(table, dict):
            raise ValueError(f"domains.{name}: write [domains.{name}] with a path below it")
    return ExperimentConfig(system, own, domains, resolve(runs), tables)


def template(system: str, cls: type) -> str:
    """A commented CONFIG.toml for a system: its own section with its defaults; domains and other sections by name."""
    lines = [f"# isles experts {system} THIS.toml", "", *commented(system, cls), ""]
    lines += ["# One for each kind of text; without any, those that come with Python."]
    lines += ["# [domains.NAME]", '# path = "FOLDER"', '# difficulty = "easy"']
    lines += ["", "# [model] [data] [inner] [replicas] [world] [run]: as isles config prints them, for every run."]
    return "\n".join(lines) + "\n"


def refuse_others(asked: ExperimentConfig[Any], out: Path) -> None:
    """ValueError where OUT/experts.toml says something else than `asked`."""
    path = out / SETTINGS
    if path.exists() and read_toml(str(path)) != parse_toml(_text(asked)):  # the order of --set does not matter
        raise ValueError(f"--out {out}: holds experts of other settings ({SETTINGS}); name another directory")


def keep(asked: ExperimentConfig[Any], out: Path) -> None:
    """Write OUT/experts.toml, or see that it says the same. ValueError where it does not, or OUT cannot be made."""
    refuse_others(asked, out)
    make_directory(out)
    if not (out / SETTINGS).exists():
        write_text(out / SETTINGS, _text(asked))


def make_directory(out: Path) -> None:
    """`out`, where it is missing. ValueError where it cannot be made."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {out}: cannot be made ({error.strerror}); name another directory") from error


def _text(asked: ExperimentConfig[Any]) -> str:
    return tomlkit.dumps({"system": {"name": asked.system}, **asked.tables})


def read_saved(out: Path, cls: Mapping[str, type]) -> ExperimentConfig[Any]:
    """What OUT was made with. ValueError where it is no directory of experts."""
    if not (out / SETTINGS).is_file():
        raise ValueError(f"{out}: no {SETTINGS} there; name a directory that isles experts made")
    tables = read_toml(str(out / SETTINGS))
    system = tables.pop("system", {}).get("name")
    if system not in cls:
        raise ValueError(f"{out / SETTINGS}: damaged, it names no system; make the experts again")
    return checked(system, cls[system], tables)
