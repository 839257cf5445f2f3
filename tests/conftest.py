"""For all tests: what collecting them made stays to the end, so the garbage collector need not walk it; and they keep
nothing in the home of whoever runs them.
"""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile
from collections.abc import Generator

import pytest

_HOME = tempfile.mkdtemp(prefix="isles-tests-")
atexit.register(shutil.rmtree, _HOME, ignore_errors=True)
os.environ["ISLES_HOME"] = _HOME


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
