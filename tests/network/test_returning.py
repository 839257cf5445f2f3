"""Who stands still for too long is somebody else afterwards."""

from __future__ import annotations

from isles.network.churn import ChurnEvent, returns

E = ChurnEvent


def test_a_short_pause_is_waited_for() -> None:
    trace = [E(1.0, "pause", 0), E(4.0, "resume", 0), E(5.0, "kill", 0)]
    found = returns(trace, [0.0, 0.0], lease=3.0)
    assert list(found.events) == trace and found.begins == (0.0, 0.0) and found.machines == (0, 1)


def test_a_long_one_is_a_death_and_somebody_who_comes() -> None:
    """What happens to its number later happens to who it is then, a second long pause too; joiners keep theirs."""
    trace = [
        E(1.0, "pause", 0), E(2.0, "join", 1), E(6.0, "resume", 0),
        E(7.0, "pause", 0), E(8.0, "kill", 2), E(20.0, "resume", 0), E(21.0, "leave", 0),
    ]  # fmt: skip
    found = returns(trace, [0.0, 0.0, 2.0], lease=3.0)
    assert found.begins == (0.0, 0.0, 2.0, 6.0, 20.0) and found.machines == (0, 1, 2, 0, 0)
    assert list(found.events) == [
        E(1.0, "pause", 0), E(2.0, "join", 1), E(4.0, "resume", 0), E(4.0, "kill", 0),
        E(7.0, "pause", 3), E(8.0, "kill", 2), E(10.0, "resume", 3), E(10.0, "kill", 3), E(21.0, "leave", 4),
    ]  # fmt: skip


def test_one_that_never_goes_on_is_removed() -> None:
    found = returns([E(1.0, "pause", 1)], [0.0, 0.0], lease=0.5)
    assert list(found.events) == [E(1.0, "pause", 1), E(1.5, "resume", 1), E(1.5, "kill", 1)]
    assert len(found.begins) == 2
