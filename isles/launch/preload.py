"""What a fork server loads last, once for all workers. Imported for what importing it does.

Everything loaded by then stays in every worker to its end: neither the garbage collector nor searches through all
objects (`replicas/watch.py`) walk it again, and unwritten pages stay shared between the workers.

The server itself ends at once when its launcher has: unloading torch would cost half a second of CPU time, and seconds
on a busy machine, during which the command would still have a process.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys

import torch._dynamo  # noqa: F401  # the first optimizer of a process loads it: a second of CPU time in every worker

_SERVER = os.getpid()


def _end_at_once() -> None:
    if os.getpid() == _SERVER:  # not in a worker, which was forked from it
        os._exit(0)


if any("multiprocessing.forkserver" in word for word in sys.orig_argv):
    atexit.register(_end_at_once)  # registered last, so it runs first
gc.collect()
gc.freeze()
