"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

Trust = Annotated[
    bool, typer.Option("--trust", help="Import and run what the run's config.toml names, though it was made elsewhere.")
]
