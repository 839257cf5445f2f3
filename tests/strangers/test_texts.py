"""Small texts of strangers take little memory: what is too long, too deep or of too many parts is refused in a line."""

from __future__ import annotations

import tracemalloc

import pytest

from isles.base import parsing
from isles.base.parsing import parse_json, parse_toml

DOTS = 100_000  # 200 kB of TOML, whose keys tomllib takes for 5,000,000,000 parts: 20 GB
LARGE = {
    "a dotted key": ("a." * DOTS + "a = 1", "a key of it has more than 8 parts"),
    "with spaces": ("a . " * DOTS + "a = 1", "a key of it has more than 8 parts"),
    "in quotes": ('"\\"".' * DOTS + "a = 1", "a key of it has more than 8 parts"),
    "in other quotes": ("''." * DOTS + "a = 1", "a key of it has more than 8 parts"),
    "a table": ("[" + "a." * DOTS + "a]", "a key of it has more than 8 parts"),
    "a table in a line": ("x = { y = 1, " + "a." * DOTS + "a = 1 }", "a key of it has more than 8 parts"),
    "many keys": ("".join(f"k{n}=1\n" for n in range(70_000)), "70000 keys and lists, and no more than 65536"),
    "lists": ("x = " + "[" * 900 + "]" * 900, "it nests too deep"),
    "few lists": ("x = " + "[" * 80 + "]" * 80, "it nests too deep"),
    "length": ("# " + "x" * (17 << 20), "characters, and no more than 16777216"),
}
DEEP = ["[" * 100_000, "[" * 80 + "]" * 80, '{"a":' * 80 + "1" + "}" * 80, '{"a":' * 100_000]


def test_the_mark_that_windows_writes_is_no_part_of_the_text() -> None:
    assert parse_toml("\ufeffa = 1") == {"a": 1}


@pytest.mark.parametrize("digits", [301, 302, 4000, 5000])
def test_a_whole_number_that_no_float_holds(digits: int) -> None:
    """10^301 has 1000 bits. Whoever calculated with a longer one ended with an OverflowError."""
    for parse, text in ((parse_json, '{"a": [10%s]}'), (parse_toml, "a = [10%s]")):
        if digits == 301:
            assert parse(text % ("0" * 300)) == {"a": [10**301]}
        else:
            with pytest.raises(ValueError, match="and no more than 1000 are read" if digits < 4300 else "digits"):
                parse(text % ("0" * (digits - 1)))


@pytest.mark.parametrize("name", LARGE)
def test_toml_that_is_too_large(name: str) -> None:
    """The parser itself would take 20 GB for some of them: they are measured before it sees them."""
    text, why = LARGE[name]
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=why) as told:
            parse_toml(text)
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()
    assert len(str(told.value)) < 100 and "\n" not in str(told.value)


@pytest.mark.parametrize("text", DEEP)
def test_json_that_is_too_deep(text: str) -> None:
    for given in (text, text.encode()):
        with pytest.raises(ValueError, match="it nests too deep"):
            parse_json(given)


def test_json_of_too_many_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With small bounds, for the real ones take a while."""
    monkeypatch.setattr(parsing, "_PARTS", 10)
    monkeypatch.setattr(parsing, "_LONGEST_JSON", 100)
    assert parse_json("[" + "1," * 8 + "1]") == [1] * 9
    for text, why in (("[" + "1," * 10 + "1]", "11 values, and no more than 10"), (" " * 101, "101 characters")):
        with pytest.raises(ValueError, match=why):
            parse_json(text)


def test_what_people_write_is_read() -> None:
    """Dots in numbers and texts, eight parts, 64 levels, and marks of UTF-8."""
    toml = 'a.b."c.d.e.f.g.h.i.j".e.f.g.h.i = [1.5, 2.5]\npath = "a.b.c.d.e.f.g.h.i.j.k"\n[x.y]\nv = [0.1,0.2]\n'
    found = parse_toml(toml)
    assert found["a"]["b"]["c.d.e.f.g.h.i.j"]["e"]["f"]["g"]["h"]["i"] == [1.5, 2.5]
    assert found["path"].count(".") == 10 and found["x"]["y"]["v"] == [0.1, 0.2]
    assert parse_json("[" * 64 + "]" * 64) is not None
    assert parse_json('\ufeff{"a": "[[[[{{{{"}'.encode()) == {"a": "[[[[{{{{"}
    assert parse_json('["' + "[" * 1000 + '"]') == ["[" * 1000]
