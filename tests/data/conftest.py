from collections.abc import Callable
from pathlib import Path

import pytest

from isles.data import Corpus, DataConfig, load_corpus

Write = Callable[[dict[str, str | bytes]], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write files under a fresh folder `text` and return the folder."""

    def write_files(files: dict[str, str | bytes]) -> Path:
        root = tmp_path / "text"
        root.mkdir(exist_ok=True)
        for name, content in files.items():
            file = root / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content.encode() if isinstance(content, str) else content)
        return root

    return write_files


@pytest.fixture(scope="session")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """60 documents of unequal length in which no two lines are equal, so a window shows where it was taken."""
    root = tmp_path_factory.mktemp("stories")
    line = 0
    for document in range(60):
        lines = []
        for _ in range(3 + (document * 7) % 23):
            lines.append(f"{document:02d}:{line:05d}")
            line += 1
        (root / f"story{document:02d}.txt").write_text("\n".join(lines) + "\n")
    return load_corpus(DataConfig(path=str(root), validation_fraction=0.1))
