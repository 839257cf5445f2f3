"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer


def _known(device: str | None) -> str | None:
    """ValueError where --device names none."""
    from isles.models.config import check_device

    check_device("auto" if device is None else device, "--device")
    return device


ConfigFile = Annotated[str | None, typer.Argument(metavar="[CONFIG.toml]", help="Default: the embedded small run.")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Any setting; repeatable.")]
InnerSteps = Annotated[int | None, typer.Option(help="Inner steps a worker.")]
Device = Annotated[str, typer.Option(callback=_known, help="auto, cpu, cuda or cuda:N.")]
OwnDevice = Annotated[str | None, typer.Option(callback=_known, help="auto, cpu, cuda or cuda:N. Default: the run's.")]
As = Annotated[str | None, typer.Option("--as", metavar="MODEL", help='Time and bytes as of "1B", or "1B, A100".')]
Trust = Annotated[
    bool, typer.Option("--trust", help="Import and run what the run's config.toml names, though it was made elsewhere.")
]
