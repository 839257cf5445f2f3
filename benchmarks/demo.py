"""DeMo's work on a worker: the blocks' transform, the largest coefficients, and what a whole step adds to training.

    transform   the block DCT of a momentum of 2048 x 2048: ours, the plain three-operand einsum, scipy.fft.dctn
    extract     a gradient added to the momentum, the transform, and the 32 largest coefficients of each block of
                64 x 64: ours, and with torch.topk behind either of the others
    step        everything that DeMo does in a step of a 9.7 M-parameter model, and its share of the step's time

    python -m benchmarks.demo [transform|extract|step ...] [--json]

One thread; parties take turns, a number is the median over the turns, of CPU seconds. Ours holds the momentum by
blocks, the others as the matrix that it is: so ours pays for bringing a gradient into blocks, in `extract`, and theirs
for coefficients that do not lie together. Exit code 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import scipy.fft
import torch
from torch import Tensor, nn

import isles
from benchmarks._measure import Row, interleaved, report
from benchmarks._models import byte_model
from isles.comm.codecs.sparse import dct_basis
from isles.replicas.methods.demo.config import DeMoConfig
from isles.replicas.methods.demo.momentum import Momentum

SIDE, EDGE, K = 2048, 64, 32
RATE = 0.01
BLOCKS = SIDE // EDGE
TURNS, STEP_TURNS = 15, 7
TOKENS = (512, 4096)  # a step


def by_einsum(x: Tensor, basis: Tensor) -> Tensor:
    """(y a) (x b) -> (blocks, a b), as the rule is written."""
    return torch.einsum("yaxb,ai,bj->yxij", x.view(BLOCKS, EDGE, BLOCKS, EDGE), basis, basis).reshape(-1, EDGE * EDGE)


def by_scipy(x: Tensor) -> Tensor:
    found = scipy.fft.dctn(x.view(BLOCKS, EDGE, BLOCKS, EDGE).numpy(), axes=(1, 3), norm="ortho")
    return torch.from_numpy(found).transpose(1, 2).reshape(-1, EDGE * EDGE)


def top(coefficients: Tensor) -> tuple[Tensor, Tensor]:
    places = coefficients.abs().topk(K, dim=1, sorted=False).indices
    return coefficients.gather(1, places), places


def ratios(what: str, ours: str, parties: dict[str, Callable[[], object]]) -> list[Row]:
    """How much longer the others take."""
    times = interleaved(parties, TURNS, warm_up=2)
    bounds = {"einsum": (">=", 1.3), "scipy": (">=", 1.0)}
    cpu = {name: 1e3 * sorted(t.cpu)[TURNS // 2] for name, t in times.items()}
    return [
        Row(f"{what}  {name} / ours", times[name].per(times[ours]), "x longer", bounds[name],
            f"{cpu[name]:.1f} ms against {cpu[ours]:.1f} ms")
        for name in bounds
    ]  # fmt: skip


def transform() -> list[Row]:
    """The transform alone."""
    x, basis = _matrix(), dct_basis(EDGE)
    momentum = _momentum(x)
    momentum.add([(0, x)], 1.0)

    def ours() -> None:
        for piece in momentum.blocks.pieces(x.device):
            momentum.transform.forward(momentum.vector[piece.first : piece.last].view(-1, EDGE, EDGE))

    expected = by_scipy(x)
    torch.testing.assert_close(by_einsum(x, basis), expected, rtol=1e-4, atol=1e-4)
    found = momentum.transform.forward(momentum.vector.view(-1, EDGE, EDGE))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    return ratios(
        "transform", "ours", {"ours": ours, "einsum": lambda: by_einsum(x, basis), "scipy": lambda: by_scipy(x)}
    )


def extract() -> list[Row]:
    """From a gradient to values and places."""
    x, basis = _matrix(), dct_basis(EDGE)
    momentum, plain = _momentum(x), torch.zeros_like(x)

    def ours() -> tuple[Tensor, Tensor]:
        momentum.begin(0)
        momentum.add([(0, x)], RATE)
        return momentum.extract()

    def added() -> Tensor:
        return plain.mul_(momentum.config.compression_decay).add_(x, alpha=RATE)

    parties: dict[str, Callable[[], object]] = {
        "ours": ours,
        "einsum": lambda: top(by_einsum(added(), basis)),
        "scipy": lambda: top(by_scipy(added())),
    }
    theirs = top(by_scipy(added()))[0].abs().sort(dim=1).values
    torch.testing.assert_close(ours()[0].view(-1, K).abs().sort(dim=1).values, theirs, rtol=1e-3, atol=1e-6)
    return ratios("extract  ", "ours", parties)


def _momentum(x: Tensor) -> Momentum:
    return Momentum([x.shape], DeMoConfig(compression_topk=K, compression_chunk=EDGE), x.device)


def _matrix() -> Tensor:
    return torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(0))


def step() -> list[Row]:
    """A training step with DeMo around SGD and with SGD alone, in a world of one; AdamW(fused) beside them."""
    group = isles.init().outer
    rows = []
    for tokens in TOKENS:
        loops = {
            "sgd": Loop(tokens, sgd),
            "adamw": Loop(tokens, lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)),
            "demo": Loop(tokens, lambda model: isles.DeMo(model, sgd(model), group)),
        }
        times = interleaved(loops, STEP_TURNS)
        each = {name: sorted(t.cpu)[STEP_TURNS // 2] for name, t in times.items()}
        share = 1 - times["sgd"].per(times["demo"])
        note = f"{each['demo']:.3f} s; {each['sgd']:.3f} s with SGD alone, {each['adamw']:.3f} s with AdamW"
        rows.append(Row(f"step       DeMo's share, {tokens} tokens a step", 100 * share, "%", None, note))
    return rows


class Loop:
    """A training loop over random bytes, a step a call."""

    def __init__(self, tokens: int, optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
        self.model = byte_model()
        self.optimizer = optimizer(self.model)
        self.data = torch.randint(256, (2, tokens), generator=torch.Generator().manual_seed(0))

    def __call__(self) -> None:
        nn.functional.cross_entropy(self.model(self.data[0]), self.data[1]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-4, fused=True)


def main() -> int:
    """Run what is asked for."""
    parts: dict[str, Callable[[], list[Row]]] = {"transform": transform, "extract": extract, "step": step}
    parser = argparse.ArgumentParser(description="What DeMo costs on a worker.")
    parser.add_argument("parts", nargs="*", help=f"any of {', '.join(parts)}; default: all")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(parts):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    return report([row for name in options.parts or parts for row in parts[name]()], options.json)


if __name__ == "__main__":
    sys.exit(main())
