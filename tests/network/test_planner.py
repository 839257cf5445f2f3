"""The planner against the library's own accounts, against docs/which-method.md, and its order."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from isles.models.sizes import SIZES, matrices
from isles.network.links import Links
from isles.network.named import links
from isles.network.planner.costs import Lines
from isles.network.planner.forms import FORMS, LARGEST, LOW_RANK, MOMENTUM
from isles.network.planner.job import Job
from isles.network.planner.planner import curve, plan, utilisation
from isles.network.planner.turns import TURNS, Turns
from isles.network.planner.ways import WAYS

JOB = Job(parameters=1e8, layers=12, step_seconds=1.0, workers=8, links=links("home-fibre"))


def way(method, codec="none"):
    return next(one for one in WAYS if one.method == method and one.codec == codec)


@pytest.mark.parametrize(
    ("network", "wanted"),
    [
        ("datacentres", (91.3, 98.8, 99.3, 99.9, 99.9)),
        ("lan", (16.7, 89.9, 94.0, 98.9, 99.4)),
        ("home-fibre", (5.2, 72.8, 82.4, 96.4, 97.9)),
        ("home-cable", (0.7, 26.3, 31.2, 78.1, 86.2)),
    ],
)
def test_the_table_of_which_method(network, wanted):
    job = replace(JOB, links=links(network))
    lines = Lines.of(job.links, range(8))
    asked = [("ddp", 1), ("diloco", 50), ("noloco", 50), ("diloco", 500), ("noloco", 500)]
    assert [round(100 * utilisation(job, way(name), every, lines), 1) for name, every in asked] == list(wanted)


@pytest.mark.parametrize("one", WAYS, ids=lambda one: f"{one.method} {one.settings}")
def test_bytes_and_memory_are_those_of_the_library(one):
    """What `isles train --dry-run` counts for the same settings."""
    from isles.training.config.reading import read_config
    from isles.training.plan.run_plan import plan_run

    steps, every = (4, 1) if one.every else (80, 20)
    settings = [f"replicas.{word.replace(' ', '')}" for word in one.settings.split(", ") if word]
    settings += [f"replicas.sync_every={every}"] if one.rounds else []
    settings += ["replicas.start_compress=0"] if one.codec == LOW_RANK else []  # a plan is of the rounds after those
    settings += ["replicas.sampler=stratified"] if one.method == "ist" else []  # the same every round
    size = (
        "10M" if one.codec in (LOW_RANK, MOMENTUM, LARGEST) or ":" in one.codec else "0.12M"
    )  # of less the headers show
    flags = {"replicas.method": one.method, "world.workers": 8, "run.steps": steps, "model.size": size}
    counted = plan_run(read_config(None, flags, [*settings, "data.path=isles/network"]))
    links = Links(bandwidth=1e9)
    job = replace(JOB, parameters=counted.parameters, links=links, matrices=matrices(SIZES[size]))
    (planned,) = plan(job, every=every, ways=[one])
    sent = sum(counted.outline.sent) / 8 / steps
    assert planned.bytes_a_step == pytest.approx(sent, rel=0.003)
    agree(planned.memory, counted.fullest.memory)


ROUNDED = {"messages under way", "bases of the factors", "scratch"}  # scales and edges of blocks, fragments
TINY = {"thresholds", "bases of the transform"}


def agree(planned, counted):
    """Vectors are those of the dry run to the byte, the whole to half a percent; where nothing is encoded or divided,
    to the byte too, but for AdamW's four bytes a tensor.
    """
    assert planned.training == pytest.approx(counted.training - counted.tables, rel=0.01)
    assert planned.peak == pytest.approx(counted.peak - counted.tables, rel=0.008)
    held, there = ({one.what: one for one in each.held} for each in (planned, counted))
    assert set(held) == set(there) - TINY
    for what in set(held) - ROUNDED:
        assert held[what].when == there[what].when
        assert held[what].nbytes == pytest.approx(there[what].nbytes, rel=1e-3), what
    assert held["messages under way"].nbytes == pytest.approx(there["messages under way"].nbytes, rel=0.06)
    assert planned.inner == pytest.approx(counted.inner, rel=1e-3)


@pytest.mark.parametrize(
    ("method", "size"), [("ddp", "10M"), ("diloco", "0.12M"), ("noloco", "10M"), ("eager", "0.12M")]
)
def test_memory_is_the_dry_runs_to_the_byte(method, size):
    """Of what is neither encoded nor cut into fragments; AdamW's step counts are left out."""
    from isles.models.config import ModelConfig
    from isles.models.factory import sketch
    from isles.training.config.reading import read_config
    from isles.training.plan.run_plan import plan_run

    flags = {"replicas.method": method, "world.workers": 8, "run.steps": 40, "model.size": size}
    more = [] if method == "ddp" else ["replicas.sync_every=20"]
    counted = plan_run(read_config(None, flags, [*more, "data.path=isles/network"]))
    job = replace(JOB, parameters=counted.parameters, links=Links(bandwidth=1e9), matrices=matrices(SIZES[size]))
    planned, counted = way(method).memory(job), counted.fullest.memory
    assert set(planned.held) == set(counted.held)
    assert (planned.weights, planned.gradients) == (counted.weights, counted.gradients)
    tensors = sum(1 for _ in sketch(ModelConfig(size=size)).parameters())
    assert planned.inner == counted.inner - 4 * tensors
    assert planned.peak == counted.peak - counted.tables - 4 * tensors


def test_forms_are_those_of_the_codecs():
    import torch

    from isles.comm.codecs import codec

    for name, form in FORMS.items():
        made = codec(name)
        assert form.bits == 8 * made.wire_bytes(1 << 20, torch.float32) / (1 << 20)
        assert form.back * form.bits == pytest.approx(8 * made.back.wire_bytes(1 << 20, torch.float32) / (1 << 20))


def test_streaming_by_hand():
    """Four fragments, two workers: 4-bit codes all round, 0.4125 s each; a step hides one, or the link is full."""
    job = Job(parameters=4e8, layers=12, step_seconds=0.3, workers=2, links=Links(bandwidth=1e9))
    lines = Lines.of(job.links, range(2))
    one = way("streaming-diloco", "fp4")
    for every, waits in ((100, 4 * (0.4125 - 0.3)), (2, 4 * 0.4125 - 2 * 0.3)):
        exchanges = one.exchanges(job, FORMS["fp4"], every, None).planned(TURNS * every)
        assert Turns(exchanges, every, 2).waiting(lines, 0.3) == pytest.approx(waits)


def test_order_and_wants():
    job = replace(JOB, workers=4)
    made = plan(job, targets=(0.9, 0.5), every=None)
    assert {one.way for one in made} == set(WAYS)
    reached = [one for one in made if one.reaches]
    assert made[: len(reached)] == reached
    assert [(one.way.kind, one.every) for one in reached] == sorted((one.way.kind, one.every) for one in reached)
    rest = [one.utilisation for one in made[len(reached) :]]
    assert rest == sorted(rest, reverse=True) and all(share < 0.9 for share in rest)
    for one in made:
        for target, factor in zip((0.9, 0.5), one.wanted, strict=True):
            below, above = curve(job, one, [factor * 0.999, factor * 1.001])
            assert below < target <= above
        smaller = [every for every in (10, 20, 30, 50, 100, 200, 300, 500) if every < one.every]
        lines = Lines.of(job.links, range(4))
        assert all(utilisation(job, one.way, every, lines) < 0.9 for every in smaller)


@pytest.mark.long
def test_fast_links_want_data_parallel_and_slow_ones_do_not():
    ways = [way("ddp"), way("diloco"), way("eager"), way("noloco"), way("streaming-noloco")]
    assert plan(replace(JOB, links=Links(bandwidth=1e11)), ways=ways)[0].way is way("ddp")
    slow = plan(replace(JOB, links=links("worldwide"), workers=12))
    assert slow[0].way.method == "noloco" and math.isnan(slow[-1].wanted[0])


def test_hours_need_tokens():
    ways = [way("diloco")]
    assert plan(JOB, ways=ways)[0].hours is None
    one = plan(replace(JOB, tokens=3600e6, step_tokens=1e6), ways=ways)[0]
    assert one.hours == pytest.approx(1 / one.utilisation)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"workers": 0}, "workers = 0"),
        ({"workers": 5000}, "choose 2 to 2000"),
        ({"parameters": -1}, "parameters"),
        ({"parameters": 1e30}, "choose up to 1e.15"),
        ({"layers": 0}, "layers"),
        ({"layers": 10**8}, "choose 1 to 750"),
        ({"step_seconds": math.inf}, "step_seconds"),
        ({"tokens": 1e9}, "give both"),
        ({"links": Links(bandwidth=[1.0, 2.0])}, "bandwidth has 2 values"),
    ],
)
def test_no_such_job(fields, words):
    with pytest.raises(ValueError, match=words):
        replace(JOB, **fields)


def test_no_such_wish():
    with pytest.raises(ValueError, match="targets"):
        plan(JOB, targets=(1.5,))
    with pytest.raises(ValueError, match="sync_every = 0"):
        plan(JOB, every=0)


@pytest.mark.parametrize(
    ("one", "other"),
    [("localsgd", "diloco"), ("fedavg", "diloco"), ("fedyogi", "diloco"), ("slowmo", "diloco"), ("delayed", "eager")],
)
def test_methods_that_cost_the_same(one, other):
    """Those that are not planned with send, and when, what another does."""
    from isles.training.config.reading import read_config
    from isles.training.plan.run_plan import plan_run

    def outline(method):
        flags = {"replicas.method": method, "world.workers": 8, "run.steps": 60, "replicas.sync_every": 20}
        return plan_run(read_config(None, flags, ["data.path=isles/network"])).outline

    assert outline(one) == outline(other)
    assert one not in {made.method for made in WAYS}
