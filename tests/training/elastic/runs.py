"""Elastic runs in threads of this process: the lighthouse's keeper, and workers over real sessions on loopback."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from isles.comm.credentials import parse_token
from isles.comm.elastic.messages import Over
from isles.comm.elastic.transport import ElasticTransport
from isles.training.config.sections import Config
from isles.training.elastic.entering import Here, in_run
from isles.training.elastic.joining import Participant
from isles.training.elastic.lighthouse import Keeper
from tests.comm.elastic.sessions import free_port


class Run:
    """A lighthouse in a thread. `workers`: by the order in which they were started; `endings`: what became of each."""

    def __init__(self, config: Config, out: Path) -> None:
        self.config, self.out = config, out
        self.address = f"127.0.0.1:{free_port()}"
        self.workers: dict[int, Participant] = {}
        self.endings: dict[int, Any] = {}
        self.lines: list[dict[str, Any]] = []
        self.notices: list[str] = []
        self.summary: Any = None
        self._threads: list[threading.Thread] = []
        self._token = ""
        self.keep()

    def keep(self) -> None:
        """Light it, or light it again."""
        lit = threading.Event()

        def told(token: str) -> None:
            self._token = token
            lit.set()

        self.keeper = Keeper(self.config, self.out, self.address, told, self.lines.append, self.notices.append)

        def keep() -> None:
            try:
                self.summary = self.keeper.run()
            except Exception as error:
                self.summary = error
                lit.set()

        self._keeping = threading.Thread(target=keep, daemon=True)
        self._keeping.start()
        assert lit.wait(20.0) and not isinstance(self.summary, Exception), self.summary

    def stop(self) -> None:
        """Put the light out."""
        self.keeper.stopping.set()
        self._keeping.join(20.0)

    def rest(self) -> None:
        """Wait until nobody computes any more: a thread in the midst of torch must not outlive the interpreter."""
        self.until(lambda: not any(thread.is_alive() for thread in self._threads))

    def join(self, *, listens: bool = False) -> int:
        """Start a worker; its number. listens: for direct links."""
        number = len(self._threads)
        here = Here(listen=("127.0.0.1", 0), announced="127.0.0.1") if listens else Here()

        def work() -> None:
            try:
                token = parse_token(self._token)
                with in_run(self.address, token, here, tell=self.notices.append) as worker:
                    self.workers[number] = worker
                    self.endings[number] = worker.run()
            except Exception as error:
                self.endings[number] = error

        self._threads.append(threading.Thread(target=work, daemon=True))
        self._threads[-1].start()
        return number

    def vanish(self, number: int) -> None:
        """Its connection breaks, as when its process is killed; then it ends."""
        transport = self.workers[number].transport
        assert isinstance(transport, ElasticTransport)
        for session in {transport._relay, *(way for ways in transport._ways.values() for way in ways)}:
            session.close()
        self.workers[number].company.ended = Over()

    def until(self, over: Callable[[], bool], seconds: float = 120.0) -> None:
        """Wait. TimeoutError."""
        ends = time.monotonic() + seconds
        while not over():
            if time.monotonic() > ends:
                raise TimeoutError(f"{self.notices[-3:]} {self.endings}")
            time.sleep(0.01)

    def step(self, number: int) -> int:
        """Inner steps that a worker has done."""
        worker = self.workers.get(number)
        return 0 if worker is None else worker.optimizer.steps

    def end(self) -> Any:
        """Wait for the end of the run; its summary."""
        self._keeping.join(90.0)
        for number, thread in enumerate(self._threads):
            if number in self.workers or number in self.endings:
                thread.join(20.0)
        if isinstance(self.summary, Exception):
            raise self.summary
        return self.summary
