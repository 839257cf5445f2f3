"""What a fork server loads last, once for all workers. Imported for what importing it does.

What is loaded by then stays to the end of every worker: neither the garbage collector walks it again nor whoever looks
through all objects (`replicas/elsewhere.py`), and pages that nobody writes to stay shared between the workers.
"""

from __future__ import annotations

import gc

import torch._dynamo  # noqa: F401  # the first optimizer of a process loads it: a second of CPU time in every worker

gc.collect()
gc.freeze()
