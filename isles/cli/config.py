"""`isles config`: the full configuration as commented TOML, to start a file of one's own from."""

from __future__ import annotations

from typing import Annotated

import typer


def config(
    method: Annotated[
        str | None, typer.Option(help="Whose settings the section replicas shows. Default: noloco.")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="Print this preset instead, to change it.")] = None,
    presets: Annotated[bool, typer.Option("--presets", help="List the presets.")] = False,
) -> None:
    """Print every setting with its default and what it means, as a CONFIG.toml for `isles train`."""
    from isles.training.config.presets import preset_file
    from isles.training.config.presets import presets as known

    if sum((method is not None, preset is not None, presets)) > 1:
        raise ValueError("--method, --preset and --presets each print something else: give one of them")
    if presets:
        from isles.cli.terminal import print_named

        print_named(known())
        print("isles train --preset NAME runs one, isles config --preset NAME prints it")
    elif preset is not None:
        print(preset_file(preset).read_text(encoding="utf-8"), end="")
    else:
        from isles.training.config.reading import template

        print(template(method or "noloco"), end="")
