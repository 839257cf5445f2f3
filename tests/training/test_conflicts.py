"""The table of what does not go together: every row is of settings that there are, and speaks where it should."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from isles.base.tables import in_tables, keys_of
from isles.replicas import METHODS, config_of
from isles.training.config.conflicts import EXTERNAL_SITUATIONS, FOLLOW, Conflict, conflicts, refuse_conflicts
from isles.training.config.reading import resolve
from isles.training.config.sections import SECTIONS

STAGES: dict[str, Any] = {"pipeline.stages": 2, "pipeline.microbatches": 2, "data.batch_size": 8}
STAGES |= {"model.tie_embeddings": False}
SWARM = {**STAGES, "pipeline.routing": "swarm", "replicas.method": "none"}
CLUSTERS = {**STAGES, "pipeline.routing": "ravnest", "replicas.method": "localsgd", "pipeline.clip": "stage"}
VIRTUAL = {"world.backend": "virtual"}
SITUATIONS: dict[str, dict[str, Any]] = {
    "pipeline.stages > 1": STAGES,
    "pipeline.recovery.stage_loss": {**STAGES, "pipeline.recovery.stage_loss": 0.1, "replicas.method": "ddp"},
    "peers": SWARM,
    'pipeline.routing = "swarm"': SWARM,
    "pipeline.swarm.delay_updates": {"pipeline.swarm.delay_updates": 1},
    "diloco": {"replicas.method": "diloco"},
    "noloco": {"replicas.method": "noloco"},
    "a method with rounds": {"replicas.method": "diloco"},
    'pipeline.routing = "ravnest"': CLUSTERS,
    "several clusters": {"pipeline.ravnest.clusters": [[1], [1]], "world.workers": 4},
    "inner.max_norm": {"inner.max_norm": 1.0},
    "a robust mean of all workers": {"replicas.method": "diloco", "replicas.robust": "clip"},
    "a codec that drops entries": {"replicas.method": "diloco", "replicas.codec": "topk:64"},
    "islands": {"world.inner": 2},
    "a method of every step": {"replicas.method": "ddp"},
    "a method that is an optimizer": {"replicas.method": "demo", "inner.max_norm": 0.0},
    "replicas that are kept alike": {"replicas.method": "dct-dp", "inner.max_norm": 0.0},
    "replicas with weights of their own": {"replicas.method": "diloco"},
    "fsdp": {"replicas.method": "fsdp"},
    "memory.disk": {"memory.disk": "/tmp", "replicas.method": "ddp"},
    "a plan of memory": {"memory.method": "auto", "memory.machine": "H100", "replicas.method": "diloco"},
    'memory.vectors = "disk"': {"memory.vectors": "disk", "memory.disk": "/tmp"},
    'memory.update = "early"': {"memory.update": "early"},
    "workers that come and go": {"replicas.method": "diloco"},
    "clusters that come and go": {"replicas.method": "localsgd"},
    "--churn": VIRTUAL,
    "the virtual clock": VIRTUAL,
}
VALUES: dict[str, Any] = {
    "replicas.method": "demo",
    "inner.optimizer": "torch.optim:NAdam",
    "replicas.mixing": "groups",
    "replicas.cadence": "isles.replicas.parts.choices:EveryH",
    "replicas.fragments": "strided",
    "replicas.delay": "carry",
    "replicas.on_late": "quorum",
    "replicas.robust": "clip",
    "replicas.on_peer_failure": "raise",
    "replicas.on_broken": "leave out",
    "replicas.error_feedback": "local",
    "pipeline.clip": "model",
    "pipeline.boundary.kind": "dct:0.75",
    "pipeline.swarm.stage_lost": "rebuild",
    "pipeline.recovery.stage_loss": 0.1,
    "data.split": "by_file",
    "data.batch_mode": "global",
    "memory.method": "auto",
    "memory.vectors": "disk",
    "memory.disk": "/tmp",
    "run.loggers": ["tensorboard"],
    "run.start": "runs/other",
    "run.priced_as": "1B",
    "world.elastic.join_state": "anchors",
}
OF = {
    "replicas.mixing": "custom",
    "replicas.cadence": "custom",
    "replicas.delay": "dilocox",
    "replicas.reading": "custom",
    "replicas.outer_delay": "custom",
    "replicas.fragments": "custom",
    "replicas.overlap_steps": "streaming-diloco",
    "replicas.every_step_until": "postlocal-sgd",
    "replicas.on_peer_failure": "noloco",
}
"""A method that has the setting."""
ALONE = {"world.inside": {"world.inner": 2}, "memory.vectors": {"memory.disk": "/tmp"}}
ALONE |= {"pipeline.routing": SWARM, "pipeline.swarm.stage_lost": {"pipeline.stages": 3, "world.workers": 6}}
ALONE |= {"pipeline.recovery.stage_loss": {"replicas.method": "none"}}
ALONE |= {
    "replicas.cadence": {"replicas.options.cadence": {"sync_every": 3}},
    "replicas.reading": {"replicas.outer_delay": 1},
}
"""What a setting needs to be one."""


PAGE = Path(__file__).parents[2] / "docs" / "conflicts.md"
HEAD = """# What does not go together

`isles methods --legal` prints these tables too, and those of the parts of one method
([composing.md](composing.md)). A run with a combination that they name is refused with one line before anything starts.
Combinations that depend on numbers, such as a number of workers that does not fill whole replicas, are refused as well;
they are described with their settings.
"""


def page() -> str:
    """What docs/conflicts.md must be; `python -m tests.training.test_conflicts` writes it."""
    lines = [HEAD]
    for where, rows in groupby(conflicts(), key=lambda row: row.where):
        told = f" ({EXTERNAL_SITUATIONS[where[0]]})" if where[0] in EXTERNAL_SITUATIONS else ""
        lines += [
            f"With {' and '.join(one.strip('()') for one in where)}{told}:\n",
            "| not | because | instead |\n|---|---|---|",
        ]
        lines += [f"| `{row.what}` | {row.because} | {row.mend} |" for row in rows]
        lines.append("")
    return "\n".join(lines)


def test_the_page_is_the_table() -> None:
    assert PAGE.read_text() == page()


def test_the_table_is_of_what_there_is() -> None:
    keys = {f"{name}.{key}" for name, cls in SECTIONS.items() for key in keys_of(cls)} | {"replicas.method"}
    keys |= {f"replicas.{key}" for name in METHODS for key in keys_of(config_of(name))}
    for row in conflicts():
        assert {where.strip("()") for where in row.where} <= EXTERNAL_SITUATIONS.keys() | FOLLOW.keys()
        assert set(row.keys) <= keys, row
        assert row.because and row.mend
    said = Counter((row.where, key, row.goes, row.never) for row in conflicts() for key in row.keys)
    assert set(said.values()) == {1}
    known = EXTERNAL_SITUATIONS.keys() | FOLLOW.keys()
    assert {where.strip("()") for row in conflicts() for where in row.where} == known


def refused(row: Conflict, key: str) -> Any:
    """A value of `key` that does not go."""
    default: Any = resolve({})
    for name in key.split("."):
        default = getattr(default, name, None)
    other = (not default) if isinstance(default, bool) else default + 1 if isinstance(default, int | float) else 1
    values = [*row.never, VALUES.get(key), other, True]
    return next(value for value in values if value not in (None, "any", *row.goes))


ROWS = [
    (row, key)
    for row in conflicts()
    for key in row.keys
    if row.where[0] != "a plan of paths" and row.never != ("skippipe",)  # test_partial.py has plans
]


@pytest.mark.parametrize(("row", "key"), ROWS, ids=lambda one: one if isinstance(one, str) else one.situations)
def test_every_row_speaks(row: Conflict, key: str) -> None:
    settings: dict[str, Any] = {}
    for where in row.where:
        settings |= SITUATIONS.get(where.strip("()"), {})
    if key in OF:
        settings["replicas.method"] = OF[key]
    settings |= ALONE.get(key, {})
    if row.never[:1] != ("any",):
        settings[key] = refused(row, key)
    with pytest.raises(ValueError) as caught:
        refuse_conflicts(resolve(in_tables(settings)), *(where for where in row.where if where in EXTERNAL_SITUATIONS))
    message = str(caught.value)
    assert message.startswith(f"{key} = ")
    assert f" does not go with {row.situations}: {row.because}; {row.mend}" in message


if __name__ == "__main__":
    PAGE.write_text(page())
