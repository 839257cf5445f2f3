"""What starting workers takes on every backend: how long they wait, what Ctrl-C does, where warnings go."""

from __future__ import annotations

import contextlib
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from isles.comm.transport import Deadlines
from isles.training.config.planned import longest_wait, plan_of
from isles.training.config.sections import Config

_PAUSES = 1000.0  # mean lengths of a pause: chance e^-1000, and room for many pauses in a round


def deadlines(config: Config) -> Deadlines:
    """The waits that [world] asks for. A deadline tells a lost worker from a slow one; one that pauses comes back, so
    who cannot go on alone waits for it however long it stays away.
    """
    world = config.world
    own = Deadlines(
        outer=world.outer_deadline,
        eval=world.eval_deadline,
        pipeline=world.pipeline_deadline,
        slowest_link=world.slowest_link,
        join=world.join_deadline,
        silence=world.silence,
    )
    plan = plan_of(config.pipeline)
    if plan is not None:
        waits = {name: max(own.of(name), longest_wait(plan)) for name in ("inner", "outer", "pipeline")}
        own = replace(own, **waits)
    if world.pauses is None:
        return own
    patience = {
        name: max(_PAUSES * world.pause_seconds, own.of(name))
        for name in ("control", "inner", "outer", "pipeline", "eval")
    }
    return replace(own, **(patience | ({"outer": own.outer} if config.replicas.survives else {})))


@contextlib.contextmanager
def first_interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C calls `stop` once; a second is KeyboardInterrupt as ever. Outside of the main thread nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def first(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        if isinstance(before, Interrupts):
            before.asked = True
        stop()

    before = signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Interrupts:
    """Around several pieces of work, one after another: a Ctrl-C that came too late for the one under way, which was
    done by then, stops those after it. Elsewhere it is KeyboardInterrupt as ever.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def __call__(self, *_: object) -> None:
        """The handler."""
        self.asked = True
        raise KeyboardInterrupt

    def check(self) -> None:
        """KeyboardInterrupt where Ctrl-C was pressed. Called before each piece."""
        if self.asked:
            raise KeyboardInterrupt


@contextlib.contextmanager
def warnings_told(tell: Callable[[Any], None]) -> Iterator[None]:
    """Python warnings become notices to the user, each once, instead of source lines on stderr."""
    told: set[str] = set()

    def show(message: Warning | str, *where: Any, **more: Any) -> None:
        text = " ".join(str(message).split())
        if text not in told:
            told.add(text)
            tell({"notice": text})

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
