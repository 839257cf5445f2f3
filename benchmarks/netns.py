"""Methods on a line that is really slow: workers in network namespaces, joined over a switch with token-bucket rates.

    python -m benchmarks.netns [--workers 2] [--turns 3] [--json]        Linux, root, iproute2; without: says so, exit 0

The computation of a step is paced at 60 ms, as a device's would be: forward and backward of a 0.53M-parameter decoder
on 16 tokens (real, printed beside), and sleep for the rest. `optimizer.step()`, AdamW's and the method's, comes on top.
H = 25 steps a round; the rate is such that the float32 outer gradient takes 0.8 of 25 times 60 ms.

    utilisation      wall of `none` / wall of the method, same steps, same turn; after one round that is not counted
    round, model     wall of a round against max(H s, T) for methods that overlap, H s + T for those that wait, with
                     s: a step of `none`, T: bytes sent with their headers / rate, less what the token bucket has
                     saved up while the line was idle; bounded for two workers, whose exchange is one message each way
    veth, counter    bytes that the cable's end has received, against those the library counts, from the making of the
                     optimizer to its end; methods whose exchanges have 2 MB and more
    pair exchange    8 MB swapped by two workers: bits with headers (segments of 1448 bytes) a second / rate

Medians over the turns, of the slowest worker. Exit code 1 if a bound is missed.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from benchmarks._machines import BURST, CABLE, machines
from benchmarks._measure import Row
from benchmarks._slow_line import main
from benchmarks._stage import play
from benchmarks._wire import HEADERS, wire_of

PACE = 0.060  # seconds that the computation of a step takes
H = 25
SHARE = 0.8  # of a round's computation that one float32 exchange takes
SEGMENT = 1448  # bytes of payload in a full packet
SWAPPED = 8_000_000  # bytes of the pair exchange
PATIENCE = 1200.0  # seconds for everything


@dataclass(frozen=True)
class Case:
    """One method with its options. steps: counted in a turn; warm_up: before them. waits: whether the computation
    stands still for the exchange. large: whether its messages are of 2 MB and more. utilisation: its bound.
    """

    method: str
    options: dict[str, Any] = field(default_factory=dict)
    steps: int = 2 * H
    warm_up: int = H
    waits: bool = False
    large: bool = True
    utilisation: tuple[str, float] | None = None


_DENSE = {"rank": 0, "codec": "none", "error_feedback": "none"}
_FIXED = {"window": 0, "start_compress": 0}
_STREAMING = {"sync_every": H, "codec": "fp4", "layers_per_fragment": 1}

CASES: dict[str, Case] = {
    "none": Case("none", large=False),
    "ddp": Case("ddp", steps=4, warm_up=1, waits=True),
    "diloco": Case("diloco", {"sync_every": H}, waits=True),
    "delayed": Case("delayed", {"sync_every": H}),
    "eager": Case("eager", {"sync_every": H}, utilisation=(">=", 0.95)),
    "eager, H = 13": Case("eager", {"sync_every": 13}, steps=39, warm_up=26),
    "dilocox, dense, carry": Case("dilocox", {"sync_every": H, **_DENSE}),
    "dilocox, dense, no delay": Case("dilocox", {"sync_every": H, "delay": "none", **_DENSE}, waits=True),
    "dilocox, no delay": Case("dilocox", {"sync_every": H, "delay": "none", **_FIXED}, large=False),
    "dilocox": Case("dilocox", {"sync_every": H, **_FIXED}, large=False),
    "streaming fp4, tau 5": Case("streaming-diloco", {**_STREAMING, "overlap_steps": 5}, large=False,
                                 utilisation=(">=", 0.95)),
    "streaming fp4, tau 1": Case("streaming-diloco", {**_STREAMING, "overlap_steps": 1}, large=False),
}  # fmt: skip


def on_the_line(payload: float) -> float:
    """Bytes that the token bucket charges for `payload` bytes: with the headers of full packets."""
    return payload * (1 + HEADERS / SEGMENT)


# On the workers.


def made() -> tuple[Any, Any]:
    """The model and its inner optimizer."""
    import torch

    from isles.models import ModelConfig, build

    model = build(ModelConfig(size="0.53M", device="cpu"), seed=0)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def worker(world: Any, cases: dict[str, dict[str, Any]], turns: int) -> dict[str, Any]:
    """What this worker measures of every case and of the exchange: lists of one entry a turn."""
    told: dict[str, Any] = {name: [] for name in (*cases, "exchange")}
    for turn in range(turns):
        names = list(cases)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            told[name].append(run(world, Case(**cases[name])))
        told["exchange"] += [exchange(world), exchange(world)]
    return told


def run(world: Any, case: Case, pace: float = PACE) -> dict[str, float]:
    """One turn of one case, the computation of a step paced at `pace` seconds. wall: seconds of the counted steps;
    real: of a step's computation, the median; veth and counted: bytes received, by the cable's end and by the library.
    """
    import torch

    import isles

    model, inner = made()
    tokens = torch.randint(256, (1, 17), generator=torch.Generator().manual_seed(world.rank))
    traffic, real = world.transport.traffic, []
    world.world.barrier()
    seen, counted = wire_of(CABLE), traffic.total("bytes_received")
    optimizer = isles.method(case.method)(model, inner, world.outer, **case.options)

    def step() -> None:
        # Before the backward pass: after it, what ddp has begun to send would go on behind the sleep.
        time.sleep(max(pace - (real[-1] if real else 0.0), 0.0))
        start = time.perf_counter()
        model(tokens).loss.backward()
        real.append(time.perf_counter() - start)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(case.warm_up):
        step()
    start = time.perf_counter()  # no barrier: it would queue behind what is under way
    for _ in range(case.steps):
        step()
    wall = time.perf_counter() - start
    optimizer.finish()
    world.world.barrier()
    veth, counted = wire_of(CABLE) - seen, traffic.total("bytes_received") - counted
    return {"wall": wall, "real": median(real), "veth": veth.bytes_received, "counted": counted}


def exchange(world: Any) -> float:
    """Seconds in which this worker and its neighbour swap `SWAPPED` bytes, the token buckets being empty; 0 for one
    that is left over.
    """
    import torch

    if world.rank ^ 1 >= world.outer.size:
        return 0.0
    start = 0.0
    for nbytes in (8 * BURST, SWAPPED):
        start = time.perf_counter()
        world.outer.exchange(world.rank ^ 1, torch.zeros(nbytes, dtype=torch.uint8))
    return time.perf_counter() - start


# Here.


def exchange_seconds(nbytes: float, speed: float, idle: float) -> float:
    """Seconds until `nbytes` have passed at `speed` bits per second, after the line was idle for so many seconds."""
    return 8 * on_the_line(nbytes) / speed - min(8 * BURST / speed, max(idle, 0.0))


def round_seconds(case: Case, step: float, nbytes: float, speed: float) -> float:
    """What a round with one exchange of the whole model should take, `step` being the seconds of a step alone."""
    own = case.options["sync_every"] * step
    if case.waits:
        return own + exchange_seconds(nbytes, speed, own)
    return max(own, exchange_seconds(nbytes, speed, own - 8 * on_the_line(nbytes) / speed))


def rate(workers: int) -> tuple[float, int, float]:
    """(bits per second, bytes that a worker sends in a float32 exchange, seconds that these take)."""
    import torch

    from isles.comm.codecs import codec
    from isles.comm.collectives.mean import sent_bytes
    from isles.models import ModelConfig, parameters

    nbytes = sent_bytes(parameters(ModelConfig(size="0.53M").shape()), torch.float32, codec("none"), workers, 0)
    seconds = SHARE * H * PACE
    return 8 * (on_the_line(nbytes) - BURST) / seconds, nbytes, seconds


def table(workers: int, turns: int) -> list[Row]:
    """Set up, run, and put the results together."""
    speed, nbytes, transfer = rate(workers)
    with machines(workers) as cast:
        for machine in cast:
            machine.limit(speed)
        arguments = {"cases": {name: asdict(case) for name, case in CASES.items()}, "turns": turns}
        told = play(cast, "benchmarks.netns:worker", arguments, PATIENCE)
    turns_of = {name: [list(ranks) for ranks in zip(*(one[name] for one in told), strict=True)] for name in told[0]}

    def worst(name: str, key: str) -> list[float]:
        """By turn, of the slowest worker."""
        return [max(rank[key] for rank in ranks) for ranks in turns_of[name]]

    step = [wall / CASES["none"].steps for wall in worst("none", "wall")]
    rows = [
        Row("line", speed / 1e6, "Mbit/s", None, f"{nbytes / 1e6:.2f} MB a float32 exchange: {transfer:.2f} s"),
        Row("a step of none", 1e3 * median(step), "ms", None, f"paced at {1e3 * PACE:.0f} ms, and AdamW"),
        Row("its real computation", 1e3 * median(worst("none", "real")), "ms"),
    ]
    walls = {name: [wall / case.steps for wall in worst(name, "wall")] for name, case in CASES.items()}
    for name, case in CASES.items():
        if name == "none":
            continue
        ratio = median(bare / wall for bare, wall in zip(step, walls[name], strict=True))
        note = f"{1e3 * median(walls[name]):.1f} ms a step"
        rows.append(Row(f"utilisation    {name}", ratio, "of none", case.utilisation, note))
    for name, case in CASES.items():
        if not case.large or case.method == "ddp":
            continue
        every = case.options["sync_every"]
        said = [round_seconds(case, bare, nbytes, speed) for bare in step]
        ratio = median(every * wall / model for wall, model in zip(walls[name], said, strict=True))
        note = f"{every * median(walls[name]):.2f} s a round, {median(said):.2f} s by the model"
        bound = ("<=", 0.1) if workers == 2 else None
        rows.append(Row(f"round, model   {name}", abs(ratio - 1), "off", bound, note))
    for name, case in CASES.items():
        if case.large:
            ranks = [rank for turn in turns_of[name] for rank in turn]
            off = max(abs(rank["veth"] / rank["counted"] - 1) for rank in ranks)
            note = f"{sum(rank['counted'] for rank in ranks) / 1e6:.1f} MB counted"
            rows.append(Row(f"veth, counter  {name}", off, "off", ("<=", 0.03), note))
    swap = median(max(seconds) for seconds in turns_of["exchange"])
    share = 8 * SWAPPED / swap / speed
    note = f"{share:.3f} without headers; both directions at once"
    rows.append(Row("pair exchange  bits with headers", on_the_line(share), "of the rate", (">=", 0.95), note))
    return rows


if __name__ == "__main__":
    sys.exit(main("Methods on a line that is really slow.", 2, table, paired=False))
