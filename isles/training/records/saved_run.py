"""A finished run read back: its configuration and its one model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from isles.data.tokenizer import Tokenizer, load_tokenizer
from isles.models import build, limits
from isles.models.factory import next_token_scores
from isles.training.config.reading import read_config
from isles.training.config.sections import Config
from isles.training.records.dcp import METADATA, load_dcp
from isles.training.records.shard import not_finite
from isles.training.stage_runner import planned_cut, run_scheme


@dataclass(frozen=True)
class SavedRun:
    """A finished run, for evaluation, generation and export."""

    config: Config
    model: Any
    tokenizer: Tokenizer

    @property
    def context(self) -> int:
        """The longest sequence, in tokens."""
        return limits(self.config.model).context

    def logits(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Scores (B, T, V) for the token after each of `tokens_BT`, int64, on any device. ValueError for a model of
        the user's own that gives none.
        """
        return next_token_scores(self.model, tokens_BT.to(next(self.model.parameters()).device))


def encoded(tokenizer: Tokenizer, text: str) -> torch.Tensor:
    """Token ids of `text`, (T,), int64."""
    return torch.tensor([int(token) for token in tokenizer.encode(text)], dtype=torch.int64, device="cpu")


def load_weights(model: nn.Module, weights: Path, of: str) -> None:
    """Fill `model` from a file as of `start_file`. of: the origin of the model's configuration, for the message.
    ValueError: a file is missing, damaged, or of another model.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_model

    if not weights.is_file():
        raise ValueError(f"{weights.parent}: no {weights.name} there; name the directory of a finished run")
    try:
        if weights.name == METADATA:
            load_dcp(model, weights.parent)
        else:
            load_model(model, str(weights), device=str(next(model.parameters()).device))
    except SafetensorError as error:
        raise ValueError(f"{weights}: damaged ({error}); train again, or take it from a copy") from error
    except (RuntimeError, ValueError) as error:  # of every tensor that does not fit, on lines of its own
        first = " ".join(str(error).split())[:200]
        raise ValueError(f"{weights}: does not fit the model of {of}; was it changed since? ({first})") from error
    parameters = {name for name, _ in model.named_parameters()}
    if (broken := not_finite(model.state_dict(), parameters)) is not None:
        raise ValueError(f"{weights}: {broken} is no number any more: train again, with a lower inner.lr")


def start_file(start: str) -> Path:
    """The file that `run.start` names, of weights or of DCP's metadata. ValueError if there is none."""
    path = Path(start).expanduser()
    name = METADATA if (path / METADATA).is_file() else "model.safetensors"
    weights = path if path.suffix == ".safetensors" else path / name
    if not weights.is_file():
        raise ValueError(f"run.start = {start!r}: no {weights.name} there; name a finished run, or leave it empty")
    return weights


def untrained(config: Config, *, masked: bool = True) -> nn.Module:
    """The model of a run before its first step. masked: as in `load_saved`."""
    model = build(config.model, seed=config.run.seed, isolates=config.data.isolate_documents)
    if masked and config.pipeline.boundary.kind != "none":
        model = run_scheme(config, planned_cut(config)).restored(model)
    return model


def load_saved(run: Path, *, device: str = "auto", trust: bool = False, masked: bool = True) -> SavedRun:
    """The consolidated model of the run directory `run`, ready to be evaluated. device: replaces its `model.device`.
    trust: import code that it names, whoever made the run. masked: with the masks of boundary "dct", if it was trained
    with them. ValueError if there is no model, or for masked = False if there are no masks.
    """
    run = run.parent if run.is_file() else run
    weights = run / "model.safetensors"
    if not weights.is_file():  # first: a directory without a model may have no configuration either
        raise ValueError(f"{run}: no model.safetensors there; name the directory of a finished run")
    config = read_config(str(run / "config.toml"), {"model.device": device}, [], trust=trust)
    kind = config.pipeline.boundary.kind
    if not masked and not kind.startswith("dct:"):
        raise ValueError(f'{run}: pipeline.boundary.kind = "{kind}" has no mask to be judged without')
    model = untrained(config, masked=masked)
    load_weights(model, weights, str(run / "config.toml"))
    return SavedRun(config, model.eval(), load_tokenizer(config.data.tokenizer, config.data.vocab))
