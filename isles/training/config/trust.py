"""Code that a configuration names: when it may be imported, and a check that it can be used.

    model.factory = "package.module:function"     replicas.method = "package.module:Class"     `isles.base.parts.CODE`

A user who passes a CONFIG.toml to a command trusts it. A run directory is data, and may come from anywhere: code that
it names is imported only if its own record proves that the names were typed on this machine,

    RUN/typed.json    {"names": {key: name}, "mac": HMAC-SHA256 of them under HOME/key}

or if the user passes `--trust`, which writes that record. HOME/key is 32 random bytes that never leave this user's
home.

The files that a configuration names beside itself (a plan of paths, its links) are copied into the run directory, so
that resume needs nothing else, also if the run was moved.

    RUN/config.toml      pipeline.skippipe.plan = "plan.json", world.virtual.links = "links.toml"
    RUN/plan.json        RUN/links.toml

A relative name in a configuration file is first looked up beside that file. Loads no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from isles.base.durable import home, write_text
from isles.base.errors import printable
from isles.base.parsing import parse_json
from isles.base.parts import CODE, make, names_code
from isles.base.tables import changed, read_toml, table_of
from isles.comm.credentials import write_private
from isles.replicas.parts.legal import member, refuse
from isles.training.config.sections import Config

TYPED = "typed.json"
_OF_A_RUN = (TYPED, "metrics.jsonl", "summary.json", "model.safetensors", "checkpoints")


def names_in(tables: Mapping[str, Any]) -> dict[str, Any]:
    """The names in a configuration's tables that would be imported, with the arguments of their calls."""
    found: dict[str, Any] = {}
    for axis, setting in CODE.items():
        keys = (f"{setting.section}.{setting.key}", f"{setting.section}.{setting.options}" if setting.options else "")
        value, options = (table.get(name) for table, name in (table_of(tables, key) for key in keys))
        if value is not None and names_code(axis, value):
            found |= {keys[0]: value} | ({keys[1]: options} if options else {})
    return found


def names_of(config: Config) -> dict[str, Any]:
    """`names_in` of a run's configuration."""
    pipeline = {**vars(config.pipeline), "boundary": vars(config.pipeline.boundary)}
    replicas = {"method": config.method, **vars(config.replicas)}
    plain = {section: vars(getattr(config, section)) for section in ("model", "data", "inner")}
    return names_in({"replicas": replicas, "pipeline": pipeline} | plain)


def check_code(config: Config) -> None:
    """Import a run's own parts, and create each once, except boundaries, which need the stream's width, and sources,
    which open data. Loads torch if there are any.

    Raises:
        ValueError: in one line, if one is missing, is no such part, or takes other options; or if they do not go
            together by their own declarations.
    """
    named, choice = names_of(config), dict(getattr(config.replicas, "choice", {}))
    for axis, (section, key, options, interface, *_) in CODE.items():
        name = named.get(f"{section}.{key}")
        if name is None or not interface or axis in ("boundary", "source"):
            continue
        try:
            if axis == "optimizer":
                from isles.training.optimizer import check_own_optimizer

                check_own_optimizer(config.inner)
                continue
            made = make(axis, name, named.get(f"{section}.{options}"))
            if axis in choice:
                choice[axis] = member(axis, made)
                refuse(choice)
        except ValueError as error:
            raise ValueError(f"{section}.{error}") from error


def check(path: Path, tables: Mapping[str, Any], *, trust: bool) -> None:
    """ValueError if the file at `path`, with these tables, is of a run and names code that was not typed here. trust:
    it is imported all the same from now on.
    """
    names, run = names_in(tables), path.parent
    if not names or not any((run / name).exists() for name in _OF_A_RUN) or _was_typed(run, names):
        return
    if not trust:
        listed = ", ".join(f"{key} = {value!r}" for key, value in names.items())
        raise ValueError(
            f"{path}: would import and run {printable(listed, 300)}, and this run was not made here: look at it, and "
            "if you trust it add --trust (of isles eval, generate, export, resume, train, experts)"
        )
    vouch(run, names)


def trust_runs(runs: Iterable[Path]) -> None:
    """`--trust` for several runs at once: the code that their config.toml names is imported from now on."""
    for run in runs:
        path = run / "config.toml"
        if path.is_file():
            check(path, read_toml(str(path)), trust=True)


def vouch(run: Path, names: Mapping[str, Any]) -> None:
    """Record in the run directory that its user trusts these names. If that fails, --trust is needed again."""
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
    payload = json.dumps(names, sort_keys=True).encode()
    return hmac.new(_key(), b"isles typed\0" + payload, hashlib.sha256).hexdigest()


def _key() -> bytes:
    """This user's key, created on first use. OSError if it cannot be saved."""
    path = home() / "key"
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(path, secrets.token_bytes(32))
    return path.read_bytes()


_PLAN, _LINKS = "pipeline.skippipe.plan", "world.virtual.links"
_NAMES = {_PLAN: "plan.json", _LINKS: "links.toml"}
SAVED_WITH_RUN = tuple(_NAMES.values())


def referenced_files(config: Config) -> dict[str, Path]:
    """Those of a run, by the setting that names them."""
    if not config.pipeline.skippipe.plan:
        return {}
    files = {_PLAN: Path(config.pipeline.skippipe.plan)}
    if config.world.is_simulated and config.world.virtual.links.endswith(".toml"):
        files[_LINKS] = Path(config.world.virtual.links)
    return files


def referenced_names(config: Config) -> dict[str, str]:
    """The values of these settings in the run's own config.toml."""
    return {key: _NAMES[key] for key in referenced_files(config)}


@contextmanager
def settled(config: Config, out: Path) -> Iterator[Config]:
    """Context: `config` with its own copies of the files that it names, in the existing directory `out`; later changes
    of the originals have no effect. A run that ends before it has written anything leaves no copies.
    """
    copied, values = [], {}
    for key, file in referenced_files(config).items():
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
    """Resolve file names in the tables of a configuration file that are relative to its `folder`."""
    for where, usual in _NAMES.items():
        table, key = table_of(tables, where)
        name = table.get(key)
        if isinstance(name, str) and Path(name).suffix == Path(usual).suffix and (folder / name).is_file():
            table[key] = str(folder / name)
