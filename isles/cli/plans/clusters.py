"""`isles plan clusters`: which nodes share a copy of the model, and where it is cut among them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isles.base.errors import unknown_name
from isles.base.tables import in_tables
from isles.cli.terminal import AsJson, Set, print_table
from isles.report.panels import Table
from isles.report.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from isles.network.clusters import ClusterNode, ModelLoad, NodeCluster
    from isles.training.config.sections import Config


def plan_clusters(
    nodes: Annotated[
        str, typer.Argument(metavar="NODES.toml", help="The nodes' own tables, as `isles doctor --describe` prints.")
    ],
    config: Annotated[
        str | None, typer.Option(help="Whose model and batches; default: the built-in run's, untied.")
    ] = None,
    assignments: Set = None,
    clusters: Annotated[int, typer.Option(help="How many at most.")] = 5,
    by: Annotated[
        str, typer.Option(help="Cut so that the slowest stage is fast: time; or the fullest, empty: memory.")
    ] = "time",
    seed: Annotated[int, typer.Option(help="Of the search, above eight nodes.")] = 0,
    json: AsJson = False,
    write: Annotated[Path | None, typer.Option(help="Also write the whole run as a new CONFIG.toml.")] = None,
) -> None:
    """Put unequal nodes into clusters that hold one copy of the model each, and print the settings of such a run."""
    from isles.network.clusters import SPLITS, form_clusters, read_nodes

    if by not in SPLITS:
        raise ValueError(unknown_name("--by", by, SPLITS))
    if clusters < 1:
        raise ValueError(f"--clusters {clusters}: choose 1 or more")
    if write is not None and write.exists():
        raise ValueError(f"--write {write}: exists already; name a new file")
    described, load = read_nodes(nodes), _load(_run(config, {}, assignments))
    try:
        made = form_clusters(described, load, most=clusters, by=by, seed=seed)
    except ValueError as error:
        raise ValueError(f"{nodes}: {error}") from None
    settings = _settings(made)
    if json:
        cuts = [list(cluster.split.cuts) for cluster in made]
        describe_nodes = [asdict(node) for node in described]
        print(dumps({"nodes": describe_nodes, "ranks": _rows(described, made), "pipeline.ravnest.clusters": cuts}))
    else:
        import tomlkit

        _show(described, load, made)
        print("\n" + tomlkit.dumps(in_tables(settings)).rstrip())
    if write is not None:
        from isles.training.config.reading import to_toml

        try:
            write.write_text(to_toml(_run(config, settings, assignments)), encoding="utf-8")
        except OSError as error:
            raise ValueError(f"--write {write}: cannot be written ({error.strerror}); name another file") from error
        print(write, file=sys.stderr if json else sys.stdout)


def _run(config: str | None, settings: Mapping[str, Any], assignments: Sequence[str] | None) -> Config:
    """The run of CONFIG, or the built-in one, with these settings and what --set says."""
    from isles.training.config.reading import read_config

    flags: dict[str, Any] = {} if config is not None else {"model.tie_embeddings": False}
    return read_config(config, {**flags, **settings}, assignments or [])


def _settings(made: Sequence[NodeCluster]) -> dict[str, Any]:
    """Of a run in these clusters; where each is one node, that is plain `localsgd`."""
    cuts = [list(cluster.split.cuts) for cluster in made]
    clusters = {"routing": "ravnest", "ravnest.clusters": cuts, "recompute": True, "clip": "stage"} if any(cuts) else {}
    return {
        "replicas.method": "localsgd",
        **{f"pipeline.{key}": value for key, value in clusters.items()},
        "world.workers": sum(len(cluster.nodes) for cluster in made),
    }


def _load(read: Config) -> ModelLoad:
    from isles.models import limits, sketch
    from isles.models.cuts import decoder_costs
    from isles.models.stages import costs_of, is_tied, load_of
    from isles.training.config.inner import most_moments

    model = sketch(read.model)
    if is_tied(model):
        raise ValueError(
            "model.tie_embeddings = true: the embedding is the head as well, and they lie at two ends of a cluster; "
            "set it to false"
        )
    costs = costs_of(model) if read.model.own is not None else decoder_costs(read.model.shape())
    sequences = max(1, read.data.batch_size // read.pipeline.microbatches)
    states = float(most_moments(read.inner, "adamw"))
    return load_of(model, costs, sequences=sequences, length=limits(read.model).context, states=states)


def _rows(nodes: Sequence[ClusterNode], made: Sequence[NodeCluster]) -> list[dict[str, Any]]:
    """A node each, by cluster and stage, which is the order of the ranks."""
    rows = []
    for number, cluster in enumerate(made):
        for stage, node in enumerate(cluster.nodes):
            rows.append(
                {
                    "rank": len(rows),
                    "node": nodes[node].name,
                    "cluster": number,
                    "stage": stage,
                    "first_block": (0, *cluster.split.cuts)[stage],
                    "seconds": cluster.split.seconds[stage],
                    "memory": cluster.split.fills[stage],
                }
            )
    return rows


def _show(nodes: Sequence[ClusterNode], load: ModelLoad, made: Sequence[NodeCluster]) -> None:
    heads = ["node", "rank", "cluster", "stage", "blocks from", "a microbatch", "memory"]
    rows = []
    for row in _rows(nodes, made):
        cells_before = [str(row[key]) for key in ("rank", "cluster", "stage", "first_block")]
        rows.append([row["node"], *cells_before, format_seconds(row["seconds"]), f"{100 * row['memory']:.3g} %"])
    print_table(Table(heads=heads, rows=rows, names=1))
    slowest, fastest = max(one.seconds for one in made), min(one.seconds for one in made)
    if not any(cluster.split.cuts for cluster in made):
        print("\nevery node holds a whole model, so none is cut")
    print(
        f"\n{len(made)} clusters; one copy of the model takes {format_bytes(load.least)} or more; the slowest cluster "
        f"takes {slowest / fastest:.3g} times as long for a microbatch as the fastest"
    )
