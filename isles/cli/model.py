"""What is done with a trained model.

isles generate RUN --prompt TEXT    let it go on writing
isles export RUN                    a form that others read
isles eval RUN                      perplexity on validation text, of the whole model or of some of its stages; or
                                    multiple choice on a local JSONL file
"""

from __future__ import annotations

import math
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isles.base.errors import unknown_name
from isles.base.imports import describe, import_target
from isles.cli.terminal import Device, Trust, print_named, print_table
from isles.report.panels import Table

if TYPE_CHECKING:
    from isles.training.records.saved_run import SavedRun
    from isles.training.scoring import CurvePoint


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
    from isles.models.factory import generate as sample
    from isles.training.records.saved_run import encoded, load_saved

    saved = load_saved(run, device=device, trust=trust)
    ids = sample(
        saved.logits,
        encoded(saved.tokenizer, prompt),
        new_tokens=tokens,
        context=saved.context,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
    )
    print(prompt + saved.tokenizer.decode(list(ids)))


def export(
    run: Annotated[Path, typer.Argument(help="Directory of a finished run.")],
    format: Annotated[str, typer.Option(help="hf: config.json and weights for transformers; safetensors; dcp.")] = "hf",
    out: Annotated[Path | None, typer.Option(help="Folder to write. Default: RUN/export-FORMAT.")] = None,
    device: Device = "auto",
    trust: Trust = False,
) -> None:
    """Write the run's consolidated model for other tools."""
    from torch.distributed.checkpoint import save

    from isles.models.hf import save_as_llama
    from isles.pipeline.boundaries.names import boundary_name
    from isles.training.config.trust import SAVED_WITH_RUN
    from isles.training.records.model_folder import write_beside
    from isles.training.records.saved_run import load_saved

    if format not in ("hf", "safetensors", "dcp"):
        raise ValueError(unknown_name("--format", format, ("hf", "safetensors", "dcp")))
    run = run.parent if run.is_file() else run
    folder = out or run / f"export-{format}"
    saved = load_saved(run, device=device, trust=trust)
    own, boundary = saved.config.model.own, saved.config.pipeline.boundary.kind
    unknown = "the model of model.factory" if own == "factory" else ""
    if boundary_name(boundary).kind in ("dct", "bottleneck", "maxout", "own"):
        unknown = f'a model with what crosses its boundaries (pipeline.boundary.kind = "{boundary}")'
    if format == "hf" and unknown:
        raise ValueError(f"{run}: transformers does not know {unknown}; write it with --format safetensors")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise ValueError(f"--out {folder}: is a file; name a folder") from error
    if format == "hf" and own == "hf":
        saved.model.model.save_pretrained(folder)
    elif format == "hf":
        save_as_llama(saved.model, folder)
    elif format == "dcp":
        with warnings.catch_warnings(action="ignore"):  # this is one process, and may write over a checkpoint
            save(saved.model.state_dict(), checkpoint_id=folder, no_dist=True)
    else:
        for name in ("model.safetensors", "config.toml", *(name for name in SAVED_WITH_RUN if (run / name).is_file())):
            shutil.copyfile(run / name, folder / name)
    if format == "hf":
        write_beside(saved, run, folder)
    print(folder)


def evaluate(
    run: Annotated[Path, typer.Argument(help="Directory of a finished run.")],
    data: Annotated[str | None, typer.Option(help="Text to evaluate on. Default: the run's own.")] = None,
    questions: Annotated[
        Path | None, typer.Option(help="JSONL with multiple-choice questions (HellaSwag, PIQA or ARC layout).")
    ] = None,
    tasks: Annotated[str | None, typer.Option(help="Tasks of lm-eval: names, or .yaml files, with commas.")] = None,
    drop_stages: Annotated[str | None, typer.Option(help="Run without these stages, such as 2,4.")] = None,
    early_exit: Annotated[int | None, typer.Option(help="Go from this stage to the head.")] = None,
    order: Annotated[str | None, typer.Option(help="Run these stages in this order, such as 0,2,1,3.")] = None,
    curves: Annotated[
        bool, typer.Option("--curves", help="Loss against stages dropped, exchanged, and left early.")
    ] = False,
    without_mask: Annotated[
        bool, typer.Option("--without-mask", help='With pipeline.boundary.kind = "dct:...": let all entries cross.')
    ] = False,
    device: Device = "auto",
    trust: Trust = False,
) -> None:
    """Judge the run's consolidated model. Stages are those of the run; of one that was not cut, its blocks."""
    from isles.training.records.saved_run import load_saved

    partial = any(part is not None for part in (drop_stages, early_exit, order))
    if curves and partial:
        raise ValueError("--curves evaluates many orders by itself: leave --drop-stages, --early-exit and --order out")
    partial |= curves
    if sum((partial, questions is not None, tasks is not None, tasks is not None and data is not None)) > 1:
        raise ValueError("--questions and --tasks are asked of the whole model: leave the other options out")
    saved = load_saved(run, device=device, trust=trust, masked=not without_mask)
    if tasks is not None:
        return _on_tasks(run, tasks, saved)
    if questions is not None:
        from isles.training.scoring import accuracies, read_questions

        found = accuracies(read_questions(questions), saved.logits, saved.tokenizer.encode, saved.context)
        print(f"questions      {found['questions']}")
        print(f"accuracy       {found['accuracy']:.4f}")
        print(f"accuracy_norm  {found['accuracy_norm']:.4f}   (log probability per byte of the ending)")
        return
    from isles.data import Loader, load_corpus
    from isles.models import autocast
    from isles.models.factory import check_marks
    from isles.training.step import model_losses

    own = saved.config.data
    held = own.validation_fraction or 0.05  # a run may keep nothing, but of this text a part is to be evaluated
    settings = own if not data else replace(own, path=data, validation_path="", mixture=None, validation_fraction=held)
    corpus = load_corpus(settings)
    loader = Loader(corpus, settings, context=saved.context)
    where = next(saved.model.parameters()).device
    if saved.config.model.own is not None and loader.marks:
        check_marks(saved.model, saved.context, isolates=settings.isolate_documents)
    if partial:
        from isles.models.stages import blocks_of_stages
        from isles.training.scoring import asked_order, order_loss, stages_of
        from isles.training.scoring import curves as evaluated_curves

        pieces = stages_of(saved.config, saved.model)

        def loss_of(stages: tuple[int, ...]) -> float:
            context = autocast(saved.config.model, where)
            blocks = blocks_of_stages(pieces, stages)
            return order_loss(saved.model, loader.validation_batches(), blocks, context)

        if curves:
            print_table(_table(evaluated_curves(len(pieces), loss_of)))
            return
        asked = asked_order(
            len(pieces), drop=_stages("--drop-stages", drop_stages), leave=early_exit, order=_stages("--order", order)
        )
        print(f"stages      {','.join(map(str, asked))} of {len(pieces)}")
        losses = {"val_loss": loss_of(asked)}
    else:
        losses = model_losses(saved.model, loader, lambda: autocast(saved.config.model, where))
    rows = {key[4:].replace(".", " of "): f"{loss:.4f} nats/token" for key, loss in losses.items()}  # val_loss.NAME
    print_named(rows | {"perplexity": f"{math.exp(losses['val_loss']):.4f}"})


def _on_tasks(run: Path, tasks: str, saved: SavedRun) -> None:
    """Print what lm-eval finds of the exported model on `tasks`."""
    evaluated = import_target("--tasks: lm-eval (pip install lm-eval)", "lm_eval:simple_evaluate")
    export(run, device="cpu")
    end, newline = saved.tokenizer.eos_id, [*saved.tokenizer.encode("\n"), 0][0]
    before = {} if end is not None else {"prefix_token_id": int(newline)}  # what ends a document here
    model, where = {"pretrained": str(run / "export-hf"), **before}, str(next(saved.model.parameters()).device)
    try:
        found = evaluated("hf", model, tasks.split(","), device=where)["results"]
    except Exception as error:  # lm-eval's, and its tasks': whatever they raise
        raise ValueError(f"--tasks {tasks}: {describe(error)}") from error
    for task, values in found.items():
        print_named({f"{task}  {key.split(',')[0]}": x for key, x in values.items() if isinstance(x, float)})


def _stages(option: str, text: str | None) -> list[int]:
    if text is None:
        return []
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} {text}: write numbers of stages with commas between, such as 2,4") from None


def _table(points: list[CurvePoint]) -> Table:
    rows = [
        [point.kind, str(point.count), str(len(point.losses))]
        + [f"{loss:.4f}" for loss in (point.mean, min(point.losses), max(point.losses))]
        for point in points
    ]
    return Table(heads=["stages", "how many", "orders", "mean loss", "best", "worst"], rows=rows, names=1)
