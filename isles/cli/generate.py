"""`isles generate RUN --prompt TEXT`: let a trained model go on writing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from isles.cli.terminal import Device, Trust


def generate(
    run: Annotated[Path, typer.Argument(help="Directory of a finished run.")],
    prompt: Annotated[str, typer.Option(help="Text to go on from.")],
    tokens: Annotated[int, typer.Option(help="New tokens.", min=1)] = 200,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time.", min=0.0)] = 0.8,
    top_k: Annotated[int, typer.Option(help="Choose among so many likeliest tokens (0: all).", min=0)] = 0,
    seed: Annotated[int, typer.Option(help="Of the draws.", min=0)] = 0,
    device: Device = "auto",
    trust: Trust = False,
) -> None:
    """Continue a prompt with the run's consolidated model."""
    from isles.models.generate import generate as sample
    from isles.training.records.saved_run import load_run

    saved = load_run(run, device=device, trust=trust)
    ids = sample(
        saved.logits,
        saved.encode(prompt),
        new_tokens=tokens,
        context=saved.context,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
    )
    print(prompt + saved.tokenizer.decode(list(ids)))
