"""`isles plan`'s table: against the dry run and the virtual clock, by hand, and for any number of workers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isles.cli.plans.methods import config_of
from isles.models.config import ModelConfig
from isles.models.sizes import SIZES, parameters
from isles.plan.methods import EVERY, MethodPlan, plan_methods
from isles.plan.question import Candidate, InSite, PlanQuestion, candidates, decoder_of
from isles.plan.run_plan import plan_run
from isles.replicas import METHODS
from isles.training.config.reading import read_config
from tests.training.runs import write_text
from tests.training.test_dry_time import shown

MODEL = ModelConfig(size="0.12M", context=8)
QUESTION = PlanQuestion(model=MODEL, step_seconds=0.1, workers=4, network="2Mbit/s, 25ms")


def one_of(method: str, text: str = "") -> Candidate:
    return next(one for one in candidates(method) if one.settings == text)


def planned(question: PlanQuestion, method: str, every: int | None = None, text: str = "", **more) -> MethodPlan:
    (plan,) = plan_methods(question, every=every, among=[one_of(method, text)], **more).plans
    return plan


def named(one: object) -> str:
    return f"{one.method} {one.settings}" if isinstance(one, Candidate) else str(one)


NETS = ("2Mbit/s, 25ms", "20Mbit/s, 10ms")
CELLS = [
    (one, workers, net)
    for number, one in enumerate(candidates())
    for workers, net in ((3, NETS[number % 2]), (5, NETS[(number + 1) % 2]))
    if one.method != "fsdp"  # of processes alone
]
QUICK = [
    cell
    for cell in CELLS
    if (cell[0].method, cell[1]) in {("ddp", 3), ("ddp", 5), ("noloco", 3), ("ist", 3)}
    and not cell[0].settings.startswith("codec")
]


@pytest.mark.parametrize(
    ("one", "workers", "net"),
    [pytest.param(*cell, marks=[] if cell in QUICK else pytest.mark.long) for cell in CELLS],
    ids=named,
)
def test_a_plan_is_the_dry_run_and_the_run(one: Candidate, workers: int, net: str, tmp_path: Path) -> None:
    """Of a run's tokens: the share of the time spent computing, to half a point; memory of the dry run to the byte."""
    steps = 7 if one.every or one.method in ("ddp", "dct-dp", "demo") else 13
    question = replace(QUESTION, workers=workers, network=net, tokens=float(steps), step_tokens=1.0)
    every = 6 if "overlap_steps" in one.settings else 3
    if one.method == "dct-dp":  # by stale thresholds more is sent than sparsity says
        one = replace(one, settings=f"{one.settings}, threshold_interval = 1")
    (plan,) = plan_methods(question, every=every, among=[one]).plans
    data = replace(plan.config.data, path=str(write_text(tmp_path / "text.txt")), batch_size=1, validation_fraction=0.0)
    config = replace(plan.config, data=data)
    found, seen = plan_run(config), shown(config)
    assert plan.memory.peak == found.fullest.memory.peak
    said = 1.0 if found.time is None else found.time.utilisation
    assert said == pytest.approx(plan.utilisation, abs=1e-9)
    assert 100 * plan.utilisation == pytest.approx(seen, abs=0.5)


def test_by_hand() -> None:
    """123,200 float32 parameters among four at 2 Mbit/s, 25 ms; H = 20 steps of 0.1 s.

    diloco: shards there and means back, 2 x 3/4 of 492.8 kB, two latencies: 2.96 s. noloco's single vector: 492.8 kB,
    one latency: 2.00 s. ddp: the same mean as diloco, but its one bucket is sent when the step is over.
    """
    model, up, late = 4 * parameters(SIZES["0.12M"]), 2e6, 0.025
    mean = 2 * 3 / 4 * 8 * model / up + 2 * late
    for method, every, text, waits, sent in (
        ("diloco", 20, "", mean, 1.5 * model / 20),
        ("noloco", 20, "exchange = single_vector", 8 * model / up + late, model / 20),
        ("ddp", 1, "", mean, 1.5 * model),
    ):
        plan = planned(QUESTION, method, every, text)
        assert plan.waits == pytest.approx(waits, rel=2e-3), method
        assert plan.utilisation == pytest.approx(every * 0.1 / (every * 0.1 + plan.waits))
        assert plan.bytes_a_step == pytest.approx(sent, rel=2e-3), method
    assert planned(QUESTION, "diloco", 20, targets=(0.9,)).timing.wanted[0] == pytest.approx(
        (mean - 2 * late) / (2 / 0.9 - 2 - 2 * late), rel=5e-3
    )


def test_the_h_beyond_those_tried_is_named() -> None:
    """2.96 s a round of a mean are a tenth of 266 steps; at a fiftieth of the rate of 13,270, in two
    digits."""
    slow = replace(QUESTION, network="0.04Mbit/s, 25ms")
    assert planned(QUESTION, "diloco").every == 300
    plan = planned(slow, "diloco")
    assert (plan.every, plan.timing.enough) == (max(EVERY), 14_000)


def test_all_methods_are_planned_in_order() -> None:
    table = plan_methods(replace(QUESTION, network="20Mbit/s, 10ms"))
    assert {one.candidate.method for one in table.plans} == set(METHODS) and not table.left_out
    *plans, last = table.plans
    assert last.candidate.method == "none" and last.utilisation == 1.0 and last.bytes_a_step == 0
    reached = [one for one in plans if one.timing.reaches]
    assert plans[: len(reached)] == reached
    assert [(one.candidate.kind, one.every) for one in reached] == sorted(
        (one.candidate.kind, one.every) for one in reached
    )
    rest = [one.utilisation for one in plans[len(reached) :]]
    assert rest == sorted(rest, reverse=True) and all(share < 0.9 for share in rest)
    same = {one.candidate.method: one for one in plans if not one.candidate.settings}
    for one, other in (("localsgd", "diloco"), ("fedavg", "diloco"), ("slowmo", "diloco"), ("delayed", "eager")):
        assert same[one].timing == same[other].timing and same[one].bytes_a_step == same[other].bytes_a_step


def test_who_cannot_lose_workers_is_last_where_they_come_and_go() -> None:
    table = plan_methods(replace(QUESTION, network="1Gbit/s, 1ms"), grows=True)
    assert table.plans[0].candidate.method in ("diloco", "noloco")
    grows = [one.grows for one in table.plans]
    assert grows == sorted(grows, reverse=True) and not grows[-1]


def test_what_cannot_be_is_left_out_with_the_reason() -> None:
    table = plan_methods(replace(QUESTION, workers=500), every=50, among=[*candidates("ist"), *candidates("diloco")])
    assert {one.candidate.method for one in table.plans} == {"diloco"}
    assert all("ist" in name and "500 workers" in why for name, why in table.left_out.items())
    with pytest.raises(ValueError, match="500 workers"):
        plan_methods(replace(QUESTION, workers=500), among=candidates("ist"))
    with pytest.raises(ValueError, match="targets"):
        plan_methods(QUESTION, targets=(1.5,))
    with pytest.raises(ValueError, match="sync_every = 0"):
        plan_methods(QUESTION, every=0)


FLEET = [one_of("ddp"), one_of("diloco"), one_of("noloco"), one_of("demo")]


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    one=st.sampled_from(FLEET),
    workers=st.lists(st.sampled_from([2, 4, 9, 16, 17, 64, 1000, 100_000]), min_size=2, max_size=2).map(sorted),
    rate=st.sampled_from([1, 8, 60]),
    latency=st.sampled_from([1, 20, 200]),
)
def test_more_workers_slower_lines_longer_ways_compute_no_more(
    one: Candidate, workers: list[int], rate: int, latency: int
) -> None:
    """To a thousandth: segments and shards are of whole entries. Of an odd number in pairs one is alone in each round,
    and does not wait.
    """

    def waits(count: int, rate: float, latency: float) -> float:
        """As a share of computing."""
        network = f"{rate}Mbit/s, {latency}ms"
        question = replace(QUESTION, workers=count, network=network)
        return 1 / plan_methods(question, every=20, among=[one]).plans[0].utilisation - 1

    few, many = workers
    least, paired = waits(few, rate, latency), 1 - 1 / many if one.method == "noloco" and many % 2 else 1.0
    assert waits(many, rate, latency) >= paired * least - 1e-3
    assert min(waits(few, rate / 3, latency), waits(few, rate, 3 * latency)) >= least - 1e-3


def test_any_fleet_is_planned() -> None:
    """In homes of twelve cities; memory and bytes are of that many."""
    question = PlanQuestion(model=decoder_of(1e8, 12), step_seconds=1.0, workers=100_000, network="worldwide")
    table = plan_methods(question, every=50, among=[one for one in candidates() if one.method in ("diloco", "noloco")])
    found = {named(one.candidate): one for one in table.plans}
    assert found["noloco "].utilisation > found["diloco "].utilisation > 0.1
    assert found["diloco "].bytes_a_step == pytest.approx(8 * question.parameters / 50, rel=0.01)
    with pytest.raises(ValueError, match="choose 2 to 100,000"):
        replace(question, workers=100_001)


def test_a_plan_as_a_configuration_plans_the_same(tmp_path: Path) -> None:
    """What --out writes as run.toml."""
    question = replace(QUESTION, tokens=40.0, step_tokens=1.0)
    for method, text in (("streaming-diloco", "codec = fp4"), ("ist", "split = ffn, sampler = stratified")):
        plan = planned(question, method, 10, text)
        (tmp_path / f"{method}.toml").write_text(config_of(plan, "a network"))
        found = plan_run(read_config(str(tmp_path / f"{method}.toml"), {}, []))
        assert found.time is not None
        assert found.time.utilisation == pytest.approx(plan.utilisation, abs=1e-9)
        assert found.fullest.memory.peak == plan.memory.peak


@pytest.mark.parametrize(("wanted", "layers"), [(1e5, 2), (1.3e6, 4), (1e8, 12), (1.3e9, 24), (7e9, 32), (1e15, 750)])
def test_a_decoder_of_so_many_parameters(wanted: float, layers: int) -> None:
    assert parameters(decoder_of(wanted, layers).shape()) == pytest.approx(wanted, rel=0.01)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"workers": 0}, "workers = 0"),
        ({"step_seconds": float("inf")}, "step_seconds"),
        ({"tokens": 1e9}, "give step_tokens too"),
        ({"network": "lam"}, "did you mean 'lan'"),
    ],
)
def test_no_such_question(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(QUESTION, **fields)


@pytest.mark.parametrize(
    ("wanted", "layers", "words"),
    [(-1.0, 2, "parameters"), (1e30, 2, "choose up to 1e.15|up to 1e"), (1e6, 0, "layers"), (1e3, 700, "fewer layers")],
)
def test_no_such_decoder(wanted: float, layers: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        decoder_of(wanted, layers)


SITES = [
    (inside, method, net)
    for inside in ("ddp", "stages")
    for method, net in (("diloco", "2Mbit/s, 25ms"), ("noloco", "20Mbit/s, 10ms"), ("eager", "20Mbit/s, 10ms"))
]


@pytest.mark.parametrize(
    ("inside", "method", "net"),
    [pytest.param(*cell, marks=[] if cell[1] == "diloco" else pytest.mark.long) for cell in SITES],
)
def test_sites_are_planned_as_the_dry_run_and_the_run(inside: InSite, method: str, net: str, tmp_path: Path) -> None:
    """Two devices behind each line: as the dry run and the virtual clock have it; memory to the byte."""
    near = {"devices": 2, "near": "100Mbit/s, 1ms", "inside": inside}
    question = replace(QUESTION, network=net, tokens=13.0, step_tokens=1.0, **near)
    plan = planned(question, method, 3)
    (tmp_path / "run.toml").write_text(config_of(plan, "a network"))
    assert read_config(str(tmp_path / "run.toml"), {}, []).pipeline == plan.config.pipeline
    text = str(write_text(tmp_path / "text.txt"))
    rows = plan.config.pipeline.microbatches if inside == "stages" else 1
    data = replace(plan.config.data, path=text, batch_size=rows, validation_fraction=0.0)
    config = replace(plan.config, data=data)
    found = plan_run(config)
    assert found.time is not None and found.time.utilisation == pytest.approx(plan.utilisation, abs=1e-9)
    assert plan.memory.peak == found.fullest.memory.peak
    assert 100 * plan.utilisation == pytest.approx(shown(config), abs=0.5)


def test_a_site_by_hand() -> None:
    """Two sites of four devices, H = 20 steps of 0.1 s, 123,200 float32 parameters, gigabit without latency inside.

    Across: both sites send 492.8 kB over 2 Mbit/s at once, 25 ms later it is there; the four devices send a quarter
    each. Inside: every step a mean of four, every round three quarters of the model from each to each.
    """
    near = {"devices": 4, "near": "1Gbit/s, 0ms"}
    plan = planned(replace(QUESTION, workers=8, **near), "diloco", 20)
    model = 4 * parameters(SIZES["0.12M"])
    across, spread, step = 8 * model / 2e6 + 0.025, 8 * 0.75 * model / 1e9, 8 * 2 * 0.75 * model / 1e9
    assert plan.waits == pytest.approx(across + spread + 20 * step, rel=0.03)
    assert plan.bytes_a_step == pytest.approx(model / 4 / 20, rel=0.01)


def test_what_is_best_costs_least_and_nothing_is_better() -> None:
    """Of 13 steps of 0.1 s at three dollars an hour, and 0.1 a GB that is sent."""
    question = replace(QUESTION, tokens=13.0, step_tokens=1.0, price_gb=0.1, price_hour=3.0)
    table = plan_methods(question, every=3, among=[*candidates("ddp"), *candidates("diloco")], best="money")
    for plan in table.plans:
        assert plan.hours is not None and plan.nbytes is not None
        assert plan.money == pytest.approx(3.0 * 4 * plan.hours + 0.1 * plan.nbytes / 1e9)
        worse = [
            one for one in table.plans if one.hours <= plan.hours and one.nbytes <= plan.nbytes and one is not plan
        ]
        kinds = [one for one in worse if one.candidate.kind <= plan.candidate.kind]
        assert not (plan.is_best and [one for one in kinds if one.money < plan.money])
    assert any(plan.is_best for plan in table.plans)
    with pytest.raises(ValueError, match="give --price-gb or --price-hour"):
        plan_methods(QUESTION, best="money")
