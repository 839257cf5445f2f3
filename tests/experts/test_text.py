"""The default domains: what each holds, and how a domain's text is dealt out."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from isles.data import DataConfig
from isles.experts.domains import Domain, DomainText, comment_lines, of_difficulty, pooled, read_domains, without_prose
from tests.experts.small import write_domains

SOURCE = '''"""What it is.

Two lines of it.
"""
# A remark.
import os

TEXT = """
# not a remark
"""


class A:
    """A class."""

    def f(self):
        """Does."""
        # Says why.
        return 1  # stays
'''


def test_docstrings_and_comments_leave_the_code() -> None:
    assert without_prose(SOURCE).splitlines() == [
        "import os", "", 'TEXT = """', "# not a remark", '"""', "", "class A:", "", "    def f(self):",
        "        return 1  # stays",
    ]  # fmt: skip
    assert [SOURCE.splitlines()[n].strip() for n in sorted(comment_lines(SOURCE))] == ["# A remark.", "# Says why."]


def test_the_default_domains_are_of_every_python(tmp_path: Path) -> None:
    domains = read_domains({}, tmp_path, 30_000)
    kinds = {domain.name: domain.difficulty for domain in domains}
    assert kinds.items() >= {"tables": "easy", "english": "medium", "code": "difficult", "comments": "held_out"}.items()
    for domain in domains:
        texts = [json.loads(line)["text"] for line in Path(domain.path).read_text().splitlines()]
        assert sum(map(len, texts)) >= 30_000 and all(text.strip() for text in texts)
    marks = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert read_domains({}, tmp_path, 30_000) == domains
    assert marks == {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match='no domain of difficulty "easy"'):
        of_difficulty(domains[1:], "easy")


def test_no_sequence_is_in_two_parts_and_a_pool_is_even(tmp_path: Path) -> None:
    write_domains(tmp_path)
    data = DataConfig(validation_fraction=0.3)
    texts = [DomainText(Domain(name=name, path=str(tmp_path / f"{name}.txt")), data, 16) for name in ("easy", "medium")]
    parts = [texts[0].training_rows(), texts[0].held_rows("prior", 999), texts[0].held_rows("test", 999)]
    ends = [part.tobytes() for part in parts]
    assert sum(len(part) for part in parts) * 16 >= len(texts[0].corpus.train) + len(texts[0].corpus.validation) - 64
    assert len(set(ends)) == 3
    pool = pooled(texts, tmp_path / "pool", 0, validation=5)
    assert np.bincount(pool.label).tolist() == [len(pool.rows) // 2] * 2
    again = pooled(texts, tmp_path / "pool", 0, validation=5)
    assert again.corpus.sha256 == pool.corpus.sha256 and np.array_equal(again.rows, pool.rows)
    with pytest.raises(ValueError, match="holds other sequences"):
        pooled(texts, tmp_path / "pool", 1, validation=5)
