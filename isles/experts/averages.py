"""One set of parameters out of several experts, to branch a new one from (Branch-Train-Merge, arXiv 2208.03306):

    theta = sum_j P(j) theta_j,    P(j): the mean posterior of expert j over validation text of the new domain

For experts of one shape that come from one seed. In OUT: model.safetensors, average.json (of which runs, in what
shares) and the config.toml of the first; enough for `run.start`, `isles eval` and `isles generate`. It is no run: it
has no summary.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

from isles.data import DataConfig
from isles.experts.domains import Domain, DomainText
from isles.experts.forest import ForestMember, Served
from isles.experts.routing.routing import CACHED_SEQUENCES, cached
from isles.training.records.saved_run import SavedRun
from isles.training.records.shard import save_model
from isles.training.records.writer import write_config

WEIGHTS = "model.safetensors"


def averaged(served: Served, shares: Sequence[float]) -> SavedRun:
    """The experts of `served` as one model. ValueError as `Served.average`."""
    first = served.runs[0]
    model = deepcopy(first.model)
    model.load_state_dict(served.average(shares))
    return replace(first, model=model)


def shares_on(served: Served, data: DataConfig) -> list[float]:
    """The experts' mean posterior on the text of `data`: on the part of its validation text that nothing is evaluated
    on.

    ValueError where it holds too little.
    """
    text = DomainText(Domain(name="new", path=data.path), data, served.context)
    return cached(served.scores(text.sequences("prior", CACHED_SEQUENCES)), statistic="mean").exp().tolist()


def write_average(served: Served, shares: Sequence[float], out: Path) -> None:
    """Keep the average in `out`; the weights come last, so where they are, all is. ValueError: `out` holds a model."""
    if (out / WEIGHTS).exists():
        raise ValueError(f"--out {out}: holds a model already; name another directory")
    one = averaged(served, shares)
    out.mkdir(parents=True, exist_ok=True)
    facts = {"of": served.names, "shares": list(shares)}
    (out / "average.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    write_config(one.config, out)
    save_model(one.model, out / WEIGHTS)


def make_average(parents: Sequence[str], folder: Path, out: Path, data: DataConfig) -> None:
    """The average of runs of `folder`, in the shares of their posterior on `data`, unless it is there already."""
    if (out / WEIGHTS).is_file():
        return
    served = Served.load([ForestMember(name=name, run=folder / name) for name in parents])
    write_average(served, shares_on(served, data), out)
