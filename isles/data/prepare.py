"""From files to a corpus (`load_corpus`: once a process and, on request, once a machine): read, tokenise, and keep
validation out of training.

Which side a document falls on is decided by a hash of its name, so it depends neither on the machine nor on the other
documents. Where that leaves validation less than half or more than twice its share (one book, a few files of unequal
size) every document is cut in two instead and its end goes to validation. Either way no token is on both sides.
"""

from __future__ import annotations

import hashlib
import json
import threading
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from isles.data.config import DataConfig
from isles.data.corpus import FORMAT, Corpus, SplitBy, TokenStream, content_sha256, is_stored, open_corpus, save_corpus
from isles.data.documents import Source, fingerprint, list_sources, read_documents
from isles.data.tokenizer import Ids, Tokenizer, load_tokenizer, smallest_dtype

_BATCH_CHARACTERS = 4_000_000  # enough for a tokenizer to fill the cores, few enough to hold as text


def prepare_corpus(
    sources: Sequence[Source], tokenizer: Tokenizer, *, path: str, text_key: str, validation_fraction: float
) -> Corpus:
    """Read every source and split it. Needs memory for about three times the tokens. ValueError: no text."""
    hashes: list[float] = []
    file_of: list[int] = []
    chunks: list[Ids] = []
    lengths: list[int] = []
    for batch in _batches(sources, text_key):
        ids = tokenizer.encode_batch([_ended(text, tokenizer) for _, _, text in batch])
        if tokenizer.eos_id is not None:
            ids = [np.append(some, np.array(tokenizer.eos_id, dtype=some.dtype)) for some in ids]
        file_of += [file for file, _, _ in batch]
        hashes += [_unit_hash(name) for _, name, _ in batch]
        lengths += [len(some) for some in ids]
        chunks.append(np.concatenate(ids).astype(smallest_dtype(tokenizer.vocab_size), copy=False))
    if not sum(lengths):
        raise ValueError(
            f"data.path = {path!r} holds no text ({len(sources)} files, all empty or binary); give files with text"
        )
    _warn_of_left_out(sources, set(file_of))

    length_D = np.array(lengths, dtype=np.int64)
    trained_D, split_by = _training_lengths(np.array(hashes), length_D, validation_fraction)
    tokens = np.concatenate(chunks)
    del chunks
    # Training and validation lengths alternate, document by document; one of the two is 0 when documents stay whole.
    pieces = np.stack([trained_D, length_D - trained_D], axis=1).ravel()
    in_training = np.repeat(np.tile([True, False], len(length_D)), pieces)
    files = tuple(source.name for source in sources)
    file_D = np.array(file_of, dtype=smallest_dtype(len(files)))
    train = _stream(tokens[in_training], trained_D, files, file_D)
    np.logical_not(in_training, out=in_training)  # a byte a token: no second mask
    validation = _stream(tokens[in_training], length_D - trained_D, files, file_D)
    return Corpus(
        name=path or "standard library",
        tokenizer=tokenizer,
        train=train,
        validation=validation,
        split_by=split_by,
        sha256=content_sha256(train, validation),
    )


def _batches(sources: Sequence[Source], text_key: str) -> Iterator[list[tuple[int, str, str]]]:
    """Lists of (index of the file, document name, text), in order, of a bounded number of characters."""
    batch: list[tuple[int, str, str]] = []
    characters = 0
    for index, source in enumerate(sources):
        for name, text in read_documents(source, text_key):
            batch.append((index, name, text))
            characters += len(text)
            if characters >= _BATCH_CHARACTERS:
                yield batch
                batch, characters = [], 0
    if batch:
        yield batch


def _ended(text: str, tokenizer: Tokenizer) -> str:
    """Without an id that ends a document a newline does, so that the last word of one is not glued to the next."""
    return text if tokenizer.eos_id is not None or text.endswith("\n") else text + "\n"


def _training_lengths(hash_D: np.ndarray, length_D: np.ndarray, fraction: float) -> tuple[np.ndarray, SplitBy]:
    """(D,) number of leading tokens of each document that training sees; the rest is validation."""
    if fraction == 0:
        return length_D, "document"
    in_validation_D = hash_D < fraction
    share = length_D[in_validation_D].sum() / length_D.sum()
    if fraction / 2 <= share <= 2 * fraction and share < 1:
        return np.where(in_validation_D, 0, length_D), "document"
    validation_D = np.ceil(length_D * fraction).astype(np.int64)
    return np.maximum(length_D - validation_D, np.minimum(length_D, 1)), "position"


def _unit_hash(name: str) -> float:
    """A number in [0, 1) that depends on the name alone."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:8], "big") / 2**64


def _stream(tokens: np.ndarray, length_D: np.ndarray, files: tuple[str, ...], file_D: np.ndarray) -> TokenStream:
    present = length_D > 0
    bounds = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(length_D[present])])
    return TokenStream(tokens=tokens, bounds=bounds, files=files, file_of=file_D[present])


def _warn_of_left_out(sources: Sequence[Source], read: set[int]) -> None:
    """Empty files are no loss; files with content that gave no document are worth a word."""
    silent = [source for index, source in enumerate(sources) if index not in read]
    binary = [source.name for source in silent if source.kind != "dataset" and source.path.stat().st_size]
    if binary:
        warnings.warn(
            f"data.path: {len(binary)} of {len(sources)} files hold no text and were left out, among them {binary[0]}",
            stacklevel=4,
        )


_REMEMBERED = 4  # corpora: a comparison of tokenizers or of text needs a few, and each may be large
_corpora: dict[tuple[str, str], Corpus] = {}  # by content and cache folder, the one used last at the end
_lock = threading.Lock()  # virtual workers are threads: the second waits for the corpus instead of making another


def load_corpus(config: DataConfig) -> Corpus:
    """Read, tokenise and split the text of `config`; a second call in the process returns the same object.

    The files are looked at on every call (names, sizes, times of change), and a change makes a new corpus. With
    `config.cache` the arrays are saved in that folder and memory-mapped, so that later processes read nothing else. A
    `config.path` that is itself such a folder (`store.save_corpus`) is opened as it is, with the split that it has.
    ValueError, one line with key and what to do, where something cannot be read or holds no text.
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
