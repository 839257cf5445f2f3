"""What a collective costs: closed forms, what the library's mean counts, and unequal links."""

import math

import numpy as np
import pytest

from isles.network.links import Links
from isles.network.planner import costs


def lines_of(links, workers):
    return costs.Lines.of(links, range(workers))


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 8, 64])
def test_unequal_links_that_are_equal_give_the_closed_forms(workers):
    lines = lines_of(Links(bandwidth=1e6, latency=0.03), workers)
    for made, over in [
        (costs.two_shot(workers), costs.two_shot_seconds),
        (costs.all_gather(workers), costs.all_gather_seconds),
        (costs.library_mean(workers), costs.mean_seconds),
    ]:
        assert over(lines, 8e6) == pytest.approx(made.seconds(8e6, 1e6, 0.03), rel=1e-12, abs=1e-15)
    if workers > 1:
        assert costs.partner_seconds(lines, 8e6) == pytest.approx(costs.pair().seconds(8e6, 1e6, 0.03))
    assert costs.ring(2).payloads == 1  # the papers' two islands send each parameter once


def test_the_slowest_link_rules():
    """One of eight at a hundredth of the rate: a mean is as slow as if all were; a pair without it is not."""
    lines = lines_of(Links(bandwidth=[1e8] * 7 + [1e6]), 8)
    slow = lines_of(Links(bandwidth=1e6), 8)
    for over in (costs.two_shot_seconds, costs.all_gather_seconds):
        assert over(lines, 1e6) == pytest.approx(over(slow, 1e6))
    assert costs.pair_seconds(lines, 0, 1, 1e6) == pytest.approx(0.01)
    assert costs.pair_seconds(lines, 0, 7, 1e6) == costs.pair_seconds(lines, 7, 0, 1e6) == 1.0
    assert costs.partner_seconds(lines, 1e6) == 1.0  # of the slow one, whoever its partner is
    assert costs.two_shot_seconds(lines.scaled(100), 1e6) == pytest.approx(costs.two_shot_seconds(lines, 1e6) / 100)


def test_latency_counts_once_a_hop():
    far = np.full((4, 4), 0.01)
    far[0, 1] = 0.5
    links = Links(bandwidth=math.inf, latency=far)
    lines = lines_of(links, 4)
    assert costs.two_shot_seconds(lines, 1.0) == pytest.approx(0.01 + 0.5)  # 0 does not wait for 1
    assert costs.partner_seconds(lines, 1.0) == pytest.approx((0.5 + 0.01 + 0.01) / 3)


def test_each_is_served_in_turn_from_the_one_behind():
    """1 s a message, and 5 s from 0 to 1, whom 0 serves first: there after 1 + 5 s; served last, after 2 + 5."""
    far = np.zeros((3, 3))
    far[0, 1] = 5.0
    assert costs.all_gather_seconds(lines_of(Links(bandwidth=1.0, latency=far), 3), 1.0) == 6.0


def test_shared_and_asymmetric_lines():
    household = Links(bandwidth=[40e6, 40e6], uplinks=[0, 0, 1, 1])
    assert costs.two_shot_seconds(lines_of(household, 4), 1e6) == pytest.approx(
        costs.two_shot_seconds(lines_of(Links(bandwidth=20e6), 4), 1e6)
    )
    assert costs.pair_seconds(costs.Lines.of(household, [0, 2]), 0, 1, 40e6) == 1.0  # the other two are silent
    asymmetric = lines_of(Links(bandwidth=[1e9, 1e7], downlink=[1e9, 1e8], uplinks=[0, 1]), 2)
    assert costs.pair_seconds(asymmetric, 0, 1, 1e9) == 100.0  # the upload of the second
    narrow = lines_of(Links(bandwidth=1e9, downlink=1e8), 4)
    assert costs.two_shot_seconds(narrow, 1e9) == costs.two_shot_seconds(lines_of(Links(bandwidth=1e8), 4), 1e9)


@pytest.mark.parametrize("name", ["none", "int8", "fp4", "topk:64"])
@pytest.mark.parametrize("workers", [2, 3, 8])
def test_the_librarys_mean_is_what_the_library_counts(name, workers):
    torch = pytest.importorskip("torch")
    from isles.comm.codecs import codec
    from isles.comm.collectives.mean import HEADER_BYTES, sent_bytes
    from isles.network.planner.closed import parallel_bytes

    form, elements = codec(name), 1 << 20
    bytes_there = form.wire_bytes(elements, torch.float32)
    back = form.back.wire_bytes(elements, torch.float32) / bytes_there
    sent = sum(sent_bytes(elements, torch.float32, form, workers, p) for p in range(workers)) / workers
    if form.lossless:
        assert parallel_bytes(elements, workers, steps=1) == sent
    sent -= HEADER_BYTES * (workers - 1)
    assert costs.library_mean(workers, back).payloads * bytes_there == pytest.approx(sent, rel=0.002)


def test_no_worker_is_refused():
    with pytest.raises(ValueError, match="workers = 0"):
        costs.ring(0)
