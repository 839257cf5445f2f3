"""A plan as a file, and the network that it was made for."""

import json
import math

import pytest

from isles.network.links import Links, links
from isles.network.routing.plan import PipelinePlan, as_json, delays_of, fingerprint, plan_network, read_plan, slips
from isles.network.routing.problem import RoutingProblem, replay_paths
from isles.network.routing.replay import Sizes
from isles.network.routing.search import blind
from tests.network.routing.instances import drawn


@pytest.fixture
def plan():
    problem = drawn(0, (2, 3, 3, 3), path_length=3)
    return PipelinePlan(problem=problem, paths=blind(problem), links="abc", cuts=(2, 4, 6))


def test_a_plan_is_read_as_it_was_written(plan, tmp_path):
    file = tmp_path / "plan.json"
    file.write_text(as_json(plan))
    assert read_plan(file) == plan
    assert len(plan.routes) == plan.problem.microbatches
    assert all(route.home for route in plan.routes)
    file.write_text(as_json(PipelinePlan(problem=plan.problem, paths=plan.paths, links="abc")))
    assert read_plan(str(file)).cuts is None


def changed(plan, **keys):
    table = json.loads(as_json(plan))
    table.update(keys)
    return json.dumps({key: value for key, value in table.items() if value != "left out"})


def test_what_is_wrong_in_a_file_is_one_line(plan, tmp_path):
    paths = json.loads(as_json(plan))["paths"]
    swapped = [{**paths[0], "nodes": paths[0]["nodes"][::-1]}, *paths[1:]]
    cases = [
        ('{"form": ', "not valid JSON"),
        ("[]", "is no plan"),
        (changed(plan, form="other"), "is no plan"),
        (changed(plan, stages="left out"), "plan.stages is missing"),
        (changed(plan, memory="three"), "plan.memory = 'three'"),
        (changed(plan, memory=0), "memory = 0: choose 1 or more"),
        (changed(plan, pathes=1), "unknown key 'plan.pathes': did you mean 'plan.paths'"),
        (changed(plan, paths=swapped), "begins at node"),
        (changed(plan, paths=paths[1:]), "has no path"),
        (changed(plan, paths=[*paths, paths[0]]), "a slot has two paths"),
        (changed(plan, memory=1), "(and "),
        (changed(plan, expected={"step_seconds": 1.0, "busy_seconds": []}), "expected.step_seconds says 1: plan again"),
    ]
    file = tmp_path / "plan.json"
    for text, reported in cases:
        file.write_text(text)
        with pytest.raises(ValueError) as error:
            read_plan(file)
        assert reported in str(error.value) and str(error.value).startswith(f"{file}: ")
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"nowhere.json: cannot be read .*; name a plan"):
        read_plan(tmp_path / "nowhere.json")


def test_a_plan_for_something_else_is_refused(plan):
    plan.refuse(links="abc", workers=11, cuts=(2, 4, 6))
    plan.refuse()
    with pytest.raises(ValueError, match=r"for other links \(abc, these are abd\): plan again"):
        plan.refuse(links="abd")
    with pytest.raises(ValueError, match="for 11 workers, there are 12"):
        plan.refuse(workers=12)
    with pytest.raises(ValueError, match="before blocks 2, 4, 6, the run before 2, 4, 5"):
        plan.refuse(cuts=[2, 4, 5])


def test_delays_of_links():
    uneven = Links(bandwidth=[8e3, 16e3], downlink=[math.inf, 4e3], latency=[[0, 0.5], [0.25, 0]])
    assert delays_of(uneven, 2, 1000, overhead=0.125) == ((0.0, 0.5 + 2 + 0.125), (0.25 + 0.5 + 0.125, 0.0))
    pairs = Links(bandwidth=[[1, 8e3], [4e3, 1]], latency=0.5)
    assert delays_of(pairs, 2, 1000) == ((0.0, 1.5), (2.5, 0.0))
    with pytest.raises(ValueError, match="matrix of 3 x 3"):
        delays_of(pairs, 3, 1000)


def test_a_slip_of_the_table_is_reported():
    rates = [[1e6] * 4 for _ in range(4)]
    rates[1][2] = 1e4
    assert slips(delays_of(Links(bandwidth=rates), 4, 1e5)) == [
        "the way from 1 to 2 takes 80 s, 100 times the median: check the table"
    ]
    assert not slips(delays_of(links("worldwide"), 24, 1e6))


def test_fingerprints_tell_networks_apart():
    same = Links(bandwidth=1e6, latency=0.1), Links(bandwidth=[1e6] * 3, latency=lambda source, target: 0.1)
    assert fingerprint(same[0], 3) == fingerprint(same[1], 3) != fingerprint(same[0], 4)
    for other in (
        Links(bandwidth=2e6, latency=0.1),
        Links(bandwidth=1e6, latency=0.2),
        Links(bandwidth=1e6, latency=0.1, jitter=0.1),
        Links(bandwidth=1e6, latency=0.1, downlink=5e5),
        Links(bandwidth=[1e6, 1e6], latency=0.1, uplinks=[0, 0, 1]),
        Links(bandwidth=[[1e6] * 3] * 3, latency=0.1),
    ):
        assert fingerprint(other, 3) != fingerprint(same[0], 3)


def two_origins(overhead: float = 0.0) -> PipelinePlan:
    """Origins 0 and 1 behind one line of 1000 bit/s; nodes 2 and 3, fast on wide lines, are the other stage. 1000 bits
    a message, 0.5 s of latency; a forward takes an origin 1 s, a loss 0.25 s, a backward 1.5 s.
    """
    network = Links(bandwidth=[1e3, 1e12, 1e12], latency=0.5, uplinks=[0, 0, 1, 2])
    lines = plan_network(network, 4, Sizes(forward=125, home=125, backward=125), overhead)
    delays = delays_of(network, 4, 125, overhead)
    problem = RoutingProblem(
        stages=((0, 1), (2, 3)),
        delays=delays,
        forward=(1.0, 1.0, 1e-9, 1e-9),
        path_length=2,
        memory=1,
        waves=1,
    )
    return PipelinePlan(problem=problem, paths={(0, 0): (0, 2), (1, 0): (1, 3)}, links="", network=lines)


def test_messages_that_leave_together_share_the_link(tmp_path):
    """Two stages, by hand. At 1 s both origins send 1000 bits over one line of 1000 bit/s: 2 s instead of 1 s.

    alone    1 forward + 1 line + 0.5 there + 0.5 home + 0.25 loss + 1 line + 0.5 there + 0.5 home + 1.5 backward = 6.75
    shared   1 s more for each of the two messages of an origin
    """
    plan = two_origins()
    assert replay_paths(plan.problem, plan.paths).makespan == pytest.approx(6.75, abs=1e-6)
    assert plan.step_seconds == pytest.approx(8.75, abs=1e-6)
    file = tmp_path / "plan.json"
    file.write_text(as_json(plan))
    assert read_plan(file) == plan and read_plan(file).step_seconds == plan.step_seconds
    # a message costs 0.1 s beside its line: there, home, there, home
    assert two_origins(0.1).step_seconds == pytest.approx(8.75 + 0.4, abs=1e-6)
    file.write_text(changed(plan, expected={"step_seconds": 6.75, "busy_seconds": []}))
    with pytest.raises(ValueError, match=r"takes 8.75 s, expected.step_seconds says 6.75: plan again"):
        read_plan(file)
