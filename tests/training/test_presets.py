"""Presets: each is a run that could start, and says what it is."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from isles.cli.settings import config as print_config
from isles.cli.train import train
from isles.models import parameters
from isles.plan.record import RunPlan
from isles.plan.run_plan import plan_run
from isles.training.config.presets import preset_file, presets
from isles.training.config.reading import read_config

NAMES = list(presets())


PAPERS = ("noloco-small", "diloco-60m")  # which are planned once, where their numbers are looked at too
LARGE = ("noloco-medium", "noloco-large", "two-datacentres")  # whose replays take seconds


@cache
def plan_of(name: str) -> RunPlan:
    """The preset's dry run on the virtual clock."""
    config = read_config(str(preset_file(name)), {}, [])
    return plan_run(replace(config, world=replace(config.world, backend="virtual")))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.long if n in LARGE else ()) for n in NAMES if n not in PAPERS]
)
def test_a_preset_resolves_and_can_be_planned(name: str) -> None:
    check(name)


def test_every_preset_is_read() -> None:
    for name, text in presets().items():
        assert read_config(str(preset_file(name)), {}, []).run.steps > 100, name
        assert 20 < len(text) < 120


def check(name: str) -> None:
    """Its dry run refuses nothing, warns of nothing, and computes most of the time on the links that it is for."""
    planned = plan_of(name)
    assert planned.outline.rounds >= (20 if name == "dilocox-clusters" else 100)
    short = ("diloco-60m", "dilocox-clusters")  # 176 rounds in the paper too, where its momentum wants 200; a small one
    assert not planned.notices or name in short
    assert planned.time is not None and planned.time.utilisation is not None
    assert planned.time.utilisation > 0.9 or name in short or name.startswith("noloco")  # no links of their own


@pytest.mark.long
def test_the_papers_presets_have_the_papers_numbers() -> None:
    """Tokens of a step, steps, rounds and sizes, worked out from the papers' tables."""
    noloco, diloco = (read_config(str(preset_file(name)), {}, []) for name in ("noloco-small", "diloco-60m"))
    for name in PAPERS:
        check(name)
    planned = plan_of("noloco-small")
    assert (planned.tokens_per_step, planned.config.run.steps, planned.outline.rounds) == (2**19, 25_000, 500)
    assert (noloco.inner.lr, noloco.inner.lr * noloco.inner.final_lr_fraction) == pytest.approx((6e-4, 6e-5))
    assert noloco.replicas.pull == 0.7  # type: ignore[attr-defined]
    planned = plan_of("diloco-60m")
    assert (planned.tokens_per_step, planned.outline.rounds) == (8 * 512 * 1024, 176)
    assert parameters(diloco.model.shape()) == pytest.approx(60e6, rel=0.05)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "replicas", "stages", "tokens"),
    [("noloco-medium", 8, 2, 2**20), pytest.param("noloco-large", 16, 4, 2**21, marks=pytest.mark.long)],
)
def test_the_papers_presets_in_stages(name: str, replicas: int, stages: int, tokens: int) -> None:
    """Table 1 and 2 of NoLoCo's paper."""
    config = read_config(str(preset_file(name)), {}, [])
    planned = plan_run(config)
    assert (config.replicas_in_all, len(planned.workers), config.pipeline.routing) == (replicas, stages, "random")
    assert (planned.tokens_per_step, planned.config.run.steps, planned.outline.rounds) == (tokens, 25_000, 500)
    assert sum(stage.parameters for stage in planned.workers) == planned.parameters


def test_the_command_lists_and_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    print_config(presets=True)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == NAMES
    print_config(preset="home-links")
    assert capsys.readouterr().out == preset_file("home-links").read_text()
    with pytest.raises(ValueError, match="did you mean 'home-links'"):
        print_config(preset="home-link")
    with pytest.raises(ValueError, match="give one of them"):
        print_config(preset="home-links", presets=True)


def test_a_preset_stands_where_a_file_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Flags and --set win over it; a file beside it is refused."""
    train(preset="home-links", steps=300, set_=["model.size=0.53M"], dry_run=True)
    out = capsys.readouterr().out
    assert "noloco, 8 workers, 300 steps" in out and "0.53M" in out
    with pytest.raises(ValueError, match="give one of the two"):
        train(config="my.toml", preset="home-links", dry_run=True)
    with pytest.raises(ValueError, match="--probe goes with --dry-run"):
        train(probe=True)
