"""What a lighthouse says to anybody with the token, without taking part."""

from __future__ import annotations

from isles.comm.credentials import Token
from isles.comm.sockets.connection import LinkLost
from isles.membership.keys import STATUS
from isles.membership.messages import RunStatus, SwarmStatus, decode
from isles.membership.requests import ask
from isles.membership.tls_session import open_session

_PATIENCE = 5.0  # seconds
_LONGEST = 4 << 20  # bytes


def run_status(address: str, token: Token) -> RunStatus | SwarmStatus:
    """How the run at `address` stands. ValueError where this is not its token; OSError where nobody answers."""
    mend = f"isles doctor --join {address} looks at it"
    try:
        session = open_session(token, address, _PATIENCE)
    except LinkLost as error:
        raise OSError(f"{address}: no lighthouse answers there ({error}): {mend}") from None
    try:
        answer = ask(session, STATUS, b"", _PATIENCE)
    finally:
        session.close()
    if answer is None:
        raise OSError(f"{address}: the lighthouse has stopped: ask again once it is restarted")
    now = decode(answer, limit=_LONGEST)
    if not isinstance(now, RunStatus | SwarmStatus):
        raise ValueError(f"{address}: the lighthouse there does not say how its run stands; {mend}")
    return now
