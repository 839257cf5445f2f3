"""The methods that `isles plan methods` compares, each with the settings that matter on slow lines. Methods of
`METHODS` without a row here are planned as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from isles.replicas import METHODS, method
from isles.tables import parse_value


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """settings: "key = value, ...". kind: what it changes in training, by its place in `KINDS`. why: what speaks for
    it. every: the H that it is made for; None: any.
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
_PAIRS = "nobody waits for more than one other worker"
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
    (_ALONE, "nobody waits for anybody", (("none", ""),)),
)
_EVERY = {"sparta": 1}


def candidates(name: str | None = None) -> list[Candidate]:
    """In the order in which those of equal rank are shown. name: of one method, of one's own too."""
    made = [
        Candidate(method=known, settings=settings, kind=kind, why=why, every=_EVERY.get(known))
        for kind, why, rows in _ROWS
        for known, settings in rows
    ]
    listed = {one.method for one in made}
    for other in (*METHODS, *([] if name is None or name in METHODS else [name])):
        if other not in listed:
            kind = 1 if method(other).level == "parameter" else 0
            made.append(Candidate(method=other, kind=kind, why=METHODS.get(other, ("", "it is your own"))[1]))
    return [one for one in made if name in (None, one.method)]
