"""What a worker reads: its share of the corpus, batch after batch, and the text kept for validation."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch import Tensor

from isles.comm.mesh import Mesh
from isles.data import Corpus, Loader, load_corpus
from isles.data.tokenizer import Tokenizer
from isles.models import limits
from isles.training.config.sections import Config


class Text(Loader):
    """This worker's. corpus: that of `config.data`, where it was loaded already. share: (which, of how many) of the
    text; None: that of the worker's place. ValueError for text that the model or the batch does not fit.

    positions: places in the data's order of the batches that it reads, (b,) int64 each, instead of its share of every
    step, where workers come and go; None: its share.
    """

    positions: Iterator[np.ndarray] | None = None

    def __init__(
        self, config: Config, world: Mesh, corpus: Corpus | None = None, share: tuple[int, int] | None = None
    ) -> None:
        corpus, (context, vocab) = corpus or load_corpus(config.data), limits(config.model)
        check_vocabulary(vocab, corpus.tokenizer)
        if world.local_rank == 0:  # every machine has files of its own
            world.report({"corpus": corpus.sha256, "rank": world.rank})
        reader, readers = share or world.reader
        super().__init__(corpus, config.data, context=context, worker=reader, workers=readers, seed=config.run.seed)
        together = readers if self.split == "iid" else 1  # who read the same sequences
        if self.batch_size * together > self.sequences:
            raise ValueError(
                f"data.batch_size = {self.batch_size}: a step would read {self.batch_size * together} sequences of "
                f"{self.sequences}, some of them twice; choose a smaller batch or give more text"
            )

    @property
    def validates(self) -> bool:
        """Whether text was kept for validation."""
        return len(self.corpus.validation) > 0

    def batch(self) -> Tensor:
        """The next one (b, T+1)."""
        return next(self) if self.positions is None else self.read(next(self.positions))


def check_vocabulary(vocab: int | None, tokenizer: Tokenizer) -> None:
    """ValueError unless a model of `vocab` token ids (None: not known) has one for each of the tokenizer's."""
    if vocab is not None and tokenizer.vocab_size > vocab:
        raise ValueError(
            f"model.vocab = {vocab} is smaller than the tokenizer's {tokenizer.vocab_size} ids: "
            f"set model.vocab = {tokenizer.vocab_size}, or choose another data.tokenizer"
        )
