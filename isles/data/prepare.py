"""From the documents of `data.path` and `data.validation_path` to a corpus (`load_corpus`): tokenised by one process a
machine, in memory that does not depend on the size of the text, and stored (`store`) for all others.

Long documents are cut at line ends into pieces. A cut must change no id, so the ids around it are compared with those
of the uncut text; where no line end will do, the piece grows, up to the whole document.

Where validation has no files of its own, a hash of a document's name decides which side of the split it falls on, so
it depends neither on the machine nor on the other documents. Where that leaves validation less than half or more than
twice its share (one book, a few files of unequal size) every document is cut in two instead and its end goes to
validation; no token is on both sides.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from isles.base.durable import home
from isles.base.scratch import scratch
from isles.data.config import PREPARING, DataConfig
from isles.data.corpus import Corpus, SplitBy, content_sha256
from isles.data.parts import named
from isles.data.sources import Chunk, Document, Source, by_group, fingerprint, list_sources, no_text, read_documents
from isles.data.store import FORMAT, Draft, is_stored, make_corpus, not_writable, open_corpus
from isles.data.tokenizer import ByteTokenizer, ReadyIds, Tokenizer, load_tokenizer, smallest_dtype

OnProgress = Callable[[str], None]

_BATCH_CHARACTERS = 1_000_000  # a tokenizer takes some 120 bytes for each while it encodes them
_PIECE_CHARACTERS = 100_000  # a batch has several, for the tokenizer's threads
_AROUND = 512  # characters on each side of a cut that are encoded to compare
_BLANK = 64  # of them next to the cut that may be blank, so that both sides hold all of a run of blank characters
_TRIES = 3  # line ends that are tried in a piece; where none is exact, it is joined to the next one
_SAVED, _SHOWN = 1.0, 1.0  # seconds between two saved places, and between two lines of progress
_END = b"\xff"  # of a document in the digest of the text: no byte of UTF-8


class _Piece(NamedTuple):
    """name, file: of its document. text: or ids. last: of it. done: bytes of all sources before its end, about."""

    file: int
    name: str
    text: Any
    last: bool
    done: float


class _Changed(Exception):
    """The text is not the one that a draft was begun with."""


def _prepare(
    draft: Draft, sources: Sequence[Source], config: DataConfig, tokenizer: Tokenizer, notify: OnProgress
) -> Corpus:
    """Read every source from where the draft stands, and split it. ValueError: no text."""
    try:
        text = _tokenise(draft, sources, config, tokenizer, notify)
    except _Changed:
        draft.restart()
        text = _tokenise(draft, sources, config, tokenizer, notify)
    documents = draft.all_documents()
    length_D, file_D = documents["tokens"], documents["file"].astype(smallest_dtype(len(sources)))
    groups, first = by_group(sources), 0
    held = {group[0].part for group in groups if group[0].validates}
    trained_D, split_by = length_D.copy(), "document"
    for group in groups:  # each part is split as if it was alone
        in_D, first = (first <= file_D) & (file_D < first + len(group)), first + len(group)
        if not length_D[in_D].sum():
            raise no_text(config, group, "all empty or binary")
        fraction = 0.0 if config.validation_path or group[0].part in held else float(config.validation_fraction)
        trained_D[in_D], by = _training_lengths(documents["hash"][in_D], length_D[in_D], fraction)
        trained_D[in_D] *= not group[0].validates
        split_by = by if by == "position" else split_by
    _warn_of_left_out(sources, set(file_D.tolist()))
    start_D = np.cumsum(length_D) - length_D
    draft.narrow(smallest_dtype(tokenizer.vocab_size))
    where = {"files": tuple(f"{one.part}{one.part and '/'}{one.name}" for one in sources), "file_of": file_D}
    train = draft.stream("train", start_D, trained_D, **where)
    validation = draft.stream("validation", start_D + trained_D, length_D - trained_D, **where)
    return Corpus(
        name=", ".join(named(config.path).values()) or config.source or "standard library",
        tokenizer=tokenizer,
        train=train,
        validation=validation,
        split_by=split_by,
        sha256=content_sha256(train, validation),
        text_sha256=text,
    )


def _tokenise(
    draft: Draft, sources: Sequence[Source], config: DataConfig, tokenizer: Tokenizer, notify: OnProgress
) -> str:
    """Append the ids of all text after the draft's place; returns the text's digest. _Changed: it is another text."""
    digest = hashlib.sha256()
    begun = saved = shown = now = time.monotonic()
    total, first = max(sum(source.size for source in sources), 1), None
    for batch in _batches(_pieces(draft, sources, config, tokenizer, digest)):
        if isinstance(tokenizer, ReadyIds):
            ids = [one.text for one in batch]
        else:
            ids = tokenizer.encode_batch([_ended(one.text, tokenizer) if one.last else one.text for one in batch])
        for piece, some in zip(batch, ids, strict=True):
            digest.update(b"" if sources[piece.file].is_remote else _bytes(piece.text))
            draft.add(some)
            draft.characters += len(piece.text)
            if piece.last:
                if tokenizer.eos_id is not None:
                    draft.add(np.array([tokenizer.eos_id]))
                digest.update(_END)
                draft.end_document(piece.file, _unit_hash(piece.name))
        now, done = time.monotonic(), batch[-1].done
        first = first or (now, done)
        if now - saved > _SAVED:
            draft.save(digest.hexdigest())
            saved = now
        if now - shown > _SHOWN and done > first[1]:
            left = (total - done) * (now - first[0]) / (done - first[1])
            of = f"{done / total:.0%} of {total / 1e6:.0f} MB, {timedelta(seconds=round(left))} left"
            notify(f"{PREPARING}: {of if done <= total else f'{done / 1e6:.0f} MB'}")  # of what says no size
            shown = now
    if shown > begun:
        notify(f"prepared the data in {timedelta(seconds=round(now - begun))}")
    return digest.hexdigest()


def _pieces(
    draft: Draft, sources: Sequence[Source], config: DataConfig, tokenizer: Tokenizer, digest: hashlib._Hash
) -> Iterator[_Piece]:
    """All pieces after the draft's place; what lies before it only enters the digest. _Changed: it is another text."""
    whole, characters, expected = draft.documents, draft.characters, draft.text
    before, number, file_D = 0, 0, draft.all_documents()["file"]
    for file, source in enumerate(sources):
        size, into = source.size, hashlib.sha256() if source.is_remote else digest  # a store says itself what changed
        if is_stored := source.is_remote and file < max(file_D, default=0):  # not fetched again
            number += (count := int((file_D == file).sum()))
            digest.update(_END * count)
        for document in () if is_stored else _documents(source, config, draft.part):
            if number < whole:
                _after(document.chunks, None, into)
                digest.update(_END)
            elif number == whole:
                document = document._replace(chunks=_after(document.chunks, characters, into))
                if digest.hexdigest() != expected:
                    raise _Changed
            number += 1
            if number <= whole:
                continue
            read = characters if number == whole + 1 else 0
            for text, last in _cut(document.chunks, tokenizer):
                read += len(text)
                yield _Piece(file, document.name, text, last, before + max(document.read * size, min(read, size)))
        before += size
    if number <= whole and digest.hexdigest() != expected:
        raise _Changed


def _documents(source: Source, config: DataConfig, folder: Path | None = None) -> Iterator[Document]:
    """Those that hold text."""
    for document in read_documents(source, config, folder):
        for chunk in document.chunks:
            yield document._replace(chunks=chain([chunk], document.chunks))


def _bytes(chunk: Chunk) -> bytes:
    return chunk.encode() if isinstance(chunk, str) else chunk.tobytes()


def _after(chunks: Iterator[Chunk], characters: int | None, digest: hashlib._Hash) -> Iterator[Chunk]:
    """The chunks after so many characters, None: after all; what lies before enters the digest."""
    for chunk in chunks if characters != 0 else ():
        digest.update(_bytes(chunk[:characters]))
        if characters is not None and characters <= len(chunk):
            return chain([chunk[characters:]] if len(chunk) > characters else [], chunks)
        characters = None if characters is None else characters - len(chunk)
    return chunks


def _batches(pieces: Iterator[_Piece]) -> Iterator[list[_Piece]]:
    batch: list[_Piece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _cut(chunks: Iterator[Chunk], tokenizer: Tokenizer) -> Iterator[tuple[Any, bool]]:
    """(text, whether it is the last) of pieces that give the ids of the whole document, encoded one by one."""
    text: Any = ""
    reach = _PIECE_CHARACTERS
    for chunk in chunks:
        if isinstance(tokenizer, ByteTokenizer | ReadyIds):
            if len(text):
                yield text, False
            text = chunk
            continue
        text, at = text + chunk, 0
        while len(text) - at > reach + _AROUND:
            end = _exact_cut(cast(str, text), at + reach, tokenizer)
            reach += _PIECE_CHARACTERS
            if end is not None:
                yield text[at:end], False
                at, reach = end, _PIECE_CHARACTERS
        text = text[at:]
    yield text, True


def _exact_cut(text: str, before: int, tokenizer: Tokenizer) -> int | None:
    """A place at one of the last line ends of the piece before `before` where a cut changes no id; None: at none of
    them.
    """
    line_end = before
    for _ in range(_TRIES):
        line_end = text.rfind("\n", before - _PIECE_CHARACTERS + 2 * _AROUND, line_end)
        if line_end < 0:
            break
        blank = text[line_end - _AROUND : line_end].rstrip()
        # Blank characters often share an id with those after them, the line end sometimes with the mark before it.
        for end in (line_end - _AROUND + len(blank), line_end + 1):
            left, right = text[end - _AROUND : end], text[end : end + _AROUND]
            if len(left.rstrip()) + _BLANK < len(left) or len(right.lstrip()) + _BLANK < len(right):
                continue
            whole, *parts = tokenizer.encode_batch([left + right, left, right])
            if np.array_equal(whole, np.concatenate(parts)):
                return end
    return None


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


def _warn_of_left_out(sources: Sequence[Source], read: set[int]) -> None:
    """Empty files are no loss; files with content that gave no document are worth a word."""
    silent = [source for index, source in enumerate(sources) if index not in read]
    binary = [source for source in silent if source.kind not in ("dataset", "mds", "own") and source.size]
    if binary:
        warnings.warn(
            f"data.{binary[0].key}: {len(binary)} of {len(sources)} files hold no text and were left out, "
            f"among them {binary[0].name}",
            stacklevel=4,
        )


_REMEMBERED = 4  # corpora: a comparison of tokenizers or of text needs a few, and each may be large
_corpora: dict[tuple[str, str], Corpus] = {}  # by content and cache folder, the one used last at the end
_lock = threading.Lock()  # virtual workers are threads: the second waits for the corpus instead of making another


def load_corpus(config: DataConfig, notify: OnProgress = lambda text: None, *, check: bool = False) -> Corpus:
    """Read, tokenise and split the text of `config`, or open what another process stored (`data.cache`); a second call
    in the process returns the same object. A `config.path` that is a stored corpus is opened with the split it has.

    The files are looked at on every call (names, sizes, times of change), and a change makes a new corpus. notify: gets
    lines of progress, which begin with `PREPARING`, and remarks. check: read the text of a stored corpus again, and
    make it anew if its hash is another. ValueError, one line with key and what to do, where something cannot be read
    or written or holds no text.
    """
    tokenizer = load_tokenizer(config.tokenizer, config.vocab)
    if is_stored(config):
        stored = open_corpus(Path(config.path).expanduser(), tokenizer)
        assert stored is not None
        return stored
    sources = list_sources(config)
    content, folder = _stored_as(config, sources, tokenizer)
    key = (content, config.cache)

    def make(part: Path) -> Corpus:
        rows = isinstance(tokenizer, ReadyIds) and any(source.kind != "ids" for source in sources)
        dtype = np.min_scalar_type(-tokenizer.vocab_size) if rows else smallest_dtype(tokenizer.vocab_size)
        with contextlib.closing(Draft(part, dtype)) as draft:
            return _prepare(draft, sources, config, tokenizer, notify)

    with _lock:
        corpus = _corpora.pop(key, None)
        stored = None if folder is None or not check or sources[0].is_remote else open_corpus(folder, tokenizer)
        if stored is not None and stored.text_sha256 != _text_sha256(sources, config):
            notify("the text has changed since it was prepared: preparing it anew")
            shutil.rmtree(cast(Path, folder))
            corpus = None
        if corpus is None and folder is not None:
            try:
                corpus = make_corpus(folder, tokenizer, make, notify)
            except OSError as error:
                if config.cache != "auto" or error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise not_writable(folder, error) from error
                warnings.warn(f"{not_writable(folder, error)}; each process prepares its own now", stacklevel=2)
        if corpus is None:
            with scratch() as own:
                corpus = make_corpus(own / "corpus", tokenizer, make)  # its mapping outlives the folder
        _corpora[key] = corpus
        while len(_corpora) > _REMEMBERED:
            del _corpora[next(iter(_corpora))]
    return corpus


def prepare_data(config: DataConfig, notify: OnProgress) -> None:
    """Before other processes call `load_corpus`: do now what is done once a machine. Arguments and errors as there."""
    if corpus_folder(config) is not None:
        load_corpus(config, notify)


def corpus_folder(config: DataConfig) -> Path | None:
    """Where `load_corpus` stores the corpus; None where each process reads the text itself."""
    if is_stored(config):
        return Path(config.path).expanduser()
    return _stored_as(config, list_sources(config), load_tokenizer(config.tokenizer, config.vocab))[1]


_SMALL = 32_000_000  # bytes of text that are read and split as bytes in a fraction of a second


def _stored_as(config: DataConfig, sources: list[Source], tokenizer: Tokenizer) -> tuple[str, Path | None]:
    """(what the corpus is made from, its folder)"""
    marks = fingerprint(sources)
    settings = [config.path, config.validation_path, config.column, config.ids_dtype, float(config.validation_fraction)]
    facts = json.dumps([FORMAT, tokenizer.fingerprint, marks, *settings], sort_keys=True)
    content = hashlib.sha256(facts.encode()).hexdigest()[:32]
    cache = config.cache
    if cache == "auto":
        small = isinstance(tokenizer, ByteTokenizer | ReadyIds) and sum(size for *_, size, _ in marks) <= _SMALL
        small = small and not any(source.origin for source in sources)
        cache = "" if small else str(home() / "corpora")
    return content, Path(cache).expanduser() / content if cache else None


def _text_sha256(sources: Sequence[Source], config: DataConfig) -> str:
    """Hex digest of all text."""
    digest = hashlib.sha256()
    for source in sources:
        for document in _documents(source, config):
            _after(document.chunks, None, digest)
            digest.update(_END)
    return digest.hexdigest()
