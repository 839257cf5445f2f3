"""`isles plan clusters` and `isles doctor --describe`, in this process: what they print, and what they refuse."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from isles.cli.doctor import doctor
from isles.cli.plans.clusters import plan_clusters as plan
from isles.network.clusters import ClusterNode
from isles.plan.run_plan import refuse
from isles.training.clusters import stage_server as describing
from isles.training.config.reading import read_config

UNTIED = ["model.layers=6", "model.tie_embeddings=false"]


@pytest.fixture
def nodes(tmp_path: Path) -> str:
    path = tmp_path / "nodes.toml"
    made = [ClusterNode(name=f"n{n}", memory=8e6 * n, speed=1e10 * n, bandwidth=4e7) for n in range(1, 6)]
    path.write_text("".join(node.to_toml() for node in made))
    return str(path)


def test_a_plan_prints_the_settings_of_its_run(nodes: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan(nodes, assignments=UNTIED)
    words = capsys.readouterr().out
    settings = tomllib.loads(words[words.index("[replicas]") :])
    cuts = settings["pipeline"]["ravnest"]["clusters"]
    assert settings["world"]["workers"] == 5 == sum(len(own) + 1 for own in cuts)
    assert all(f"n{number}" in words for number in range(1, 6))

    plan(nodes, assignments=UNTIED, json=True)
    told = json.loads(capsys.readouterr().out)
    assert told["pipeline.ravnest.clusters"] == cuts
    assert [row["rank"] for row in told["ranks"]] == list(range(5))
    assert all(row["memory"] <= 1 for row in told["ranks"])


@pytest.mark.parametrize("size", [6, 2])
def test_what_it_writes_is_a_run(nodes: str, tmp_path: Path, size: int) -> None:
    """In clusters, or of whole models where every node holds one."""
    path, own = tmp_path / "run.toml", [f"model.layers={size}"]
    plan(nodes, assignments=own, write=path)
    run = read_config(str(path), {}, [])
    assert (run.method, run.world.workers, run.model.layers) == ("localsgd", 5, size)
    assert run.pipeline.routing == ("ravnest" if size == 6 else "fixed")
    refuse(run)
    with pytest.raises(ValueError, match="exists already"):
        plan(nodes, assignments=own, write=path)


@pytest.mark.parametrize(
    ("assignments", "options", "words"),
    [
        (["model.size=100M", "model.tie_embeddings=false"], {}, "5 nodes offer 0.12 GB, one copy of the model takes"),
        (["model.tie_embeddings=true"], {}, "model.tie_embeddings = true: the embedding is the head as well"),
        (UNTIED, {"by": "tim"}, "unknown --by 'tim': did you mean 'time'?"),
        (UNTIED, {"clusters": 0}, "--clusters 0: choose 1 or more"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(
    nodes: str, assignments: list[str], options: dict[str, object], words: str
) -> None:
    with pytest.raises(ValueError) as error:
        plan(nodes, assignments=assignments, **options)  # type: ignore[arg-type]
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_machine_describes_itself(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(describing, "_FOR", 0.0)
    doctor(describe=True)
    (table,) = tomllib.loads(capsys.readouterr().out)["node"]
    assert table.keys() == {"name", "memory", "speed"}
    assert table["memory"] > 1e6 and float(table["speed"].removesuffix("G")) > 0
    with pytest.raises(ValueError, match="--describe: goes with --peer alone"):
        doctor(describe=True, listen="29400")
