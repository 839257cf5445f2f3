"""Elastic runs in threads of this process: the lighthouse's keeper, and workers over real sessions on loopback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from typing_extensions import override

from isles.comm.credentials import parse_token
from isles.comm.mesh import arrange
from isles.membership.messages import Over
from isles.membership.p2p.transport import ElasticTransport
from isles.membership.rounds import IslandGroup
from isles.training.config.sections import Config
from isles.training.elastic.connect import LocalSettings, admit, follow, leading, with_member
from isles.training.elastic.leader import Participant
from isles.training.lighthouse.rounds import RoundsLighthouseServer
from tests.membership.sessions import vanish, workers
from tests.training.lit import LitRun


@contextmanager
def in_run(run: LitRun, here: LocalSettings) -> Iterator[Participant]:
    """A worker of it in a member."""
    with ExitStack() as stack:
        connection = admit(stack, run.address, parse_token(run.token), here, notify=run.notices.append)
        yield stack.enter_context(with_member(connection, IslandGroup(), notify=run.notices.append))


class Run(LitRun):
    """A lighthouse in a thread. `workers`: by the order in which they were started; `end_reasons`: what became of
    each.
    """

    def __init__(self, config: Config, out: Path) -> None:
        self.workers: dict[int, Participant] = {}
        self.own: dict[str, Any] = {"data": {"path": config.data.path}}
        super().__init__(config, out)

    @override
    def made(self, told: Callable[[str], None]) -> RoundsLighthouseServer:
        return RoundsLighthouseServer(self.config, self.out, self.address, told, self.lines.append, self.notices.append)

    def here(self, **more: Any) -> LocalSettings:
        """What a worker says for itself."""
        return LocalSettings(own=self.own, **more)

    def rest(self) -> None:
        """Wait until nobody computes any more: a thread in the midst of torch must not outlive the interpreter."""
        self.until(lambda: not any(thread.is_alive() for thread in self._threads))

    def join(self, *, listens: bool = False) -> int:
        """Start a worker; its number. listens: for direct links."""
        here = self.here(listen=("127.0.0.1", 0), announced="127.0.0.1") if listens else self.here()

        def work(number: int) -> Any:
            with in_run(self, here) as worker:
                self.workers[number] = worker
                return worker.run()

        return self.start(work)

    def join_island(self, folder: Path) -> list[int]:
        """Start the workers of an island, whose network inside is one of its own; their numbers, the leader's first."""
        size, met = self.config.world.inner, ExitStack()
        inside = met.enter_context(workers(folder, size))
        left = [*range(size)]

        def work(transport: ElasticTransport, number: int) -> Any:
            where = arrange(transport), self.address, parse_token(self.token), self.here()
            try:
                if transport.rank > 0:
                    return follow(*where)
                with leading(*where) as worker:
                    self.workers[number] = worker
                    return worker.run()
            finally:
                left.pop()
                if not left:
                    met.close()

        return [self.start(partial(work, transport)) for transport in inside]

    def vanish(self, number: int) -> None:
        """Its connection breaks, as when its process is killed; then it ends."""
        transport = self.workers[number].transport
        assert isinstance(transport, ElasticTransport)
        vanish(transport)
        self.workers[number].client.ended = Over()

    def step(self, number: int) -> int:
        """Inner steps that a worker has done."""
        worker = self.workers.get(number)
        return 0 if worker is None else worker.optimizer.steps

    def end(self) -> Any:
        """Wait for the end of the run; its summary."""
        self._keeping.join(90.0)
        for number, thread in enumerate(self._threads):
            if number in self.workers or number in self.end_reasons:
                thread.join(20.0)
        return self.ended()
