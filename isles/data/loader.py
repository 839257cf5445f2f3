"""The loader: one worker's endless, resumable sequence of batches.

A sequence is a window of `context` targets: context + 1 tokens, of which the last is also the first of the next window.
Windows do not overlap otherwise; the tokens after the last whole window of a stream are not read. Of a corpus of rows
(`Corpus.row`) each row is one sequence. No window has tokens of two parts of a text (`data.path` as a table): those of
a part begin at its first token, and N is the sum over the parts.

Each epoch permutes the N windows, and epochs follow one another without a gap: with n sequences consumed by all workers
so far, row i of worker w of W reads (split "iid")

    position p = n + i W + w;    window = order(epoch = p // N)[p mod N];    n grows by b W a step.

So the union over the workers at a step is the batch of one worker with batch b W at the same step, for ever; every
epoch reads every window exactly once (of `data.mixture`: see `order.mixed_order`); and a batch at an epoch's end is
filled from the next epoch (rolled over, never dropped or short). With "by_file" each worker has windows of its own and
p = n / W + i, over its own order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from isles.base.marks import FIRST, learned_in
from isles.data.config import DataConfig
from isles.data.corpus import Corpus, TokenStream
from isles.data.order import epoch_order, mixed_order
from isles.data.parts import apportioned, named


class Loader:
    """One worker's batches of `corpus`: an iterator that never ends.

    Holds no tokens of its own; loaders over one corpus also share the epoch's order, so hundreds of them are cheap.

    corpus: shared. config: `split`, `batch_mode`, `batch_size`, `validation_sequences` are read here.
    context: targets a sequence. worker, workers: which share of the batches. seed: of the epoch orders.

    batch_size: sequences that this worker reads a step (after `batch_mode`).
    sequences: windows in this worker's epoch (of all workers together with "iid").
    consumed: sequences read so far by all workers together.
    marks: whether some tokens are marked (`isles.base.marks`): those not learned, firsts of isolated documents.
    validation_weights: how many sequences, or with marks learned targets, `validation_batches` gives of each text.

    ValueError: an impossible worker, context or seed; a global batch that does not divide; too little text for one
    sequence; fewer documents than workers with "by_file".
    """

    def __init__(
        self, corpus: Corpus, config: DataConfig, *, context: int, worker: int = 0, workers: int = 1, seed: int = 0
    ) -> None:
        if context < 1:
            raise ValueError(f"context = {context} is not a number of tokens; use at least 1")
        if not 0 <= worker < workers:
            raise ValueError(f"worker = {worker} is not one of {workers} workers; use 0 to {workers - 1}")
        if seed < 0:
            raise ValueError(f"seed = {seed} is negative; use 0 or more")
        self.corpus = corpus
        self.config = config
        self.context = context
        self.worker = worker
        self.workers = workers
        self.seed = seed
        self.split = config.split
        self.batch_size, self._isolates = config.batch_size_per_worker(workers), config.isolate_documents
        self.marks = corpus.masks or self._isolates
        self.consumed = 0
        names = [*named(config.path)]
        ranges = corpus.train.ranges(names)
        if config.split == "by_file":
            offsets = document_shares(corpus.train.bounds, workers)
            names, ranges = [""], [(int(offsets[worker]), int(offsets[worker + 1]))]
        for name, (begin, end) in zip(names, ranges, strict=True):
            if end - begin <= context:
                of = "training" if config.split == "iid" else f"the share of worker {worker} in training"
                raise ValueError(
                    f"data.path{name and '.'}{name}: {of} has {end - begin} tokens, fewer than context + 1 = "
                    f"{context + 1}; give more text or a shorter context"
                )
        if corpus.row not in (0, context + 1):
            raise ValueError(
                f"data.path: {corpus.name} holds sequences of {corpus.row} tokens, which needs model.context = "
                f"{corpus.row - 1}, not {context}"
            )
        self._windows, self._stride = windows(corpus.train.tokens, context, 1), corpus.row or context
        self._begin_P = np.array([begin for begin, _ in ranges])
        self._sizes = tuple(len(windows(corpus.train.tokens[slice(*one)], context, corpus.row)) for one in ranges)
        self._first_P = np.cumsum(self._sizes) - self._sizes
        self.sequences = sum(self._sizes)
        self._taken = tuple(apportioned(self.sequences, [config.mixture[name] for name in names if config.mixture]))
        if not all(self._taken):
            raise ValueError(f"data.mixture = {config.mixture}: one has none of {self.sequences} sequences; raise it")
        self._validation = self._fixed_validation(config)
        self.validation_weights = {
            name: sum(int(learned_in(batch)) for batch in self.validation_batches(name)) if self.marks else len(starts)
            for name, starts in self._validation.items()
        }
        if idle := [f" of {name}" if name else "" for name, count in self.validation_weights.items() if not count]:
            key = "validation_path" if config.validation_path else "validation_fraction"
            why = f"no token{idle[0]} that validation reads is learned"
            raise ValueError(f"data.{key}: {why}; raise data.validation_sequences, or give other text for validation")
        self._orders: dict[int, np.ndarray] = {}  # by epoch, those that the last batch touched

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self

    def __next__(self) -> torch.Tensor:
        """The next batch: (batch_size, context + 1) int64; inputs are [:, :-1], targets [:, 1:]."""
        rows = np.arange(self.batch_size)
        if self.split == "iid":
            positions = self.consumed + rows * self.workers + self.worker
        else:
            positions = self.consumed // self.workers + rows
        batch = self.read(positions)
        self.consumed += self.batch_size * self.workers
        return batch

    def read(self, positions: np.ndarray) -> torch.Tensor:
        """The batch at (b,) ascending `positions` p of the order above: (b, context + 1) int64. Moves nothing."""
        epochs, offsets = np.divmod(positions, self.sequences)
        chosen = np.empty(len(positions), dtype=np.int64)
        orders = {}
        for epoch in np.unique(epochs).tolist():
            orders[epoch] = order = self._order(epoch)
            here = epochs == epoch
            chosen[here] = order[offsets[here]]
        self._orders = orders
        part = np.searchsorted(self._first_P, chosen, side="right") - 1
        starts = self._begin_P[part] + (chosen - self._first_P[part]) * self._stride
        return self._batch(self.corpus.train, self._windows, starts)

    def validation_batches(self, name: str | None = None) -> Iterator[torch.Tensor]:
        """The batches of one validation pass: (rows, context + 1) int64, the last one perhaps with fewer rows.

        The same sequences in the same order for every worker, seed and number of workers: `validation_sequences`
        windows evenly spaced over the validation tokens, or all of them where there are fewer; so many of each text
        where there are several. name: of one of these; None: one after the other. Weigh a batch by its learned targets:
        with a global batch size the number of workers decides how the sequences are cut into batches.
        ValueError without validation text.
        """
        if not self._validation:
            raise ValueError("data.validation_fraction = 0 keeps no text for validation; use for example 0.05")
        every = windows(self.corpus.validation.tokens, self.context, 1)
        for starts in self._validation.values() if name is None else [self._validation[name]]:
            for first in range(0, len(starts), self.batch_size):
                yield self._batch(self.corpus.validation, every, starts[first : first + self.batch_size])

    def state_dict(self) -> dict[str, Any]:
        """Where the data stands, ready for JSON. It is the same for every worker, so a run saves only one."""
        return {
            "corpus_sha256": self.corpus.sha256,
            "seed": self.seed,
            "context": self.context,
            "split": self.split,
            "parts": [list(self._sizes), list(self._taken)] if len(self._sizes) > 1 else [],
            "workers": self.workers,
            "batch_size": self.batch_size,
            "consumed": self.consumed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken: the next batch is the one that would have come next. ValueError: a state of
        another corpus, seed, context or layout (see `resharded`).
        """
        mine = self.state_dict()
        if not isinstance(state, dict) or set(state) != set(mine):
            raise ValueError(f"the loader state does not have the keys {', '.join(mine)}; was it saved by a loader?")
        for key, value in mine.items():
            if key != "consumed" and state[key] != value:
                why = f"the loader state has {key} = {state[key]!r} but this run has {value!r}"
                raise ValueError(f"{why}; resume with the same one")
        consumed = state["consumed"]
        if not isinstance(consumed, int) or isinstance(consumed, bool) or consumed < 0:
            raise ValueError(f"the loader state has consumed = {consumed!r}; it must be a whole number of sequences")
        self.consumed = consumed

    def _batch(self, stream: TokenStream, every: np.ndarray, starts: np.ndarray) -> torch.Tensor:
        """Those of `every` window that begin at tokens `starts`. ValueError where one is not as it was written."""
        for start in starts.tolist():
            stream.check(start, start + self.context + 1)
        batch = every[starts].astype(np.int64)
        for row, start in zip(batch, starts, strict=True) if self._isolates else ():
            first, last = np.searchsorted(stream.bounds, (start, start + len(row)))
            firsts = stream.bounds[first:last] - start
            row[firsts] = np.minimum(row[firsts], ~row[firsts]) - FIRST
        return torch.from_numpy(batch)

    def _order(self, epoch: int) -> np.ndarray:
        if epoch in self._orders:
            return self._orders[epoch]
        if self._taken:
            return mixed_order(self._sizes, self._taken, seed=self.seed, epoch=epoch)
        share = self.worker if self.split == "by_file" else 0
        return epoch_order(self.sequences, seed=self.seed, epoch=epoch, share=share)

    def _fixed_validation(self, config: DataConfig) -> dict[str, np.ndarray]:
        """The first tokens of the windows that validation reads, by name of the text; {} without validation text."""
        found, stream = dict[str, np.ndarray](), self.corpus.validation
        names = [*named(config.validation_path or config.path)]
        for name, (begin, end) in zip(names, stream.ranges(names) if len(stream) else (), strict=False):
            if end - begin <= self.context:  # said now and not after the first thousand steps
                key, mend = ("path", "give") if config.validation_path else ("fraction", "raise it or give")
                raise ValueError(
                    f"data.validation_{key} gives {end - begin} tokens{name and f' of {name}'} for validation, fewer "
                    f"than context + 1 = {self.context + 1}; {mend} more text"
                )
            count = len(windows(stream.tokens[begin:end], self.context, self.corpus.row))
            found[name] = begin + spaced(count, config.validation_sequences) * self._stride
        return found


def resharded(state: dict[str, Any], *, workers: int, batch_size: int) -> dict[str, Any]:
    """A loader's state for another number of workers and sequences a worker and step, at the same position of the data.

    With "iid" reading goes on at the same position of the same order, so the epoch still reads every sequence once;
    with "by_file" shares are drawn anew, so some documents are read again early.
    """
    return {**state, "workers": workers, "batch_size": batch_size}


def windows(tokens: np.ndarray, context: int, row: int = 0) -> np.ndarray:
    """(N, context + 1) view of (T,) tokens without a copy, N = (T - 1) // context; with rows (`Corpus.row`) T / row."""
    return np.lib.stride_tricks.sliding_window_view(tokens, context + 1)[:: row or context]


def spaced(count: int, wanted: int) -> np.ndarray:
    """Indices of `wanted` of `count` windows, evenly spaced; all where there are fewer."""
    taken = min(wanted, count)
    return np.arange(taken) * count // max(taken, 1)


def document_shares(bounds: np.ndarray, workers: int) -> np.ndarray:
    """(workers + 1,) token offsets of disjoint shares; worker w holds the documents in [offsets[w], offsets[w + 1]).

    Shares are runs of neighbouring documents, cut at the document bounds nearest to an even division of the tokens;
    every worker gets at least one document. Neighbours in path order are alike, so shares differ in kind: that is what
    `by_file` is for. `bounds`: (D + 1,), as in a TokenStream. ValueError: fewer documents than workers.
    """
    documents = len(bounds) - 1
    if documents < workers:
        raise ValueError(
            f'data.split = "by_file" cannot share {documents} documents among {workers} workers; use data.split = '
            '"iid", fewer workers or more files'
        )
    cuts = [0]
    for worker in range(1, workers):
        even = bounds[-1] * worker / workers
        above = int(np.searchsorted(bounds, even))
        nearest = above if bounds[above] - even < even - bounds[above - 1] else above - 1
        cuts.append(min(max(nearest, cuts[-1] + 1), documents - (workers - worker)))
    cuts.append(documents)
    return np.asarray(bounds)[cuts]
