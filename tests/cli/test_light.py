"""What answers without torch: help, settings, tables of methods, reports, and the lighthouse's reading of its run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from isles.replicas import METHODS, config_of, method
from isles.training.config.reading import template
from tests.report.sample import write_sample

WALK = """
import json, sys
from typer.main import get_command
from isles import cli, report

def pages(command, *words):
    yield [*words, "--help"]
    for name, below in getattr(command, "commands", {}).items():
        yield from pages(below, *words, name)

told = json.loads(sys.argv[1])
for words in [*told, *pages(get_command(cli.app))]:
    sys.argv = ["isles", *words]
    try:
        cli.main()
    except SystemExit as ended:
        assert not ended.code, (words, ended.code)
    assert not {"torch", "numpy", "resvg_py"} & sys.modules.keys(), words
print("walked")
"""
READ = """
import json, sys
from isles.cli.elastic.lighthouse import _drawn_up
from isles.training.elastic.support import rules

for config, assignments in json.loads(sys.argv[1]):
    rules(_drawn_up(config, {"world.workers": 4}, assignments, None)[0])
    assert not {"torch", "numpy"} & sys.modules.keys(), (config, assignments)
print("read")
"""


def run(program: str, told: object, folder: Path) -> str:
    """The last line of a process of its own."""
    words = [sys.executable, "-c", program, json.dumps(told)]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


def test_commands_that_compute_nothing_load_no_torch(tmp_path: Path) -> None:
    """Every page of help, too."""
    (tmp_path / "run").mkdir()
    write_sample(tmp_path / "run", steps=5)
    told = [["methods"], ["methods", "--legal"], ["config", "--presets"], ["report", "run"]]
    told += [["config", "--method", name] for name in ("none", "ddp", "diloco", "noloco", "custom", "demo", "ist")]
    assert run(WALK, told, tmp_path) == "walked"


def test_a_lighthouse_reads_its_run_without_torch(tmp_path: Path) -> None:
    """Whatever method, and routing, it names; the model of Isles' own."""
    (tmp_path / "noloco.toml").write_text(template("noloco"))
    swarm = ["pipeline.routing=swarm", "pipeline.stages=2", "model.tie_embeddings=false"]
    told: list[tuple[str | None, list[str]]] = [
        ("noloco.toml", ["run.tokens=1000000"]),
        (None, ["replicas.method=diloco", "replicas.codec=topk:64+int4", "replicas.error_feedback=local"]),
        (None, ["replicas.method=custom", "replicas.fragments=whole"]),
        (None, ["replicas.method=none", *swarm]),
        (None, ["replicas.method=diloco", *swarm]),
        (None, ["replicas.method=localsgd", *swarm[1:], "pipeline.routing=ravnest", "pipeline.clip=stage"]),
    ]
    assert run(READ, told, tmp_path) == "read"


def test_the_settings_of_a_method_are_those_of_its_class() -> None:
    """METHODS names both, and so does the class. Without the class it is known which methods workers may come and go
    under.
    """
    from isles.replicas.config import OuterConfig

    for name in METHODS:
        assert config_of(name) is method(name).Config
        assert issubclass(config_of(name), OuterConfig) == method(name).follows_roster
