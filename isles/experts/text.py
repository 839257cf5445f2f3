"""The default domains: four or five kinds of text that come with every Python, cut from the standard library.

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
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path

from isles.data.sources import list_sources
from isles.durable import write_text

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
    kept, blank = [], True
    for number, line in enumerate(text.splitlines()):
        if number in dropped or (blank and not line.strip()):
            continue
        kept.append(line.rstrip())
        blank = not line.strip()
    return "\n".join(kept)


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
    for file in _shuffled(source.path for source in list_sources("")):
        text = file.read_text(encoding="utf-8", errors="replace")
        if "\f" not in text:  # splitlines would count other lines than the parser
            yield text


def _stdlib() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _shuffled(files: Iterable[Path]) -> list[Path]:
    return sorted(files, key=lambda file: hashlib.sha256(f"{file.parent.name}/{file.name}".encode()).digest())
