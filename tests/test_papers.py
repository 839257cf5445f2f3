"""docs/papers.md against the code: a paper has one home, which names it first; no other file names it unlisted."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.main import get_command

from isles import cli
from isles.replicas import METHODS
from isles.training.config.reading import gather, resolve

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
PATH, NUMBER = re.compile(r"`(isles/[^`]+)`"), re.compile(r"\b\d{4}\.\d{5}\b")


class Row(NamedTuple):
    """One system's line of the page."""

    system: str
    number: str
    home: str
    others: str
    page: str
    command: str
    test: str

    def holds(self, file: Path) -> bool:
        """Whether the row lists `file`, in its home or beside it."""
        return any(file == ROOT / path or ROOT / path in file.parents for path in PATH.findall(self.home + self.others))


def rows() -> list[Row]:
    """Of both tables."""
    lines = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| system")]
    return [Row(*(field.strip() for field in line.strip("|").split("|"))) for line in lines]


ROWS = rows()


def named_in(file: Path) -> set[str]:
    """The numbers of arXiv that a file of ours names."""
    return set(NUMBER.findall(file.read_text(encoding="utf-8")))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.system)
def test_a_home_names_its_paper_first(row: Row) -> None:
    home = ROOT / PATH.findall(row.home)[0]
    first = home / "__init__.py" if home.is_dir() else home
    said = ast.get_docstring(ast.parse(first.read_text(encoding="utf-8"))) or ""
    assert not row.number or row.number in said, f"{first.relative_to(ROOT)} does not name arXiv {row.number}"
    for other in PATH.findall(row.others):
        assert row.number in named_in(ROOT / other), f"{other} does not name arXiv {row.number}"
    (target,) = re.findall(r"\]\(([\w-]+\.md)\)", row.page)
    assert (ROOT / "docs" / target).is_file()


def test_no_other_file_names_a_paper() -> None:
    files = [path for path in (ROOT / "isles").rglob("*") if path.suffix in (".py", ".toml")]
    known = {row.number for row in ROWS} - {""}
    found = [
        f"{file.relative_to(ROOT)} names {number}"
        for file in files
        for number in named_in(file) & known
        if not any(row.number == number and row.holds(file) for row in ROWS)
    ]
    assert not found, "\n".join(["docs/papers.md does not list:", *sorted(found)])


def test_every_method_has_a_row() -> None:
    made = {"custom", "none", "streaming-noloco"}  # of no paper of their own
    named = {word.strip("`") for row in ROWS for word in row.command.split()}
    assert set(METHODS) - named == made


@pytest.mark.parametrize("command", sorted({row.command.strip("`") for row in ROWS}))
def test_the_command_is_one(command: str) -> None:
    """Its words are commands, their options are there, and its settings can be read."""
    _, *words = command.split()
    here = get_command(cli.app)
    while words and hasattr(here, "commands"):
        here = here.commands[words.pop(0)]
    options = {option for one in here.params for option in one.opts}
    assert {word for word in words if word.startswith("--")} <= options
    said = list(zip(words[::2], words[1::2], strict=True)) if words[:1] and words[0].startswith("--") else []
    resolve(gather(None, {}, [f"replicas.method={value}" if option == "--method" else value for option, value in said]))
