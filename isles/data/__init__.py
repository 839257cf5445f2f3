"""Text in, batches of token windows out: corpora, tokenizers and the stateful sharded loader.

A `Corpus` is shared and immutable; a `Loader` is one worker's light view of it. Importing this package loads neither
torch nor NumPy; the names below load on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import DataConfig
    from .corpus import Corpus
    from .load import load_corpus
    from .loader import Loader
    from .tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

__all__ = ["ByteTokenizer", "Corpus", "DataConfig", "Loader", "Tokenizer", "load_corpus", "load_tokenizer"]

_HOMES = {
    "ByteTokenizer": "tokenizer",
    "Corpus": "corpus",
    "DataConfig": "config",
    "Loader": "loader",
    "Tokenizer": "tokenizer",
    "load_corpus": "load",
    "load_tokenizer": "tokenizer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value  # the next access no longer comes through here
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
