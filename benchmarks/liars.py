"""One liar of four workers, whose shares stay within `world.trust_ratio`: what it costs, and what `replicas.robust`
saves.

    python -m benchmarks.liars [--rules none,clip,trimmed,median] [--attacks ...] [--seeds 0,1,2] [--steps 800]

The job of a bare `isles train` (`training/config/embedded.toml`) with diloco and four workers on the virtual clock;
worker 3 lies. Attacks that know the others' shares are applied where the shares of a part are averaged, so they are as
strong as a liar that hears everything:

    sign flip       its own share times -5 (the ratio is 10, and shares shrink from round to round)
    alike           the mean of the honest shares minus 1.5 standard deviations (ALIE, Baruch et al., arXiv 1902.06635)
    inner product   the mean of the honest shares times -4 (IPM, Xie et al., arXiv 1903.03936)
    label flip      it trains on labels t -> 255 - t
    free riding     zeros

Printed: validation losses of the one model, mean and spread over the seeds, and the difference to the same seeds with
the liar's share left out ("absent": the plain mean of the three others, which read the same text). "alone": a run of
three workers, which deals the text to three and not to four, so its difference shows what another order of text does.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, stdev
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

from isles.comm.collectives.mean import MeanPart
from isles.running.run import launch
from isles.training.config.reading import read_config
from isles.training.trainer import Trainer

ATTACKS = ("alone", "none", "sign flip", "alike", "inner product", "label flip", "free riding")
RULES = ("none", "clip", "trimmed", "median")
LIAR = 3
_FLIPS = threading.local()


@contextlib.contextmanager
def lies(attack: str) -> Iterator[None]:
    """Have worker 3 of the runs in this block lie."""
    step, cross_entropy, reduce = Trainer._step, functional.cross_entropy, MeanPart.reduce

    def stepped(self: Trainer) -> None:
        _FLIPS.on = self.world.rank == LIAR
        try:
            step(self)
        finally:
            _FLIPS.on = False

    def flipped(scores: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(scores, 255 - labels if getattr(_FLIPS, "on", False) else labels)

    def reduced(self: MeanPart, wire: Tensor, out: Tensor, usable: Sequence[int]) -> None:
        if self.call.channel == "outer":
            own = self.call.group.rank
            wires = {position: wire if position == own else self.inbox[position] for position in usable}
            falsify(attack, {at: self.decode(one, out.numel()) for at, one in wires.items()})
        reduce(self, wire, out, usable)

    with contextlib.ExitStack() as stack:
        if attack == "label flip":
            stack.enter_context(mock.patch.object(Trainer, "_step", stepped))
            stack.enter_context(mock.patch.object(functional, "cross_entropy", flipped))
        elif attack not in ("none", "alone"):
            stack.enter_context(mock.patch.object(MeanPart, "reduce", reduced))
        yield


def falsify(attack: str, shares: dict[int, Tensor]) -> None:
    """Change the liar's share in place. shares: by position, of one part."""
    honest = torch.stack([share for position, share in shares.items() if position != LIAR])
    if attack == "sign flip":
        shares[LIAR].mul_(-5.0)
    elif attack == "alike":
        shares[LIAR].copy_(honest.mean(0) - 1.5 * honest.std(0, correction=0))
    elif attack == "inner product":
        shares[LIAR].copy_(-4.0 * honest.mean(0))
    elif attack == "absent":
        shares[LIAR].copy_(honest.mean(0))
    else:
        shares[LIAR].zero_()


def one_run(rule: str, attack: str, seed: int, steps: int, workers: int = 4) -> float:
    """The validation loss at the end."""
    given = ["world.backend=virtual", f"world.workers={workers}", f"run.seed={seed}", f"run.steps={steps}"]
    given += ["run.validate_every=0", "replicas.method=diloco", f"replicas.robust={rule}"]
    with lies(attack), tempfile.TemporaryDirectory() as folder:
        summary = launch(read_config(None, {}, given), Path(folder) / "run", lambda _: None, lambda _: None)
    assert summary is not None and summary["val_loss"] is not None
    return float(summary["val_loss"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rules", default=",".join(RULES))
    parser.add_argument("--attacks", default=",".join(ATTACKS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--without", help="losses of these seeds without the liar, if they are known")
    asked = parser.parse_args()
    seeds = [int(seed) for seed in asked.seeds.split(",")]
    without = [float(loss) for loss in asked.without.split(",")] if asked.without else []
    cases = [(rule, attack) for attack in asked.attacks.split(",") for rule in asked.rules.split(",")]
    for rule, attack in [*([] if without else [("none", "absent")]), *cases]:
        workers = 3 if attack == "alone" else 4
        losses = [one_run(rule, attack, seed, asked.steps, workers) for seed in seeds]
        without = without or losses
        worse = mean(loss - base for loss, base in zip(losses, without, strict=True))
        spread = stdev(losses) if len(losses) > 1 else 0.0
        figures = " ".join(f"{loss:.4f}" for loss in losses)
        print(f"{attack:22}{rule:9}{mean(losses):9.4f}{spread:8.4f}{worse:+9.4f}   {figures}", flush=True)


if __name__ == "__main__":
    main()
