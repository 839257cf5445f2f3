"""Tokenizers: text to ids and back.

Bytes are built in; a Hugging Face `tokenizer.json` needs the extra `hf`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from isles.base.parsing import parse_json
from isles.data.config import IDS

_BYTES = Path(__file__).with_name("byte_level")  # BPE without merges over the bytes, for other tools
Ids = np.ndarray  # one-dimensional, of the smallest unsigned type that holds every id


def smallest_dtype(count: int) -> np.dtype:
    """The smallest unsigned integer type that holds 0 .. count - 1."""
    return np.min_scalar_type(max(0, count - 1))


class Tokenizer(Protocol):
    """What a corpus asks of a tokenizer.

    `eos_id` ends a document; None where the vocabulary has no such id (documents are then ended by a newline).
    `fingerprint` is equal for two tokenizers exactly when they give equal ids. `files`: its tokenizer.json, and the
    tokenizer_config.json beside it, which may be missing; none where there is no text.
    """

    name: str
    vocab_size: int
    eos_id: int | None
    fingerprint: str
    files: tuple[Path, ...]

    def encode(self, text: str) -> Ids: ...

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]: ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str: ...


class ByteTokenizer:
    """One id a UTF-8 byte: 256 ids, no special ones, any text, nothing to download."""

    name = "bytes"
    vocab_size = 256
    eos_id: int | None = None
    fingerprint = "bytes"
    files: tuple[Path, ...] = (_BYTES / "tokenizer.json", _BYTES / "tokenizer_config.json")

    def encode(self, text: str) -> Ids:
        """uint8 ids, one a byte of the UTF-8 form."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids`; bytes that are not UTF-8 (a sampled or cut character) become U+FFFD."""
        return bytes(int(i) for i in ids).decode("utf-8", errors="replace")


class ReadyIds:
    """In the place of a tokenizer where files hold ids (`data.tokenizer = "ids"`): text is a ValueError."""

    name = IDS
    eos_id: int | None = None
    files: tuple[Path, ...] = ()

    def __init__(self, vocab: int) -> None:
        self.vocab_size = vocab
        self.fingerprint = f"{IDS} {vocab}"

    def encode(self, *_: Any, **__: Any) -> Any:
        raise ValueError('data.tokenizer = "ids": the run read token ids, so it can use no text; give ids')

    encode_batch = decode = encode


class HuggingFaceTokenizer:
    """A `tokenizer.json` of the `tokenizers` library. Special tokens are not added; a corpus adds `eos_id` itself.

    `eos_id` is read from the `tokenizer_config.json` beside the file, the second of `files`, where there is one.
    """

    def __init__(self, file: Path) -> None:
        try:
            from tokenizers import Tokenizer as RustTokenizer
        except ImportError:
            raise ValueError(
                f'data.tokenizer = {str(file)!r} needs the package tokenizers; pip install ".[hf]"'
            ) from None
        content = file.read_bytes()
        try:
            self._rust: Any = RustTokenizer.from_str(content.decode("utf-8"))
        except Exception as error:  # the library raises bare Exception for a file that it cannot parse
            reason = " ".join(str(error).split())
            raise ValueError(
                f"data.tokenizer = {str(file)!r} is not a Hugging Face tokenizer.json ({reason}); save one with "
                "tokenizer.save(...)"
            ) from None
        # A tokenizer.json may carry the truncation and padding of another use: they would cut and fill documents.
        self._rust.no_truncation()
        self._rust.no_padding()
        self.name = file.parent.name if file.name == "tokenizer.json" else file.stem
        ids = self._rust.get_vocab(with_added_tokens=True).values()
        if not ids:
            raise ValueError(f"data.tokenizer = {str(file)!r} has an empty vocabulary; train it before saving it")
        self.vocab_size = max(ids) + 1  # ids may have gaps, and an embedding needs a row for the largest
        self.files: tuple[Path, ...] = (file, file.with_name("tokenizer_config.json"))
        self.eos_id = _eos_id(self.files[1], self._rust)
        self.fingerprint = hashlib.sha256(content + str(self.eos_id).encode()).hexdigest()
        self._dtype = smallest_dtype(self.vocab_size)

    def encode(self, text: str) -> Ids:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of each text; the library spreads a batch over the cores."""
        encodings = self._rust.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=self._dtype) for encoding in encodings]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._rust.decode([int(i) for i in ids], skip_special_tokens=False)


def load_tokenizer(tokenizer: str, vocab: int = 0) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names; ValueError where there is none. vocab: `data.vocab`."""
    if tokenizer == IDS:
        return ReadyIds(vocab)
    if tokenizer == "bytes":
        return ByteTokenizer()
    path = Path(tokenizer).expanduser()
    if not path.exists():
        raise ValueError(f'data.tokenizer = {tokenizer!r} does not exist; use "bytes" or the path of a tokenizer.json')
    if path.is_dir():
        path = path / "tokenizer.json"
        if not path.is_file():
            raise ValueError(
                f"data.tokenizer = {tokenizer!r} holds no tokenizer.json; save the fast form there "
                '(AutoTokenizer.from_pretrained(...).save_pretrained(folder)), or set data.tokenizer = "bytes"'
            )
    return HuggingFaceTokenizer(path)


def _eos_id(config: Path, rust: Any) -> int | None:
    if not config.is_file():
        return None
    try:
        token = parse_json(config.read_text(encoding="utf-8")).get("eos_token")
    except (ValueError, AttributeError):
        raise ValueError(f"data.tokenizer: {str(config)!r} is not a JSON object; correct or remove it") from None
    if isinstance(token, dict):  # older files hold the token with its flags
        token = token.get("content")
    return rust.token_to_id(token) if token else None
