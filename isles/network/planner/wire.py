"""Messages without content on the lines of the virtual clock, and the protocols of the planned patterns over them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence

from isles.network.engine import EventQueue, Wire, WireMessage
from isles.network.planner.planned import (
    Cross,
    Doubling,
    Mean,
    MessagePattern,
    Ragged,
    Ring,
    Swap,
    Then,
    Tree,
    Waves,
    fed,
    fed_by,
)
from isles.network.topology import Topology


class PlannedWaiting:
    """One end of a message. done: it is gone, or has arrived."""

    __slots__ = ("done", "waiter")

    def __init__(self) -> None:
        self.done = False
        self.waiter: PlannedTransfer | None = None

    def finish(self) -> None:
        """Now."""
        self.done = True
        if self.waiter is not None:
            waiter, self.waiter = self.waiter, None
            waiter.one_done()


PlannedSteps = Iterator[list[PlannedWaiting]]


class PlannedTransfer:
    """A protocol under way at one worker: goes on whenever all that it waits for is done."""

    __slots__ = ("_pending", "_steps", "done", "on_end")

    def __init__(self, steps: PlannedSteps) -> None:
        self._steps, self._pending = steps, 0
        self.done = False
        self.on_end: Callable[[], None] | None = None
        self._go()

    def one_done(self) -> None:
        """One of what it waits for."""
        self._pending -= 1
        if not self._pending:
            self._go()

    def _go(self) -> None:
        for works in self._steps:
            pending = [work for work in works if not work.done]
            if pending:
                self._pending = len(pending)
                for work in pending:
                    work.waiter = self
                return
        self.done = True
        if self.on_end is not None:
            on_end, self.on_end = self.on_end, None
            on_end()


class PlannedMessage(WireMessage):
    """key: by which its receive is known."""

    __slots__ = ("key", "sent")

    def __init__(self, source: int, target: int, key: Hashable, channel: str, bits: float) -> None:
        super().__init__(source, target, channel, bits)
        self.key, self.sent = key, PlannedWaiting()


class PlannedWire(Wire[PlannedMessage]):
    """The lines between the ranks of `topology`, and the clock. messages: handed in so far. norms: by exchange, when
    the last worker so far asked for a gradient's norm.
    """

    def __init__(self, topology: Topology, seed: int) -> None:
        super().__init__(topology, seed, EventQueue())
        self.messages = 0
        self.norms: dict[Hashable, float] = {}
        self._posted: dict[Hashable, PlannedWaiting] = {}
        self._arrived: set[Hashable] = set()

    def send(self, source: int, target: int, nbytes: float, key: Hashable, channel: str) -> PlannedWaiting:
        """Done when the last bit has left."""
        self.messages += 1
        message = PlannedMessage(source, target, key, channel, 8.0 * nbytes)
        self.carry(message)
        return message.sent

    def recv(self, target: int, source: int, key: Hashable) -> PlannedWaiting:
        """Done when it is there. A key is used once between two ranks."""
        work, key = PlannedWaiting(), (target, source, key)
        if key in self._arrived:
            self._arrived.discard(key)
            work.done = True
        else:
            self._posted[key] = work
        return work

    def left(self, message: PlannedMessage) -> None:
        """Who waits for its send goes on."""
        message.sent.finish()

    def arrived(self, message: PlannedMessage) -> None:
        """Who waits for it goes on."""
        key = message.target, message.source, message.key
        work = self._posted.pop(key, None)
        if work is None:
            self._arrived.add(key)
        else:
            work.finish()


class PlannedMember:
    """Position `place` of `group` in one exchange, known by `key`."""

    def __init__(self, wire: PlannedWire, group: Sequence[int], place: int, key: Hashable, channel: str) -> None:
        self._wire, self._group, self._key, self._channel = wire, group, key, channel
        self.place, self.size = place, len(group)
        self.others = [(place + step) % self.size for step in range(1, self.size)]

    def send(self, position: int, nbytes: float, part: Hashable = 0) -> PlannedWaiting:
        """To another position."""
        here, there = self._group[self.place], self._group[position]
        return self._wire.send(here, there, nbytes, (self._key, part), self._channel)

    def recv(self, position: int, part: Hashable = 0) -> PlannedWaiting:
        """From another position."""
        return self._wire.recv(self._group[self.place], self._group[position], (self._key, part))

    def swap(self, sizes: Sequence[float], part: Hashable = 0) -> list[PlannedWaiting]:
        """sizes[p] to each other position p, and what they send here; receives first, as everywhere."""
        works = [self.recv(position, part) for position in self.others]
        return works + [self.send(position, sizes[position], part) for position in self.others]

    def alike(self, nbytes: float, part: Hashable = 0) -> list[PlannedWaiting]:
        """`nbytes` to everyone, and theirs."""
        return self.swap((nbytes,) * self.size, part)


def play(pattern: MessagePattern, member: PlannedMember) -> PlannedSteps:
    """What a member of the pattern's group does; its waits, in turn."""
    place, size = member.place, member.size
    if isinstance(pattern, Mean):
        yield from _mean(pattern, member, 0)
    elif isinstance(pattern, Swap):
        yield member.alike(pattern.sizes[place])
    elif isinstance(pattern, Cross):
        works = [member.recv(position) for position in member.others if pattern.sizes[position][place]]
        sizes = pattern.sizes[place]
        yield works + [member.send(position, sizes[position]) for position in member.others if sizes[position]]
    elif isinstance(pattern, Doubling):
        reach = 1
        while reach < size:
            nbytes = pattern.nbytes * min(reach, size - reach)
            yield [member.recv((place + reach) % size, reach), member.send((place - reach) % size, nbytes, reach)]
            reach *= 2
    elif isinstance(pattern, Waves):
        for wave, nbytes in enumerate(pattern.sizes):
            yield member.alike(nbytes, wave)
    elif isinstance(pattern, Ragged):
        heads = member.alike(pattern.header, "header")
        works = [member.send(position, pattern.nbytes) for position in member.others if pattern.nbytes]
        yield heads
        yield works + [member.recv(position) for position in member.others if pattern.nbytes]
    elif isinstance(pattern, Then):
        yield from _together([_mean(one, member, part) for part, one in enumerate(pattern.first)])
        yield from _mean(pattern.second, member, "second")
    elif isinstance(pattern, Tree):
        if place:
            yield [member.recv(fed_by(place))]
        yield [member.send(position, pattern.nbytes) for position in fed(place, size)]
    else:
        assert isinstance(pattern, Ring), pattern
        for step in range(2 * (size - 1)):
            each = pattern.nbytes / (2 * (size - 1))
            yield [member.recv((place - 1) % size, step), member.send((place + 1) % size, each, step)]


def _mean(pattern: Mean, member: PlannedMember, part: Hashable) -> PlannedSteps:
    headers = member.alike(pattern.header, (part, "header"))
    before: tuple[int, list[PlannedWaiting]] | None = None
    for index, (there, back) in enumerate(pattern.segments):
        tag = part, index
        works = member.alike(back[member.place], tag) if there is None else member.swap(list(there), tag)
        if before is None:
            yield headers  # the first segment is already on its way behind them
        else:
            yield from _finished(pattern, member, part, *before)
        before = index, works
    assert before is not None
    yield from _finished(pattern, member, part, *before)


def _finished(
    pattern: Mean, member: PlannedMember, part: Hashable, index: int, works: list[PlannedWaiting]
) -> PlannedSteps:
    yield works
    there, back = pattern.segments[index]
    if there is not None:
        yield member.alike(back[member.place], (part, index, "back"))


def _together(protocols: list[PlannedSteps]) -> PlannedSteps:
    while protocols:
        waits, going = [], []
        for protocol in protocols:
            works = next(protocol, None)
            if works is not None:
                waits += works
                going.append(protocol)
        protocols = going
        if waits:
            yield waits
