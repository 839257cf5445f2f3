"""What anybody with the token asks the lighthouse, and how fast the line to it is: `ECHO` answers at once with as many
bytes as asked.
"""

from __future__ import annotations

import time

from isles.comm.elastic.keys import ECHO, PIECE
from isles.comm.elastic.session import Session
from isles.comm.sockets.lost import LinkLost
from isles.comm.sockets.rates import LineRates, line_rates

_PATIENCE = 5.0  # seconds in which a lighthouse that is being lit serves nothing yet
_ANSWER = 10.0  # seconds
_AGAIN = 0.05  # seconds between tries


def echo_line(session: Session) -> LineRates | None:
    """Measured now, within some seconds; None where the lighthouse stops answering meanwhile."""

    def echo(out: int, back: int) -> None:
        answer = ask(session, ECHO, back.to_bytes(4, "big") + bytes(out))
        if answer is None or len(answer) != back:
            raise LinkLost("the lighthouse does not answer")

    try:
        return line_rates(echo, PIECE)
    except LinkLost:
        return None


def ask(session: Session, key: str, said: bytes, seconds: float = _ANSWER) -> bytes | None:
    """The lighthouse's answer; None where it refuses or says nothing."""
    until = time.monotonic() + _PATIENCE
    while True:
        reply, refusal = session.answer(key, said, seconds=seconds)
        if reply is not None or refusal is not None or time.monotonic() > until:
            return reply
        time.sleep(_AGAIN)
