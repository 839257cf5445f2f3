"""Text in, batches of token windows out: corpora, tokenizers and the stateful sharded loader.

A `Corpus` is shared and immutable; a `Loader` is one worker's light view of it. Importing this package loads neither
torch nor NumPy; the names below load on first use.

`config`   the `[data]` section
`prepare`  documents to a corpus; `sources`: files to documents; `tokenizer`: text to ids
`corpus`   tokens for training and validation; `store`: on disk, made by one process a machine
`loader`   a worker's batches; `order`: of the sequences in an epoch
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from isles.base.imports import on_first_use

if TYPE_CHECKING:
    from isles.data.config import DataConfig
    from isles.data.corpus import Corpus
    from isles.data.loader import Loader
    from isles.data.prepare import load_corpus, prepare_data
    from isles.data.tokenizer import ByteTokenizer, load_tokenizer

__all__, __getattr__, __dir__ = on_first_use(__name__)
