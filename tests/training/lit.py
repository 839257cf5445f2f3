"""A lighthouse in a thread of this process, for runs whose workers are threads of it too."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from isles.training.config.sections import Config
from tests.membership.sessions import free_port


class LitRun(ABC):
    """`end_reasons`: what became of each worker, by the order in which they were started."""

    def __init__(self, config: Config, out: Path) -> None:
        self.config, self.out = config, out
        self.address, self.token = f"127.0.0.1:{free_port()}", ""
        self.end_reasons: dict[int, Any] = {}
        self.lines: list[dict[str, Any]] = []
        self.notices: list[str] = []
        self.summary: Any = None
        self._threads: list[threading.Thread] = []
        self.keep()

    @abstractmethod
    def made(self, told: Callable[[str], None]) -> Any:
        """The keeper of the run, which tells its token."""

    def keep(self) -> None:
        """Light it, or light it again."""
        lit = threading.Event()

        def told(token: str) -> None:
            self.token = token
            lit.set()

        self.keeper = self.made(told)

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

    def start(self, work: Callable[[int], Any]) -> int:
        """Have a worker do `work`, given its number; its number."""
        number = len(self._threads)

        def ends() -> None:
            try:
                self.end_reasons[number] = work(number)
            except Exception as error:
                self.end_reasons[number] = error

        self._threads.append(threading.Thread(target=ends, daemon=True))
        self._threads[-1].start()
        return number

    def until(self, over: Callable[[], bool], seconds: float = 120.0) -> None:
        """Wait. TimeoutError."""
        ends = time.monotonic() + seconds
        while not over():
            if time.monotonic() > ends or isinstance(self.summary, Exception):
                raise TimeoutError(f"{self.notices[-6:]} {self.end_reasons} {self.summary}")
            time.sleep(0.01)

    def ended(self) -> Any:
        """The summary of a run that is over, or its error."""
        if isinstance(self.summary, Exception):
            raise self.summary
        return self.summary
