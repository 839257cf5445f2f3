"""Counts of network traffic, taken where a buffer is handed to the transport, and the times of transfers and waits.

transports call `transfer`, `waited` and `paused`  ->  totals by channel, for the whole run
                                         ->  the newest `MAX_SPANS` spans, until `take_spans` removes them
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from isles.comm.tags import CHANNELS, Channel

MAX_SPANS = 4096


class ClockSpan(NamedTuple):
    """An interval from `start` to `end`, in seconds of the worker's clock (`Transport.now`).

    transfer: an exchange was under way, whether or not the computation waited. blocked: the computation waited for an
    exchange. away: the worker was paused; this kind has no channel.
    """

    kind: Literal["transfer", "blocked", "away"]
    channel: Channel | Literal[""]
    start: float
    end: float


@dataclass(slots=True)
class ChannelTraffic:
    """One channel's totals: bytes and messages in each direction, and seconds that the computation waited for it."""

    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    blocked_seconds: float = 0.0


@dataclass(slots=True)
class Traffic:
    """Totals of one worker by channel. All groups over one transport share them."""

    channels: dict[Channel, ChannelTraffic] = field(
        default_factory=lambda: {name: ChannelTraffic() for name in CHANNELS}
    )
    spans: deque[ClockSpan] = field(default_factory=lambda: deque(maxlen=MAX_SPANS), compare=False)
    """The newest spans, ordered by their ends."""
    mark: Callable[[], Any] = field(default=lambda: None, compare=False)
    """Returns a mark for the work queued on the device so far, or None on a device without a queue."""
    _unsettled: deque[tuple[Any, ClockSpan]] = field(default_factory=lambda: deque(maxlen=MAX_SPANS), compare=False)

    def __getitem__(self, channel: Channel) -> ChannelTraffic:
        return self.channels[channel]

    def sent(self, channel: Channel, nbytes: int) -> None:
        counts = self.channels[channel]
        counts.bytes_sent += nbytes
        counts.messages_sent += 1

    def received(self, channel: Channel, nbytes: int) -> None:
        counts = self.channels[channel]
        counts.bytes_received += nbytes
        counts.messages_received += 1

    def reassign(self, nbytes: int, *, sent: bool, before: Channel) -> None:
        """Take a message of `nbytes` off the channel `before`, because it is counted on another channel as well."""
        counts, direction = self.channels[before], "sent" if sent else "received"
        for name, count in ((f"bytes_{direction}", nbytes), (f"messages_{direction}", 1)):
            setattr(counts, name, getattr(counts, name) - count)

    def transfer(self, channel: Channel, start: float, end: float) -> None:
        self.spans.append(ClockSpan("transfer", channel, start, end))

    def waited(self, channel: Channel, start: float, end: float, mark: Any = None) -> None:
        """Count a wait of the computation. mark: result of `mark()` when the wait began."""
        self.channels[channel].blocked_seconds += end - start
        span = ClockSpan("blocked", channel, start, end)
        if mark is None:
            self.spans.append(span)
        else:
            self._unsettled.append((mark, span))

    def settle(self, at: Callable[[Any], float]) -> None:
        """Subtract from the marked waits the time in which the device still had queued work. at: gives the time when
        the device reached a mark, on this clock.
        """
        while self._unsettled:
            mark, span = self._unsettled.popleft()
            idle = min(max(at(mark), span.start), span.end)
            self.channels[span.channel or "control"].blocked_seconds -= idle - span.start
            self.spans.append(span._replace(start=idle))

    def paused(self, start: float, end: float) -> None:
        self.spans.append(ClockSpan("away", "", start, end))

    def take_spans(self) -> list[ClockSpan]:
        """Remove and return the spans since the last call, at most the newest `MAX_SPANS`."""
        spans = []
        while self.spans:  # one by one: a driver thread may add some meanwhile
            spans.append(self.spans.popleft())
        return spans

    def total(self, field_name: str, *channels: Channel) -> float:
        """Sum one field over `channels` (default: all)."""
        return sum(getattr(self.channels[name], field_name) for name in (channels or CHANNELS))

    def by_channel(self) -> dict[str, dict[str, float]]:
        """Bytes in each direction and seconds blocked, for the channels with traffic."""
        keys = ("bytes_sent", "bytes_received", "blocked_seconds")
        totals = {name: {key: getattr(counts, key) for key in keys} for name, counts in self.channels.items()}
        return {name: counts for name, counts in totals.items() if any(counts.values())}

    def state_dict(self) -> dict[str, dict[str, float]]:
        """JSON-able totals; `load_state_dict` restores them exactly."""
        return {name: asdict(counts) for name, counts in self.channels.items()}

    def load_state_dict(self, state: dict[str, dict[str, float]]) -> None:
        """Restore the totals of `state_dict` in place, so that every group over the transport sees them."""
        for name, values in state.items():
            for key, value in values.items():
                setattr(self.channels[name], key, value)  # type: ignore[literal-required]
