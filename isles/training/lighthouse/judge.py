"""The lighthouse's own look at files that claim to be the run's model: their form, and their validation loss.

Torch is loaded in a child process, or used where this process has it already:

    python -m isles.training.lighthouse.judge RUN CORPUS FILE...    prints a `Judgement` as JSON

A file has the run's form if its header is the one that this run's workers write: names, types and shapes of the
tensors, and which of them are tied. The text is this machine's `data.path`, if it is the workers' text.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Thread

from isles.base.errors import printable
from isles.base.parsing import parse_json
from isles.training.lighthouse.mean import form_of
from isles.training.records.rundir import CONFIG

_LOOK = 0.1  # seconds between two looks at the child
_UNKNOWN = {"val_loss": math.nan}


@dataclass(frozen=True)
class Judgement:
    """Of files, in order. losses: `Losses` in nats; None for a file that is not of the run's form; val_loss is infinite
    for one that gives no number, not a number if it is not known. why: the reason for what is not known.
    """

    losses: list[dict[str, float] | None]
    why: str = ""


def judge(run: Path, corpus: str, files: Sequence[Path], seconds: float, stops: Callable[[], bool]) -> Judgement:
    """Judge `files` by the configuration of the run directory `run`. corpus: SHA-256 of the workers' text. seconds: the
    longest wait. InterruptedError once `stops`.
    """
    words = [str(run), corpus, *map(str, files)]
    unknown: list[dict[str, float] | None] = [_UNKNOWN] * len(files)
    found = [Judgement(unknown, f"it took longer than world.eval_deadline, {seconds:g} s")]
    command = [sys.executable, "-m", __name__, *words]
    child = (
        None if "torch" in sys.modules else subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    )

    def work() -> None:
        if child is None:
            found.append(_judged(*words))
            return
        out, error = child.communicate()
        if child.returncode == 0:
            found.append(Judgement(**parse_json(out)))
        else:
            last = (error.decode(errors="replace").strip().splitlines() or [f"exit code {child.returncode}"])[-1]
            found.append(Judgement(unknown, printable(last, 300)))

    thread, left = Thread(target=work, daemon=True), seconds
    thread.start()
    while thread.is_alive() and left > 0 and not stops():
        thread.join(min(_LOOK, left))
        left -= _LOOK
    judgement = found[-1]
    if child is not None:
        child.kill()
    if stops():
        raise InterruptedError
    return judgement


def _judged(run: str, corpus: str, *files: str) -> Judgement:
    from isles.data import Loader, load_corpus
    from isles.models import autocast, limits
    from isles.training.config.reading import read_config
    from isles.training.records.saved_run import load_weights, untrained
    from isles.training.records.shard import model_form
    from isles.training.step import model_losses

    losses: list[dict[str, float] | None] = [_UNKNOWN] * len(files)
    try:
        config = read_config(str(Path(run, CONFIG)), {}, [], trust=True)  # of whoever keeps this lighthouse
        model = untrained(config)
        form = model_form(model)
        losses = [_UNKNOWN if form_of(Path(file)) == form else None for file in files]
        text = load_corpus(config.data)
        if text.sha256 != corpus:
            return Judgement(losses, f"data.path = {config.data.path!r} here is not the workers' text")
        if not len(text.validation):
            return Judgement(losses, "data.validation_fraction = 0 keeps no text for validation")
        loader = Loader(text, config.data, context=limits(config.model).context)
        where = next(model.parameters()).device
        for number, file in enumerate(files):
            if losses[number] is not None:
                load_weights(model, Path(file), "the run")
                found = model_losses(model, loader, lambda: autocast(config.model, where))
                losses[number] = found if math.isfinite(found["val_loss"]) else {"val_loss": math.inf}
        return Judgement(losses)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        return Judgement(losses, printable(str(error), 300))


if __name__ == "__main__":
    print(json.dumps(asdict(_judged(*sys.argv[1:]))))
