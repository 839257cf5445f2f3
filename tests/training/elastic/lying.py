"""A process with the token that says to a run's lighthouse what a `Liar` draws, until it is ended. It joins again when
it is shut out. Prints what it has said, as JSON, twice a second.

    python -m tests.training.elastic.lying ADDRESS TOKEN CORPUS SEED
"""

from __future__ import annotations

import json
import sys
import time
from random import Random
from types import SimpleNamespace
from typing import Any

from isles import __version__
from isles.comm.credentials import parse_token
from isles.membership.client import MembershipClient
from isles.membership.keys import HELLO
from isles.membership.messages import Entry, Hello, decode, encode
from isles.membership.requests import ask
from isles.membership.tls_session import Session, open_session
from tests.membership.hostile import CERTIFICATES, Liar, Speaker


def known(client: MembershipClient) -> Any:
    """What a member knows of the run, as far as a `Liar` asks."""
    state = client.state
    members = {client.member}.union(*(view.members for view in state.views.values()))
    seat = SimpleNamespace(round=state.round, call=state.call)
    return SimpleNamespace(
        workers=dict.fromkeys(sorted(members), seat), newest_round=state._newest_round, issued=state._issued
    )


def joined(session: Session, corpus: str) -> MembershipClient | None:
    """The client of a new member; None if it is not admitted."""
    answer = ask(session, HELLO, encode(Hello(__version__, corpus, session.name(), CERTIFICATES, machine="liar")))
    entry = None if answer is None else decode(answer)
    return MembershipClient(session, entry) if isinstance(entry, Entry) else None


def main() -> None:
    address, token, corpus, seed = sys.argv[1:]
    liar, session = Liar(Random(int(seed))), open_session(parse_token(token), address, 10.0)
    client: MembershipClient | None = None
    while True:
        if client is None or client.ended is not None:
            client = joined(session, corpus)
            if client is not None:
                Speaker(liar, client, lambda client=client: known(client), session.name(), corpus)
        time.sleep(0.5)
        said = [[kind, was_taken, times] for (kind, was_taken), times in sorted(liar.said.items())]
        print(json.dumps({"member": None if client is None else client.member, "said": said}), flush=True)


if __name__ == "__main__":
    main()
