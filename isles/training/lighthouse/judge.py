"""The lighthouse's own look at files that claim to be the run's model: their form, and their validation loss.

Torch is loaded in a child process, or used where this process has it already:

    python -m isles.training.lighthouse.judge RUN CORPUS FILE...    prints the losses as JSON

A file has the run's form if its header is the one that this run's workers write: names, types and shapes of the
tensors, and which of them are tied. The text is this machine's `data.path`, if it is the workers' text.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

from safetensors import SafetensorError, safe_open

from isles.base.errors import printable
from isles.base.parsing import parse_json
from isles.training.records.rundir import CONFIG

_LOOK = 0.1  # seconds between two looks at the child


@dataclass(frozen=True)
class Judgement:
    """Of files, in order. fits: whether each has the run's form; None: not known. losses: in nats, infinite for a file
    that gives none; None: not known. why: the reason for what is not known.
    """

    fits: list[bool] | None = None
    losses: list[float] | None = None
    why: str = ""


def judge(run: Path, corpus: str, files: Sequence[Path], seconds: float, stops: Callable[[], bool]) -> Judgement:
    """Judge `files` by the configuration of the run directory `run`. corpus: SHA-256 of the workers' text. seconds: the
    longest wait. InterruptedError once `stops`.
    """
    words = [str(run), corpus, *map(str, files)]
    found: list[Any] = []
    child = None
    if "torch" not in sys.modules:
        command = [sys.executable, "-m", __name__, *words]
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def work() -> None:
        if child is None:
            found.append(_judged(*words))
            return
        out, error = child.communicate()
        last = (error.decode(errors="replace").strip().splitlines() or [f"exit code {child.returncode}"])[-1]
        found.append(parse_json(out) if child.returncode == 0 else {"why": last})

    thread, left = Thread(target=work, daemon=True), seconds
    thread.start()
    while thread.is_alive() and left > 0 and not stops():
        thread.join(min(_LOOK, left))
        left -= _LOOK
    if child is not None:
        child.kill()
    if stops():
        raise InterruptedError
    if not found:
        return Judgement(why=f"it took longer than world.eval_deadline, {seconds:g} s")
    return Judgement(**(found[0] | {"why": printable(found[0]["why"], 300)}))


def _judged(run: str, corpus: str, *files: str) -> dict[str, Any]:
    """The fields of a `Judgement`."""
    from isles.data import Loader, load_corpus
    from isles.models import autocast, build, limits
    from isles.training.config.reading import read_config
    from isles.training.records.saved_run import load_weights
    from isles.training.records.shard import model_form
    from isles.training.stage_runner import planned_cut, run_scheme
    from isles.training.step import validation_loss

    found: dict[str, Any] = {"why": ""}
    try:
        config = read_config(str(Path(run, CONFIG)), {}, [], trust=True)  # of whoever keeps this lighthouse
        model = build(config.model, seed=config.run.seed)
        if config.pipeline.boundary.kind != "none":
            model = run_scheme(config, planned_cut(config)).restored(model)
        form = model_form(model)
        found["fits"] = [_form(file) == form for file in files]
        text = load_corpus(config.data)
        if text.sha256 != corpus:
            return found | {"why": f"data.path = {config.data.path!r} here is not the workers' text"}
        if not len(text.validation):
            return found | {"why": "data.validation_fraction = 0 keeps no text for validation"}
        loader, where = Loader(text, config.data, context=limits(config.model).context), next(model.parameters()).device
        losses = []
        for file in files:
            try:
                load_weights(model, Path(file), "the run")
                loss = validation_loss(model, loader.validation_batches(), autocast(config.model, where))
                losses.append(loss if math.isfinite(loss) else math.inf)
            except ValueError:
                losses.append(math.inf)
        return found | {"losses": losses}
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        return found | {"why": str(error)}


def _form(file: str) -> dict[str, Any] | None:
    """Types and shapes of a safetensors file by name, and its metadata; None if it is none."""
    try:
        with safe_open(file, framework="np"), open(file, "rb") as opened:
            header = parse_json(opened.read(int.from_bytes(opened.read(8), "little")))
        return {name: {k: v for k, v in one.items() if k != "data_offsets"} for name, one in header.items()}
    except (OSError, SafetensorError, ValueError, AttributeError):
        return None


if __name__ == "__main__":
    print(json.dumps(_judged(*sys.argv[1:])))
