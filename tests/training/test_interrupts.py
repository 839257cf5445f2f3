"""Ctrl-C that the code under way has lost."""

from __future__ import annotations

import ctypes
import signal

import pytest

from isles.training.interrupts import Interrupts, first_interrupt


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_one_that_c_code_has_swallowed_stops_what_comes_next() -> None:
    """As while a library is imported whose C code calls back into Python: the run must not begin all the same."""
    pressed = ctypes.CFUNCTYPE(None)(lambda: signal.raise_signal(signal.SIGINT))
    before = signal.getsignal(signal.SIGINT)
    for begin in (Interrupts, lambda: first_interrupt(lambda: None)):
        begun = False
        with pytest.raises(KeyboardInterrupt), Interrupts():
            pressed()  # printed as ignored, and goes no further
            with begin():
                begun = True
        assert not begun
    assert signal.getsignal(signal.SIGINT) is before
