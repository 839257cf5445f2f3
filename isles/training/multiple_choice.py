"""Multiple choice over a local JSONL file: which ending does the model find likeliest?

    score(ending) = sum of log p(token | context, tokens before) over the ending's tokens
    accuracy            the ending with the highest score is right
    accuracy_norm       the same with score / bytes of the ending, so that long endings are not at a loss

Layouts, told by their keys: HellaSwag (ctx, endings, label), PIQA (goal, sol1, sol2, label), ARC (question, choices,
answerKey).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isles.parsing import parse_json


@dataclass(frozen=True, slots=True)
class Question:
    """A context, its endings, and the index of the right one."""

    context: str
    endings: tuple[str, ...]
    answer: int


def read_questions(path: Path) -> Iterator[Question]:
    """The questions of a JSONL file; ValueError names file, line and what is wrong."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield parse_question(parse_json(line))
            except (KeyError, TypeError, ValueError, IndexError) as error:
                raise ValueError(
                    f"{path}, line {number}: no question of HellaSwag, PIQA or ARC layout ({error!r})"
                ) from error


def parse_question(row: dict[str, Any]) -> Question:
    """One row of any of the three layouts."""
    if "endings" in row:
        question = Question(row["ctx"] + " ", tuple(row["endings"]), int(row["label"]))
    elif "goal" in row:
        question = Question(row["goal"] + " ", (row["sol1"], row["sol2"]), int(row["label"]))
    else:
        asked = row["question"]  # one form of ARC keeps stem and choices together, the other side by side
        stem, choices = (asked["stem"], asked["choices"]) if isinstance(asked, dict) else (asked, row["choices"])
        if isinstance(choices, dict):
            labels, texts = list(choices["label"]), list(choices["text"])
        else:
            labels, texts = [choice["label"] for choice in choices], [choice["text"] for choice in choices]
        question = Question(f"Question: {stem}\nAnswer: ", tuple(texts), labels.index(row["answerKey"]))
    if not 0 <= question.answer < len(question.endings):
        raise ValueError(f"label {question.answer} of {len(question.endings)} endings")
    return question


@torch.no_grad()
def accuracies(
    questions: Iterator[Question], logits: Callable[[Tensor], Tensor], encode: Callable[[str], Any], context: int
) -> dict[str, float]:
    """{"questions", "accuracy", "accuracy_norm"}. logits: (1, T) int64 -> (1, T, V); context: longest T; the text's
    start is cut.
    """
    count = right = right_norm = 0
    for question in questions:
        scores = [ending_score(question.context, ending, logits, encode, context) for ending in question.endings]
        lengths = [max(len(ending.encode()), 1) for ending in question.endings]
        count += 1
        right += _best(scores) == question.answer
        right_norm += _best([score / size for score, size in zip(scores, lengths, strict=True)]) == question.answer
    if not count:
        raise ValueError("no questions in the file")
    return {"questions": count, "accuracy": right / count, "accuracy_norm": right_norm / count}


def ending_score(
    before: str, ending: str, logits: Callable[[Tensor], Tensor], encode: Callable[[str], Any], context: int
) -> float:
    """Log probability, nats, of the ending's tokens after `before`."""
    head, whole = list(encode(before)), list(encode(before + ending))
    # A tokenizer may join the last character of the context with the ending: what they share counts as context.
    shared = next((i for i, (a, b) in enumerate(zip(head, whole, strict=False)) if a != b), min(len(head), len(whole)))
    tokens = torch.tensor(whole, dtype=torch.int64, device="cpu")[-(context + 1) :]
    ending_tokens = min(len(whole) - max(shared, 1), len(tokens) - 1)
    if ending_tokens < 1:
        return 0.0
    log_p_TV = logits(tokens[None, :-1])[0].float().log_softmax(-1).cpu()
    return float(log_p_TV[-ending_tokens:].gather(1, tokens[-ending_tokens:, None]).sum())


def _best(scores: list[float]) -> int:
    return max(range(len(scores)), key=scores.__getitem__)
