"""The start of a run on several machines: they connect, and node 0 checks that all of them have the same run.

These must be equal: the version of Isles, the configuration, the command (train or resume). These must differ: --node,
and the run directory, where each machine writes its own workers' shards.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from isles.base.parsing import MANY, Int, Unfit, parse_toml, value_of
from isles.comm.credentials import read
from isles.data import prepare_data
from isles.launch import rendezvous
from isles.launch.nodes import NodeGroup, NodeSpec
from isles.training.config.reading import to_toml
from isles.training.config.sections import Config
from isles.training.config.trust import referenced_names
from isles.training.records.checkpoint import Checkpoints
from isles.training.records.tokens import host_credentials, node_token

_SHOWN = 3  # differing keys that a message names
_Steps = Annotated[list[Annotated[Int, Field(ge=0)]], MANY] | None
_OPEN = (
    "messages between workers are neither encrypted nor authenticated: use a private network or WireGuard "
    "(docs/two-machines.md)"
)


@contextlib.contextmanager
def meet_nodes(
    config: Config, node_spec: NodeSpec, out: Path, resume: int | None, notify: Callable[[str], None]
) -> Iterator[NodeGroup]:
    """Context: the connected machines of this run. At the end they disconnect, with the error if there was one. Before,
    this machine's text is tokenised, which may take longer than others wait.

    resume: None for a new run, else the step to resume from; `node_group.facts["resume"]` is then the newest step up to
    it of which all machines have a checkpoint. notify: called with progress messages for the user.
    """
    if node_spec.nodes == 1:
        prepare_data(config.data, notify)
        yield NodeGroup(spec=node_spec)
        return
    world = config.world
    if not world.has_processes:
        raise ValueError(
            f'--nodes {node_spec.nodes}: world.backend = "{world.backend}" runs on one machine; take one out'
        )
    if world.workers < node_spec.nodes:
        raise ValueError(
            f"--nodes {node_spec.nodes}: more machines than world.workers = {world.workers}, which counts the workers "
            "of all of them; raise it"
        )
    description = {
        "config": described(config),
        "checkpoints": None if resume is None else [step for step in Checkpoints(out).steps() if step <= resume],
        "out": None if node_spec.shared_directory else [uuid.getnode(), str(out.resolve())],
    }
    quiet = lambda text: None  # noqa: E731
    prepare_data(config.data, quiet if node_spec.shared_directory and node_spec.node else notify)
    if node_spec.shared_directory:
        notify = quiet  # torchrun starts all at once: there is nothing to wait for
    node_group = _meet(node_spec, description, out, world.join_deadline, notify)
    notify(_OPEN)
    for link in node_group.links.values():
        link.patience(world.silence)
    try:
        if node_spec.node == 0:
            others = {} if node_spec.shared_directory else node_group.descriptions
            node_group.facts.update(resume=None if resume is None else _common_step(description, others))
        yield node_group
    except KeyboardInterrupt as error:
        together = getattr(error, "late", 0.0) is None  # an `Interrupted` after a common step is no error
        node_group.part(None if together else error)
        raise
    except BaseException as error:
        node_group.part(error)
        raise
    node_group.part()


def _meet(
    node_spec: NodeSpec, description: Mapping[str, Any], out: Path, seconds: float, notify: Callable[[str], None]
) -> NodeGroup:
    if node_spec.node > 0:
        token = node_spec.token if node_spec.shared_directory else node_token(out, node_spec.token)
        assert token is not None
        return rendezvous.come(node_spec, token, description, seconds, notify)
    if node_spec.credentials is not None:
        mine, fresh = read(node_spec.credentials), False
    else:
        mine, fresh = host_credentials(out, node_spec.token)

    def notify_waiting(text: str) -> None:
        nonlocal fresh
        notify(text)
        if fresh:
            fresh = False
            notify(
                f"on the others the same command, but: --nodes {node_spec.nodes} --node 1 --rendezvous "
                f"{node_spec.rendezvous} --token {mine.token}"
            )

    return rendezvous.host(node_spec, mine, partial(_disagreement, description), seconds, notify_waiting)


def _disagreement(mine: Mapping[str, Any], theirs: Mapping[str, Any], node: int) -> str:
    """Why `node`, with its description, cannot take part in node 0's run; empty if it can."""
    try:
        value_of(theirs, "checkpoints", _Steps)
    except Unfit:
        return "it does not describe its run as isles does"
    if (theirs.get("checkpoints") is None) != (mine["checkpoints"] is None):
        commands = [
            "isles train" if description.get("checkpoints") is None else "isles resume"
            for description in (theirs, mine)
        ]
        return f"node {node} was started with `{commands[0]}`, node 0 with `{commands[1]}`: use the same on both"
    if different := differences(mine["config"], theirs.get("config"), "on node 0"):
        return (
            f"node {node} has another configuration: {different}: start all nodes with the same CONFIG.toml and flags"
        )
    if mine["out"] is not None and theirs.get("out") == mine["out"]:
        return f"node {node} writes into the same directory as node 0, {mine['out'][1]}: give each its own --out"
    return ""


def described(config: Config) -> dict[str, Any]:
    """The configuration as tables that are equal on all machines and in the run directory."""
    return parse_toml(to_toml(config, referenced_names(config)))


def differences(mine: Mapping[str, Any], theirs: Any, here: str) -> str:
    """The first differing keys, such as "run.steps = 20 there, 10 on node 0"; empty if none differ. here: of `mine`."""

    def flat(tables: Any) -> dict[str, Any]:
        sections = tables.items() if isinstance(tables, Mapping) else ()
        return {
            f"{section}.{key}": value
            for section, table in sections
            if isinstance(table, Mapping)
            for key, value in table.items()
        }

    own, other = flat(mine), flat(theirs)
    found = [
        f"{key} = {other.get(key, 'not set')!r} there, {own.get(key, 'not set')!r} {here}"
        for key in {**own, **other}
        if own.get(key) != other.get(key)
    ]
    return "; ".join(found[:_SHOWN]) + (f" (and {len(found) - _SHOWN} more keys)" if len(found) > _SHOWN else "")


def _common_step(mine: Mapping[str, Any], descriptions: Mapping[int, Any]) -> int:
    steps = {0: mine["checkpoints"], **{node: description["checkpoints"] for node, description in descriptions.items()}}
    common = set.intersection(*map(set, steps.values()))
    if not common:
        listed = "; ".join(f"node {node}: {', '.join(map(str, own)) or 'none'}" for node, own in steps.items())
        raise ValueError(f"no checkpoint is on all nodes (steps on {listed}): start again with `isles train`")
    return max(common)
