"""Which method for which link: seconds, bytes and memory of this library's methods, from the time of a step and the
lines between the workers.

c: seconds of a step of computing; H: steps a round; t(b): seconds of the mean of the model as b bits a parameter
(`costs.mean_seconds`); p(b): of a swap with a partner (`costs.partner_seconds`). Seconds that a worker waits, a round:

| method | waits |
|---|---|
| ddp              | H = 1: max(t - 2c/3, t(last bucket)); t where one bucket holds the model; backward: 2c/3 |
| diloco           | t |
| streaming-diloco | F fragments in turns: max(F max(0, t/F - tau c), F t/F - Hc), tau = 1 |
| noloco           | p(payload) + max(0, p(anchors) - Hc); with exchange = "single_vector" p(32) |
| streaming-noloco | F fragments in turns: max(F max(0, p/F - tau c), 2p - Hc), tau = 1 |
| eager, dilocox   | max(0, t - Hc) |
| sparseloco       | t, of the largest entries only |
| sparta           | H = 1: t, of a random part |

localsgd, fedavg, postlocal-sgd (in the end) and slowmo cost what diloco does, delayed what eager does.

    utilisation = Hc / (Hc + waits)

Left out: jitter, headers, the time to encode, workers of unequal speed. Memory: weights, gradients, AdamW (16 bytes a
parameter, float32) and the vectors that the method keeps while a round is under way.

Rank: a plan that reaches the wanted utilisation comes before one that does not; then what changes training less:
gradients every step (ddp); answers of the same round; answers a round late (eager, dilocox) or of a part of the
entries (sparseloco, sparta); then the smaller H; then the order of `WAYS`. That is a judgement from the papers'
losses, not a measurement of yours. Of those that do not reach it, the one that computes most of the time is first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from isles.network.costs import Lines, library_mean, mean_seconds, partner_seconds
from isles.network.links import Links

EVERY = (10, 20, 30, 50, 100, 200, 300, 500)
"""Rounds that are tried, in inner steps."""
MOST_WORKERS = 2000
_BACKWARD = 2 / 3
_BUCKET = 8 * 25 * 2**20  # bits; ddp's bucket_megabytes = 25
_OVERLAP = 1  # steps; streaming-diloco's overlap_steps
_ADAMW = 16  # bytes a parameter: float32 weights, gradients, two moments


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A codec's size: bits a parameter with its scales, and of an entry of the mean per bit of one sent."""

    bits: float
    back: float = 1.0


_SPARSE = 64 / 4096 * (12 + 2 + 32 / 64)  # a place, a value, its share of a scale
FORMS = {
    "none": Form(bits=32),
    "bf16": Form(bits=16),
    "int8": Form(bits=8 + 32 / 256),
    "int4": Form(bits=4 + 32 / 64),
    "fp4": Form(bits=4 + 32 / 256, back=16 / (4 + 32 / 256)),
    "topk:64+int2": Form(bits=_SPARSE, back=32 / _SPARSE),
    "randk:0.005": Form(bits=round(0.005 * 4096) / 4096 * 32),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is to be trained. layers: of the decoder. step_seconds: of one inner step of computing. tokens: of the whole
    run, and of one step of all workers; None: not asked for.
    """

    parameters: float
    layers: int
    step_seconds: float
    workers: int
    links: Links
    tokens: float | None = None
    step_tokens: float | None = None

    def __post_init__(self) -> None:
        for key in ("parameters", "step_seconds", "tokens", "step_tokens"):
            value = getattr(self, key)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{key} = {value}: choose a number above 0")
        if self.layers < 1:
            raise ValueError(f"layers = {self.layers}: choose 1 or more")
        if not 2 <= self.workers <= MOST_WORKERS:
            raise ValueError(f"workers = {self.workers}: choose 2 to {MOST_WORKERS}")
        if (self.tokens is None) != (self.step_tokens is None):
            raise ValueError("tokens and step_tokens: give both, for hours, or neither")
        self.links.check(self.workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A method with its settings. vectors: float32 copies of the model that it keeps. kind: 0 gradients every step, 1
    answers of the same round, 2 a round late or of some entries. why: what speaks for it. every: the H that it is made
    for; None: any.
    """

    method: str
    codec: str
    settings: str
    kind: int
    vectors: int
    waits: Callable[[Job, Lines, Form, int], float]
    payloads: Callable[[int, Form], float]
    why: str
    every: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One way at one H. waits: seconds a round. bytes_a_step: that a worker sends, on average. wanted: how many times
    the present rates it wants for each target; nan: no rate is enough. memory: bytes a worker. hours: None where no
    tokens are given.
    """

    way: Way
    every: int
    waits: float
    utilisation: float
    reaches: bool
    wanted: tuple[float, ...]
    bytes_a_step: float
    memory: float
    hours: float | None


def plan(job: Job, *, targets: Sequence[float] = (0.9,), every: int | None = None) -> list[Plan]:
    """All ways, the first the one to try first. targets: utilisations for which rates are asked; the first of them is
    the one to reach. every: H for all; None: for each way the smallest of `EVERY` that reaches it, or the largest.
    """
    if not targets or not all(0 < target < 1 for target in targets):
        raise ValueError(f"targets = {list(targets)}: choose shares between 0 and 1, such as 0.9")
    if every is not None and every < 1:
        raise ValueError(f"sync_every = {every}: choose 1 or more")
    lines = Lines.of(job.links, range(job.workers))
    made = [_first_enough(job, lines, way, targets, [every] if every else list(EVERY)) for way in WAYS]
    order = {way: place for place, way in enumerate(WAYS)}
    return sorted(
        made,
        key=lambda one: (
            (0, one.way.kind, one.every, order[one.way]) if one.reaches else (1, -one.utilisation, 0, order[one.way])
        ),
    )


def utilisation(job: Job, way: Way, every: int, lines: Lines) -> float:
    """Share of the time spent computing."""
    computing = every * job.step_seconds
    return computing / (computing + way.waits(job, lines, FORMS[way.codec], every))


def curve(job: Job, one: Plan, factors: Sequence[float]) -> list[float]:
    """The plan's utilisation with every rate multiplied by each factor."""
    lines = Lines.of(job.links, range(job.workers))
    return [utilisation(job, one.way, one.every, lines.scaled(factor)) for factor in factors]


def _first_enough(job: Job, lines: Lines, way: Way, targets: Sequence[float], tried: list[int]) -> Plan:
    tried = [way.every] if way.every else tried
    shares = {every: utilisation(job, way, every, lines) for every in tried}
    every = next((every for every in tried if shares[every] >= targets[0]), tried[-1])
    form, share = FORMS[way.codec], shares[every]
    hours = None
    if job.tokens is not None and job.step_tokens is not None:
        hours = job.tokens / job.step_tokens * job.step_seconds / share / 3600
    return Plan(
        way=way,
        every=every,
        waits=way.waits(job, lines, form, every),
        utilisation=share,
        reaches=share >= targets[0],
        wanted=tuple(_wanted(job, way, every, lines, target) for target in targets),
        bytes_a_step=way.payloads(job.workers, form) * form.bits / 8 * job.parameters / every,
        memory=(_ADAMW + 4 * way.vectors) * job.parameters,
        hours=hours,
    )


def _wanted(job: Job, way: Way, every: int, lines: Lines, target: float) -> float:
    """The factor on all rates at which the target is just reached, by bisection to 0.01 %."""
    low, high = math.log(1e-9), math.log(1e9)
    if utilisation(job, way, every, lines.scaled(math.exp(high))) < target:
        return math.nan
    while high - low > 1e-4:
        middle = (low + high) / 2
        enough = utilisation(job, way, every, lines.scaled(math.exp(middle))) >= target
        low, high = (low, middle) if enough else (middle, high)
    return math.exp(high)


def _all(job: Job, lines: Lines, form: Form, share: float = 1.0) -> float:
    return mean_seconds(lines, share * form.bits * job.parameters, form.back)


def _ddp(job: Job, lines: Lines, form: Form, every: int) -> float:
    whole, buckets = _all(job, lines, form), math.ceil(32 * job.parameters / _BUCKET)
    if buckets == 1:
        return whole
    return max(whole - _BACKWARD * job.step_seconds, _all(job, lines, form, 1 / buckets))


def _diloco(job: Job, lines: Lines, form: Form, every: int) -> float:
    return _all(job, lines, form)


def _fragments(job: Job) -> int:
    return -(-job.layers // min(3, -(-job.layers // 2)))  # the methods' default


def _streaming(job: Job, lines: Lines, form: Form, every: int) -> float:
    fragments = _fragments(job)
    one = _all(job, lines, form, 1 / fragments)
    return fragments * max(0.0, one - _OVERLAP * job.step_seconds, one - every / fragments * job.step_seconds)


def _noloco(job: Job, lines: Lines, form: Form, every: int) -> float:
    swap = partner_seconds(lines, form.bits * job.parameters)  # anchors travel in the same form
    return swap + max(0.0, swap - every * job.step_seconds)


def _streaming_pairs(job: Job, lines: Lines, form: Form, every: int) -> float:
    swap, fragments = partner_seconds(lines, form.bits * job.parameters), _fragments(job)
    one = partner_seconds(lines, form.bits * job.parameters / fragments)  # the anchors left a round before
    late = fragments * max(0.0, one - _OVERLAP * job.step_seconds)
    return max(late, 2 * swap - every * job.step_seconds, 0.0)


def _single_vector(job: Job, lines: Lines, form: Form, every: int) -> float:
    return partner_seconds(lines, form.bits * job.parameters)


def _eager(job: Job, lines: Lines, form: Form, every: int) -> float:
    return max(0.0, _all(job, lines, form) - every * job.step_seconds)


def _mean_payloads(workers: int, form: Form) -> float:
    return library_mean(workers, form.back).payloads


def _ways() -> tuple[Way, ...]:
    every_step = "every worker takes the same step: best loss a step"
    same_round = "all workers stay equal, one exchange a round"
    pairs = "nobody waits for more than one other worker"
    late = "the exchange has a whole round to arrive"

    part = "little is sent, and what is left out is not lost"

    def over_all(
        method: str,
        codec: str,
        kind: int,
        vectors: int,
        waits: Callable[..., float],
        why: str,
        settings: str | None = None,
        every: int | None = None,
    ) -> Way:
        spoken = "" if codec == "none" else f"codec = {codec}"
        return Way(
            method=method,
            codec=codec,
            settings=spoken if settings is None else settings,
            every=every,
            kind=kind,
            vectors=vectors,
            waits=waits,
            payloads=_mean_payloads,
            why=why,
        )

    def in_pairs(
        codec: str,
        settings: str,
        vectors: int,
        waits: Callable[..., float],
        payloads: int,
        method: str = "noloco",
    ) -> Way:
        return Way(
            method=method,
            codec=codec,
            settings=settings,
            kind=1,
            vectors=vectors,
            waits=waits,
            payloads=lambda workers, form: payloads,
            why=pairs,
        )

    return (
        over_all("ddp", "none", 0, 1, _ddp, every_step, every=1),
        over_all("ddp", "bf16", 0, 1, _ddp, every_step, every=1),
        over_all("ddp", "int8", 0, 1, _ddp, every_step, every=1),
        over_all("diloco", "none", 1, 3, _diloco, same_round),
        over_all("diloco", "int8", 1, 3, _diloco, same_round),
        over_all("streaming-diloco", "fp4", 1, 3, _streaming, "a fragment at a time travels behind the computation"),
        in_pairs("none", "", 4, _noloco, 2),
        in_pairs("none", "exchange = single_vector", 3, _single_vector, 1),
        in_pairs("int8", "codec = int8, anchor_codec = int8", 5, _noloco, 2),
        in_pairs("none", "", 4, _streaming_pairs, 2, method="streaming-noloco"),
        in_pairs("int8", "codec = int8, anchor_codec = int8", 5, _streaming_pairs, 2, method="streaming-noloco"),
        over_all("sparseloco", "topk:64+int2", 2, 3, _diloco, part),
        over_all("eager", "none", 2, 6, _eager, late),
        over_all("eager", "fp4", 2, 6, _eager, late),
        over_all("dilocox", "int4", 2, 6, _eager, late, settings="codec = int4, rank = 0"),
        over_all("sparta", "randk:0.005", 2, 3, _diloco, part, settings="fraction = 0.005", every=1),
    )


WAYS = _ways()
