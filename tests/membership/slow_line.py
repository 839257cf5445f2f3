"""Members without training, each on a machine of its own, that ask the lighthouse and fetch files from each other.

    python -m tests.membership.slow_line light FOLDER HOST LEASE
    python -m tests.membership.slow_line NUMBER FOLDER HOST LEASE

Each writes a line of JSON for what it sees: a member that comes or goes, and the time that each answer took.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from pathlib import Path

from isles.comm import credentials
from isles.comm.credentials import parse_token
from isles.membership.state_transfer import FetchRequest, StateServer, StateUnavailable
from isles.membership.tls_session import open_router, open_session

PORT, FILE = 29400, 1 << 20
PEER = {"0": "3", "3": "0", "1": "2", "2": "1"}
"""Whose file each one fetches, again and again."""


def main(name: str, folder: Path, host: str, lease: float) -> None:
    """Run until this process is killed."""
    lines = (folder / f"{name}.jsonl").open("a", buffering=1)

    def note(**what: object) -> None:
        lines.write(json.dumps({"at": time.monotonic(), **what}) + "\n")

    if name == "light":
        session = open_router(credentials.found(folder / "credentials"), f"{host}:{PORT}", lease)
        session.serve("isles/here", lambda query: query.reply(b"yes"))
        session.watch("isles/member/*", lambda key, there: note(member=key.rpartition("/")[2], there=there))
        (folder / "token").write_text(str(credentials.read(folder / "credentials").token))
        threading.Event().wait()
    session = open_session(parse_token(f"@{folder / 'token'}"), f"{host}:{PORT}", 30.0)
    file = folder / f"file-{name}"
    file.write_bytes(bytes(FILE))
    transfers = StateServer(session, name, print)
    transfers.publish("state", file, {})

    def fetch() -> None:
        asked = FetchRequest(source=PEER[name], what="state", most=FILE, seconds=60.0)
        while True:
            with contextlib.suppress(StateUnavailable):
                began = time.monotonic()
                transfers.fetch(asked, folder / f"taken-{name}")
                note(fetched=time.monotonic() - began)
            time.sleep(0.2)

    threading.Thread(target=fetch, daemon=True).start()
    session.present(f"isles/member/{name}")
    while True:
        began = time.monotonic()
        answer, _ = session.answer("isles/here", b"", seconds=60.0, urgent=True)
        note(trip=time.monotonic() - began, whole=answer is not None)
        time.sleep(0.1)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], float(sys.argv[4]))
