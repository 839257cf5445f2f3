"""Where each cluster of a run cuts the model, and which worker holds what of it."""

from __future__ import annotations

from isles.models import sketch
from isles.models.cuts import decoder_costs
from isles.models.stages import Stage
from isles.pipeline.pipeline import Cut, cut_of
from isles.pipeline.ravnest.refinement import SharedSegment, refinement
from isles.training.config.sections import Config
from isles.training.staged import planned_cut


def cluster_cuts(config: Config) -> list[Cut]:
    """Of every cluster. ValueError for a model that cannot be cut there."""
    if not config.pipeline.clusters:
        return [planned_cut(config)] * config.replicas_in_all
    model, costs = sketch(config.model), None
    if config.model.own is None:
        costs = decoder_costs(config.model.shape())
    return [cut_of(model, len(cuts) + 1, costs=costs, cut=cuts, loss_at="last") for cuts in config.pipeline.clusters]


def ranks_of(cuts: list[Cut]) -> list[list[int]]:
    """Of each cluster, in the order of its stages."""
    found: list[list[int]] = []
    for cut in cuts:
        first = found[-1][-1] + 1 if found else 0
        found.append(list(range(first, first + len(cut.pieces))))
    return found


def shared_segments(config: Config, cuts: list[Cut]) -> list[SharedSegment]:
    """What is averaged over whom: which stage of each cluster."""
    model = sketch(config.model)
    named: dict[tuple[int, ...], list[list[str]]] = {}
    held = []
    for cut in cuts:
        key = tuple(piece.blocks.start for piece in cut.pieces)
        if key not in named:
            named[key] = [[name for name, _ in Stage(model, piece).named_parameters()] for piece in cut.pieces]
        held.append(dict(enumerate(named[key])))
    return refinement(held)
