"""The papers' calculations about pipelines: what they must come near to, and which way they must go."""

from __future__ import annotations

import pytest

from isles.network.theory.pipelines import DILOCOX, PROTOCOL, rates, stage_utilisation, step_of


def test_wide_models_bear_slow_lines() -> None:
    """SWARM: utilisation rises with the width at every round trip, and falls less with the round trip."""
    for round_trip in (0.0, 0.05, 0.2):
        shares = [stage_utilisation(width, round_trip) for width in (768, 4096, 12_288)]
        assert shares == sorted(shares)
    lost = [stage_utilisation(width, 0.2) / stage_utilisation(width, 0.0) for width in (768, 4096, 12_288)]
    assert lost == sorted(lost) and lost[0] < 0.2 < 0.7 < lost[2]
    assert 100 * stage_utilisation(12_288, 0.1) == pytest.approx(60.2, abs=5)  # the paper's


@pytest.mark.parametrize("model", PROTOCOL, ids=lambda model: model.name)
def test_a_hundredth_of_the_bytes_on_80_mbit_is_near_100_gbit(model) -> None:
    small, whole, fast = (step_of(model, *how)[0] for how in ((80e6, 0.01), (80e6, 1.0), (100e9, 1.0)))
    assert small < 1.5 * fast and whole > 15 * small


def test_dilocox_parts_are_in_the_papers_order() -> None:
    """Both ends are set by the paper's; what lies between comes within a third of its figures."""
    found = rates(DILOCOX[1])
    assert found["DiLoCoX"] / found["AllReduce"] == pytest.approx(357, rel=0.01)
    for what, paper in DILOCOX[1].printed.items():
        assert found[what] == pytest.approx(paper, rel=0.34)
    assert list(found.values()) == sorted(found.values())
