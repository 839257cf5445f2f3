"""The token of a run on several machines: where it is created, where each machine saves it, when it is deleted.

HOME/tokens/HALF/    tokens that `isles token` has made on this machine, by the first half of the token
RUN/credentials/     node 0: the key, the certificate and the secret; another node: the token only

They are deleted from RUN when the run is complete; until then `isles resume` finds them there.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from isles.base.durable import home
from isles.comm import credentials
from isles.comm.credentials import Credentials, Token, parse_token

CREDENTIALS = "credentials"
VARIABLE = "ISLES_TOKEN"
_TOKEN = "token"


def read_token(text: str | None, nodes: int) -> Token | None:
    """The token of --token, or else of ISLES_TOKEN; None if there is neither. ValueError if --token has no effect here,
    or is no token.
    """
    if nodes == 1:
        if text is not None:
            raise ValueError("--token is for several machines: add --nodes and --rendezvous, or take it out")
        return None
    text = text if text is not None else os.environ.get(VARIABLE)
    return parse_token(text) if text else None


def make_token() -> Token:
    """Create a token, for a run whose node 0 is this machine. ValueError if it cannot be saved."""
    new = _tokens() / f"new-{os.getpid()}"
    try:
        shutil.rmtree(new, ignore_errors=True)
        token = credentials.found(new).token
        new.rename(_tokens() / token.fingerprint)
    except OSError as error:
        raise ValueError(
            f"{_tokens()}: cannot be written to ({error.strerror}); name another folder with ISLES_HOME"
        ) from error
    return token


def host_credentials(run: Path, typed: Token | None) -> tuple[Credentials, bool]:
    """The credentials of node 0 of the run in the directory `run`, and whether they are new, so that no other machine
    knows the token. ValueError if the key of a passed token is not on this machine, or its certificate has expired.
    """
    folder = run / CREDENTIALS
    if typed is not None and not (folder.exists() and credentials.read(folder).token == typed):
        made = _tokens() / typed.fingerprint
        if not made.exists() or credentials.read(made).token != typed:
            raise ValueError(
                "--token: was not made on this machine, which is node 0 and must have its key; make one here with "
                "`isles token`, or leave --token out here and copy the one that is shown"
            )
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(made, folder)
    fresh = not folder.exists()
    mine = credentials.found(folder) if fresh else credentials.read(folder)
    if credentials.stale(mine):
        raise ValueError("--token: its certificate has expired; make another one with `isles token`")
    return mine, fresh


def node_token(run: Path, typed: Token | None) -> Token:
    """The token of another node of the run in the directory `run`, saved there. ValueError if there is none."""
    folder = run / CREDENTIALS / _TOKEN
    if typed is None:
        if not folder.exists():
            raise ValueError(f"--token is missing: give the one that node 0 shows, or {VARIABLE}, or --token @FILE")
        return parse_token(f"@{folder}")
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    credentials.write_private(folder, str(typed).encode("ascii"))
    return typed


def forget(run: Path) -> None:
    """Remove them from a run that is over."""
    shutil.rmtree(run / CREDENTIALS, ignore_errors=True)


def _tokens() -> Path:
    return home() / "tokens"
