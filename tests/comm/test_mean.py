"""The mean of a group over real gloo processes: the same bits everywhere, bytes as promised, mix-ups noticed."""

from __future__ import annotations

import pytest

from tests.comm.mean_workers import HEADER, Case, all_cases, diverging, late, several, unnumbered
from tests.gloo import run_gloo

SCALE_BLOCK = {"none": None, "bf16": None, "fp16": 4096, "int8": 256}
CASES = [Case(name, elements) for name in SCALE_BLOCK for elements in (0, 1, 2, 5, 1003)]
CASES += [Case(name, elements, "float64") for name in SCALE_BLOCK for elements in (5, 1003)]
CASES += [Case(name, 20_011, dtype, 4096) for name in SCALE_BLOCK for dtype in ("float32", "float64")]  # 5 segments
CASES += [Case(name, 20_011, segment=1500) for name in ("none", "int8")]
CASES += [Case("none", 1003, segment=7)]  # wants more segments than there may be


def encoded(case: Case) -> int:
    """Bytes of one encoded buffer, from scratch. Cuts lie at blocks, so scales do not depend on them."""
    entry = {"none": 4 if case.dtype == "float32" else 8, "bf16": 2, "fp16": 2, "int8": 1}[case.codec]
    block = SCALE_BLOCK[case.codec]
    return entry * case.elements + (4 * -(-case.elements // block) if block else 0)


@pytest.mark.parametrize("workers", [1, 2, 3, pytest.param(4, marks=pytest.mark.long)])
def test_mean_is_exact_equal_everywhere_and_counted(workers: int) -> None:
    """For every codec, dtype and length: equal bits on all ranks, which are those of: decode, sum in rank order, divide
    (and encode once more where shards are gathered); `own` as others decode it; bytes sent = `sent_bytes` = the closed
    form 2 (N - 1) / N x encoded bytes x N, plus 32 bytes a peer.
    """
    ranks = run_gloo(all_cases, workers, args=(CASES,))
    for number, case in enumerate(CASES):
        connection_state = [rank[number] for rank in ranks]
        assert not any(view.wrong for view in connection_state), (case, [view.wrong for view in connection_state])
        assert len({view.result for view in connection_state}) == 1, case
        assert [view.counted for view in connection_state] == [view.promised for view in connection_state], case
        closed = 2 * (workers - 1) * encoded(case) + HEADER * workers * (workers - 1)
        assert sum(view.counted for view in connection_state) == closed, case


def test_a_member_that_is_elsewhere_is_named() -> None:
    """A differing step, hash or round (where the wire's 21 bits agree) raises Diverged on everyone, naming the odd one
    out (the odd one names another); the next round is unharmed, with and without numbers.
    """
    zero, one, two = run_gloo(diverging, 3)
    for connection_state in (zero, one, two):
        assert {value for key, value in connection_state.items() if key.startswith("after")} == {1.0}, connection_state
    for case, odd in (("step", 1), ("digest", 2), ("round", 0), ("unnumbered", 1)):
        for rank, connection_state in enumerate((zero, one, two)):
            kind, peer, text = connection_state[case]
            assert kind == "Diverged" and f"worker {peer} " in text, (case, rank, connection_state[case])
            assert peer == odd if rank != odd else peer != odd, (case, rank, peer)
    assert "step 11" in zero["step"][2] and "anchor hash" in zero["digest"][2] and "round 2097164" in one["round"][2]


def test_late_and_other_rounds_are_not_mistaken() -> None:
    """What comes after the receiver gave its round up is never taken for the next round's; different rounds do not
    meet, they miss their deadlines.
    """
    zero, one = run_gloo(late, 2)
    for gave_up in ("round 7", "unnumbered"):
        assert zero[gave_up][:2] == ("DeadlinePassed", 1), zero
    for connection_state in (zero, one):
        assert (
            connection_state["round 8"] == 200.5
            and connection_state["unnumbered, next"] == 400.5
            and connection_state["together"] == 500.5
        ), connection_state
        assert connection_state["apart"][0] == "DeadlinePassed", connection_state


def test_many_at_once_do_not_mix() -> None:
    """Fragments and parts of one round, and calls without a round, keep apart while all are under way at once."""
    for connection_state in run_gloo(several, 4):
        assert connection_state == [10 * fragment + part + 150.0 for fragment in range(3) for part in range(2)]
    for connection_state in run_gloo(unnumbered, 4):
        assert connection_state == [index + 150.0 for index in range(8)]
