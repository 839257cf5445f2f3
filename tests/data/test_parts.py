"""Texts of named parts: what an epoch reads of each, by hand; what a window holds; which losses there are; refusals."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from isles.data import Corpus, DataConfig, Loader, load_corpus
from isles.data.loader import resharded
from isles.data.order import epoch_order, mixed_order, rows
from isles.data.parts import apportioned
from isles.data.sources import check_sample
from tests.data.conftest import Write

CONTEXT = 10
FEW, MANY = 91, 331  # characters of the two training texts: 9 and 33 windows of 10


@pytest.fixture
def parts(write: Write) -> dict[str, str]:
    """Paths: in the one text are only capitals, in the other only digits; with the line end, as many tokens as said."""
    letters, digits = "".join(chr(65 + i % 26) for i in range(FEW - 1)), "".join(str(i % 10) for i in range(MANY - 1))
    root = write(
        {"letters.txt": letters, "digits.txt": digits, "held.txt": "x" * 60 + "y" * 15, "other.txt": "z" * 120}
    )
    return {"letters": str(root / "letters.txt"), "digits": str(root / "digits.txt")}


def config(paths: dict[str, str] | str, **values) -> DataConfig:
    return DataConfig(**{"path": paths, "validation_fraction": 0, "batch_size": 6} | values)


def read(corpus: Corpus, of: DataConfig, workers: int, steps: int, seed: int = 0) -> torch.Tensor:
    """(steps, workers' rows, context + 1): what all read."""
    group = [
        Loader(corpus, of, context=CONTEXT, worker=worker, workers=workers, seed=seed) for worker in range(workers)
    ]
    return torch.stack([torch.stack([next(one) for one in group], dim=1).flatten(0, 1) for _ in range(steps)])


def is_letters(row: list[int]) -> bool:
    """Each row is of one part alone, but for the line end at its text's end."""
    kinds = {chr(token).isalpha() for token in row if token != 10}
    assert len(kinds) == 1
    return kinds.pop()


@pytest.mark.parametrize(
    ("count", "shares", "numbers"),
    [(10, [0.3, 0.7], [3, 7]), (10, [3, 7], [3, 7]), (7, [1, 1], [4, 3]), (5, [1, 1, 1], [2, 1, 2]), (9, [2], [9])],
)
def test_things_are_shared_out_whole(count: int, shares: list[float], numbers: list[int]) -> None:
    """By hand: round(7 / 2) = 4 and the rest; marks at 5/3 and 10/3 of 5 round to 2 and 3."""
    assert apportioned(count, shares) == numbers


def test_the_order_of_a_tiny_mixture_by_hand() -> None:
    """Two sequences of one part, six of another, half of each: an epoch of 8 reads the first part twice whole, and the
    second one's permutations four at a time: 4, then 2 and 2 of the next, then 4.
    """
    ones = [epoch_order(2, seed=5, epoch=epoch, share=1).tolist() for epoch in range(6)]
    others = [(2 + epoch_order(6, seed=5, epoch=epoch, share=2)).tolist() for epoch in range(2)]
    expected = [
        ones[0] + ones[1] + others[0][:4],
        ones[2] + ones[3] + others[0][4:] + others[1][:2],
        ones[4] + ones[5] + others[1][2:],
    ]
    for epoch, read in enumerate(expected):
        places = epoch_order(8, seed=5, epoch=epoch, share=0)
        assert mixed_order((2, 6), (4, 4), seed=5, epoch=epoch).tolist() == [read[place] for place in places]
    # A contract between machines and versions:
    assert mixed_order((2, 6), (4, 4), seed=5, epoch=0).tolist() == [0, 2, 1, 3, 5, 7, 0, 1]


@pytest.mark.parametrize("taken", [(1, 299), (150, 150), (270, 30)])
def test_a_part_repeats_nothing_before_all_of_it_was_read(taken: tuple[int, int]) -> None:
    sizes, counts = (40, 260), np.zeros(300, dtype=int)
    for epoch in range(12):
        order = mixed_order(sizes, taken, seed=1, epoch=epoch)
        assert (order < 40).sum() == taken[0] and len(order) == 300
        assert not np.array_equal(np.sort(order), order)  # spread over the epoch
        counts += np.bincount(order, minlength=300)
        assert np.ptp(counts[:40]) <= 1 and np.ptp(counts[40:]) <= 1
    assert mixed_order(sizes, taken, seed=1, epoch=1 << 45).max() < 300  # where unassigned samples are


def test_windows_and_shares_of_two_parts(parts: dict[str, str]) -> None:
    """9 + 33 windows: by size all of them once; by a mixture of 2 to 1 an epoch has 28 of the letters', 14 of the
    digits'. The text of the two laid end to end has one more window than they have, over the seam.
    """
    corpus = load_corpus(config(parts))
    assert corpus.train.ranges(["digits", "letters"]) == [(0, MANY), (MANY, MANY + FEW)]  # by name
    texts = [Path(parts[name]).read_bytes() + b"\n" for name in ("digits", "letters")]
    windows = [text[at : at + CONTEXT + 1] for text in texts for at in range(0, len(text) - CONTEXT, CONTEXT)]
    by_size = read(corpus, config(parts), 1, 7).flatten(0, 1).tolist()
    assert Counter(map(bytes, by_size)) == Counter(windows) and len(windows) == 42
    mixed = config(parts, mixture={"letters": 2, "digits": 1})
    for seed in (0, 1):
        epochs = read(corpus, mixed, 1, 14, seed).reshape(2, 42, CONTEXT + 1)
        assert [sum(map(is_letters, epoch.tolist())) for epoch in epochs] == [28, 28]


def test_mixtures_do_not_depend_on_the_workers_and_go_on_with_others(parts: dict[str, str]) -> None:
    of = config(parts, mixture={"letters": 0.7, "digits": 0.3}, batch_mode="global")
    corpus = load_corpus(of)
    whole = read(corpus, of, 1, 20)
    for workers in (2, 3):
        assert torch.equal(read(corpus, of, workers, 20), whole)
    loader = Loader(corpus, of, context=CONTEXT, worker=1, workers=2)
    first = list(islice(loader, 9))
    assert torch.equal(torch.stack(first), whole[:9, 1::2])
    state = json.loads(json.dumps(loader.state_dict()))
    for worker in range(3):
        other = Loader(corpus, of, context=CONTEXT, worker=worker, workers=3)
        other.load_state_dict(resharded(state, workers=3, batch_size=2))
        assert torch.equal(torch.stack(list(islice(other, 11))), whole[9:, worker::3])
    with pytest.raises(ValueError, match=r"^the loader state has parts = .*; resume with the same one$"):
        again = Loader(corpus, config(parts, mixture={"letters": 1, "digits": 1}), context=CONTEXT)
        again.load_state_dict({**state, "workers": 1, "batch_size": 6})


def test_rounds_of_members_read_the_mixture_once(parts: dict[str, str]) -> None:
    """Elastic rounds: three members of 2, 1 and 3 steps, then two of 2 each, from positions alone."""
    of = config(parts, mixture={"letters": 0.5, "digits": 0.5}, batch_size=2)
    loader = Loader(load_corpus(of), of, context=CONTEXT)
    places, start = [], 0
    for fresh in ((2, 1, 3), (2, 2)):
        for index, steps in enumerate(fresh):
            places += [rows(start, fresh, index, step, batch_size=2) for step in range(steps)]
        start += sum(fresh)
    taken = sorted(
        (place, bytes(row)) for at in places for place, row in zip(at, loader.read(at).tolist(), strict=True)
    )
    assert [place for place, _ in taken] == list(range(20))
    assert [row for _, row in taken] == [bytes(row) for row in read(loader.corpus, of, 1, 10).flatten(0, 1).tolist()]


def test_one_part_is_the_text_alone_and_a_stored_one_is_the_same(parts: dict[str, str], tmp_path: Path) -> None:
    alone, named = config(parts["digits"]), config({"digits": parts["digits"]})
    assert load_corpus(alone).sha256 == load_corpus(named).sha256
    assert torch.equal(read(load_corpus(alone), alone, 2, 9), read(load_corpus(named), named, 2, 9))
    stored = config(parts, cache=str(tmp_path / "cache"), mixture={"letters": 1, "digits": 1}, validation_fraction=0.3)
    in_memory = config(parts, mixture={"letters": 1, "digits": 1}, validation_fraction=0.3)
    assert torch.equal(read(load_corpus(stored), stored, 1, 9), read(load_corpus(in_memory), in_memory, 1, 9))
    with pytest.raises(ValueError, match=r"^data\.path = .*: a stored corpus has its own split; leave it out"):
        load_corpus(config({"digits": parts["digits"], "stored": str(next((tmp_path / "cache").iterdir()))}))


def test_each_part_is_split_as_if_alone_and_has_its_own_sequences(parts: dict[str, str]) -> None:
    """A fifth of each, at its end: 19 and 67 tokens, so 1 and 6 windows."""
    of = config(parts, validation_fraction=0.2, validation_sequences=4)
    corpus = load_corpus(of)
    ends = {name: Path(path).read_bytes() + b"\n" for name, path in parts.items()}
    assert corpus.validation.tokens.tobytes() == ends["digits"][-67:] + ends["letters"][-19:]
    loader = Loader(corpus, of, context=CONTEXT)
    assert loader.validation_weights == {"digits": 4, "letters": 1}
    ((row,),) = [batch.tolist() for batch in loader.validation_batches("letters")]
    assert bytes(row) == ends["letters"][-19:-8]
    assert sum(map(len, loader.validation_batches())) == 5


def test_texts_for_validation_have_names_of_their_own(parts: dict[str, str]) -> None:
    root = Path(parts["digits"]).parent
    held = {"x": str(root / "held.txt"), "z": str(root / "other.txt"), "digits": str(root / "other.txt")}
    of = config(parts["digits"], validation_path=held, validation_fraction=0.05, validation_sequences=5)
    loader = Loader(load_corpus(of), of, context=CONTEXT)
    assert loader.validation_weights == {"digits": 5, "x": 5, "z": 5}
    seen = {name: set(torch.cat(list(loader.validation_batches(name))).flatten().tolist()) for name in held}
    assert seen == {"digits": {ord("z")}, "x": {ord("x"), ord("y")}, "z": {ord("z")}}


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (
            {"mixture": {"letters": 1, "digit": 1}},
            r"data\.mixture\.digit is no name of data\.path; use digits, letters",
        ),
        ({"mixture": {"letters": 1}}, r"data\.mixture\.digits is missing; give its share, a number above 0, or"),
        ({"mixture": {"letters": 0, "digits": 1}}, r"data\.mixture\.letters = 0; give"),
        ({"mixture": {"letters": -0.5, "digits": 1}}, r"data\.mixture\.letters = -0\.5; give"),
        ({"mixture": {"letters": "1", "digits": 1}}, r"data\.mixture\.letters = '1'; give"),
        ({"mixture": {"letters": float("nan"), "digits": 1}}, r"data\.mixture\.letters = nan; give"),
        ({"mixture": {"letters": 1, "digits": 1}, "split": "by_file"}, r"data\.mixture is for .*; write tables"),
        ({"mixture": {"a": 1}, "path": "a.txt"}, r"data\.mixture is for .*; write tables"),
        ({"mixture": 0.5}, r"data\.mixture is for .*; write tables"),
        ({"path": {}}, r"data\.path has 0 names; give 1 to 32"),
        ({"path": {"a.b": "a.txt"}}, r"data\.path has the name 'a\.b'; use up to 32 letters"),
        ({"path": {"a/b": "a.txt"}}, r"data\.path has the name 'a/b'; use"),
        ({"path": {"": "a.txt"}}, r"data\.path has the name ''; use"),
        ({"validation_path": {"ü": "a.txt"}}, r"data\.validation_path has the name 'ü'; use"),
        ({"path": {"a": ""}}, r"data\.path\.a = '' is no path; give"),
        ({"path": {"a": 5}}, r"data\.path\.a = 5 is no path; give"),
        ({"path": {"a": "nowhere.txt"}}, r"data\.path\.a = 'nowhere\.txt' does not exist; give"),
        ({"path": ["a.txt"]}, r"data\.path = \['a\.txt'\] is not a string; put"),
        ({"tokenizer": {"a": "b"}}, r"data\.tokenizer = .* is not a string"),
        ({"path": {"a": "/dev/null/"}}, r"data\.path\.a = '/dev/null/' (does not exist|is a folder without)"),
    ],
)
def test_what_cannot_be_is_one_line(parts: dict[str, str], values: dict, line: str) -> None:
    with pytest.raises(ValueError, match=f"^{line}") as caught:
        load_corpus(config(parts, **values))
    assert "\n" not in str(caught.value)


def test_too_little_of_a_part_is_named(parts: dict[str, str], write: Write) -> None:
    root = write({"short.txt": "abc", "empty.txt": ""})
    for paths, values, line in (
        ({"short": "short.txt"}, {}, r"data\.path\.short: training has 4 tokens, fewer than context \+ 1 = 11; give"),
        ({"empty": "empty.txt"}, {}, r"data\.path\.empty = .* holds no text \(1 files, all empty or binary\); give"),
        ({}, {"mixture": {"letters": 1, "digits": 1e-4}}, r"data\.mixture = .*: one has none of 42 sequences; raise"),
        ({}, {"validation_fraction": 0.1}, r"data\.validation_fraction gives 10 tokens of letters for validation, .*;"),
    ):
        of = config(parts | {name: str(root / file) for name, file in paths.items()}, **values)
        with pytest.raises(ValueError, match=f"^{line}"):
            Loader(load_corpus(of), of, context=CONTEXT)
    with pytest.raises(ValueError, match=r"^data\.path\.empty = .*empty\.txt' holds no text \(1 files, all empty\)"):
        check_sample(config(parts | {"empty": str(root / "empty.txt")}))


def test_a_sample_shows_a_text_shorter_than_a_sequence(parts: dict[str, str], write: Write) -> None:
    """By its bytes: these 10 are 10 ids, and perhaps one for the end; a sequence of context 11 has 12."""
    short = str(write({"short.txt": "ten bytes\n"}) / "short.txt")
    for of, where in (
        (config(short), r"data\.path"),
        (config(parts | {"short": short}), r"data\.path\.short"),
        (config(parts, validation_path={"short": short}, validation_fraction=0.05), r"data\.validation_path\.short"),
    ):
        check_sample(of, 10)
        line = rf"^{where} has at most 11 tokens, fewer than context \+ 1 = 12; give more text or a shorter context$"
        with pytest.raises(ValueError, match=line):
            check_sample(of, 11)
