"""`isles eval RUN`: perplexity on validation text, or multiple choice on a local JSONL file."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from isles.cli.options import Trust


def evaluate(
    run: Annotated[Path, typer.Argument(help="Directory of a finished run.")],
    data: Annotated[str | None, typer.Option(help="Text to judge on. Default: the run's own.")] = None,
    questions: Annotated[
        Path | None, typer.Option(help="JSONL with multiple-choice questions (HellaSwag, PIQA or ARC layout).")
    ] = None,
    trust: Trust = False,
) -> None:
    """Judge the run's consolidated model."""
    from isles.training.records.saved import load_run

    saved = load_run(run, trust=trust)
    if questions is not None:
        from isles.training.multiple_choice import accuracies, read_questions

        found = accuracies(
            read_questions(questions),
            saved.logits,
            saved.tokenizer.encode,
            saved.context,
        )
        print(f"questions      {found['questions']}")
        print(f"accuracy       {found['accuracy']:.4f}")
        print(f"accuracy_norm  {found['accuracy_norm']:.4f}   (log probability per byte of the ending)")
        return
    from isles.data import Loader, load_corpus
    from isles.models import autocast
    from isles.training.evaluation import validation_loss

    settings = saved.config.data if data is None else replace(saved.config.data, path=data)
    corpus = load_corpus(settings)
    loader = Loader(corpus, settings, context=saved.context)
    device = next(saved.model.parameters()).device
    loss = validation_loss(saved.model, loader.validation_batches(), autocast(saved.config.model, device))
    print(f"loss        {loss:.4f} nats/token")
    print(f"perplexity  {math.exp(loss):.4f}")
