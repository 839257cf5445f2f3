"""What a lighthouse says to anybody with the token, without taking part."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from isles.comm import credentials
from isles.comm.credentials import Token
from isles.comm.elastic.keys import STATUS
from isles.comm.elastic.links.echo import ask
from isles.comm.elastic.messages import RunNow, decode
from isles.comm.elastic.session import Session, open_session
from isles.comm.elastic.swarm.words import SwarmNow
from isles.comm.sockets.addresses import parse_address

_PATIENCE = 5.0  # seconds
_AGAIN = 0.5  # seconds between tries
_LONGEST = 4 << 20  # bytes


def run_now(address: str, token: Token) -> RunNow | SwarmNow:
    """How the run at `address` stands. ValueError where this is not its token; OSError where nobody answers."""
    host, port = parse_address(address, "HOST:PORT")
    mend = f"isles doctor --join {address} looks at it"
    with tempfile.TemporaryDirectory(prefix="isles-") as folder:
        session = _session(address, host, port, token, Path(folder) / "credentials", mend)
        try:
            answer = ask(session, STATUS, b"", _PATIENCE)
        finally:
            session.close()
    if answer is None:
        raise OSError(f"{address}: the lighthouse has gone: ask again once it is lit")
    now = decode(answer, limit=_LONGEST)
    if not isinstance(now, RunNow | SwarmNow):
        raise ValueError(f"{address}: the lighthouse there does not say how its run stands; {mend}")
    return now


def _session(address: str, host: str, port: int, token: Token, folder: Path, mend: str) -> Session:
    """With the lighthouse, which may just be being lit. Errors as `run_now`."""
    until = time.monotonic() + _PATIENCE
    while True:
        try:
            mine = credentials.fetch(host, port, token, folder, seconds=_PATIENCE)
            return open_session("client", mine, connect=address, patience=_PATIENCE)
        except OSError as error:
            if time.monotonic() + _AGAIN > until:
                raise OSError(f"{address}: no lighthouse answers there ({error.strerror or error}): {mend}") from None
        time.sleep(_AGAIN)
