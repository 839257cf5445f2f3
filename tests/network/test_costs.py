"""What a collective costs in closed form: payloads and latencies of the papers' formulas."""

import pytest

from isles.network.planner import costs


@pytest.mark.parametrize("workers", [2, 3, 4, 8, 64])
def test_by_hand(workers):
    """8 Mbit of payload on 1 Mbit/s, 30 ms: what is sent 1 - 1/n times, there and back; or n - 1 times at once."""
    share = (workers - 1) / workers
    assert costs.two_shot(workers).seconds(8e6, 1e6, 0.03) == pytest.approx(2 * (8 * share + 0.03))
    assert costs.ring(workers).seconds(8e6, 1e6, 0.03) == pytest.approx(16 * share + 2 * (workers - 1) * 0.03)
    assert costs.all_gather(workers).seconds(8e6, 1e6, 0.03) == pytest.approx(8 * (workers - 1) + 0.03)
    assert costs.pair().seconds(8e6, 1e6, 0.03) == pytest.approx(8.03)


def test_two_islands_send_each_parameter_once():
    assert costs.ring(2).payloads == 1


def test_no_worker_is_refused():
    with pytest.raises(ValueError, match="workers = 0"):
        costs.ring(0)
