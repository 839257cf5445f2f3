"""`isles data prepare`: tokenise a run's text before the run."""

from __future__ import annotations

import sys

import typer

from isles.cli.terminal import ConfigFile, Set, Trust, end_in_order, print_named
from isles.report.units import format_bytes

app = typer.Typer(help="Prepare text.", no_args_is_help=True)


@app.command("prepare")
def prepare(
    config: ConfigFile = None,
    set_: Set = None,
    trust: Trust = False,
) -> None:
    """Tokenise the text of a configuration once, for all runs on this machine; goes on where it was stopped."""
    from isles.data import load_corpus
    from isles.data.prepare import corpus_folder
    from isles.data.sources import check_sample
    from isles.training.config.reading import gather, resolve, tokens_a_step

    end_in_order()
    run = resolve(gather(config, {}, set_ or [], trust=trust))
    data, tokens = run.data, run.run.steps * tokens_a_step(run, run.replicas_in_all)
    check_sample(data)
    corpus = load_corpus(data, lambda text: print(text, file=sys.stderr, flush=True), check=True)
    parts, folder = (corpus.train, corpus.validation), corpus_folder(data)
    rows, names = {}, sorted(data.path) if isinstance(data.path, dict) else []
    for name, (begin, end) in zip(names, corpus.train.ranges(names), strict=True):
        share = data.mixture[name] / sum(data.mixture.values()) if data.mixture else (end - begin) / len(corpus.train)
        epochs = f"{share * tokens / max(end - begin, 1):.2g} epochs of it in {tokens:,} tokens"
        rows[f"  {name}"] = f"{end - begin:,} to train on, {share:.1%} of what is read: {epochs}"
    print_named(
        {
            "text": corpus.name,
            "tokens": f"{len(parts[0]):,} to train on, {len(parts[1]):,} for validation",
            **rows,
            "documents": ", ".join(f"{len(part.file_of):,}" for part in parts),
            "size": format_bytes(sum(part.tokens.nbytes for part in parts)),
            "stored": str(folder) if folder else "not stored: each process reads this text itself (data.cache)",
        }
    )
