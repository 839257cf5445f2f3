"""The papers' calculations about pipelines: what they must come near to, and which way they must go."""

from __future__ import annotations

import pytest

from isles.papers.pipelines import PROTOCOL, dilocox_times, stage_utilisation, step_of


def test_wide_models_bear_slow_links() -> None:
    """SWARM: utilisation rises with the width at every round trip, and falls less with the round trip."""
    for round_trip in (0.0, 0.05, 0.2):
        shares = [stage_utilisation(width, round_trip) for width in (768, 4096, 12_288)]
        assert shares == sorted(shares)
    lost = [stage_utilisation(width, 0.2) / stage_utilisation(width, 0.0) for width in (768, 4096, 12_288)]
    assert lost == sorted(lost) and lost[0] < 0.2 < 0.7 < lost[2]


@pytest.mark.parametrize("model", PROTOCOL, ids=lambda model: model.name)
def test_a_hundredth_of_the_bytes_on_80_mbit_is_near_100_gbit(model) -> None:
    small, whole, fast = (step_of(model, *how)[0] for how in ((80e6, 0.01), (80e6, 1.0), (100e9, 1.0)))
    assert small < 1.5 * fast and whole > 15 * small


def test_dilocox_parts() -> None:
    """The whole is set to the abstract's 357 times: a step computes for a 356th of its dense exchange, 1712 s: 4.809 s.
    Without compression a step takes 1712 / 125 s, without overlap 4.809 + 1712 / 125 / 8.
    """
    found = dilocox_times()
    assert found["DiLoCoX"] == pytest.approx(357) and found["AllReduce"] == 1
    assert found["no compression"] == pytest.approx(1716.809 / 13.696, rel=1e-4)
    assert found["no overlap"] == pytest.approx(1716.809 / 6.521, rel=1e-4)
