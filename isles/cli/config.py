"""`isles config`: the full configuration as commented TOML, to start a file of one's own from."""

from __future__ import annotations

from typing import Annotated

import typer


def config(
    method: Annotated[str, typer.Option(help="Whose settings [replicas] shows.")] = "noloco",
) -> None:
    """Print every setting with its default and what it means, as a CONFIG.toml for `isles train`."""
    from isles.training.template import template

    print(template(method), end="")
