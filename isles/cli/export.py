"""`isles export RUN`: the trained model in a form that others read."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from isles.cli.terminal import Device, Trust


def export(
    run: Annotated[Path, typer.Argument(help="Directory of a finished run.")],
    format: Annotated[str, typer.Option(help="hf: config.json and weights for transformers; safetensors.")] = "hf",
    out: Annotated[Path | None, typer.Option(help="Folder to write. Default: RUN/export-FORMAT.")] = None,
    device: Device = "auto",
    trust: Trust = False,
) -> None:
    """Write the run's consolidated model for other tools."""
    from isles.base.errors import unknown_name
    from isles.data.tokenizer import HuggingFaceTokenizer
    from isles.models.hf import save_as_llama
    from isles.pipeline.boundaries.names import boundary_name
    from isles.training.config.trust import SAVED_WITH_RUN
    from isles.training.records.saved_run import load_run

    if format not in ("hf", "safetensors"):
        raise ValueError(unknown_name("--format", format, ("hf", "safetensors")))
    folder = out or run / f"export-{format}"
    saved = load_run(run, device=device, trust=trust)
    own, boundary = saved.config.model.own, saved.config.pipeline.boundary.kind
    if format == "hf" and boundary_name(boundary).kind in ("dct", "bottleneck", "maxout", "own"):
        raise ValueError(
            f'{run}: what crosses its boundaries (pipeline.boundary.kind = "{boundary}") is part of the model, and '
            "transformers knows no such model; write it with --format safetensors"
        )
    if format == "hf" and own == "factory":
        raise ValueError(
            f"{run}: transformers does not know the model of model.factory; write it with --format safetensors"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise ValueError(f"--out {folder}: is a file; name a folder") from error
    if format == "hf" and own == "hf":
        saved.model.model.save_pretrained(folder)
    elif format == "hf":
        save_as_llama(saved.model, folder)
    else:
        for name in ("model.safetensors", "config.toml", *(name for name in SAVED_WITH_RUN if (run / name).is_file())):
            shutil.copyfile(run / name, folder / name)
    if format == "hf" and isinstance(saved.tokenizer, HuggingFaceTokenizer):
        for name, file in zip(("tokenizer.json", "tokenizer_config.json"), saved.tokenizer.files, strict=True):
            if file.is_file():
                shutil.copyfile(file, folder / name)
    print(folder)
