"""How flat vectors of one layout become their group's mean, round after round: entry by entry through a codec
(`Coded`), or as low-rank factors (`Factors`).

The mean of matrices as low-rank factors (PowerSGD, Vogels et al. 2019, arXiv 1905.13727, Algorithm 1), in one transfer
of two phases.

    each round, A_i (m, n) the matrix of worker i, Q (n, r) that of the last round:

        Qo = orth(Q)    P  = mean_i A_i Qo        first exchange; what is dense travels beside it
        Po = orth(P)    Q <- mean_i A_i^T Po      second exchange
        every A_i <- Po Q^T

Both factors may travel in the form of a codec: `mean` sums decoded values, so the same bits arrive everywhere, and
worker i has put Po C(A_i^T Po)^T into the mean: residuals and mean hold together what was put in. Keeping Q makes every
round one step of a power iteration, so a subspace that moves slowly is followed. orth is a QR decomposition: a column
of zeros divides by nothing there. All members compute it from the same bits; the anchor's hash tells if a different
processor ever disagrees.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from isles.base.modes import torch_threads
from isles.comm.call import Call
from isles.comm.codecs.base import Codec
from isles.comm.codecs.lowrank import Form, LowRank
from isles.comm.collectives.basic import Stamp
from isles.comm.collectives.mean import as_decoded, mean, pattern, working_bytes
from isles.comm.transport import Steps, Work, works_of
from isles.network.exchange_plan import MessagePattern, Then

_DENSE, _SECOND = 2, 3  # parts of a round, see `mean`; 0 and 1 are the caller's


class Averaging(ABC):
    """Means of flat vectors (n,) of one layout. Rounds are counted from 1. Means of one object never overlap in
    time.
    """

    held_bytes = 0
    """Bytes of state between rounds."""
    preserves_signs = False
    """Whether the mean of zeros has the sign that all of them had."""
    starting = 0
    """The number of first rounds whose messages differ from later ones."""

    @abstractmethod
    def pattern(self, round: int, size: int) -> MessagePattern:
        """The message pattern of one mean in a group of `size`."""

    def sent_bytes(self, round: int, size: int, position: int) -> int:
        """Bytes that `position` of a group of `size` hands to the transport for one mean, headers included."""
        return int(self.pattern(round, size).sent(position, size))

    @abstractmethod
    def working_bytes(self, size: int) -> int:
        """Bytes that one mean takes at its peak, beyond the vector."""

    @abstractmethod
    def mean(
        self, call: Call, buffer: Tensor, stamp: Stamp, own: Tensor | None, residual: Tensor | None, part: int
    ) -> Steps[tuple[int, ...]]:
        """Put the mean of the usable members into `buffer`. Arguments and result as for `mean.mean`."""

    @abstractmethod
    def share(self, buffer: Tensor, round: int, fragment: int, member: int, out: Tensor) -> None:
        """Fill `out` (n,) with what the others will decode of rank `member`'s `buffer`, before it is sent."""

    def state_dict(self) -> dict[str, Any]:
        """State between rounds."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert not state


class Coded(Averaging):
    """Averages entry by entry, through `codec`."""

    def __init__(self, codec: Codec, elements: int, dtype: torch.dtype, robust: str = "none") -> None:
        self.codec, self.elements, self.dtype, self.robust = codec, elements, dtype, robust
        self.preserves_signs = codec.lossless

    @override
    def pattern(self, round: int, size: int) -> MessagePattern:
        return pattern(self.elements, self.dtype, self.codec, size)

    @override
    def working_bytes(self, size: int) -> int:
        return working_bytes(self.elements, self.dtype, self.codec, size, self.robust)

    @override
    def mean(
        self, call: Call, buffer: Tensor, stamp: Stamp, own: Tensor | None, residual: Tensor | None, part: int
    ) -> Steps[tuple[int, ...]]:
        return mean(call, buffer, self.codec, stamp, own, residual, part, robust=self.robust)

    @override
    def share(self, buffer: Tensor, round: int, fragment: int, member: int, out: Tensor) -> None:
        as_decoded(buffer, self.codec, round, fragment, member, out)


class _Matrix(NamedTuple):
    """A matrix (rows, columns) that begins at entry `start` of the vector."""

    start: int
    rows: int
    columns: int

    def of(self, vector: Tensor) -> Tensor:
        return vector[self.start : self.start + self.rows * self.columns].view(self.rows, self.columns)


class Factors(Averaging):
    """Averages matrices as low-rank factors. bases: Q (n, r) of each compressed matrix, equal on all members; all may
    change them between two rounds in the same way, r <= form.rank.
    """

    def __init__(
        self, form: LowRank, shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.form, self.dtype = form, dtype
        self.matrices: list[_Matrix] = []
        self._dense: list[int] = []  # lengths of the dense runs between the matrices
        start = run = 0
        for shape in shapes:
            matrix = form.matrix(shape)
            if matrix is not None:
                self.matrices.append(_Matrix(start, *matrix))
                self._dense.append(run)
            start += prod(shape)
            run = 0 if matrix is not None else run + prod(shape)
        self._dense.append(run)
        self.elements = start
        draw = torch.Generator().manual_seed(0)  # the same on all members
        self.bases = [self._drawn(m.columns, min(form.rank, m.rows, m.columns), draw, device) for m in self.matrices]

    def _drawn(self, rows: int, columns: int, draw: torch.Generator, device: torch.device) -> Tensor:
        if device.type == "meta":  # a sketch has no numbers
            return torch.empty(rows, columns, dtype=self.dtype, device=device)
        return torch.randn(rows, columns, generator=draw, dtype=self.dtype, device="cpu").to(device)

    @property
    @override
    def held_bytes(self) -> int:  # type: ignore[override]
        return sum(basis.nbytes for basis in self.bases)

    @property
    @override
    def starting(self) -> int:  # type: ignore[override]
        return self.form.start if self.matrices else 0

    @override
    def pattern(self, round: int, size: int) -> MessagePattern:
        if self._whole(round):
            return pattern(self.elements, self.dtype, self.form.dense, size)
        first, second = (pattern(n, self.dtype, self.form.values, size) for n in self._factors())
        dense = sum(self._dense)
        beside = (pattern(dense, self.dtype, self.form.dense, size),) if dense else ()
        return Then((first, *beside), second)

    @override
    def working_bytes(self, size: int) -> int:
        parts = [(sum(self._dense), self.form.dense), *((n, self.form.values) for n in self._factors())]
        factors = sum(n * self.dtype.itemsize + working_bytes(n, self.dtype, form, size) for n, form in parts)
        starting = self._whole(1)
        return max(factors, working_bytes(self.elements, self.dtype, self.form.dense, size) if starting else 0)

    @override
    def share(self, buffer: Tensor, round: int, fragment: int, member: int, out: Tensor) -> None:
        """Raises: the share is known only with the mean, and compositions that need it are refused."""
        raise AssertionError("a low-rank share was asked for, which Composition refuses")

    @override
    def mean(
        self, call: Call, buffer: Tensor, stamp: Stamp, own: Tensor | None, residual: Tensor | None, part: int
    ) -> Steps[tuple[int, ...]]:
        assert own is None, "see `share`"
        if self._whole(call.round or 0):
            return (yield from mean(call, buffer, self.form.dense, stamp, None, residual, part))
        inputs = [matrix.of(buffer) for matrix in self.matrices]
        first = _flat([a @ _orth(q) for a, q in zip(inputs, self.bases, strict=True)])
        exchanges = [mean(call, first, self.form.values, stamp, part=part, agree_first=self.form.adapts)]
        dense, left = self._pick(buffer), None if residual is None else self._pick(residual)
        if len(dense):
            exchanges.append(mean(call, dense, self.form.dense, stamp, residual=left, part=_DENSE))
        usable = (yield from _together(exchanges))[0]  # all exchanges have the same stamp
        if not usable:
            return ()
        columns = [_orth(p) for p in self._split(first, [len(a) for a in inputs])]
        own_second = _flat([a.T @ p for a, p in zip(inputs, columns, strict=True)])
        second, lost = own_second.clone(), None if residual is None else own_second.clone()
        yield from mean(call, second, self.form.values, stamp, residual=lost, part=_SECOND)
        self.bases = self._split(second, [a.shape[1] for a in inputs])
        with torch_threads(1):  # as in `_orth`
            for a, p, q in zip(inputs, columns, self.bases, strict=True):
                torch.mm(p, q.T, out=a)
        self._put_back(dense, buffer)
        if residual is not None and left is not None and lost is not None:
            self._put_back(left, residual)
            into_mean = self._split(own_second.sub_(lost), [a.shape[1] for a in inputs])
            for matrix, p, q in zip(self.matrices, columns, into_mean, strict=True):
                matrix.of(residual).addmm_(p, q.T, alpha=-1)
        return usable

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"bases": [basis.clone() for basis in self.bases]}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.bases = [basis.clone() for basis in state["bases"]]

    def _whole(self, round: int) -> bool:
        return round <= self.form.start or not self.matrices

    def _factors(self) -> tuple[int, int]:
        """Numbers of entries of all first and of all second factors."""
        ranks = [basis.shape[1] for basis in self.bases]
        return (
            sum(matrix.rows * rank for matrix, rank in zip(self.matrices, ranks, strict=True)),
            sum(basis.numel() for basis in self.bases),
        )

    def _split(self, factors: Tensor, heights: Sequence[int]) -> list[Tensor]:
        shapes = [(height, basis.shape[1]) for height, basis in zip(heights, self.bases, strict=True)]
        return [piece.view(shape) for piece, shape in zip(factors.split(list(map(prod, shapes))), shapes, strict=True)]

    def _runs(self, vector: Tensor) -> list[Tensor]:
        """The dense runs of a vector, between its matrices."""
        sizes = [
            size for matrix, run in zip(self.matrices, self._dense, strict=False) for size in (run, prod(matrix[1:]))
        ]
        return list(vector.split([*sizes, self._dense[-1]])[::2])

    def _pick(self, vector: Tensor) -> Tensor:
        """The dense part of a vector, as a vector of its own."""
        return torch.cat(self._runs(vector))

    def _put_back(self, dense: Tensor, vector: Tensor) -> None:
        torch._foreach_copy_(self._runs(vector), list(dense.split(self._dense)))


def _orth(x: Tensor) -> Tensor:
    """Orthonormal columns that span those of x. By one thread: another number may give other bits at another member."""
    with torch_threads(1):
        return torch.linalg.qr(x).Q


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _together(protocols: Sequence[Steps[tuple[int, ...]]]) -> Steps[list[tuple[int, ...]]]:
    """Run several protocols at once: each wait covers the messages of all. They must wait for all that they yield."""
    results: dict[int, tuple[int, ...]] = {}
    while len(results) < len(protocols):
        waits: list[Work] = []
        for index, protocol in enumerate(protocols):
            if index not in results:
                try:
                    works, needed = works_of(next(protocol))
                    assert needed == len(works), "one of several cannot be waited for together with all of others"
                    waits += works
                except StopIteration as end:
                    results[index] = end.value
        if waits:
            yield waits
    return [results[index] for index in range(len(protocols))]


def averaging(
    form: Form, shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device, robust: str = "none"
) -> Averaging:
    """Averages in `form` of vectors that hold tensors of `shapes` in order. device: the CPU, or meta for a plan.
    robust: see `mean`; not of low-rank factors.
    """
    if isinstance(form, LowRank):
        return Factors(form, shapes, dtype, device)
    return Coded(form, sum(map(prod, shapes)), dtype, robust)
