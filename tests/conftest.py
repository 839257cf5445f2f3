"""For all tests: what collecting them made stays to the end, so the garbage collector need not walk it; they keep
nothing in the home of whoever runs them, compute on one thread as a worker does, whichever test ran before, and hear
Ctrl-C, as do the commands that they start: a shell has its background jobs ignore it. Of a test's long cases two are
run, spread over them, and of whole worlds one; all where ISLES_EVERY_CASE is set. The environment of a test ends with
it: `isles.init` chooses gloo's interface there, and another test's commands run on other machines. Of several
processes one collects before the others, which find the bytecode that it has written.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import os
import shutil
import signal
import tempfile
import threading
from collections import defaultdict
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

_STARTER = os.environ.get("ISLES_HOME", "")  # in a process of xdist: the folder of the one that has started it
_HOME = tempfile.mkdtemp(prefix="isles-tests-")
atexit.register(shutil.rmtree, _HOME, ignore_errors=True)
os.environ["ISLES_HOME"] = _HOME

# Commands that tests start find the tests' own models too, wherever they run.
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_ROOT, os.environ.get("PYTHONPATH")]))

if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_MANY = 1000  # tests, of which some need the fork server


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    if session.config.getoption("dist", "no") == "no":  # else tests run in the processes that this one starts
        import torch

        # With other numbers sums are rounded otherwise: what is held against workers' bits must add up as they do.
        torch.set_num_threads(1)
    gc.disable()
    try:
        with _first(hasattr(session.config, "workerinput")):
            return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000, 10, 50)  # what tests leave in caches is walked again less often
        gc.enable()
        if len(session.items) > _MANY and not session.config.option.collectonly:
            from tests.forked import start_forked_server

            start_forked_server()


@contextmanager
def _first(among_others: bool) -> Iterator[None]:
    """Alone where no process has been in here before, else with all that come then: in a fresh checkout rewriting the
    tests' assertions costs more than all else that collecting does.
    """
    if not among_others:
        yield
        return
    with open(os.path.join(_STARTER, "collecting.lock"), "ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(lock, fcntl.LOCK_SH)
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Module | pytest.Class, name: str, obj: object) -> list[Any] | None:
    """Of a test that is long in all its cases none is made where no long one is run."""
    if not name.startswith("test_") or collector.config.option.markexpr != "not long":
        return None
    marks = [*getattr(obj, "pytestmark", []), *collector.iter_markers()]
    return [] if any(mark.name == "long" for mark in marks) else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    before = dict(os.environ)
    try:
        return (yield)
    finally:
        if os.environ != before:
            os.environ.clear()
            os.environ.update(before)


_LONG_CASES = 2  # of a test, if its mark says no other number: `make test-long` ends within an hour
_WORLDS = ("training/elastic", "training/swarm", "training/clusters", "faults", "integration")  # there one: minutes


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "ISLES_EVERY_CASE" in os.environ:
        return
    grids = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if item.get_closest_marker("long"):
            grids[item.nodeid.split("[")[0]].append(item)
    dropped = set[pytest.Item]()
    for name, cases in grids.items():
        usual = 1 if name.startswith(tuple(f"tests/{room}/" for room in _WORLDS)) else _LONG_CASES
        most = cases[0].get_closest_marker("long").kwargs.get("cases", usual)  # type: ignore[union-attr]
        dropped |= {*cases} - {cases[place * len(cases) // most] for place in range(most)}
    config.hook.pytest_deselected(items=[item for item in items if item in dropped])
    items[:] = [item for item in items if item not in dropped]
