"""What holds for all tests: they keep nothing in the home of whoever runs them."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

_HOME = tempfile.mkdtemp(prefix="isles-tests-")
atexit.register(shutil.rmtree, _HOME, ignore_errors=True)
os.environ["ISLES_HOME"] = _HOME
