"""`--as`: time and bytes of a run as if its model were a larger one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from isles.cli import app
from isles.models.config import ModelConfig
from isles.models.sizes import SIZES, parameters
from isles.plan.methods import plan_methods
from isles.plan.question import PlanQuestion, candidates
from isles.plan.run_plan import named, priced
from isles.training.config.reading import read_config
from isles.training.simulated_churn import trace_of
from tests.training.runs import ROWS, TINY, write_rows, write_text


def agree(name: str, codec: str, size: str, network: str, steps: int, every: int) -> None:
    """The seconds and bytes of a small run, priced, and those of `isles plan` for the shape, which knows no run."""
    workers, seconds = 4, 2.5
    one = next(one for one in candidates(name) if one.replicas.get("codec", "none") == codec)
    words = [*TINY, "data.path=isles/network", f"replicas.sync_every={every}", f"run.steps={steps}"]
    words = [word for word in words if name != "ddp" or "sync_every" not in word]
    words += [f"replicas.{word.replace(' ', '')}" for word in one.settings.split(", ") if word]
    flags = {"replicas.method": name, "world.workers": workers, "world.virtual.links": network}
    found = priced(read_config(None, flags, words, shared=True), f"{size}, {seconds}s")
    question = PlanQuestion(
        model=ModelConfig(size=size),
        step_seconds=seconds,
        workers=workers,
        network=network,
        tokens=steps,
        step_tokens=1,
    )
    (plan,) = plan_methods(question, every=every, among=[one]).plans
    assert plan.hours is not None
    assert found["virtual_seconds"] == pytest.approx(3600 * plan.hours, rel=0.01), (name, codec, network)
    sent = steps * plan.bytes_a_step
    sent += 4 * question.parameters * (workers - 1) / workers  # worker 0's weights, down a tree
    assert found["priced_bytes_per_worker"] == pytest.approx(sent, rel=0.01), (name, codec, network)


@pytest.mark.parametrize(
    ("network", "name", "codec"),
    [
        (
            "datacentres",
            "diloco",
            "int8",
        ),  # over 30 ms each segment of a mean waits for its answer: their number counts
        ("worldwide", "noloco", "none"),  # anchors that are late share lines with what pairs exchange next
        ("home-fibre", "streaming-noloco", "none"),
    ],
)
def test_seconds_and_bytes_are_those_of_isles_plan(network: str, name: str, codec: str) -> None:
    agree(name, codec, "1B", network, 60, 20)


@pytest.mark.long
@pytest.mark.parametrize("network", ["datacentres", "home-fibre", "worldwide"])
@pytest.mark.parametrize(
    ("name", "codec"),
    [
        ("ddp", "none"),
        ("ddp", "int8"),
        ("diloco", "none"),
        ("diloco", "int8"),
        ("noloco", "none"),
        ("streaming-diloco", "fp4"),
        ("streaming-noloco", "none"),
        ("eager", "none"),
        ("sparseloco", "topk:64+int2"),
    ],
)
def test_as_1b(name: str, codec: str, network: str) -> None:
    agree(name, codec, "1B", network, 8 if name == "ddp" else 60, 20)


def trained(folder: Path, name: str, *more: str) -> tuple[dict[str, Any], str]:
    settings = [f"data.path={write_text(folder / 'text.txt')}", "data.batch_size=1", "data.validation_sequences=2"]
    settings += [
        "world.virtual.links=10Mbit/s, 20ms",
        "world.backend=virtual",
        "replicas.sync_every=2",
        "run.validate_every=0",
    ]
    words = [word for one in settings for word in ("--set", one)]
    words += ["--method", "diloco", "--workers", "2", "--out", str(folder / name), *more]
    done = CliRunner().invoke(app, ["train", *words])
    assert done.exit_code == 0, done.output
    return json.loads((folder / name / "summary.json").read_text()), done.stdout


def test_a_run_priced_as_itself(tmp_path: Path) -> None:
    """Its own model and step: its own clock, from the first step to the last one. As a larger one: the losses and bytes
    of the run, the clock of the other; the title says so, on every page.
    """
    (own, _), (longer, _) = (trained(tmp_path, name, "--steps", name) for name in ("4", "8"))
    same = [priced(read_config(str(tmp_path / name / "config.toml"), {}, []), "0.12M, 100ms") for name in ("4", "8")]
    more = same[1]["virtual_seconds"] - same[0]["virtual_seconds"]  # before the first step and after the last are alike
    assert more == pytest.approx(longer["virtual_seconds"] - own["virtual_seconds"], rel=0.01)
    large, said = trained(tmp_path, "large", "--steps", "4", "--as", "35M, 100ms")
    kept = ("val_loss", "bytes_sent_per_worker", "parameters", "replica_std")
    assert [large[key] for key in kept] == [own[key] for key in kept]
    assert large["priced_bytes_per_worker"] > 100 * own["bytes_sent_per_worker"]
    assert large["virtual_seconds"] > 50 * own["virtual_seconds"]
    assert "priced as 35M" in " ".join(said.split())
    assert "priced as 35M" in (tmp_path / "large" / "report.html").read_text()
    ids = json.dumps(str(write_rows(tmp_path / "rows.jsonl")))
    on_ids = read_config(str(tmp_path / "4" / "config.toml"), {}, [*ROWS, f"data.path={ids}"])
    assert priced(on_ids, "35M, 100ms")["virtual_seconds"] == large["virtual_seconds"]  # whatever its vocabulary
    words = ["compare", str(tmp_path / "4"), "--as", "35M, 100ms", "--out", str(tmp_path / "page")]
    done = CliRunner().invoke(app, [*words, "--over", "10Mbit/s, 20ms", "--over", "1Gbit/s, 1ms"])
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "page" / "compare.json").read_text())
    assert list(rows) == ["diloco@world.virtual.links=10Mbit/s, 20ms", "diloco@world.virtual.links=1Gbit/s, 1ms"]
    slow, fast = (row[0]["virtual_seconds"] for row in rows.values())
    assert slow == large["virtual_seconds"] > 20 * fast  # without training again
    assert "priced as 35M" in (tmp_path / "page" / "report.html").read_text() and "sent as priced" in done.stdout


@pytest.mark.parametrize(
    ("text", "more", "said"),
    [
        ("2B", [], "'2B' is not known"),
        ("1B, A1000", [], "did you mean"),
        ("1B, A100, 3, 4", [], 'write it as "1B"'),
        ("1B, 2", [], "has no unit"),
        ("0.12M, 0s", [], "a step of 0 s"),
        ("1B", ["world.virtual.step_jitter=0.1"], "world.virtual.step_jitter makes the run depend on time"),
        ("1B", ["world.virtual.pause_every=60"], "world.virtual.pause_every makes the run depend on time"),
    ],
)
def test_refused(text: str, more: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        priced(read_config(None, {"replicas.method": "diloco"}, [*TINY, "data.path=isles/network", *more]), text)


def test_where_it_is_no_setting() -> None:
    words = [*TINY, "data.path=isles/network", "run.priced_as=1B"]
    with pytest.raises(ValueError, match="come and go the run depends on time"):
        trace_of(read_config(None, {"replicas.method": "diloco"}, words), "10%/h")
    with pytest.raises(ValueError, match="of the virtual clock"):
        read_config(None, {"replicas.method": "diloco"}, [*words, "world.backend=distributed"])


def test_a_step_of_the_named_hardware() -> None:
    """6 operations a parameter and token, at 40 % of the peak that the makers state."""
    for text, peak, tokens in (("1B", 989e12, 131072), ("1B, A100", 312e12, 131072), ("1B, L4, 2k", 121e12, 2000)):
        assert named(text) == ("1B", pytest.approx(6 * parameters(SIZES["1B"]) * tokens / (0.4 * peak)))
