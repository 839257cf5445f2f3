"""Domains: kinds of text with a name, a difficulty and a path, and what is read of each.

A domain's text is an ordinary `data.path`, split into training and validation text as everywhere in Isles. Validation
documents alternate between two parts: "prior" (from which a cached prior is estimated) and "test" (for evaluation),
so that nothing evaluated was seen before. A domain of difficulty "held_out" is only evaluated.

The default domains: four or five kinds of text that come with every Python, cut from the standard library.

tables     easy        the character tables of `encodings`: whole files that resemble each other
english    medium      docstrings of the library, and the topics of `pydoc_data`: English about programming
code       difficult   the library's code without docstrings and comments
comments   held out    the comments that stand on lines of their own, a document a file
headers    held out    the C headers of this Python, where they are installed

Files are taken in the order of a hash of their names until `characters` are reached, so a small share is a mixture.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from isles.base.durable import write_text
from isles.base.parsing import parse_json
from isles.base.tables import typed
from isles.data import Corpus, DataConfig, load_corpus
from isles.data.corpus import rows_corpus
from isles.data.loader import spaced, windows
from isles.data.order import epoch_order
from isles.data.sources import list_sources
from isles.data.store import save_corpus

Texts = Iterator[str]


def write_texts(folder: Path, characters: int) -> dict[str, Path]:
    """Write NAME.jsonl for each domain of the module that has text, unless it is there; the files, by name."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for name, texts in _TEXTS.items():
        path = folder / f"{name}.jsonl"
        if not path.exists():
            lines = [json.dumps({"text": text}) for text in _up_to(characters, texts())]
            if not lines:
                continue
            write_text(path, "\n".join(lines) + "\n")
        found[name] = path
    return found


def _up_to(characters: int, texts: Iterable[str]) -> Iterator[str]:
    taken = 0
    for text in texts:
        if text.strip():
            yield text
            taken += len(text)
            if taken >= characters:
                return


def _tables() -> Texts:
    for file in _shuffled((_stdlib() / "encodings").glob("*.py")):
        text = file.read_text(encoding="utf-8")
        if "_table" in text or "_map" in text:  # the others are code
            yield text


def _english() -> Texts:
    topics = _stdlib() / "pydoc_data" / "topics.py"
    prose = _strings(topics.read_text(encoding="utf-8")) if topics.is_file() else []
    for text in _library():
        yield "\n\n".join(_docstrings(text))
        if prose:  # a topic between the files, as long as there are some
            yield prose.pop()


def _code() -> Texts:
    for text in _library():
        yield without_prose(text)


def _comments() -> Texts:
    for text in _library():
        lines = text.splitlines()
        yield "\n".join(lines[number].strip() for number in sorted(comment_lines(text)))


def _headers() -> Texts:
    include = sysconfig.get_path("include")
    for file in _shuffled(Path(include).rglob("*.h") if include else []):
        yield file.read_text(encoding="utf-8", errors="replace")


_TEXTS: dict[str, Callable[[], Texts]] = {
    "tables": _tables,
    "english": _english,
    "code": _code,
    "comments": _comments,
    "headers": _headers,
}


def without_prose(text: str) -> str:
    """Python source without docstrings and without comments on lines of their own; blank lines that follow go too."""
    dropped = comment_lines(text)
    for node in _docstring_nodes(text):
        dropped |= set(range(node.lineno - 1, node.end_lineno or node.lineno))
    lines_left, blank = [], True
    for number, line in enumerate(text.splitlines()):
        if number in dropped or (blank and not line.strip()):
            continue
        lines_left.append(line.rstrip())
        blank = not line.strip()
    return "\n".join(lines_left)


def comment_lines(text: str) -> set[int]:
    """Numbers, from 0, of the lines that hold a comment alone; a `#` inside a string of several lines is none."""
    inside: set[int] = set()
    for node in ast.walk(_tree(text)):
        if isinstance(node, ast.Constant | ast.JoinedStr) and (node.end_lineno or 0) > node.lineno:
            inside |= set(range(node.lineno, node.end_lineno or node.lineno))
    return {
        number
        for number, line in enumerate(text.splitlines())
        if line.lstrip().startswith("#") and number not in inside
    }


def _docstring_nodes(text: str) -> list[ast.Expr]:
    found = []
    for node in ast.walk(_tree(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            constant = first.value if isinstance(first, ast.Expr) else None
            if isinstance(first, ast.Expr) and isinstance(constant, ast.Constant) and isinstance(constant.value, str):
                found.append(first)
    return sorted(found, key=lambda node: node.lineno)


def _docstrings(text: str) -> list[str]:
    return [ast.literal_eval(node.value).strip() for node in _docstring_nodes(text)]


def _strings(text: str) -> list[str]:
    """The long strings of a module that is one dictionary of them."""
    constants = (node.value for node in ast.walk(_tree(text)) if isinstance(node, ast.Constant))
    return [value for value in constants if isinstance(value, str) and len(value) > 200]


@lru_cache(maxsize=2)  # each file is asked for its docstrings and for its comments
def _tree(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except SyntaxError:  # the library holds a few files that are wrong on purpose
        return ast.Module(body=[], type_ignores=[])


def _library() -> Texts:
    for file in _shuffled(source.path for source in list_sources(DataConfig())):
        text = file.read_text(encoding="utf-8", errors="replace")
        if "\f" not in text:  # splitlines would count other lines than the parser
            yield text


def _stdlib() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _shuffled(files: Iterable[Path]) -> list[Path]:
    return sorted(files, key=lambda file: hashlib.sha256(f"{file.parent.name}/{file.name}".encode()).digest())


Difficulty = Literal["easy", "medium", "difficult", "held_out"]
DomainPart = Literal["prior", "test"]
TEXTS = "texts.json"
TRAINED: tuple[Difficulty, ...] = ("easy", "medium", "difficult")
_DEFAULTS: dict[str, Difficulty] = {
    "tables": "easy",
    "english": "medium",
    "code": "difficult",
    "comments": "medium",
    "headers": "difficult",
}


@dataclass(frozen=True, kw_only=True)
class Domain:
    """name: a word, for tables and folders. path: as `data.path`. difficulty: as a person sees it; "held_out": judged,
    not trained on.
    """

    name: str
    path: str
    difficulty: Difficulty = "medium"

    def __post_init__(self) -> None:
        if not self.name.replace("-", "").replace("_", "").isalnum():
            raise ValueError(f"domain {self.name!r}: use letters, digits, - and _, for it names a folder")
        if not self.path:
            raise ValueError(f"domains.{self.name}.path is empty; give a file or a folder of text")

    @property
    def trained(self) -> bool:
        """Whether an expert may train on it."""
        return self.difficulty != "held_out"


def read_domains(
    tables: Mapping[str, Any], folder: Path, characters: int, held_out: Sequence[str] = ("comments", "headers")
) -> list[Domain]:
    """The domains that a configuration lists as [domains.NAME]; without any, the default ones, written to `folder`, of
    which those in `held_out` are only evaluated.
    """
    if tables:
        return [typed(f"domains.{name}", Domain, {"name": name, **table}) for name, table in tables.items()]
    texts = write_texts(folder, characters)
    return [
        Domain(name=name, path=str(path), difficulty="held_out" if name in held_out else _DEFAULTS[name])
        for name, path in texts.items()
    ]


def of_difficulty(domains: Sequence[Domain], difficulty: Difficulty) -> list[Domain]:
    """Those of one difficulty, in order. ValueError where there is none."""
    found = [domain for domain in domains if domain.difficulty == difficulty]
    if not found:
        raise ValueError(f'no domain of difficulty "{difficulty}": add one as [domains.NAME] with a path')
    return found


def known_texts(out: Path) -> dict[str, str]:
    """By domain, the sha256 of the text that OUT was made with; empty where nothing was made yet."""
    path = out / TEXTS
    return parse_json(path.read_text(encoding="utf-8")) if path.exists() else {}


def keep_texts(out: Path, texts: Mapping[str, str]) -> None:
    """Note these beside those that are known."""
    known = known_texts(out)
    if {**known, **texts} != known:
        write_text(out / TEXTS, json.dumps({**known, **texts}, indent=1) + "\n")


class DomainText:
    """The text of one domain, tokenised. ValueError where there is none, or too little to evaluate on."""

    def __init__(self, domain: Domain, data: DataConfig, context: int) -> None:
        self.domain, self.context = domain, context
        self.data = replace(data, path=domain.path, validation_path="", mixture=None)
        try:
            self.corpus = load_corpus(self.data)
        except ValueError as error:
            raise ValueError(f"domain {domain.name!r}: {error}") from None
        if self.corpus.masks:
            raise ValueError(f"domain {domain.name!r}: experts learn every token; leave labels and loss_mask out")
        for part, tokens in (("training", self.corpus.train), ("validation", self.corpus.validation)):
            if len(tokens) <= 2 * (context + 1):
                raise ValueError(
                    f"domain {domain.name!r} is (nearly) empty: its {part} text has {len(tokens)} tokens, fewer than "
                    f"two sequences of {context + 1}; give more text, or take the domain out"
                    + (f"; data.validation_fraction = {data.validation_fraction}" if part == "validation" else "")
                )

    def training_rows(self) -> np.ndarray:
        """(N, context + 1) windows of the training text, without a copy."""
        self.corpus.train.check()
        return windows(self.corpus.train.tokens, self.context, self.corpus.row)

    def held_rows(self, part: DomainPart, count: int) -> np.ndarray:
        """(N, context + 1) windows of one part of the validation text, at most `count`, evenly spaced."""
        rows = np.concatenate([windows(tokens, self.context) for tokens in self._documents(part)])
        return rows[spaced(len(rows), count)]

    def sequences(self, part: DomainPart, count: int) -> Tensor:
        """`held_rows` as int64, for models."""
        return torch.from_numpy(self.held_rows(part, count).astype(np.int64))

    def _documents(self, part: DomainPart) -> list[np.ndarray]:
        """The part's documents that hold a window; halves of the text where few documents do."""
        stream = self.corpus.validation
        stream.check()
        bounds = zip(stream.bounds[:-1], stream.bounds[1:], strict=True)
        documents = [stream.tokens[start:end] for start, end in bounds if end - start > self.context]
        chosen = documents[part == "test" :: 2]
        if len(documents) < 4:
            half = len(stream) // 2
            chosen = [stream.tokens[half:] if part == "test" else stream.tokens[:half]]
        return chosen


@dataclass(frozen=True, eq=False)
class Pool:
    """Sequences of several domains in one order that depends on the seed. rows: (N, context + 1). label: (N,) index of
    the domain of each. corpus: the same as a corpus of rows, stored in `folder`, so that runs can read it.
    """

    rows: np.ndarray
    label: np.ndarray
    corpus: Corpus
    folder: Path

    @property
    def validation(self) -> np.ndarray:
        """(M, context + 1) validation sequences of its domains."""
        self.corpus.validation.check()
        return self.corpus.validation.tokens.reshape(-1, self.rows.shape[1])


def pooled(texts: Sequence[DomainText], folder: Path, seed: int, *, validation: int) -> Pool:
    """The training windows of `texts` in equal numbers (of the smallest), shuffled; kept in `folder`, which a second
    call with the same texts reads back. validation: sequences of each domain, from the prior's part.
    """
    share = min(len(text.training_rows()) for text in texts)
    order = epoch_order(share * len(texts), seed=seed, epoch=0, share=0)
    rows = np.concatenate([text.training_rows()[spaced(len(text.training_rows()), share)] for text in texts])[order]
    label = np.repeat(np.arange(len(texts)), share)[order]
    validation_rows = np.concatenate([text.held_rows("prior", validation) for text in texts])
    name = "+".join(text.domain.name for text in texts)
    corpus = rows_corpus(name, texts[0].corpus.tokenizer, rows, validation_rows)
    return Pool(rows, label, store_rows(corpus, folder), folder)


def store_rows(corpus: Corpus, folder: Path) -> Corpus:
    """`save_corpus`, where `folder` may hold it already. ValueError where it holds another one."""
    stored = save_corpus(corpus, folder)
    if stored.sha256 != corpus.sha256:
        raise ValueError(f"{folder}: holds other sequences; the text or the settings changed: name another --out")
    return stored
