"""What the pages say of a method on one job is one number, however often it is said; and a page says of what loses to
workers that never talk that it does.
"""

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
METHOD = re.compile(r"(?:\*[^*]+\* \()?`([\w-]+)`\)?(?: \(.*\))?")
Said = tuple[str, str, str]
"""Job, method, loss as it is written."""
Cells = list[str]


def tables(text: str) -> Iterator[tuple[str, Cells, list[Cells]]]:
    """(job, heads, rows) of each. The line above a table of methods names its job in a comment,
    `<!-- job: ... -->`; without one its job is "".
    """
    before, found = "", list[tuple[str, Cells, list[Cells]]]()
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and not before.startswith("|"):
            named = re.fullmatch(r"<!-- job: (.+) -->", before)
            found.append((named[1] if named else "", cells, []))
        elif line.startswith("|"):
            found[-1][2].append(cells)
        before = line
    yield from found


def column(heads: Cells, word: str) -> int:
    """The first one with the word in its head; 0 without one."""
    return next((place for place, head in enumerate(heads) if re.search(rf"\b{word}\b", head)), 0)


def losses(text: str) -> Iterator[Said]:
    """Of the tables of methods that have a column of losses, but for workers that never talk, which have two."""
    for job, heads, rows in tables(text):
        place = column(heads, "loss")
        for cells in rows if place else ():
            method, loss = METHOD.fullmatch(cells[0]), NUMBER.search(cells[place]) if place < len(cells) else None
            if method and loss and method[1] in {*METHODS, ALONE} - {NEVER}:
                yield job, method[1], loss[0]


def beaten(text: str) -> Iterator[str]:
    """First cells of the rows with a loss above that of workers that never talk, the mean of their own, in one table;
    losses nearer than 0.02 are alike.
    """
    for _, heads, rows in tables(text):
        loss, own = column(heads, "loss"), column(heads, "own")
        found = {cells[0]: NUMBER.search(cells[loss]) for cells in rows if 0 < loss < len(cells)}
        never = [
            NUMBER.search(cells[own or loss])
            for cells in rows
            if len(cells) > max(own, loss) and (f"`{NEVER}`" in cells[0] or "never talk" in cells[0])
        ]
        if loss and never and never[0]:
            limit = float(never[0][0]) + 0.02
            yield from (row for row, own_loss in found.items() if own_loss and float(own_loss[0]) > limit)


def unsaid(text: str) -> list[str]:
    """Of `beaten`, what no paragraph tells: one that speaks of those who never talk, and of a method names it."""
    told = [part for part in re.split(r"\n\s*\n", text) if not part.lstrip().startswith("|")]
    told = [part for part in told if re.search(r"never\s+talk|not\s+talking", part)]
    told = [part for part in told if re.search(r"[Bb]ehind|[Ww]orse", part)]
    names = {row: METHOD.fullmatch(row) for row in beaten(text)}
    return [
        row
        for row, name in names.items()
        if not (name and name[1] == NEVER) and not any(name is None or f"`{name[1]}`" in part for part in told)
    ]


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


def test_what_loses_to_workers_that_never_talk_is_told() -> None:
    assert {page.name: found for page in PAGES if (found := unsaid(page.read_text(encoding="utf-8")))} == {}
    assert any(list(beaten(page.read_text(encoding="utf-8"))) for page in PAGES)


TOLD = "Worse than workers that\nnever talk: `eager`."


@pytest.mark.parametrize(
    ("eager", "words", "found"),
    [
        ("1.80", "", []),
        ("1.815", "", []),  # nothing below 0.02 counts
        ("1.83", "", ["`eager`"]),
        ("1.83", "Worse than workers that\nnever talk: `delayed`.", ["`eager`"]),
        ("1.83", TOLD, []),
    ],
)
def test_what_is_unsaid(eager: str, words: str, found: list[str]) -> None:
    rows = f"| `eager` | {eager} | 1.9 |\n| `ddp` | 1.50 | 1.50 |\n| `none` | 2.05 | 1.80 ± 0.01 |"
    heads = "| row | validation loss | of the workers' own |\n|---|---|---|"
    assert unsaid(f"# A page\n\n{heads}\n{rows}\n\n{words}\n") == found


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
