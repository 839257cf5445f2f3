"""The distance between replicas during training, estimated without messages between workers.

    worker    `Sample.read` at a logged step: the same few weights at all workers, as text -> world.report
    launcher  `Spread.take`: once the samples of all remaining workers are there -> {"step": s, "replica_std": x} in
              metrics.jsonl

An exact figure would need a mean of all weights over all workers: bytes that the method does not send, and a wait for
all workers, which some methods exist to avoid (on a virtual clock it would also change the run's time). The estimate is
of sqrt(mean over replicas and weights of (w - mean w)^2) from at most `WEIGHTS` weights, so its relative error is a few
per cent; it is exactly 0 if all replicas are equal. `summary.json` has the exact figure at the end. If replicas are cut
into stages, each stage has its own sample, weighted by its number of weights.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

WEIGHTS = 2048
_PENDING = 4096  # steps: a worker that runs further ahead than this makes the launcher forget the oldest


class Sample:
    """Which weights of a model are looked at: drawn once without replacement, the same on every worker.

    parameters: the trained tensors, in the same order everywhere.
    """

    def __init__(self, parameters: Sequence[Any]) -> None:
        import torch

        sizes = [parameter.numel() for parameter in parameters]
        self.weights = sum(sizes)
        """Of which the sample is one."""
        draw = torch.Generator().manual_seed(0)
        count = min(WEIGHTS, sum(sizes))
        # A random place in each of `count` equal stretches: no place twice, and every tensor has its share.
        edges = torch.arange(count + 1, dtype=torch.float64, device="cpu") * sum(sizes) / count
        low, high = edges[:-1].ceil(), edges[1:].ceil()
        shares = torch.rand(count, generator=draw, dtype=torch.float64, device="cpu")
        indices = (low + (shares * (high - low)).floor()).long()
        self._chosen = []
        start = 0
        for parameter, size in zip(parameters, sizes, strict=True):
            inside = indices[(indices >= start) & (indices < start + size)] - start
            if len(inside):
                self._chosen.append((parameter, inside.to(parameter.device)))
            start += size

    def read(self) -> str:
        """The sampled weights now, float32, base64."""
        import torch

        with torch.no_grad():
            parts = [parameter.reshape(-1)[indices].float() for parameter, indices in self._chosen]
            return base64.b64encode(torch.cat(parts).cpu().numpy().tobytes()).decode("ascii")


class Spread:
    """Puts samples together, in rank order: the same samples give the same bits. stages: by the rank of each worker
    that sends them, which stage of its replica it holds.
    """

    def __init__(self, stages: Mapping[int, int]) -> None:
        self.left = dict(stages)
        self._samples: dict[int, dict[int, tuple[str, int]]] = {}

    def take(self, step: int, worker: int, sample: str, weights: int) -> dict[int, float]:
        """The spread at `step`, by step, if this sample, of so many weights, was the last one missing."""
        self._samples.setdefault(step, {})[worker] = sample, weights
        spreads = self._whole([step])
        while len(self._samples) > _PENDING:
            del self._samples[min(self._samples)]
        return spreads

    def lose(self, worker: int) -> dict[int, float]:
        """`worker` sends no more; the spreads, by step, for which only its sample was missing."""
        self.left.pop(worker, None)
        return self._whole(sorted(self._samples))

    def _whole(self, steps: Sequence[int]) -> dict[int, float]:
        """Of those among `steps` of which all samples are there; a lost worker's own is left out."""
        whole = [step for step in steps if self.left and self._samples[step].keys() >= self.left.keys()]
        spreads = {step: self._over_stages(self._samples.pop(step)) for step in whole}
        return {step: spread for step, spread in spreads.items() if spread is not None}

    def _over_stages(self, samples: Mapping[int, tuple[str, int]]) -> float | None:
        """None where samples of one stage are not of one length."""
        squares, weights = 0.0, 0
        for stage in sorted(set(self.left.values())):
            own = [samples[worker] for worker in sorted(self.left) if self.left[worker] == stage]
            if len({len(sample) for sample, _ in own}) > 1:
                return None
            size = own[0][1]
            squares, weights = squares + size * variance_of([sample for sample, _ in own]), weights + size
        return (squares / weights) ** 0.5


def variance_of(samples: Sequence[str]) -> float:
    """The mean square of how far replicas are from their mean, over the weights of their samples."""
    import numpy as np

    weights = [np.frombuffer(base64.b64decode(text), dtype=np.float32).astype(np.float64) for text in samples]
    total = sum(weights[1:], start=weights[0])
    squares = sum(((own - total / len(weights)) ** 2 for own in weights), start=np.zeros_like(total))
    return float(squares.mean() / len(weights))
