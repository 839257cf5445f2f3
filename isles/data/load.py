"""`load_corpus`: the corpus of a configuration, made once a process and, on request, once a machine."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path

from .config import DataConfig
from .corpus import Corpus
from .prepare import prepare_corpus
from .sources import fingerprint, list_sources
from .store import FORMAT, is_stored, open_corpus, save_corpus
from .tokenizer import load_tokenizer

_REMEMBERED = 4  # corpora: a comparison of tokenizers or of text needs a few, and each may be large
_corpora: dict[tuple[str, str], Corpus] = {}  # by content and cache folder, the one used last at the end
_lock = threading.Lock()  # virtual workers are threads: the second waits for the corpus instead of making another


def load_corpus(config: DataConfig) -> Corpus:
    """Read, tokenise and split the text of `config`; a second call in the process returns the same object.

    The files are looked at on every call (names, sizes, times of change), and a change makes a new corpus. With
    `config.cache` the arrays are kept in that folder and memory-mapped, so that later processes read nothing else. A
    `config.path` that is itself such a folder (`store.save_corpus`) is opened as it is, with the split that it has.
    ValueError, one line with key and mend, where something cannot be read or holds no text.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    if is_stored(config.path):
        stored = open_corpus(Path(config.path).expanduser(), tokenizer)
        assert stored is not None
        return stored
    sources = list_sources(config.path)
    fraction = float(config.validation_fraction)
    parts = [FORMAT, config.path, fingerprint(sources), tokenizer.fingerprint, config.text_key, fraction]
    content = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
    key = (content, config.cache)
    with _lock:
        corpus = _corpora.pop(key, None)
        folder = Path(config.cache).expanduser() / content if config.cache else None
        if corpus is None and folder is not None:
            corpus = open_corpus(folder, tokenizer)
        if corpus is None:
            corpus = prepare_corpus(
                sources, tokenizer, path=config.path, text_key=config.text_key, validation_fraction=fraction
            )
            if folder is not None:
                corpus = save_corpus(corpus, folder)
        _corpora[key] = corpus
        while len(_corpora) > _REMEMBERED:
            del _corpora[next(iter(_corpora))]
    return corpus
