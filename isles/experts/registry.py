"""A forest on disk: which experts are served together, as JSON beside their run directories.

    OUT/forests/m-ho-i-he.json    {"format": 1, "system": "hdee", "experts": [{"name", "run", "domains", ...}], ...}

Paths are relative to the file, so a folder may be moved or put together from several machines. An expert is a finished
run directory of `isles train` (config.toml, model.safetensors, summary.json); nothing else is needed to serve it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from isles.durable import write_text
from isles.parsing import parse_json

_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class ForestMember:
    """One expert. run: its directory. domains: what it was trained on, in order; empty where that was not by domain."""

    name: str
    run: Path
    domains: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Forest:
    """Experts that are served together. system: "hdee" (a posterior over all) or "smalltalk" (routers choose one).

    routers: as many as experts, in their order, where these choose; clusters: the file of the centres, where those do.
    prefix: tokens that either reads.
    """

    system: str
    experts: tuple[ForestMember, ...]
    routers: tuple[ForestMember, ...] = ()
    prefix: int = 0
    clusters: Path | None = None

    def __post_init__(self) -> None:
        names = [member.name for member in self.experts]
        if not names:
            raise ValueError("a forest without experts: name at least one finished run")
        if len(set(names)) < len(names):
            raise ValueError(f"a forest with two experts of one name ({', '.join(names)}): rename one")
        if self.routers and len(self.routers) != len(self.experts):
            raise ValueError(f"{len(self.routers)} routers for {len(self.experts)} experts: one each is needed")

    @property
    def gated(self) -> bool:
        """Whether a gate chooses among the experts; else all are mixed."""
        return bool(self.routers) or self.clusters is not None

    def remove(self, name: str) -> Forest:
        """Without the expert `name` (and its router). ValueError where there is none, or it has a cluster."""
        if self.clusters is not None:
            raise ValueError(f"expert {name!r} cannot leave: the clusters are those of all; make them again without it")
        names = [member.name for member in self.experts]
        if name not in names:
            raise ValueError(f"no expert {name!r} in the forest; it holds {', '.join(names)}")
        place = names.index(name)
        return replace(
            self,
            experts=self.experts[:place] + self.experts[place + 1 :],
            routers=self.routers[:place] + self.routers[place + 1 :],
        )

    def check(self) -> None:
        """ValueError where an expert or router is not there as a finished run."""
        for member in (*self.experts, *self.routers):
            if not (member.run / "model.safetensors").is_file():
                raise ValueError(
                    f"expert {member.name!r} is missing: no model.safetensors in {member.run}; copy its run directory "
                    "there, or train it"
                )

    def save(self, path: Path) -> None:
        """Write `path`, all or nothing."""
        path.parent.mkdir(parents=True, exist_ok=True)

        def place(file: Path) -> str:
            return Path(os.path.relpath(file, path.parent)).as_posix()

        def told(member: ForestMember) -> dict[str, Any]:
            return {**asdict(member), "run": place(member.run)}

        record = {
            "format": _FORMAT,
            "system": self.system,
            "prefix": self.prefix,
            "experts": list(map(told, self.experts)),
            "routers": list(map(told, self.routers)),
            "clusters": None if self.clusters is None else place(self.clusters),
        }
        write_text(path, json.dumps(record, indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> Forest:
        """What `save` wrote. ValueError where it is missing or damaged, or an expert is."""
        try:
            record = parse_json(path.read_text(encoding="utf-8"))
            if record["format"] != _FORMAT:
                raise ValueError(f"format {record['format']} instead of {_FORMAT}")

            def member(entry: dict[str, Any]) -> ForestMember:
                return ForestMember(name=entry["name"], run=path.parent / entry["run"], domains=tuple(entry["domains"]))

            forest = cls(
                system=record["system"],
                prefix=record["prefix"],
                experts=tuple(map(member, record["experts"])),
                routers=tuple(map(member, record["routers"])),
                clusters=None if record.get("clusters") is None else path.parent / record["clusters"],
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: no forest can be read there ({error}); name the file of a forest") from error
        forest.check()
        return forest


def forest_of(runs: Sequence[Path]) -> Forest:
    """Finished runs as a forest, named like their directories."""
    forest = Forest(system="hdee", experts=tuple(ForestMember(name=run.resolve().name, run=run) for run in runs))
    forest.check()
    return forest
