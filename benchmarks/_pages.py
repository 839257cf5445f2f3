"""Tables in the documentation that a benchmark writes."""

from __future__ import annotations

from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"
_END = "<!-- end -->"


def written(page: str, maker: str, table: str) -> None:
    """Put `table` (Markdown) into docs/PAGE, between the line that names its maker and the next end."""
    path, begin = DOCS / page, f"<!-- made by {maker} -->"
    before, rest = path.read_text(encoding="utf-8").split(begin, 1)
    after = rest.split(_END, 1)[1]
    path.write_text(f"{before}{begin}\n{table}\n{_END}{after}", encoding="utf-8")
