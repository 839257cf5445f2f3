"""Names are the field's: words of our own that stood for something else are gone from what the package defines."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "isles"
NOT_NAMES = {
    "charter": "run spec",
    "churned": "simulated",
    "company": "client",
    "courier": "round exchange",
    "debt": "backlog",
    "fates": "message accounting",
    "foretold": "plannable",
    "gift": "state transfer",
    "gifts": "state transfer",
    "given": "provided",
    "keeper": "server",
    "keeping": "server",
    "kept": "saved, retained, cached",
    "lit": "up",
    "lot": "sample range",
    "muster": "swarm coordinator",
    "owed": "backlog",
    "seat": "member",
    "seats": "members",
    "seated": "member",
    "strikes": "ban score",
    "tenure": "assignment",
    "told": "notify, notifications, described",
    "whereabouts": "address book",
}
"""What is said instead, by the word that is no name here (docs/glossary.md)."""
PARTICIPLE = re.compile(
    r"\w+ed|told|kept|given|begun|gone|held|heard|said|(?:be|enter|giv|tak|keep|hold|tell|say|hear|com)ing"
)
NOUNS = {"bucketed", "delayed", "learned", "scaled", "simulated"}
"""Adjectives of the field that a module is named by: delayed updates (the paper's), learned boundaries, ..."""


def parts(name: str) -> list[str]:
    """The words of an identifier, in small letters."""
    return [part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def defined(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, name) of all that a module names: functions, classes, parameters, variables, attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def complaints(tree: ast.Module) -> list[str]:
    """One line for each name that has such a word."""
    found = ((line, name, word) for line, name in defined(tree) for word in parts(name) if word in NOT_NAMES)
    return [f"{line} {name}: say {NOT_NAMES[word]}" for line, name, word in found]


def test_names_are_the_fields() -> None:
    found = [
        f"{path.relative_to(PACKAGE.parent)}:{text}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for text in complaints(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found, "\n".join(["words that are no names here:", *found])


def test_no_module_is_named_by_a_participle() -> None:
    names = {path.stem for path in PACKAGE.rglob("*.py")} | {path.name for path in PACKAGE.rglob("*") if path.is_dir()}
    assert sorted(name for name in names - NOUNS if PARTICIPLE.fullmatch(name.rpartition("_")[2])) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("seat = 1", 1),
        ("def told_of(x): ...", 1),
        ("class StateGifts: ...", 1),
        ("self.kept: int = 0", 1),
        ("x.seats", 0),
    ],
)
def test_the_rule_fires(source: str, found: int) -> None:
    assert len(complaints(ast.parse(source))) == found
