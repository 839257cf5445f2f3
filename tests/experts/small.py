"""Small expert systems for these tests."""

from __future__ import annotations

import random
from pathlib import Path

from isles.experts.jobs import JobProgress
from isles.experts.planning import opened, settings
from isles.experts.reading import ExperimentConfig, read
from isles.experts.system import System
from tests.training.runs import TINY

KINDS = {"easy": "ab", "medium": "cdefg", "difficult": "hijklmnopq", "apart": "rstuvwxyz"}
SMALL = [
    *(word for word in TINY if not word.startswith(("data.batch", "inner.lr", "inner.warm"))),
    "data.batch_size=4",
    "data.validation_fraction=0.3",
    "inner.lr=0.02",
    "inner.warmup_steps=2",
    "run.validate_every=0",
]
HDEE = [
    *SMALL,
    "hdee.seed_steps=12",
    "hdee.steps=[12, 24, 36]",
    "hdee.ffn=[16, 24, 32]",
    "hdee.sequences=12",
    "hdee.prefix=8",
    "hdee.lr=0.01",
]
HDEE += ["hdee.seeds=[0]", "hdee.warmup_steps=1", "model.ffn=24"]
SMALLTALK = [
    *SMALL,
    "smalltalk.experts=2",
    "smalltalk.steps=6",
    "smalltalk.prefix=8",
    "smalltalk.prefixes=[4, 8]",
    "smalltalk.rounds=2",
    "smalltalk.round_sequences=16",
    "smalltalk.router_batch=8",
    "smalltalk.router_warmup=1",
    "smalltalk.router={d_model=8, layers=1, heads=2, ffn=8}",
    "smalltalk.sequences=12",
    "smalltalk.dense=['batch']",
]


def write_domains(folder: Path) -> Path:
    """Four files of letters that differ by file, and CONFIG.toml that lists them (no other section)."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for name, letters in KINDS.items():
        draw = random.Random(name)
        words = ["".join(draw.choices(letters, k=3)) for _ in range(6)]
        path = folder / f"{name}.txt"
        path.write_text("\n".join(" ".join(draw.choices(words, k=6)) for _ in range(160)))
        difficulty = "held_out" if name == "apart" else name
        lines += [f"[domains.{name}]", f'path = "{path}"', f'difficulty = "{difficulty}"', ""]
    config = folder / "domains.toml"
    config.write_text("\n".join(lines))
    return config


def asked(system: str, config: Path, *more: str) -> ExperimentConfig[object]:
    """A request for a run of a second or two."""
    own = {"hdee": HDEE, "smalltalk": SMALLTALK}[system]
    return read(system, settings(system), str(config), [*own, *more])


def made(system: str, config: Path, out: Path, *more: str, at_once: int = 1) -> System[object]:
    """Trained to the end."""
    system_ = opened(asked(system, config, *more), out)
    assert system_.train(JobProgress(), at_once=at_once)
    return system_
