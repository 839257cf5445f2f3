"""The process that workers are forked from, started early: it loads torch while the launcher does, once for all.

launcher       reads the settings    loads torch       starts the workers
fork server    loads torch, the trainer, what the first optimizer step needs     forks them: ready at once
"""

from __future__ import annotations

import multiprocessing
import signal
from multiprocessing import forkserver, resource_tracker

PRELOAD = [
    "isles.training.running.processes",
    *("isles.training.clustered.opening", "isles.training.swarmed.trainer"),  # what workers of `kinds` come to
    "isles.launch.preload",
]
"""Modules that it loads, in this order."""


def start_server() -> None:
    """Begin, unless it runs already. It ends when this process does, however that ends. Returns at once."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    resource_tracker.ensure_running()  # the server would start it, and that unblocks the signal
    # Ctrl-C and a closed terminal reach every process of it, SIGTERM often every process of a job. The server and its
    # children inherit the mask and never see them; what they mean is the launcher's to say.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP, signal.SIGTERM})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
