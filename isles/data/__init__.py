"""Text in, batches of token windows out: corpora, tokenizers and the stateful sharded loader.

A `Corpus` is shared and immutable; a `Loader` is one worker's light view of it. Importing this package loads neither
torch nor NumPy; the names below load on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from isles.imports import on_first_use

if TYPE_CHECKING:
    from .config import DataConfig
    from .corpus import Corpus
    from .load import load_corpus
    from .loader import Loader
    from .tokenizer import ByteTokenizer, load_tokenizer

__all__, __getattr__, __dir__ = on_first_use(
    __name__,
    {
        ".config": "DataConfig",
        ".corpus": "Corpus",
        ".load": "load_corpus",
        ".loader": "Loader",
        ".tokenizer": "ByteTokenizer load_tokenizer",
    },
)
