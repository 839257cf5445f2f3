"""Going on with clusters whose nodes came and went: the checkpoint of those who were left made into one of a world of
fixed size, in the same place.

    shards by rank of all who ever came -> shards of those who were left, cluster after cluster, then who stands by
    config.toml                         -> pipeline.ravnest.clusters, world.workers as they were then

Weights, moments, draws and the place in the text keep their bits: where two clusters or more were there and all of
them whole, the run goes on to the same bits as if nobody had come or gone since. Clusters that were not whole are no
more: who is left of them stands by, and the others read their text.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from isles.data.loader import resharded
from isles.durable import write_text
from isles.pipeline.config import PipelineConfig
from isles.pipeline.ravnest.seats import ClusterSeats
from isles.tables import changed
from isles.training.config.reading import to_toml
from isles.training.config.sections import Config
from isles.training.records.checkpoint import Checkpoints
from isles.training.records.lock import RunLock
from isles.training.records.reshard.stages import run_facts
from isles.training.records.shard import State

POSITIONS = "positions"
"""In a manifest: of how many workers, whenever they came, the ranks of its shards are numbers."""


def reshard_clusters(run: Path, step: int, config: Config, workers: int | None) -> tuple[Config, int, list[str]]:
    """Make the checkpoint of `run` after `step` one of those who were left: the configuration with which it is gone on
    from, the step, and what a user should know. workers: that were asked for, if any. ValueError where it cannot be;
    then nothing is changed.
    """
    checkpoints = Checkpoints(run)
    manifest, saved = checkpoints.manifest(step), checkpoints.seats(step)
    plain = checkpoints.read_shard(step, saved[0])["seats"]
    told = ClusterSeats.of_plain(plain, int(manifest[POSITIONS]))
    seats = told.without(set(told.living) - set(saved))
    if not seats.whole:
        raise ValueError(f"{run}: after step {step} no cluster was whole; name an earlier step with --step")
    nodes = [position for number in seats.whole for position in seats.clusters[number]]
    aside = [position for position in seats.living if position not in nodes]
    dropped = aside if len(seats.whole) == 1 else []  # one cluster alone has nobody to load from
    kept = nodes + [position for position in aside if position not in dropped]
    if workers not in (None, len(kept)):
        raise ValueError(f"--workers {workers}: after step {step} {len(kept)} were left; leave it out")
    now = seats.without(dropped).renumbered(kept)
    after = _config(config, now, kept)
    with RunLock(run):
        states = (_state(checkpoints.read_shard(step, position), number, now) for number, position in enumerate(kept))
        checkpoints.replace(step, states, run_facts(after))
        write_text(run / "config.toml", to_toml(after))
    clusters = f"{len(now.clusters)} cluster{'s' * (len(now.clusters) > 1)}"
    notes = [
        f"going on with the {len(kept)} workers that were left after step {step}, in {clusters}; from here on nobody "
        "comes or leaves",
        f"workers {', '.join(map(str, kept))} are 0 to {len(kept) - 1} now",
    ]
    if dropped:
        notes.append(f"workers {', '.join(map(str, dropped))} stood by: there is no second cluster to load from")
    return after, step, notes


def _config(config: Config, seats: ClusterSeats, kept: Sequence[int]) -> Config:
    """Of a world of those alone."""
    given = config.world.virtual.step_factors
    factors = list(islice(cycle(given or (1.0,)), max(kept) + 1))
    now = {"world.workers": len(kept), "pipeline.stages": 1, "pipeline.cut": ()}
    now |= {"world.virtual.step_factors": tuple(factors[position] for position in kept) if given else ()}
    now |= {"pipeline.ravnest.clusters": seats.cuts, "pipeline.ravnest.spares": 0}
    return changed(config, now | {"pipeline.together": PipelineConfig.together})


def _state(state: State, number: int, seats: ClusterSeats) -> State:
    """That of worker `number` of now."""
    place, serving = seats.place(number), state["serving"]
    if place is not None and serving is None:
        raise ValueError("the checkpoint was written while a worker was lost: name an earlier one with --step")
    transport: dict[str, Any] = state["transport"]
    if "clock" in transport:
        transport = {**transport, "messages": {}, "latest": []}  # to others than now
    loader = None if serving is None else serving["loader"]
    if loader is not None:
        shared = resharded(loader, workers=len(seats.clusters), batch_size=loader["batch_size"])
        serving = {**serving, "loader": {**shared, "consumed": state["read"]}}
    return {
        **state,
        "serving": serving if place is not None else None,
        "seats": seats.to_plain(),
        "transport": transport,
    }
