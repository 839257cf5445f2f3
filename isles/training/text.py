"""What a worker reads: its share of the corpus, batch after batch, and the text kept for validation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor

from isles.comm.mesh import Mesh
from isles.data import Corpus, Loader, load_corpus
from isles.data.tokenizer import Tokenizer
from isles.models import limits
from isles.training.config.sections import Config


class Text:
    """This worker's. corpus: that of `config.data`, where it was loaded already. share: (which, of how many) of the
    text; None: that of the worker's place. ValueError for text that the model or the batch does not fit.
    """

    def __init__(
        self, config: Config, world: Mesh, corpus: Corpus | None = None, share: tuple[int, int] | None = None
    ) -> None:
        self.corpus = corpus or load_corpus(config.data)
        context, vocab = limits(config.model)
        check_vocabulary(vocab, self.corpus.tokenizer)
        if world.local_rank == 0:  # every machine has files of its own
            world.report({"corpus": self.corpus.sha256, "rank": world.rank})
        reader, readers = share or world.reader
        self.loader = Loader(
            self.corpus, config.data, context=context, worker=reader, workers=readers, seed=config.run.seed
        )
        _check_batch(self.loader)
        self._positions: Iterator[np.ndarray] | None = None

    def take_from(self, positions: Iterator[np.ndarray]) -> None:
        """Read the batches at these places of the data's order from now on, (b,) int64 each, instead of this worker's
        share of every step: where workers come and go.
        """
        self._positions = positions

    def go_on_after(self, sequences: int) -> None:
        """What all workers read next is what comes behind so many sequences of the data's order."""
        self.loader.consumed = sequences

    @property
    def judges(self) -> bool:
        """Whether text was kept for validation."""
        return len(self.corpus.validation) > 0

    def batch(self) -> Tensor:
        """The next one (b, T+1)."""
        return next(self.loader) if self._positions is None else self.loader.read(next(self._positions))

    def validation(self) -> Iterator[Tensor]:
        """The batches of one validation pass."""
        return self.loader.validation_batches()

    def state_dict(self) -> dict[str, Any]:
        """Where the data stands."""
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        self.loader.load_state_dict(state)


def check_vocabulary(vocab: int | None, tokenizer: Tokenizer) -> None:
    """ValueError unless a model of `vocab` token ids (None: not known) has one for each of the tokenizer's."""
    if vocab is not None and tokenizer.vocab_size > vocab:
        raise ValueError(
            f"model.vocab = {vocab} is smaller than the tokenizer's {tokenizer.vocab_size} ids: "
            f"set model.vocab = {tokenizer.vocab_size}, or choose another data.tokenizer"
        )


def _check_batch(loader: Loader) -> None:
    readers = loader.workers if loader.split == "iid" else 1  # of the same sequences
    if loader.batch_size * readers > loader.sequences:
        raise ValueError(
            f"data.batch_size = {loader.batch_size}: a step would read {loader.batch_size * readers} sequences of "
            f"{loader.sequences}, some of them twice; choose a smaller batch or give more text"
        )
