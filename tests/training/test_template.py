"""`isles config`: every key is there, said in words, and the text reads back to the method's defaults."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields, make_dataclass
from pathlib import Path

import pytest

from isles.base.tables import field_docs, tables_of
from isles.experts.planning import SYSTEMS
from isles.replicas import METHODS, method
from isles.training.config.reading import read_config, template, to_toml
from isles.training.config.sections import ORDER, SECTIONS, Config
from tests.covers import share


@pytest.mark.parametrize("name", share(METHODS, 1, 4))
def test_the_template_reads_back_to_the_defaults(tmp_path: Path, name: str) -> None:
    """A file made by `isles config` is a valid CONFIG.toml with the method's own defaults."""
    path = tmp_path / "run.toml"
    path.write_text(template(name))
    config = read_config(str(path), {}, [])
    assert config.method == name
    assert config.replicas == method(name).Config()
    assert all(getattr(config, section) == cls() for section, cls in SECTIONS.items())


WRITTEN = [*SECTIONS.values(), *(method(name).Config for name in METHODS), *(own for own, _ in SYSTEMS.values())]


@pytest.mark.parametrize("cls", [*WRITTEN, *(table for cls in WRITTEN for table in tables_of(cls).values())])
def test_every_key_is_described(cls: type) -> None:
    """No field of a config class without a docstring below it, of its own or of the class that it comes from."""
    texts = field_docs(cls)
    assert list(texts) == [field.name for field in fields(cls)]
    texts |= {key: inspect.getdoc(table) or "" for key, table in tables_of(cls).items()}
    assert all(texts.values()), [key for key, text in texts.items() if not text]
    assert all(text[-1] in ".?" for text in texts.values()), "whole sentences"


@dataclass(frozen=True, kw_only=True)
class Below:
    """first: not this."""

    first: int = 1
    """What it says: of itself,
    over two lines.
    """
    second: int = 2
    third: int = 3
    "One line."


@dataclass(frozen=True, kw_only=True)
class Above(Below):
    first: int = 10
    third: int = 30
    """Otherwise here."""
    fourth: int = 4

    def something(self) -> None:
        """Not of fourth."""


def test_words_stand_below_a_field_and_are_inherited() -> None:
    below = {"first": "What it says: of itself, over two lines.", "second": "", "third": "One line."}
    assert field_docs(Below) == below
    assert field_docs(Above) == below | {"third": "Otherwise here.", "fourth": ""}
    made = make_dataclass("Made", [("one", int, 1)])
    assert field_docs(made) == {"one": ""}, "no source to read"


def test_sections_stand_in_one_place() -> None:
    """A section more in `Config` is one more everywhere: the file that is kept, the template, what is refused."""
    names = [field.name for field in fields(Config) if field.name != "method"]
    text = to_toml(Config(method="diloco", replicas=method("diloco").Config()))
    for written in (text, template("diloco")):
        heads = [line[1:-1] for line in written.splitlines() if line.startswith("[")]
        assert [head for head in heads if "." not in head] == names == list(ORDER)
        assert [head for head in heads if head.startswith("world.")] == ["world.virtual", "world.elastic"]
    assert set(SECTIONS) == set(ORDER) - {"replicas"}
    with pytest.raises(ValueError, match="choose one of " + ", ".join(sorted(ORDER))):
        read_config(None, {"words.key": 1}, [])
