"""What `isles export` writes beside the weights, so that transformers, lm-eval and people can use them:

FOLDER/tokenizer.json, tokenizer_config.json    the run's tokenizer; for "bytes" one whose ids are the bytes of UTF-8
FOLDER/generation_config.json                   how to sample
FOLDER/README.md                                a model card: what the run was, and its settings
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from isles.base.parsing import parse_json
from isles.data.tokenizer import ByteTokenizer
from isles.training.config.reading import to_toml
from isles.training.records.rundir import SUMMARY
from isles.training.records.saved_run import SavedRun

_SAID = ("method", "workers", "steps", "tokens", "parameters", "val_loss", "bytes_sent_per_worker", "isles_version")


def write_beside(saved: SavedRun, run: Path, folder: Path) -> None:
    """Write the files above into the existing `folder`, for the model `saved` of the run directory `run`."""
    config = saved.config
    for file, usual in zip(saved.tokenizer.files, ByteTokenizer.files, strict=False):  # none where a run read ids
        shutil.copyfile(file if file.is_file() else usual, folder / usual.name)
    if config.model.own is None:  # transformers has written that of its own model
        sampling = {"do_sample": True, "temperature": 0.8, "eos_token_id": saved.tokenizer.eos_id}
        (folder / "generation_config.json").write_text(json.dumps(sampling) + "\n", encoding="utf-8")
    file = run / SUMMARY
    summary = parse_json(file.read_text(encoding="utf-8")) if file.is_file() else {"method": config.method}
    rows = "\n".join(f"| {key} | {summary[key]} |" for key in _SAID if summary.get(key) is not None)
    paths = {f"data.{key}": getattr(config.data, key) for key in ("path", "validation_path")}
    names = {key: {x: Path(p[x]).name for x in p} if isinstance(p, dict) else Path(p).name for key, p in paths.items()}
    settings = to_toml(config, {**names, "model.device": "auto"}, sparse=True)
    card = Path(__file__).with_name("model_card.md").read_text(encoding="utf-8")
    card = card.format(name=run.resolve().name, method=config.method, rows=rows, settings=settings)
    (folder / "README.md").write_text(card, encoding="utf-8")
