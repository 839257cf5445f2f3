"""DiLoCoX whole (arXiv 2506.21263) and without its parts: loss, and seconds that replicas wait for each other.

    python -m benchmarks.dilocox_clusters [--tune] [--only "no overlap" ...] [--write] [--json]

The preset `dilocox-clusters` (2 clusters of 2 stages of 2 workers, the embedded text, the simulated network), as it is
and with one part changed. AllReduce is a mean of the weights after every step (`localsgd`); clusters that never talk
are judged each by itself; one cluster with the text of both takes twice as many steps. Exposed: blocked seconds of a
worker on channel `outer`; what is under way at the end has nothing left to hide behind. --tune makes the runs by which
the best rates are chosen, on a seed and on text that are not judged; commit tuned.jsonl before the others are made
(`benchmarks._once`). --write puts the table into docs/dilocox.md.

Bounds: the whole is within 0.15 nats of the same layout neither delayed nor compressed, delay and compression each
leave fewer seconds exposed.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks._measure import Row, report
from benchmarks._once import Found, best, judging
from benchmarks._pages import written
from isles.report.comparison import validation_loss_of
from isles.training.config.presets import preset_file
from isles.training.config.reading import read_config
from isles.training.config.sections import Config

PAGE, STEPS = "dilocox.md", 400
DENSE = (
    "replicas.rank=0",
    "replicas.window=0",
    "replicas.min_compression_rate=0",
    "replicas.codec=none",
    "replicas.error_feedback=none",
)
ALONE, TUNED = "one cluster, the text of both", "whole, its best rates"
OTHERS = {
    "AllReduce": 'method = "localsgd"\nsync_every = 1',
    "never talk": 'method = "none"',
    ALONE: 'method = "none"',
}
"""Other methods in the place of the preset's."""
VARIANTS: Mapping[str, tuple[str, ...]] = {
    "whole": (),
    TUNED: (),
    "no overlap": ("replicas.delay=none",),
    "no compression": DENSE,
    "neither": ("replicas.delay=none", *DENSE),
    "AllReduce": (),
    "never talk": (),
    ALONE: ("world.workers=4", f"run.steps={2 * STEPS}"),
}
RATES = tuple(
    (f"replicas.outer_lr={rate:g}", f"replicas.outer_momentum={momentum:g}")
    for rate, momentum in ((0.4, 0.5), (0.7, 0.5), (0.4, 0.0), (0.7, 0.0), (1.0, 0.0))
)
"""What --tune tries of the whole: outer rates and momenta, the preset's first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a variant came to. loss: nats a byte on held-out text; halfway: after half of its steps. exposed, seconds:
    of a worker on the virtual clock. sent: bytes of a worker to other replicas. every: steps between them. rank: mean
    of the rounds', None without.
    """

    loss: float
    halfway: float
    exposed: float
    seconds: float
    tokens: int
    sent: float
    every: float
    rank: float | None

    @property
    def rate(self) -> float:
        """Tokens a virtual second."""
        return self.tokens / self.seconds


def variant(name: str, more: tuple[str, ...] = ()) -> Config:
    """Its configuration."""
    preset = preset_file("dilocox-clusters")
    with tempfile.TemporaryDirectory() as folder:
        if name in OTHERS:
            text = re.sub(r"(?ms)^\[replicas\].*?^\[", f"[replicas]\n{OTHERS[name]}\n\n[", preset.read_text())
            preset = Path(folder, "other.toml")
            preset.write_text(text)
        return read_config(str(preset), {}, [f"run.steps={STEPS}", "run.log_every=1", *VARIANTS[name], *more])


def best_rates() -> tuple[str, ...]:
    """Of the whole."""
    return best(PAGE, "whole", {rates: variant("whole", rates) for rates in RATES})


def outcome(name: str) -> Outcome:
    """Of its run."""
    config = variant(name, best_rates() if name == TUNED else ())
    line = judging(PAGE, name, config, partial(_read, config))
    return Outcome(**{key: line[key] for key in Outcome.__slots__})


def _read(config: Config, folder: Path, summary: dict[str, Any]) -> Found:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    own = [line for line in lines if line.get("worker") == 0]
    ranks = [line["rank"] for line in own if "rank" in line]
    every = [line["sync_every"] for line in own if "sync_every" in line]
    half = [line["val_loss"] for line in lines if line.get("step") == config.run.steps // 2 and line.get("val_loss")]
    outer = summary["channels"].get("outer", {"blocked_seconds": 0.0, "bytes_sent": 0})
    return {
        "loss": validation_loss_of(summary),
        "halfway": sum(half) / len(half) if half else math.nan,
        "exposed": outer["blocked_seconds"],
        "seconds": summary["virtual_seconds"],
        "tokens": summary["tokens"],
        "sent": outer["bytes_sent"],
        "every": sum(every) / len(every) if every else getattr(config.replicas, "sync_every", 1),
        "rank": sum(ranks) / len(ranks) if ranks else None,
    }


def rows(found: Mapping[str, Outcome]) -> list[Row]:
    """What was measured, and the bounds between what of it is there."""
    made = [row for name, one in found.items() for row in (
        Row(f"{name}: loss", one.loss, "nats/byte"),
        Row(f"{name}: exposed", one.exposed, "s", None, f"of {one.seconds:.1f}; rank {one.rank}, H {one.every:.1f}"),
    )]  # fmt: skip
    whole = found.get("whole")
    if whole is None:
        return made
    if "neither" in found:
        made.append(Row("whole above neither", whole.loss - found["neither"].loss, "nats/byte", ("<=", 0.15)))
    for name in ("no overlap", "no compression"):
        if name in found:
            made.append(Row(f"exposed, whole / {name}", whole.exposed / found[name].exposed, "", ("<=", 1.0)))
    return made


def table(found: Mapping[str, Outcome]) -> str:
    """For the page."""
    lines = [
        "| | loss, nats/byte | rank, H | sent to other replicas | exposed, s of virtual s | tokens a virtual s "
        "| of the whole |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, one in found.items():
        loss = f"{one.loss:.3f}" + (f" ({one.halfway:.3f} after {one.seconds / 2:.1f} s)" if name == ALONE else "")
        lines.append(
            f"| {name} | {loss} | {'-' if one.rank is None else f'{one.rank:.1f}'}, "
            f"{f'{one.every:.1f}' if one.sent else '-'} "
            f"| {one.sent / 1e6:.2f} MB | {one.exposed:.2f} of {one.seconds:.1f} | {one.rate:,.0f} "
            f"| {one.rate / found['whole'].rate:.3g} |"
        )
    said = " and ".join(rates.removeprefix("replicas.").replace("=", " ") for rates in best_rates())
    return "\n".join([*lines, "", f"The best rates: {said}."])


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.tune:
        print(*best_rates())
        return 0
    found = {name: outcome(name) for name in given.only}
    if "whole" in found and TUNED in found:
        print(table(found))
        if given.write:
            written(PAGE, "benchmarks.dilocox_clusters", table(found))
    return report(rows(found), given.json)


if __name__ == "__main__":
    sys.exit(main())
