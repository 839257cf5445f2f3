"""What a signal means to a command before its run has begun, and where there is none to stop in good order."""

from __future__ import annotations

import signal
import sys


def end_in_order() -> None:
    """SIGTERM, and SIGHUP unless it is ignored (nohup), end the command by way of Python: no process stays behind."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: sys.exit(128 + number))
