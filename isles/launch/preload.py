"""What a fork server loads last, once for all workers. Imported for what importing it does.

What is loaded by then stays to the end of every worker: neither the garbage collector walks it again nor whoever looks
through all objects (`replicas/watch.py`), and pages that nobody writes to stay shared between the workers.

The server itself ends at once when its launcher has: taking torch apart would cost half a second of CPU time, seconds
on a busy machine, in which the command still has a process.
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
    atexit.register(_end_at_once)  # the last to come is the first to run
gc.collect()
gc.freeze()
