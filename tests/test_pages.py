"""What the pages say of a method on one job is one number, however often it is said."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from isles.replicas import METHODS
from isles.report.comparison import ALONE, NEVER

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NUMBER = re.compile(r"\d\.\d{2,}")
Said = tuple[str, str, str]
"""Job, method, loss as it is written."""


def losses(text: str) -> Iterator[Said]:
    """Of the tables of methods that have a column of losses, but for workers that never talk, which have two. The line
    above such a table names its job in a comment,
    `<!-- job: ... -->`; without one its job is "".
    """
    before, job, column = "", "", -1
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and not before.startswith("|"):
            named = re.fullmatch(r"<!-- job: (.+) -->", before)
            job = named[1] if named else ""
            column = next((place for place, head in enumerate(cells) if re.search(r"\bloss\b", head)), -1)
        elif line.startswith("|") and 0 < column < len(cells):
            method = re.fullmatch(r"(?:\*[^*]+\* \()?`([\w-]+)`\)?(?: \(.*\))?", cells[0])
            loss = NUMBER.search(cells[column])
            if method and loss and method[1] in {*METHODS, ALONE} - {NEVER}:
                yield job, method[1], loss[0]
        before = line


def differing(said: list[tuple[str, Said]]) -> list[str]:
    """Where two pages say two numbers, rounded to the shorter one's digits."""
    found = []
    for place, (page, (job, method, loss)) in enumerate(said):
        for other, (its, same, also) in said[:place]:
            digits = min(len(one.partition(".")[2]) for one in (loss, also))
            if (job, method) == (its, same) and abs(float(loss) - float(also)) > 0.5001 * 10**-digits:
                found.append(f"{job}: {method} has {also} in {other} and {loss} in {page}")
    return found


def test_pages_tell_the_same_losses() -> None:
    said = [(page.name, one) for page in PAGES for one in losses(page.read_text(encoding="utf-8"))]
    assert len({page for page, _ in said}) >= 3
    assert not [f"{page}: name the job of the table with {one[1]}" for page, one in said if not one[0]]
    assert differing(said) == []


@pytest.mark.parametrize(("loss", "wrong"), [("1.50", False), ("1.501", False), ("1.5011", True), ("1.51", True)])
def test_what_differs(loss: str, wrong: bool) -> None:
    table = (
        "\n<!-- job: J -->\n| method | sent | validation loss |\n|---|---|---:|\n| `ddp` (all) | 2.00 MB | {} ± 0.01 |"
    )
    said = [(name, one) for name, value in (("a", "1.5014"), ("b", loss)) for one in losses(table.format(value))]
    assert [one for _, one in said] == [("J", "ddp", "1.5014"), ("J", "ddp", loss)]
    assert bool(differing(said)) is wrong


def test_the_tests_that_a_page_names_are_there() -> None:
    named = [pair for page in PAGES for pair in re.findall(r"`([\w/]+\.py)::(\w+)", page.read_text(encoding="utf-8"))]
    assert len(named) > 80
    for file, name in named:
        found = [folder / file for folder in (ROOT / "tests" / "replicas", ROOT / "tests", ROOT)]
        assert any(one.is_file() and f"def {name}(" in one.read_text(encoding="utf-8") for one in found), (file, name)
