"""Fair sharing on a line: closed forms, and an exact reference computed with fractions."""

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isles.network.engine import Pipe


def drain(pipe):
    ends = {}
    while pipe.next_completion() < math.inf:
        time, message, _ = pipe.complete()
        ends[message] = time
    return ends


def near(seconds):
    return pytest.approx(seconds, rel=1e-9)


def test_one_message_takes_bits_over_rate():
    pipe = Pipe(1e6)
    pipe.add(3.0, "a", 5e5, "m")
    assert pipe.next_completion() == near(3.5)
    assert drain(pipe) == {"m": near(3.5)}
    assert pipe.next_completion() == math.inf


def test_one_flow_is_first_in_first_out():
    pipe = Pipe(100.0)
    assert pipe.add(0.0, "a", 100.0, 1) and not pipe.add(0.5, "a", 300.0, 2)
    assert pipe.complete() == (near(1.0), 1, 2)
    assert pipe.complete() == (near(4.0), 2, None)


def test_two_flows_share_equally():
    # 100 bits each way until the short one is gone at 2 s, the long one has 200 bits left for itself.
    pipe = Pipe(100.0)
    pipe.add(0.0, "a", 100.0, "short")
    pipe.add(0.0, "b", 300.0, "long")
    assert drain(pipe) == {"short": near(2.0), "long": near(4.0)}


def test_a_late_flow_takes_its_share_from_then_on():
    # Alone for 1 s: 100 of 200 bits gone; then 50 bit/s each: "first" ends at 3 s, "late" has 50 of 150 bits left.
    pipe = Pipe(100.0)
    pipe.add(0.0, "a", 200.0, "first")
    pipe.add(1.0, "b", 150.0, "late")
    assert drain(pipe) == {"first": near(3.0), "late": near(3.5)}


def test_n_equal_flows_end_together_in_the_order_of_their_starts():
    pipe = Pipe(1000.0)
    for flow in range(7):
        pipe.add(0.0, flow, 100.0, flow)
    ends = drain(pipe)
    assert list(ends) == list(range(7))
    assert set(ends.values()) == {ends[0]} and ends[0] == near(0.7)


def test_empty_messages_and_infinite_rates_take_no_time():
    pipe = Pipe(math.inf)
    pipe.add(1.0, "a", 1e12, 1)
    pipe.add(1.0, "b", 0.0, 2)
    assert pipe.next_completion() == 1.0
    assert drain(pipe) == {2: 1.0, 1: 1.0}
    slow = Pipe(1.0)
    slow.add(2.0, "a", 0.0, 1)
    slow.add(2.0, "a", 4.0, 2)
    assert drain(slow) == {1: 2.0, 2: near(6.0)}


def test_nothing_is_left_behind_when_idle():
    # The second busy period computes the same bits as a fresh one: what a resumed run relies on.
    used, fresh = Pipe(7.0), Pipe(7.0)
    used.add(0.1, "a", 0.3, 0)
    drain(used)
    for pipe in (used, fresh):
        pipe.add(1.1, "a", 0.1, 1)
        pipe.add(1.1001, "b", 0.2, 2)
    assert drain(used) == drain(fresh)


def test_rate_must_be_positive():
    with pytest.raises(ValueError, match="rate"):
        Pipe(0.0)


def reference(arrivals, rate):
    """Processor sharing by the definition, in exact fractions. arrivals: (time, flow, bits), sorted by time."""
    queues, ends, now = {}, {}, Fraction(0)
    arrivals = list(enumerate(arrivals))
    while arrivals or queues:
        finish = min((queue[0][1] for queue in queues.values()), default=None)
        due = None if finish is None else now + finish * len(queues) / rate
        if arrivals and (due is None or arrivals[0][1][0] < due):
            number, (time, flow, bits) = arrivals.pop(0)
            share = (time - now) * rate / max(len(queues), 1)
            for queue in queues.values():
                queue[0][1] -= share
            queues.setdefault(flow, []).append([number, bits])
            now = time
        else:
            for queue in queues.values():
                queue[0][1] -= finish
            for flow in [flow for flow, queue in queues.items() if queue[0][1] == 0]:
                ends[queues[flow].pop(0)[0]] = due
                if not queues[flow]:
                    del queues[flow]
            now = due
    return ends


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3), st.integers(1, 30)), min_size=1, max_size=25),
    st.integers(1, 9),
)
def test_agrees_with_the_definition(plan, rate):
    plan = sorted((Fraction(time, 4), flow, Fraction(bits)) for time, flow, bits in plan)
    pipe, ends = Pipe(float(rate)), {}
    for number, (time, flow, bits) in enumerate(plan):
        while pipe.next_completion() <= time:
            end, message, _ = pipe.complete()
            ends[message] = end
        pipe.add(float(time), flow, float(bits), number)
    ends.update(drain(pipe))
    expected = reference(plan, Fraction(rate))
    assert ends == {number: near(float(end)) for number, end in expected.items()}
    last = {}
    for number, (_, flow, _) in enumerate(plan):
        assert ends[number] >= last.get(flow, 0.0)
        last[flow] = ends[number]
