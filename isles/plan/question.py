"""The question that `isles plan methods` and `isles plan splits` answer: a model, its step time, workers and links.

It also lists the candidates of `isles plan methods`: methods with the settings that matter on slow links. Methods of
`METHODS` without a row here are planned with their defaults.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

from isles.base.tables import parse_value
from isles.models.config import ModelConfig
from isles.models.sizes import Shape, parameters
from isles.network.links import Links, links
from isles.network.machines import Machine
from isles.plan.worker_classes import WorkerClass, worker_classes
from isles.replicas import METHODS, method

MOST_PARAMETERS, MOST_LAYERS, MOST_WORKERS = 1e15, 750, 100_000
_OFF = 0.01  # the largest relative error in the number of parameters
_CONTEXT = 1024
InSite = Literal["ddp", "fsdp", "stages"]


@dataclass(frozen=True, kw_only=True)
class PlanQuestion:
    """A planned training run.

    step_seconds: computing of one inner step. network: as in `world.virtual.links`. devices: workers of a site, which
    share its uplink and reach each other over `near`; inside: their method, or "stages" of a replica. batches:
    accumulated gradients per step; with stages, microbatches per stage. tokens: of the whole run; step_tokens: of one
    step of all workers; None: not given. machine: of a worker; None: not known. price_gb: per 10^9 bytes sent to other
    sites; price_hour: per worker. None: not given.
    """

    model: ModelConfig
    step_seconds: float
    workers: int
    network: str
    devices: int = 1
    near: str = "lan"
    inside: InSite = "ddp"
    batches: int = 1
    tokens: float | None = None
    step_tokens: float | None = None
    machine: Machine | None = None
    price_gb: float | None = None
    price_hour: float | None = None

    def __post_init__(self) -> None:
        for key in ("price_gb", "price_hour"):
            value = getattr(self, key)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"{key} = {value}: choose 0 or more")
        for key in ("step_seconds", "tokens", "step_tokens"):
            value = getattr(self, key)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{key} = {value}: choose a number above 0")
        if not 2 <= self.workers <= MOST_WORKERS:
            raise ValueError(f"workers = {self.workers}: choose 2 to {MOST_WORKERS:,}")
        if self.devices < 1 or self.workers % self.devices or self.workers == self.devices:
            raise ValueError(f"devices = {self.devices}: {self.workers} workers do not make two such sites or more")
        if self.tokens is not None and self.step_tokens is None:
            raise ValueError("tokens: give step_tokens too, for hours")
        self.links.check(self.sites)

    @cached_property
    def links(self) -> Links:
        return links(self.network)

    @cached_property
    def classes(self) -> list[WorkerClass]:
        """Classes of the sites, by their links."""
        return worker_classes(self.links, self.sites)

    @property
    def sites(self) -> int:
        """Number of uplinks: sites, or workers if each has its own."""
        return self.workers // self.devices

    @property
    def stages(self) -> int:
        """Stages of a replica; 1: every worker holds the whole model."""
        return self.devices if self.inside == "stages" else 1

    @property
    def parameters(self) -> int:
        return parameters(self.model.shape())

    @property
    def steps(self) -> int | None:
        """Inner steps of the run; None: not known."""
        if self.tokens is None or self.step_tokens is None:
            return None
        return max(1, round(self.tokens / self.step_tokens))

    def tables(self, replicas: dict[str, Any], steps: int, seconds: float) -> dict[str, dict[str, Any]]:
        """The sections of a configuration of such a run. seconds: of a step of all stages together."""
        model = {key: value for key, value in asdict(self.model).items() if value != getattr(ModelConfig, key)}
        virtual = {"links": self.network, "step_seconds": seconds}
        world = {"workers": self.workers, "backend": "virtual", "virtual": virtual}
        if self.devices > 1:
            world |= {} if self.stages > 1 else {"inner": self.devices, "inside": self.inside}
            if "fsdp" in (self.inside, replicas["method"]):  # torch's FSDP needs processes
                world["backend"] = "distributed"
            else:
                virtual |= {"inner_links": self.near, "shares_uplink": True}
        data, inner, parts = {}, {}, self.stages * self.batches
        if self.step_tokens is not None:
            data = {"batch_size": max(1, round(self.sequences / self.batches)) * (parts if self.stages > 1 else 1)}
            inner = {"accumulation": self.batches} if self.batches > 1 and self.stages == 1 else {}
        pipeline = {"stages": self.stages, "microbatches": parts, "in_flight": "1f1b"} if self.stages > 1 else {}
        tables = {"model": model, "data": data, "inner": inner, "replicas": replicas, "pipeline": pipeline}
        return tables | {"world": world, "run": {"steps": steps}}

    @property
    def sequences(self) -> int:
        """Sequences of a worker's step, for about `step_tokens` tokens of all workers."""
        assert self.step_tokens is not None
        return max(1, round(self.step_tokens / self.workers / self.model.shape().context))


def decoder_of(wanted: float, layers: int) -> ModelConfig:
    """The decoder of `layers` layers and about `wanted` parameters: heads 64 wide, an MLP about four times as wide as
    its residual stream, a vocabulary of bytes, an untied output head. ValueError if none is within 1 %.
    """
    if not 0 < wanted <= MOST_PARAMETERS:
        raise ValueError(f"parameters = {wanted:g}: choose a number above 0, up to {MOST_PARAMETERS:g}")
    if not 1 <= layers <= MOST_LAYERS:
        raise ValueError(f"layers = {layers}: choose 1 to {MOST_LAYERS}")
    width = math.sqrt(wanted / layers / 16)
    heads = max(1, round(width / 64))
    width = 64 * heads if width > 48 else max(2, 2 * round(width / 2))

    def shape_with(ffn: int) -> Shape:
        return Shape(
            d_model=width, layers=layers, heads=heads, ffn=ffn, vocab=256, context=_CONTEXT, tie_embeddings=False
        )

    shape = shape_with(max(1, 1 + round((wanted - parameters(shape_with(1))) / (3 * width * layers))))
    if abs(parameters(shape) - wanted) > _OFF * wanted:
        raise ValueError(f"parameters = {wanted:g} in {layers} layers: no decoder has this size; choose fewer layers")
    return ModelConfig(**asdict(shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A method with settings.

    settings: "key = value, ...". kind: how it changes training, an index of `KINDS`. why: its advantage. every: the H
    that it needs; None: any.
    """

    method: str
    settings: str = ""
    kind: int
    why: str
    every: int | None = None

    @property
    def replicas(self) -> dict[str, Any]:
        """Keys of [replicas]."""
        pairs = (part.split(" = ") for part in self.settings.split(", ") if part)
        return {"method": self.method} | {key: parse_value(value) for key, value in pairs}


KINDS = (
    "gradients every step",
    "answers of the same round",
    "answers a round late, or of a part of the entries",
    "a part of the model at each worker",
    "no answers",
)
_ALONE = len(KINDS) - 1
_ALIKE = "all workers stay equal, one exchange a round"
_FRAGMENTS = "a fragment at a time travels behind the computation"
_PAIRS = "a worker waits for one other worker only"
_PART = "little is sent, and what is left out is not lost"
_LATE = "the exchange has a whole round to arrive"
_INT8 = "codec = int8, anchor_codec = int8"
_ROWS: tuple[tuple[int, str, tuple[tuple[str, str], ...]], ...] = (
    (
        0,
        "every worker takes the same step: best loss a step",
        (("ddp", ""), ("ddp", "codec = bf16"), ("ddp", "codec = int8"), ("fsdp", "")),
    ),
    (1, _ALIKE, (("diloco", ""), ("diloco", "codec = int8"))),
    (
        1,
        _FRAGMENTS,
        (("streaming-diloco", "codec = fp4"), ("streaming-diloco", "codec = fp4, overlap_steps = 5")),
    ),
    (1, _PAIRS, (("noloco", ""), ("noloco", "exchange = single_vector"), ("noloco", _INT8))),
    (1, _PAIRS, (("streaming-noloco", ""), ("streaming-noloco", _INT8))),
    (
        1,
        _ALIKE,
        tuple((name, "") for name in ("localsgd", "fedavg", "fedadam", "fedyogi", "slowmo", "postlocal-sgd", "custom")),
    ),
    (2, _PART, (("sparseloco", "codec = topk:64+int2"),)),
    (2, _LATE, (("eager", ""), ("eager", "codec = fp4"), ("delayed", ""))),
    (2, _LATE, (("dilocox", "codec = int4, rank = 0"), ("dilocox", "window = 0"))),
    (3, "a worker holds and computes a part of the MLPs", (("ist", "split = ffn, sampler = stratified"),)),
    (
        2,
        "every worker takes the same step, on the gradients' main directions",
        (("ddp", "codec = powersgd:4, error_feedback = local"),),
    ),
    (2, _PART, (("dct-dp", "sparsity = 0.99"), ("sparta", "fraction = 0.005"), ("demo", ""))),
    (_ALONE, "no worker waits for another", (("none", ""),)),
)
_EVERY = {"sparta": 1}


def candidates(name: str | None = None) -> list[Candidate]:
    """Candidates, in the order of equally ranked ones. name: only this method, which may be the user's own."""
    result = [
        Candidate(method=known, settings=settings, kind=kind, why=why, every=_EVERY.get(known))
        for kind, why, rows in _ROWS
        for known, settings in rows
    ]
    listed = {candidate.method for candidate in result}
    for other in (*METHODS, *([] if name is None or name in METHODS else [name])):
        if other not in listed:
            kind = 1 if method(other).level == "parameter" else 0
            result.append(Candidate(method=other, kind=kind, why=METHODS.get(other, ("", "it is your own"))[1]))
    return [candidate for candidate in result if name in (None, candidate.method)]
