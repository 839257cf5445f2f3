"""Runs by a plan, from CONFIG to summary: resumed to the same bits, judged in full order, and what is refused."""

from __future__ import annotations

import json
import shutil
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks._reference import paths_of
from isles import cli
from isles.network.links import read_links
from isles.network.routing.plan import PipelinePlan, as_json, delays_of, fingerprint, read_plan
from isles.network.routing.problem import RoutingProblem, replay_paths
from isles.network.routing.search import blind
from isles.running.run import launch
from isles.training.config.conflicts import plan_of
from isles.training.config.reading import read_config, run_name
from isles.training.config.trust import settled
from isles.training.records.saved_run import load_saved
from tests.network.routing.instances import drawn, reference
from tests.training.runs import Told, metrics, run, tiny, without_clocks, write_text
from tests.training.test_stage_loss import CHANCE, STEPS, seed_of

SIZES = (2, 1, 2)


def write_links(folder: Path, problem: RoutingProblem) -> Path:
    """A network of lines that take the problem's delays."""
    rows = ", ".join(str([f"{seconds!r}s" for seconds in row]) for row in problem.delays)
    path = folder / "links.toml"
    path.write_text(f'bandwidth = "1e18Tbit/s"\nlatency = [{rows}]\n')
    return path


def write_plan(folder: Path, problem: RoutingProblem, paths: Any = None, **changes: Any) -> PipelinePlan:
    """plan.json and links.toml in `folder`."""
    links = read_links(str(write_links(folder, problem)))
    problem = replace(problem, delays=delays_of(links, problem.nodes, 1))
    made = PipelinePlan(
        problem=problem, paths=paths or blind(problem, 1), links=fingerprint(links, problem.nodes), **changes
    )
    (folder / "plan.json").write_text(as_json(made))
    return made


def words(folder: Path, made: PipelinePlan) -> list[str]:
    own, stages = made.problem.memory * made.problem.waves, len(made.problem.stages)
    return [
        f"model.layers={stages}",
        f"pipeline.stages={stages}",
        f"pipeline.microbatches={own}",
        f"data.batch_size={own}",
        "pipeline.routing=skippipe",
        f"pipeline.skippipe.plan={folder / 'plan.json'}",
        f"world.virtual.links={folder / 'links.toml'}",
        "run.log_every=1",
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_text(tmp_path / "text.txt")
    return tmp_path


def small() -> RoutingProblem:
    return drawn(3, SIZES, path_length=2, memory=2, waves=1)


def config_of(folder: Path, made: PipelinePlan, *more: str, steps: int = 4, **given: Any):
    asked = {"method": "ddp", "workers": made.problem.nodes, **given}
    return tiny(folder / "text.txt", *words(folder, made), *more, steps=steps, **asked)


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("ddp", []),
        pytest.param("diloco", ["replicas.sync_every=3"], marks=pytest.mark.long),
        pytest.param("noloco", ["replicas.sync_every=3"], marks=pytest.mark.long),
        pytest.param("demo", [], marks=pytest.mark.long),
    ],
)
def test_a_run_by_a_plan_goes_on_elsewhere_with_the_same_bits_and_is_judged_in_full_order(
    folder: Path, method: str, more: list[str]
) -> None:
    made = write_plan(folder, small())
    whole, copy, told = folder / "whole", folder / "copy", Told()
    config = config_of(
        folder, made, "run.checkpoint_every=2", "pipeline.skippipe.gradients=visits", *more, method=method
    )

    def spoil(line: dict[str, Any]) -> None:  # the run has its own by now
        for name in ("plan.json", "links.toml"):
            (folder / name).write_text("of another run by now")

    launch(config, whole, spoil, told.notices.append)
    summary = json.loads((whole / "summary.json").read_text())
    weights = load_file(whole / "model.safetensors")
    assert summary["stages"] == 3 and summary["parameters"] == sum(own.numel() for own in weights.values())
    if method != "noloco":  # whose replicas differ from the one model
        # As many rows as the one model is judged on by itself, in the order of all its blocks.
        assert summary["val_loss"] == pytest.approx(summary["val_loss_replicas"], abs=1e-6)
    assert load_saved(whole).model is not None
    shutil.copytree(whole, copy)
    (copy / "summary.json").unlink()
    again = read_config(str(copy / "config.toml"), {}, [])
    assert again.pipeline.skippipe.plan == str(copy / "plan.json") and run_name(again) == run_name(config)
    launch(again, copy, told.lines.append, told.notices.append, resume=2)
    lines = [sorted(str(without_clocks(line)) for line in metrics(one)) for one in (whole, copy)]
    assert lines[0] == lines[1]
    assert (copy / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_a_run_that_never_began_leaves_no_copies(folder: Path) -> None:
    config = config_of(folder, write_plan(folder, small()))
    (folder / "run").mkdir()
    with pytest.raises(RuntimeError), settled(config, folder / "run") as own:
        assert Path(own.pipeline.skippipe.plan) == folder / "run" / "plan.json" != Path(config.pipeline.skippipe.plan)
        assert Path(own.world.virtual.links).read_bytes() == (folder / "links.toml").read_bytes()
        raise RuntimeError
    assert not list((folder / "run").iterdir())


@pytest.mark.long
@pytest.mark.parametrize("method", ["ddp", "diloco"])
def test_real_processes_compute_the_same_bits_by_a_plan(folder: Path, method: str) -> None:
    made = write_plan(folder, small())
    more = ["replicas.sync_every=2"] if method == "diloco" else []
    run(config_of(folder, made, *more, method=method), folder / "virtual")
    words = ["world.backend=distributed", "world.virtual.links=home-fibre", *more]
    run(config_of(folder, made, *words, method=method), folder / "real")
    virtual, real = (load_file(folder / name / "model.safetensors") for name in ("virtual", "real"))
    assert all(torch.equal(virtual[name], real[name]) for name in virtual)


def test_a_round_after_each_step_of_sgd_is_the_mean_gradient_and_rare_rounds_leave_the_plans_seconds(
    folder: Path,
) -> None:
    made = write_plan(folder, small())
    plain = ["inner.optimizer=sgd", "inner.lr=0.1", "inner.max_norm=0.0"]
    run(config_of(folder, made, *plain, steps=3), folder / "ddp")
    run(config_of(folder, made, "replicas.sync_every=1", *plain, steps=3, method="localsgd"), folder / "each")
    one, other = (load_file(folder / name / "model.safetensors") for name in ("ddp", "each"))
    assert all(torch.allclose(one[name], other[name], rtol=0, atol=1e-6) for name in one)
    run(config_of(folder, made, "replicas.sync_every=3", *plain, steps=3, method="localsgd"), folder / "rare")
    ends = defaultdict(float)
    for line in metrics(folder / "rare"):
        if "worker" in line:
            ends[line["step"]] = max(ends[line["step"]], line["clock_seconds"])
    assert ends[2] - ends[1] == pytest.approx(made.step_seconds, abs=1e-6)
    rare = load_file(folder / "rare" / "model.safetensors")
    assert not all(torch.allclose(one[name], rare[name], rtol=0, atol=1e-6) for name in one)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (["pipeline.skippipe.plan=nowhere.json"], r"pipeline.skippipe.plan = nowhere.json: cannot be read"),
        (["pipeline.skippipe.plan="], 'pipeline.routing = "skippipe" wants pipeline.skippipe.plan'),
        (["pipeline.stages=2", "model.layers=2"], "pipeline.stages = 2: the plan has 3"),
        (["pipeline.microbatches=4"], "pipeline.microbatches = 4: the plan sends 2 from each origin"),
        (["pipeline.cut=[1, 3]", "model.layers=4"], "the plan cuts the model before blocks 1, 2, the run before 1, 3"),
        (["world.virtual.links=lan"], "the plan was made for other links"),
        (["world.virtual.step_seconds=2.0"], "world.virtual.step_seconds = 2.0 does not go with a plan"),
        (["pipeline.loss_at=last"], 'pipeline.loss_at = "last": with a plan'),
        (["pipeline.in_flight=2"], "pipeline.in_flight = 2 does not go with a plan"),
        (["pipeline.routing=fixed"], 'pipeline.skippipe.plan = ".*" acts with routing = "skippipe" only'),
        (["replicas.method=dilocox"], 'replicas.method = "dilocox" does not go with a plan of paths'),
        (["replicas.method=ist"], 'replicas.method = "ist" does not go with a plan of paths'),
        (
            ["replicas.method=noloco", "replicas.on_peer_failure=solo"],
            'replicas.on_peer_failure = "solo" does not go with a plan of paths: the paths of a plan',
        ),
        (["world.workers=6", "world.virtual.links=lan"], "the plan is for 5 workers, there are 6"),
        (["world.inner=5"], "world.inner = 5 does not go with a plan"),
    ],
)
def test_what_a_plan_cannot_be_run_with_is_one_line(folder: Path, change: list[str], told: str) -> None:
    made = write_plan(folder, small(), cuts=(1, 2))
    with pytest.raises(ValueError, match=told) as refusal:
        config_of(folder, made, *change)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda text: text[:-40], "not valid JSON"),
        (lambda text: "[" * 200_000, "not valid JSON: it nests too deep"),
        (
            lambda text: text.replace('"nodes": [0, ', '"nodes": [1, ', 1),
            "begins at node 1: a path begins",
        ),
        (lambda text: text.replace('"memory": 2', '"memory": 0'), "memory = 0: choose 1 or more"),
    ],
)
def test_a_plan_that_is_broken_is_one_line(folder: Path, change: Any, told: str) -> None:
    made = write_plan(folder, small())
    path = folder / "plan.json"
    path.write_text(change(path.read_text()))
    with pytest.raises(ValueError, match=told) as refusal:
        config_of(folder, made)
    assert str(refusal.value).startswith("pipeline.skippipe.plan = ") and "\n" not in str(refusal.value)


@pytest.mark.long
def test_the_shipped_assignment_trains_on_twenty_nodes(folder: Path) -> None:
    """A step takes the replay's seconds and those in which a stage's nodes exchange their gradients."""
    problem, shipped = reference("instance_shipped")
    delays = tuple(tuple(min(seconds, 3.0) for seconds in row) for row in problem.delays)  # one line is a slip: 132 s
    problem = replace(problem, delays=delays)
    made = write_plan(folder, problem, paths_of(problem, shipped["paths_ca_one_per_origin"]))
    run(config_of(folder, made, "pipeline.clip=stage", "run.checkpoint_every=2"), folder / "run")
    shutil.copytree(folder / "run", folder / "copy")
    (folder / "copy" / "summary.json").unlink()
    again, told = read_config(str(folder / "copy" / "config.toml"), {}, []), Told()
    launch(again, folder / "copy", told.lines.append, told.notices.append, resume=2)
    weights = [(folder / name / "model.safetensors").read_bytes() for name in ("run", "copy")]
    assert weights[0] == weights[1]
    ends = {}
    for line in metrics(folder / "run"):
        if "worker" in line:
            ends[line["step"]] = max(ends.get(line["step"], 0.0), line["clock_seconds"])
    took = [ends[step + 1] - ends[step] for step in (1, 2, 3)]
    planned = read_plan(folder / "plan.json").step_seconds
    print(f"planned {planned:.4f} s, took {took}")
    assert planned == pytest.approx(33.31, abs=0.01)
    # Gradients: two messages between the two nodes of a stage that are furthest apart, after a rest.
    apart = max(problem.delays[u][v] for nodes in problem.stages for u in nodes for v in nodes)
    assert took == pytest.approx([planned + problem.costs.rest + 2 * apart] * 3, abs=1e-6)
    assert all(torch.isfinite(own).all() for own in load_file(folder / "run" / "model.safetensors").values())


def test_a_new_plan_is_made_for_the_speeds_that_were_measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A node that is four times slower than planned is found out, and gets fewer visits."""
    problem = drawn(5, (1, 3), path_length=2, memory=3, waves=1, slowest=0.2001)
    paths = {(0, 0): (0, 1), (0, 1): (0, 1), (0, 2): (0, 2)}
    made = write_plan(folder, problem, paths)
    slow = ["world.virtual.step_factors=[1.0, 4.0, 1.0, 1.0]", "run.checkpoint_every=2"]
    run(config_of(folder, made, *slow, steps=3), folder / "run")
    out = str(folder / "run" / "plan.json")  # which the run goes on by
    monkeypatch.setattr(sys, "argv", ["isles", "plan", "replan", str(folder / "run"), "--out", out, "--budget", "1s"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    out, err = capsys.readouterr()
    assert (caught.value.code or 0, err) == (0, "")
    rows = [line.split() for line in out.splitlines()[1:5]]
    assert [float(row[4]) for row in rows] == [1.0, 4.0, 1.0, 1.0]
    assert [int(row[5]) for row in rows] == [3, 2, 1, 0] and int(rows[1][6]) < 2
    new = read_plan(folder / "run" / "plan.json")
    assert new.problem.forward[1] == pytest.approx(4 * made.problem.forward[1], rel=1e-6)
    slowed = replay_paths(new.problem, made.paths).makespan
    assert new.step_seconds < slowed and f"a new plan takes {new.step_seconds:.6g} s" in out
    (folder / "run" / "summary.json").unlink()
    told, again = Told(), read_config(str(folder / "run" / "config.toml"), {}, [])
    launch(again, folder / "run", told.lines.append, told.notices.append, resume=2)
    assert plan_of(again.pipeline) == new and (folder / "run" / "summary.json").exists()


@pytest.mark.long
@pytest.mark.parametrize("method", ["ddp", "none"])
def test_a_lost_stage_of_unequal_columns_is_made_anew_alike_at_all_its_nodes(folder: Path, method: str) -> None:
    made = write_plan(folder, small())
    more = [f"pipeline.recovery.stage_loss={CHANCE}", f"run.seed={seed_of(3, [2], 4)}"]
    told = Told()
    launch(
        config_of(folder, made, *more, method=method, steps=STEPS),
        folder / "run",
        told.lines.append,
        told.notices.append,
    )
    assert any('stage 2 was lost after inner step 4, restored by "checkfree"' in notice for notice in told.notices)
    spread = json.loads((folder / "run" / "summary.json").read_text())["replica_std"]
    assert spread == 0 if method == "ddp" else spread > 0
