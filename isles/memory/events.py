"""Interface between the steps of a memory plan and an engine: lanes, work on them, and events. Loads no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

EngineLane = Literal["up", "down", "host", "read", "write"]
Urgency = tuple[int, ...]
LaneAction = Callable[[], None]
Submit = Callable[[EngineLane, Urgency, float, LaneAction, LaneAction, str], None]
"""Puts work on a lane, as `Engine.submit` says; last, what it is, for a person."""


class LaneEvent:
    """An event that happens once; callbacks of `then` run at that moment, on the thread that fires it, or at once."""

    __slots__ = ("_callbacks", "_engine", "happened")

    def __init__(self, engine: Any, happened: bool = False) -> None:
        self._engine, self.happened = engine, happened
        self._callbacks: list[LaneAction] = []

    def then(self, run: LaneAction) -> None:
        """Call it once this has happened."""
        with self._engine.changed:
            if not self.happened:
                self._callbacks.append(run)
                return
        run()

    def fire(self) -> None:
        with self._engine.changed:
            self.happened = True
            callbacks, self._callbacks = self._callbacks, []
            self._engine.changed.notify_all()
        for run in callbacks:
            run()

    def wait(self, what: str) -> None:
        """Return once it has happened. LaneFailed as soon as any lane has failed; RuntimeError once the engine is
        closed; TimeoutError after ten minutes.
        """
        if not self.happened:
            self._engine.wait_for(self, what)


class EngineEvents(Protocol):
    """The part of an engine that a step needs. changed: a condition that guards state shared by several threads."""

    changed: Any

    def event(self, happened: bool = False) -> LaneEvent: ...
