"""The multiple-choice scorer against hand-made models, in all three layouts."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from isles.training.scoring import Question, accuracies, ending_score, parse_question, read_questions


def encode(text: str) -> list[int]:
    return list(text.encode())


def likes_a(tokens_BT: Tensor) -> Tensor:
    """p(a) = 1/2 everywhere, the other 255 bytes share the rest."""
    p = torch.full((256,), 0.5 / 255)
    p[ord("a")] = 0.5
    return p.log().expand(*tokens_BT.shape, 256)


def test_scores_are_sums_of_log_probabilities_of_the_ending_alone() -> None:
    """By hand: two a's and a b, whatever stands before; also where the context is cut, and as short as it gets."""
    expected = 2 * math.log(0.5) + math.log(0.5 / 255)
    for context in (100, 5, 3):
        assert ending_score("some words ", "aab", likes_a, encode, context) == pytest.approx(expected, rel=1e-5)
    assert ending_score("some words ", "aab", likes_a, encode, 2) == pytest.approx(
        math.log(0.5) + math.log(0.5 / 255), rel=1e-5
    )


def test_length_normalisation_changes_the_choice() -> None:
    """A long likely ending loses to a short one by sum, and wins by byte."""
    questions = [Question("x ", ("aaaaaaaaaaaaaaaaaaaa", "b"), 0)]
    assert accuracies(iter(questions), likes_a, encode, 64) == {"questions": 1, "accuracy": 0.0, "accuracy_norm": 1.0}


def test_all_layouts() -> None:
    """HellaSwag, PIQA, and both forms of ARC."""
    assert parse_question({"ctx": "He", "endings": ["runs", "sits"], "label": "1"}) == Question(
        "He ", ("runs", "sits"), 1
    )
    assert parse_question({"goal": "g", "sol1": "a", "sol2": "b", "label": 0}) == Question("g ", ("a", "b"), 0)
    arc = Question("Question: q\nAnswer: ", ("x", "y"), 1)
    assert (
        parse_question({"question": "q", "choices": {"text": ["x", "y"], "label": ["A", "B"]}, "answerKey": "B"}) == arc
    )
    choices = [{"text": "x", "label": "1"}, {"text": "y", "label": "2"}]
    assert parse_question({"question": {"stem": "q", "choices": choices}, "answerKey": "2"}) == arc


@pytest.mark.parametrize(
    "line",
    ["{", "{}", "[]", '{"ctx": "a", "endings": ["b"], "label": 3}', '{"goal": "g", "label": 0}', '{"question": 3}'],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    """File and line number, in one line."""
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps({"goal": "g", "sol1": "a", "sol2": "b", "label": 0}) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=r"q\.jsonl, line 2: ") as caught:
        list(read_questions(path))
    assert "\n" not in str(caught.value)


def test_lengths_are_bytes() -> None:
    """One "é" is two bytes, so by byte it beats a "b" of one, which it loses to by the sum."""
    questions = [Question("x ", ("é", "b"), 0)]

    def likes_c3(tokens_BT: Tensor) -> Tensor:
        p = torch.full((256,), 0.4 / 255)
        p["é".encode()[0]] = 0.6
        return p.log().expand(*tokens_BT.shape, 256)

    assert accuracies(iter(questions), likes_c3, encode, 64) == {"questions": 1, "accuracy": 0.0, "accuracy_norm": 1.0}
