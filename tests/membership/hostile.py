"""What a hostile member says: words of every kind that a member may say, drawn equally, most of them with values that
could be true. And a toy world with one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

from isles.membership.client import MembershipClient
from isles.membership.coordinator import RoundsCoordinator
from isles.membership.keys import HELLO, REACH, REQUESTS, add_sequence, notify_key, signature
from isles.membership.messages import (
    ANY,
    MESSAGES,
    Ack,
    AnnounceAddress,
    Beat,
    Delivered,
    Done,
    Failed,
    Finished,
    Hello,
    Leave,
    Lookup,
    PeerReport,
    Reload,
    RequestWork,
    Silent,
    SwarmBeat,
    decode,
    encode,
)
from isles.membership.round_commit import NOTHING
from isles.membership.swarm_coordinator import SwarmCoordinator
from tests.membership.world import Node, World

SAID = Counter[tuple[str, bool]]()
"""Words of all tests of this process, by (kind, whether it was taken)."""
OF_REPLICAS = (Beat, Ack, Done, Delivered, PeerReport, Leave, Reload)
OF_SESSIONS = (Hello, Finished, Silent, Lookup, AnnounceAddress, Failed)
"""Heard by the lighthouse itself; `Failed` by workers of one's own island, and here said to other members too."""
MAY_SAY = (*OF_REPLICAS, *OF_SESSIONS, RequestWork, SwarmBeat)
"""All kinds of messages but those that the lighthouse alone says."""
CERTIFICATES = ("0" * 32,)
HUGE = 1 << 61
EVERY = 0.15  # seconds between two words


class Liar:
    """Draws words. said: by (kind, whether it was taken); taken: it passed parsing and form."""

    def __init__(self, random: Random) -> None:
        self.random, self.said = random, Counter[tuple[str, bool]]()

    def near(self, value: int) -> int:
        """A number about `value`, and now and then one that cannot be."""
        draw = self.random
        steps = (-1, 0, 0, 0, 1, 2, 3, 5, 30)
        return max(value + draw.choice(steps), 0) if draw.random() < 0.93 else draw.choice((-1, HUGE, 1 << 39))

    def member(self, known: Any) -> int:
        return self.random.choice([*known]) if self.random.random() < 0.97 else 1 << 30

    def beat(self, run: RoundsCoordinator, own: int) -> Beat:
        worker, draw = run.workers[own], self.random
        others = draw.sample([*run.workers], min(len(run.workers), draw.randrange(3)))
        return Beat(
            self.near(max(worker.round, run.newest_round)),
            draw.choice((worker.call, worker.call, worker.call, -1)),
            draw.choice((-1, run.issued)),
            tuple(self.near(run.newest_round) for _ in range(draw.randrange(2))),
            tuple((other, max(self.near(run.newest_round), 0)) for other in others),
            draw.choice((0.0, 0.5, 1e-9, 1e5, 0.5, 0.5)),
        )

    def word(self, run: RoundsCoordinator, own: int) -> Any:
        """One word to the lighthouse of whole replicas."""
        draw, newest, attempt = self.random, max(run.newest_round, 1), self.random.choice((0, 0, 0, 1, 1, 2, 3))
        match draw.randrange(7):
            case 0:
                return self.beat(run, own)
            case 1:
                return Ack(
                    draw.choice((run.issued, run.issued, run.issued + 1)), draw.random() < 0.4, self.beat(run, own)
                )
            case 2:
                return Done(self.near(newest), attempt, draw.choice((NOTHING, NOTHING, 7, 99)))
            case 3:
                return Delivered(self.near(newest), self.near(2), draw.choice((0.0, 1.0, 1e5, 1e-6)))
            case 4:
                by, charge = draw.choice((-1, -1, self.member(run.workers))), draw.choice(("late", "refused"))
                return PeerReport(self.near(newest), attempt, self.member(run.workers), charge, "x", by)  # type: ignore[arg-type]
            case 5:
                return Leave()
        return Reload()

    def session_word(self, run: Any, own: int, session: str, corpus: str) -> Any:
        """One word over the session of that name; it seldom leaves. corpus: as in `Hello`."""
        draw = self.random
        if draw.random() < len(OF_REPLICAS) / (len(OF_REPLICAS) + len(OF_SESSIONS)):
            word = self.word(run, own)
            return Finished() if isinstance(word, Leave) and draw.random() < 0.95 else word
        match draw.randrange(len(OF_SESSIONS)):
            case 0:
                version = draw.choice((MESSAGES, MESSAGES, MESSAGES, (9, 9)))
                return Hello("1.0", corpus, session, CERTIFICATES, version, "m" * draw.randrange(40))
            case 1:
                return Finished()
            case 2:
                return Silent(self.member(run.workers))
            case 3:
                return Lookup(self.member(run.workers), draw.choice((0, 0, 1)))
            case 4:
                return AnnounceAddress(
                    "", draw.choice((0, 0, 1 << 20)), session, CERTIFICATES[0], draw.choice((0, 0, -1))
                )
        return Failed(self.near(max(run.newest_round, 1)), draw.randrange(3))

    def swarm_word(self, run: SwarmCoordinator) -> Any:
        """One word to the lighthouse of a swarm."""
        draw = self.random
        if draw.random() < 0.04:
            return Leave()
        if draw.random() < 0.4:
            return RequestWork(draw.choice((ANY, 0, 1, self.near(1))), draw.choice((7, 7, 8)))
        some = draw.sample([*run.peers], draw.randrange(1, len(run.peers) + 1))
        stages = tuple(draw.randrange(len(run.rules.peers)) for _ in some)
        epoch = draw.choice((run.epoch, run.epoch, run.epoch, run.epoch + 1))
        work = (draw.choice((0.1, 0.0, 1e9)), 1.0, self.near(4), draw.choice((0.2, 0.0)))
        return SwarmBeat(epoch, self.near(run.step), tuple(some), stages, *work, ())

    def say(self, now: float, run: Any, own: int, word: Any) -> list[Any]:
        """The effects of a word, as it comes over a line; none if it is refused."""
        try:
            effects = run.hear(now, own, decode(encode(word)))
            assert effects is not None
        except ValueError:
            self.note(word, was_taken=False)
            return []
        self.note(word, was_taken=True)
        return effects

    def note(self, word: Any, *, was_taken: bool) -> None:
        self.said[type(word).__name__, was_taken] += 1
        SAID[type(word).__name__, was_taken] += 1


class Speaker:
    """Says what `liar` draws over the session of `client`, until its part in the run has ended. run: what it knows of
    the run; None while it cannot know. session, corpus: as in `Hello`.
    """

    def __init__(
        self, liar: Liar, client: MembershipClient, run: Callable[[], Any], session: str, corpus: str = "x"
    ) -> None:
        self._liar, self._client, self._run, self._session, self._corpus = liar, client, run, session, corpus
        client.session.later(self._say, EVERY)

    def _say(self) -> None:
        client, run = self._client, self._run()
        if client.ended is not None:
            return
        client.session.later(self._say, EVERY)
        if run is None:
            return
        word = self._liar.session_word(run, client.member, self._session, self._corpus)
        key, payload = {Hello: HELLO, AnnounceAddress: REACH}.get(type(word), REQUESTS), encode(word)
        if isinstance(word, Failed):
            key, payload = notify_key(self._liar.member(run.workers), 0), add_sequence(HUGE, payload)
        proof = signature(client.member, client.entry.key, key, payload)
        client.session.ask(key, payload, partial(self._answered, word), attachment=proof, seconds=3.0)

    def _answered(self, word: Any, reply: bytes | None, refusal: bytes | None) -> None:
        self._liar.note(word, was_taken=reply is not None)


class HostileWorld(World):
    """The last founder is hostile: from `lie` on it also says what a `Liar` draws."""

    def __init__(self, *, founders: int, seed: int, **form: Any) -> None:
        super().__init__(founders=founders, seed=seed, **form)
        self.hostile = Random(seed ^ 0x5EED)
        self.liar = Liar(self.hostile)
        self.nodes[-1].address = "hostile"
        self.works = self.hostile.random() < 0.5  # it trains besides
        self.silent = self.hostile.random() < 0.3  # it does not answer proposals

    def acknowledge(self, node: Node, ack: Ack) -> None:
        if not (self.silent and node.address):
            super().acknowledge(node, ack)

    def meet(self, node: Node, round: int, call: int) -> None:
        if self.works or not node.address:
            super().meet(node, round, call)

    def lie(self) -> None:
        """One word, from any member of the hostile address; sometimes it adds a member."""
        self.after(EVERY, self.lie)
        run = self.lighthouse
        if run is None:
            return
        seats = [member for member, worker in run.workers.items() if worker.address]
        live = [member for member in seats if run.workers[member].state in ("outside", "ready", "in")]
        leaving = [member for member in seats if run.workers[member].here and member not in live]
        if leaving and self.hostile.random() < 0.2:
            self.carry_out(run.disconnected(self.now, leaving[0]))
        elif len(live) < 4 and self.hostile.random() < 0.3:
            self._members[len(run.workers)] = Node(-1, 1.0, "hostile", cut=True)  # which gives no state
            hello = Hello("1.0", "toy", "hostile", CERTIFICATES)
            self.liar.note(hello, was_taken=decode(encode(hello)) == hello)
            self.carry_out(run.join(self.now, hello.corpus, (), "hostile"))
        elif live:
            own = self.hostile.choice(live)
            word = self.liar.word(run, own)
            self.carry_out(self.liar.say(self.now, run, own, word))
