"""The schema of the messages between machines during a run.

A machine with the token is trusted to take part, but its messages are data: steps are whole numbers of this run, a
worker reports only for itself, texts have no control characters, and nothing becomes a path. Any other message is
`Unfit`, and its machine counts as lost, by name.
"""

from __future__ import annotations

import base64
import contextlib
import math
import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import fields
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from isles.base.errors import printable
from isles.base.parsing import UTF8, Float, Unfit, integer, table, value_of
from isles.base.schema import TASK_KINDS, USAGE, Metrics
from isles.comm.errors import NodeLost
from isles.training.config.sections import Config
from isles.training.records.replica_spread import WEIGHTS
from isles.training.records.timeline import MAX_SPANS

_COUNT = 1 << 63


def _number(value: Any) -> Any:
    """A number, finite or not, or None."""
    if not (value is None or isinstance(value, float) or (type(value) is int and abs(value) <= _COUNT)):
        raise ValueError("it is no number")
    return value


def _weights(text: str) -> str:
    size = len(base64.b64decode(text, validate=True))
    if size % 4 or size == 0:
        raise ValueError("it is no weights")
    return text


_Number = Annotated[Any, AfterValidator(_number)]
_Sample = Annotated[str, Field(strict=True, max_length=6 * WEIGHTS), AfterValidator(_weights)]
_Notice = Annotated[str, UTF8, Field(strict=True, max_length=4000), AfterValidator(printable)]
_NAMES = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_Digest = Annotated[str, Field(strict=True, pattern="^[0-9a-f]{64}$")]
_METRICS = tuple(field.name for field in fields(Metrics))
_OPTIONAL = ("val_loss", "gradient_norm", *USAGE)
_KINDS = ("compute", "away", "blocked", "transfer", *TASK_KINDS.values())
_CHANNELS = ("", "control", "inner", "outer", "pipeline", "eval")
_COUNTED = ("bytes_sent", "bytes_received", "blocked_seconds")
_GAUGES = 64
_RESULTS = (
    "tokens", "parameters", "replica_std", "bytes_sent", "bytes_received", "ddp_bytes",
    "compute_seconds", "blocked_seconds", "train_seconds", "virtual_seconds",
)  # fmt: skip


class Schema:
    """Of the run that `of` says. A call is a check of `isles.launch.handles`."""

    def __init__(self, of: Config) -> None:
        self.steps = _COUNT if of.run.tokens else of.run.steps  # workers may come to more

    def __call__(self, kind: str, value: Any, ranks: Container[int]) -> Any:
        """The checked value of a message of `kind` about the workers `ranks`. Unfit if it is not valid."""
        if kind == "event":
            return self.event(table(value, "an event"), ranks)
        if kind == "done":
            return None if value is None else _result(table(value, "a result"))
        if kind == "held":
            return integer({"held": value}, "held", 0, self.steps + 1)  # one step on its way
        return value

    def event(self, event: dict[str, Any], ranks: Container[int]) -> dict[str, Any]:
        """One of those that `Records.take` knows; of these ranks."""
        keys = set(event)
        if keys == {"notice"}:
            return {"notice": value_of(event, "notice", _Notice)}
        if keys == {"left", "notice"}:
            return {"left": _rank(event, "left", ranks), "notice": value_of(event, "notice", _Notice)}
        if keys == {"checkpoint", "worker"}:
            return {"checkpoint": self._step(event, "checkpoint"), "worker": _rank(event, "worker", ranks)}
        if keys == {"corpus", "rank"}:
            return {"corpus": value_of(event, "corpus", _Digest), "rank": _rank(event, "rank", ranks)}
        if keys == {"sample", "weights", "step", "worker"}:
            weights = integer(event, "weights", 1, _COUNT)
            return {"sample": value_of(event, "sample", _Sample), "weights": weights, **self._origin(event, ranks)}
        if keys == {"spans"}:
            spans = event["spans"]
            if not isinstance(spans, list) or len(spans) > 2 * MAX_SPANS:
                raise Unfit("spans are too many")
            return {"spans": [self._span(table(span, "a span"), ranks) for span in spans]}
        return self._metrics(event, ranks)

    def _metrics(self, event: Mapping[str, Any], ranks: Container[int]) -> dict[str, Any]:
        gauges = [key for key in event if key not in _METRICS]
        if len(gauges) > _GAUGES or not all(_NAMES.fullmatch(key) for key in gauges) or {"lost", "left"} & set(gauges):
            raise Unfit("an event of no kind that isles has")
        fields = self._origin(event, ranks)
        for key in ("tokens", "bytes_sent", "bytes_received"):
            fields[key] = integer(event, key, 0, _COUNT)
        for key in ("blocked_seconds", "compute_seconds", "clock_seconds"):
            fields[key] = value_of(event, key, Float)
        for key in ("loss", "lr", *(key for key in _OPTIONAL if key in event), *gauges):
            fields[key] = value_of(event, key, _Number)
        return {key: fields[key] for key in event}

    def _span(self, span: Mapping[str, Any], ranks: Container[int]) -> dict[str, Any]:
        kind, channel = span.get("kind"), span.get("channel")
        if kind not in _KINDS or channel not in _CHANNELS:
            raise Unfit("a span of no kind that isles has")
        times = {key: value_of(span, key, Float) for key in ("start", "end")}
        task = {"microbatch": integer(span, "microbatch", 0, _COUNT)} if kind in TASK_KINDS.values() else {}
        return {**self._origin(span, ranks), "kind": kind, "channel": channel, **times, **task}

    def _origin(self, event: Mapping[str, Any], ranks: Container[int]) -> dict[str, Any]:
        return {"step": self._step(event, "step"), "worker": _rank(event, "worker", ranks)}

    def _step(self, event: Mapping[str, Any], key: str) -> int:
        return integer(event, key, 0, self.steps)


@contextlib.contextmanager
def checks_host_messages() -> Iterator[None]:
    """Context: an unfit message of node 0 counts as the loss of node 0."""
    try:
        yield
    except Unfit as error:
        raise NodeLost(0, f"says what isles does not say: {error}") from None


def committed(command: Mapping[str, Any], config: Config) -> tuple[int, list[int]]:
    """Step and workers of node 0's message that a checkpoint is complete. Unfit if it is none."""
    ranks = command.get("ranks")
    if not isinstance(ranks, list) or len(ranks) > config.world.workers:
        raise Unfit("ranks are no workers of this run")
    known = [integer({"rank": rank}, "rank", 0, config.world.workers - 1) for rank in ranks]
    return integer(command, "commit", 0, config.run.steps), known


def begun(facts: Mapping[str, Any], config: Config) -> int | None:
    """The step that node 0 says to go on from; None for a new run."""
    return None if facts.get("resume") is None else integer(facts, "resume", 0, config.run.steps)


def _result(result: dict[str, Any]) -> dict[str, Any]:
    """The schema of the results of `Trainer.conclude`."""
    known = {*_RESULTS, "val_loss", "val_loss_replica", "corpus_sha256", "memory", "channels"}
    texts = [key for key in result if key.startswith("val_loss.") and _NAMES.fullmatch(key)]
    if set(result) - {*texts} != known:
        raise Unfit("a result of another kind than isles'")
    fields: dict[str, Any] = {key: value_of(result, key, _Number) for key in _RESULTS}
    if not all(value is not None and 0 <= value < math.inf for value in fields.values()):
        raise Unfit("a result with a figure missing, or one that cannot be")
    fields |= {key: value_of(result, key, _Number) for key in ("val_loss", "val_loss_replica", *texts)}
    digest, memory = result["corpus_sha256"], result["memory"]
    fields["corpus_sha256"] = "" if digest == "" else value_of(result, "corpus_sha256", _Digest)
    fields["memory"] = None if memory is None else {
        key: value_of(memory, key, _Notice) if isinstance(memory[key], str) else value_of(memory, key, _Number)
        for key in table(memory, "memory") if _NAMES.fullmatch(key)
    }  # fmt: skip
    fields["channels"] = {
        name: {key: value_of(table(counts, name), key, _Number) or 0.0 for key in _COUNTED}
        for name, counts in table(result["channels"], "channels").items()
        if name in _CHANNELS
    }
    return fields


def _rank(event: Mapping[str, Any], key: str, ranks: Container[int]) -> int:
    rank = integer(event, key, 0, _COUNT)
    if rank not in ranks:
        raise Unfit(f"{key} {rank} is no worker of its")
    return rank
