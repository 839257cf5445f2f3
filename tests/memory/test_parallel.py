"""Ways to train on many devices, against numbers worked out by hand."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import pytest

from isles.memory.costs import Placement as P
from isles.memory.costs import ends_seconds, ends_update, unit_time
from isles.memory.lanes import LaneRun
from isles.network.machines import MACHINES
from isles.papers.memory_parallel import (
    HalfDecoder,
    HybridSplit,
    ParallelJob,
    StageSeconds,
    averaged,
    decoder_like,
    fastest_hybrid,
    fully_sharded,
    hybrid,
    out_of_core,
    profile_of,
    splits,
)
from isles.papers.memory_parallel_sheet import compared, turning

SHAPE = HalfDecoder(layers=8, width=1024, heads=16)
LARGE = replace(MACHINES["H100"], device_bytes=1e15, host_bytes=1e15)
ENDLESS = replace(LARGE, up=1e18, down=1e18, up_both=1e18, down_both=1e18)


def _job(**changes: object) -> ParallelJob:
    given = {"shape": SHAPE, "devices": 8, "machine": LARGE, "sequences": 16, "link": math.inf} | changes
    return ParallelJob(**given)  # type: ignore[arg-type]


def _computing(job: ParallelJob, sequences: int, again: int = 0) -> float:
    """Seconds of one device: forward, backward, `again` blocks made again, and the update, nothing moved."""
    made, here = profile_of(job.shape, sequences), job.machine
    forward = here.seconds(made.units[0].flops)
    update = unit_time(made.units[0], P("device", "keep"), here).update
    units = len(made.units)
    return units * (3 * forward + update) + again * forward + ends_seconds(made, here) + ends_update(made, here)


@pytest.mark.long
def test_where_all_fits_and_links_are_endless_nothing_waits() -> None:
    job = _job(machine=ENDLESS)
    whole, step = _computing(job, 2), out_of_core(job, shared=False).step
    assert step is not None
    assert 0.95 * whole < step < whole * 1.001  # updates may move to the host
    kind = fully_sharded(job)
    made, here = profile_of(SHAPE, 2), job.machine
    assert kind.step == pytest.approx(24 * here.seconds(made.units[0].flops) + ends_seconds(made, here), rel=0.02)


@pytest.mark.long
def test_a_slow_link_is_all_that_counts() -> None:
    """Gradients go to the others once and come back; weights of fsdp come twice, the last block's once."""
    job = _job(link=1e6, sequences=8)
    bytes_sent = 2 * 7 / 8 * 2 * SHAPE.params
    assert out_of_core(job, shared=True).step == pytest.approx(bytes_sent / 1e6, rel=0.02)
    gathered = (2 * SHAPE.layers - 1) * 7 / 8 * 2 * SHAPE.block_params
    assert fully_sharded(job).step == pytest.approx(gathered / 1e6, rel=0.12)


def test_the_mean_of_a_block_overlaps_the_backward_pass() -> None:
    """Two blocks on the device: that of the second one goes while the first one's backward pass runs."""
    made = averaged(_job(shape=replace(SHAPE, layers=2), link=1e9), replace(SHAPE, layers=2), 1, shared=False)
    alone = replace(made, units=tuple(replace(unit, averaged=1) for unit in made.units))
    plan, here = (P("device", "keep"),) * 2, LARGE
    mean = 2 * 7 / 8 * made.units[0].weights / 1e9
    ends = 2 * 7 / 8 * made.ends.weights / 1e9
    backward = 2 * here.seconds(made.units[0].flops)
    assert mean > backward
    waited = LaneRun(made, plan, here).play().step - LaneRun(alone, plan, here).play().step
    assert waited == pytest.approx(2 * mean + ends - backward, rel=1e-9)


def test_updates_on_hosts_wait_for_the_mean() -> None:
    job = _job(link=1e8)
    made = averaged(job, SHAPE, 1, shared=False)
    plan = (P("optimizer", "keep"),) * SHAPE.layers
    early, exact = (LaneRun(made, plan, LARGE, update=how).play().step for how in ("early", "exact"))
    link = 2 * 7 / 8 * (sum(unit.weights for unit in made.units) + made.ends.weights) / 1e8
    assert exact > early >= link
    assert early == pytest.approx(link, rel=0.1)


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_a_pipeline_over_endless_links_takes_its_microbatches_and_the_stages_before(stages: int) -> None:
    job = _job(shape=replace(SHAPE, vocabulary=0), devices=stages, sequences=4 * stages) if stages > 1 else _job()
    job = replace(job, shape=replace(SHAPE, vocabulary=0))
    only = HybridSplit(tensor=1, stages=stages, replicas=job.devices // stages, holds="1f1b")
    assert only in splits(job, tensor=False)
    layers, microbatches = SHAPE.layers // stages, job.sequences // only.replicas
    of_stage = layers * 3 * LARGE.seconds(SHAPE.block_flops(SHAPE.sequence))
    update = layers * unit_time(profile_of(SHAPE, 1).units[0], P("device", "keep"), LARGE).update
    step, idle = StageSeconds(job, only, [0] * stages).seconds()
    assert step == pytest.approx((microbatches + stages - 1) * of_stage + update)
    assert idle == pytest.approx(1 - microbatches * of_stage / step)


def test_cut_matrices_cost_their_all_reduces() -> None:
    """Eight sequences on one host of two: with slow lines between its devices whole replicas are better."""
    fast, slow = (
        fastest_hybrid(_job(devices=2, per_host=2, sequences=8, near=near), tensor=True) for near in (1e15, 1e6)
    )
    assert fast.step is not None
    assert slow.step is not None
    assert fast.step < slow.step
    assert slow.how.startswith("1 x 2 x 1")  # only a stream goes from stage to stage


@pytest.mark.long
def test_the_largest_is_the_deepest_that_fits() -> None:
    job = _job(machine=replace(MACHINES["V100-16"], device_bytes=3e9, host_bytes=3e9))
    for kind in (
        lambda job: out_of_core(job, shared=True),
        fully_sharded,
        lambda job: hybrid(job, tensor=False),
    ):
        layers = (kind(job).largest - SHAPE.embedding_params) / SHAPE.block_params
        assert layers == int(layers) >= 8
        deeper = replace(job, shape=replace(SHAPE, layers=int(layers) + 8))
        assert kind(deeper).step is None


@pytest.mark.long
def test_more_memory_and_faster_links_are_never_slower() -> None:
    tight = replace(MACHINES["RTX 3060"], device_bytes=3e9)
    steps = [compared(_job(machine=tight, link=link)) for link in (1e8, 1e9, 1e10)]
    for name in ("out of core, states shared", "fsdp", "pipeline x data"):
        by_link = [next(kind.step for kind in found if kind.name == name) for found in steps]
        assert all(one is not None for one in by_link)
        assert by_link == sorted(by_link, key=lambda step: -(step or 0.0))


def test_where_it_turns_is_read_off() -> None:
    assert turning(lambda rate: 1 / rate, lambda rate: 0.1, [1, 100]) == pytest.approx(10)
    assert turning(lambda rate: 0.01, lambda rate: 0.1, [1, 100]) == 1
    assert turning(lambda rate: 1.0, lambda rate: 0.1, [1, 100]) == math.inf
    assert turning(lambda rate: None, lambda rate: 0.1, [1, 100]) is None


def test_shapes_of_a_size() -> None:
    assert decoder_like(8.3e9, 72, 1024).params == pytest.approx(8.3e9, rel=0.01)
    assert decoder_like(1.3e9, 24, 1024).width == 2048


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"devices": 6, "per_host": 4}, "6 devices, 4 to a host: choose 2 or more that fill their hosts"),
        ({"sequences": 12}, "12 sequences a step do not divide among 8 devices: choose a multiple"),
        ({"link": 0.0}, "links: choose rates above 0"),
    ],
)
def test_what_cannot_be_compared_is_one_line(changes: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=f"^{told}$"):
        _job(**changes)


@pytest.mark.long
def test_plans_are_made_without_torch() -> None:
    """Simulation, search, plans and the comparison: what `isles plan` and a report may load."""
    program = (
        "import sys, isles.memory.lanes, isles.memory.search, isles.memory.plan, isles.memory.config, "
        "isles.papers.memory_parallel_sheet, isles.cli.plans.family; "
        "from isles.memory.search import Search; "
        "from isles.papers.memory_parallel import HalfDecoder, profile_of; "
        "from isles.network.machines import MACHINES; "
        "Search(profile_of(HalfDecoder(layers=4, width=512, heads=8), 1), MACHINES['RTX 3060']).run(); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=120).returncode == 0
