"""`isles config`: every key is there, said in words, and the text reads back to the method's defaults."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from isles.replicas import METHODS, method
from isles.training.config.reading import SECTIONS, read_config
from isles.training.config.template import described, template


@pytest.mark.parametrize("name", METHODS)
def test_the_template_reads_back_to_the_defaults(tmp_path: Path, name: str) -> None:
    """A file made by `isles config` is a valid CONFIG.toml with the method's own defaults."""
    path = tmp_path / "run.toml"
    path.write_text(template(name))
    config = read_config(str(path), {}, [])
    assert config.method == name
    assert config.replicas == method(name).Config()
    assert all(getattr(config, section) == cls() for section, cls in SECTIONS.items())


@pytest.mark.parametrize("cls", [*SECTIONS.values(), *(method(name).Config for name in METHODS)])
def test_every_key_is_described(cls: type) -> None:
    """No field of a config class without words in its docstring, and none that another field's words swallow."""
    texts = described(cls)
    assert list(texts) == [field.name for field in fields(cls)]
    assert all(texts.values()), [key for key, text in texts.items() if not text]
