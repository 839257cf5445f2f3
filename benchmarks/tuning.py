"""How many steps successive halving spares a search, and what it costs in loss: real searches on a small model.

    python -m benchmarks.tuning [--trials 30] [--steps 135] [--methods ddp,diloco,eager]

Each method is searched with pruning. Then the trials that were pruned are run to their end, which tells whether one of
them would have been the best. Fails where less than 40 % of the steps is saved.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from isles.cli.several import Study, Terms, names
from isles.cli.terminal import print_table
from isles.report.comparison import complete, saved
from isles.report.panels import Table
from isles.running.run import launch
from isles.training.config.reading import read_config
from isles.training.config.sections import Config

SHARE = 0.4
SMALL = {
    "model.d_model": 32,
    "model.ffn": 96,
    "model.context": 64,
    "world.workers": 2,
    "world.backend": "virtual",
    "replicas.sync_every": 5,
    "data.batch_size": 4,
    "data.validation_sequences": 32,
    "inner.warmup_steps": 12,
}


def main(words: Sequence[str]) -> int:
    """The table; 1 where pruning saves too little. words: of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tuning")
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--steps", type=int, default=135)
    parser.add_argument("--methods", default="ddp,diloco,eager")
    asked = parser.parse_args(words)
    rows, enough = [], True
    for name in names(asked.methods, "--methods"):
        flags = {**SMALL, "replicas.method": name, "run.steps": asked.steps}
        config = read_config(None, flags, [], shared=True)
        with tempfile.TemporaryDirectory() as folder:
            row, share = _searched(Terms(config=config, at="tokens", seed=1000, trials=asked.trials), Path(folder))
        rows.append([name, *row])
        enough &= share >= SHARE
    heads = ["method", "trials", "to their end", "steps saved", "trial 0", "best", "best of the pruned, run on"]
    print_table(Table(heads=heads, rows=rows))
    return 0 if enough else 1


def _searched(terms: Terms, out: Path) -> tuple[list[str], float]:
    def train(number: int, one: Config, folder: Path, look: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        return launch(one, folder, look, lambda notice: None)

    study = Study(terms, out)
    study.work(lambda: False, train)
    told = study.record()
    ended, share = complete(told), saved(told)
    pruned = [one for one in told["trials"] if one["state"] == "pruned" and one["steps"]]
    losses = [_loss(terms, one, out) for one in pruned]
    first = next((one["loss"] for one in ended if one["index"] == 0), None)
    cells = [str(terms.trials), str(len(ended)), f"{100 * share:.0f} %", "-" if first is None else f"{first:.4f}"]
    return [*cells, f"{ended[0]['loss']:.4f}", f"{min(losses):.4f}" if losses else "-"], share


def _loss(terms: Terms, trial: dict[str, Any], out: Path) -> float:
    """Of a pruned trial at its end."""
    summary = launch(terms.run(trial["settings"]), out / f"on-{trial['index']}", lambda line: None, lambda text: None)
    return float(summary["val_loss"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
