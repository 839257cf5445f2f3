"""How long a method makes a worker wait for its exchanges, seconds a round.

c: seconds of a step of computing; H: steps a round; t(b): seconds of the mean of the model as b bits a parameter
(`costs.mean_seconds`), of two exchanges one after the other where the form has two; p(n): of a swap of n models with a
partner (`costs.partner_seconds`).

| method | waits |
|---|---|
| ddp, dct-dp      | H = 1, k buckets: max(t - 2c/3 (1 - 1/k), t(last bucket)); backward: 2c/3 |
| diloco           | t |
| streaming-diloco | F fragments in turns: each max(0, t/F - tau c), more where the line is not free again, tau = 1 |
| noloco           | payload and anchors: max(p(1), p(2) - Hc); with exchange = "single_vector" p(1) |
| streaming-noloco | F fragments in turns, with p; anchors are on the line behind each landing |
| eager, dilocox   | max(0, t - Hc) |
| sparseloco       | t, of the largest entries only |
| sparta           | H = 1: t, of a random part |
| demo             | H = 1: t, of the largest coefficients, all to all |
| ist              | t, of units there and back, and of the mean of the rest, and a third latency |

localsgd, fedavg, fedadam, fedyogi, postlocal-sgd (in the end) and slowmo wait as diloco does, delayed as eager does.
Every function takes the job, its lines, the form of what is sent, and H.
"""

from __future__ import annotations

import math

from isles.network.planner.costs import Lines, mean_seconds, partner_seconds
from isles.network.planner.forms import Form
from isles.network.planner.job import Job

OVERLAP = 1
"""Steps; the streaming methods' overlap_steps."""
_BACKWARD = 2 / 3
_BUCKET = 8 * 25 * 2**20  # bits; ddp's bucket_megabytes = 25
_LAYERS = 3  # of a fragment, or half of a shorter model's: the streaming methods' defaults
_TURNS = 4


def for_mean(job: Job, lines: Lines, form: Form, every: int) -> float:
    """diloco, sparseloco, sparta, demo."""
    return _mean(job, lines, form)


def for_units(job: Job, lines: Lines, form: Form, every: int) -> float:
    """ist: units go to their keepers beside the mean, and only then to their next holders: one latency more."""
    return _mean(job, lines, form) + mean_seconds(lines, 0.0) / 2


def for_buckets(job: Job, lines: Lines, form: Form, every: int) -> float:
    """ddp, dct-dp."""
    count = math.ceil(32 * job.parameters / _BUCKET)
    hidden = _BACKWARD * job.step_seconds * (1 - 1 / count)  # what the backward pass takes from the first one on
    return max(_mean(job, lines, form) - hidden, _mean(job, lines, form, 1 / count))


def for_late_mean(job: Job, lines: Lines, form: Form, every: int) -> float:
    """eager, dilocox."""
    return max(0.0, _mean(job, lines, form) - every * job.step_seconds)


def for_fragments(job: Job, lines: Lines, form: Form, every: int) -> float:
    """streaming-diloco."""
    return _in_turns(job, every, _mean(job, lines, form), _mean(job, lines, form, 0.0))


def for_partner(job: Job, lines: Lines, form: Form, every: int) -> float:
    """noloco; anchors travel in the form of the payload."""
    return max(_swap(job, lines, form, 1), _swap(job, lines, form, 2) - every * job.step_seconds)


def for_partner_once(job: Job, lines: Lines, form: Form, every: int) -> float:
    """noloco, exchange = "single_vector"."""
    return _swap(job, lines, form, 1)


def for_partner_by_fragments(job: Job, lines: Lines, form: Form, every: int) -> float:
    """streaming-noloco."""
    return _in_turns(job, every, _swap(job, lines, form, 1), _swap(job, lines, form, 0), anchors=True)


def _mean(job: Job, lines: Lines, form: Form, share: float = 1.0) -> float:
    return sum(mean_seconds(lines, share * bits * job.parameters, form.back) for bits in form.phases)


def _swap(job: Job, lines: Lines, form: Form, models: int) -> float:
    return partner_seconds(lines, models * form.bits * job.parameters)


def _in_turns(job: Job, every: int, whole: float, empty: float, anchors: bool = False) -> float:
    """Seconds waited in a round of fragments: those of the blocks alike, and one of the rest, which is taken for empty.
    whole, empty: seconds of the exchange of all of the model and of nothing, latency; between, the line is taken.

    anchors: they follow each landing on the same line. Plays some rounds, the first of which fills the line.
    """
    layers = min(_LAYERS, -(-job.layers // 2))
    count = -(-job.layers // layers)
    sizes = [*[(whole - empty) / count] * count, 0.0]  # seconds of the line
    receive, send, land = range(3)  # their order after one step
    events = []
    for place in range(len(sizes)):
        sent = round(place * every / len(sizes)) % every
        events += [(sent, send, place), (sent + OVERLAP, receive, place), (sent + OVERLAP, land, place)]
    clock = computed = line = waited = 0.0
    due = [0.0] * len(sizes)
    for turn in range(_TURNS):
        waited = 0.0
        for step, what, place in sorted(events):
            now = (turn * every + step) * job.step_seconds
            clock, computed = clock + now - computed, now
            if what == receive:
                waited += max(0.0, due[place] - clock)
                clock = max(clock, due[place])
            elif what == send:
                line = max(line, clock) + sizes[place]
                due[place] = line + empty
            elif anchors:
                line = max(line, clock) + sizes[place]
    return waited
