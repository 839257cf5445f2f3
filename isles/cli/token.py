"""`isles token`: a secret for a run on several machines, made before it starts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def token(
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="Write it there instead of printing it.")
    ] = None,
) -> None:
    """Make a token on the machine that will be node 0. Whoever has it may take part in the run: copy it to the other
    machines as you would a password.
    """
    from isles.comm.credentials import write_private
    from isles.training.records.tokens import make_token

    if file is not None and file.exists() and not _is_token(file):
        raise ValueError(f"{file}: is there and holds no token; name another file")
    made = make_token()
    if file is None:
        print(made)
        print("give it to every machine: --token TOKEN, or ISLES_TOKEN, or --token @FILE", file=sys.stderr)
        return
    try:
        write_private(file, f"{made}\n".encode("ascii"))
    except OSError as error:
        raise ValueError(f"{file}: cannot be written ({error.strerror}); name another file") from error
    print(f"{file}; give it to every machine: --token @{file}")


def _is_token(file: Path) -> bool:
    from isles.comm.credentials import parse_token

    try:
        parse_token(f"@{file}")
    except ValueError:
        return False
    return True
