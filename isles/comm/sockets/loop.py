"""The thread that reads and writes this process's connections: one asyncio loop, started with the first of them.

So signs of life are sent and strangers are refused in time, whatever the launcher does meanwhile, such as waiting for
its workers.
"""

from __future__ import annotations

import asyncio
import asyncio.sslproto
import atexit
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

_READ = 1 << 15  # buffer of each TLS connection; asyncio's default is 256 kB
_FAREWELL = 1.0  # seconds for pending work at the end of the process
_starting = threading.Lock()  # the first connections may be made in several threads at once
_loop: asyncio.AbstractEventLoop | None = None


def run(coroutine: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
    """The coroutine's result, from any other thread. TimeoutError after `seconds`; it is then cancelled."""
    future = start(coroutine)
    try:
        return future.result(seconds)
    finally:
        future.cancel()


def start(coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Start a coroutine in the loop, from any thread."""
    return asyncio.run_coroutine_threadsafe(coroutine, _started())


def call(function: Callable[..., object], *arguments: Any) -> None:
    """Call a function in the loop's thread, soon."""
    _started().call_soon_threadsafe(function, *arguments)


def _started() -> asyncio.AbstractEventLoop:
    global _loop
    with _starting:
        if _loop is None:
            with contextlib.suppress(AttributeError):  # private: Python has no public name for it
                asyncio.sslproto.SSLProtocol.max_size = _READ
            _loop = asyncio.new_event_loop()
            thread = threading.Thread(target=_loop.run_forever, name="isles-links", daemon=True)
            thread.start()
            atexit.register(_end, _loop, thread)
        return _loop


def _forked() -> None:
    """After a fork the child has the loop's memory but not its thread: start anew when needed. The lock is new too: a
    thread of the parent may have held the old one, and it is not here to release it.
    """
    global _loop, _starting
    _loop, _starting = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def _end(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """Cancel all tasks, because asyncio would warn of pending ones."""
    if loop is not _loop:  # of the parent of a fork: its thread is not here
        return

    async def cancel() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=_FAREWELL) if tasks else None
        loop.stop()

    asyncio.run_coroutine_threadsafe(cancel(), loop)
    # Twice: `cancel` waits for the tasks up to _FAREWELL itself.
    thread.join(2 * _FAREWELL)
