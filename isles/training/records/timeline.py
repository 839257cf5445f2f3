"""When a worker computed, waited and exchanged: a bounded record for the report's lanes.

    trainer: `step(start, end)` each inner step; transports: transfers and waits (`Traffic.spans`)
      -> `take` at every logged step: the first `MAX_SPANS` spans of the run, when there are that many
      -> `rest` when the worker stops: what came since, at most the newest `MAX_SPANS`
      -> RUN/timeline.jsonl, one span a line: {"step", "worker", "kind", "channel", "start", "end"}

and, where replicas lie in stages, the tasks of the last step (`tasks`): forward, loss, backward, with "microbatch".

kind: compute or away (channel ""), blocked or transfer. Steps that follow each other at once are one span of
computing, waits and pauses inside them included, so a lane is: computing, and over it what was not. Seconds of the
same clock as `clock_seconds`. Memory: about `MAX_SPANS` spans a worker; time: one comparison a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from isles.base.schema import TASK_KINDS
from isles.comm.traffic import ClockSpan
from isles.network.routing.events import Span

MAX_SPANS = 400

SpanRecord = dict[str, Any]


class Timeline:
    """The record of one worker. resumed: it goes on from a checkpoint, whose run has its first spans already."""

    def __init__(self, worker: int, resumed: bool = False) -> None:
        self.worker = worker
        self._head: list[SpanRecord] | None = None if resumed else []
        self._tail: deque[SpanRecord] = deque(maxlen=MAX_SPANS)
        self._segment: tuple[float, float] | None = None
        self._compute: list[tuple[float, float]] = []

    def step(self, start: float, end: float) -> None:
        """One inner step went from `start` to `end`, seconds."""
        if self._segment is not None and start - self._segment[1] <= 0.1 * (end - start):
            self._segment = self._segment[0], end
        else:
            self._close_segment()
            self._segment = start, end

    def take(self, step: int, spans: list[ClockSpan], offset: float) -> list[SpanRecord]:
        """Add the records up to inner step `step`; returns the first `MAX_SPANS` spans once there are that many, else
        nothing.

        offset: seconds of the run before this worker's clock began.
        """
        self._close_segment()
        recorded = [("compute", "", *segment) for segment in self._compute] + [tuple(span) for span in spans]
        self._compute = []
        recorded.sort(key=lambda span: span[3])
        records = [
            self._record(step, kind, channel, start + offset, end + offset) for kind, channel, start, end in recorded
        ]
        if self._head is None:
            self._tail.extend(records)
            return []
        self._head += records
        if len(self._head) < MAX_SPANS:
            return []
        full = self._head[:MAX_SPANS]
        self._tail.extend(self._head[MAX_SPANS:])
        self._head = None
        return full

    def rest(self) -> list[SpanRecord]:
        """The remaining spans, which `take` has not returned."""
        left, self._head = [*(self._head or ()), *self._tail], None
        self._tail.clear()
        return left

    def tasks(self, step: int, played: Sequence[Span], offset: float) -> list[SpanRecord]:
        """Records of the tasks of inner step `step`."""
        return [
            self._record(step, TASK_KINDS[task.kind], "pipeline", start + offset, end + offset)
            | {"microbatch": task.microbatch}
            for _, task, start, end in played[:MAX_SPANS]
        ]

    def _record(self, step: int, kind: str, channel: str, start: float, end: float) -> SpanRecord:
        record = {"step": step, "worker": self.worker, "kind": kind, "channel": channel}
        return record | {"start": round(start, 6), "end": round(end, 6)}

    def _close_segment(self) -> None:
        if self._segment is not None:
            self._compute.append(self._segment)
            self._segment = None
