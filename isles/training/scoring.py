"""Multiple choice over a local JSONL file: which ending is the most likely one by the model?

    score(ending) = sum of log p(token | context, tokens before) over the ending's tokens
    accuracy            the ending with the highest score is right
    accuracy_norm       the same with score / bytes of the ending, so that long endings have no disadvantage

Layouts, recognised by their keys: HellaSwag (ctx, endings, label), PIQA (goal, sol1, sol2, label), ARC (question,
choices, answerKey).

Also the loss of a trained model with some of its stages dropped, exchanged, or with an early exit.

Stage 0 runs first in every order, as it embeds the tokens; norm and head come last, after any stage.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import combinations, islice, pairwise
from math import comb
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isles.base.marks import targets_of
from isles.base.parsing import parse_json
from isles.models.blocks import check_order, sharing
from isles.models.cuts import Piece, pieces
from isles.models.decoder import next_token_loss
from isles.models.stages import cuttable, logits_in_order
from isles.training.config.sections import Config
from isles.training.stage_runner import planned_cut
from isles.training.step import validation_loss


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
        text = row["question"]  # one form of ARC keeps stem and choices together, the other side by side
        stem, choices = (text["stem"], text["choices"]) if isinstance(text, dict) else (text, row["choices"])
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
        scores = [
            ending_score(question.context, continuation, logits, encode, context) for continuation in question.endings
        ]
        lengths = [max(len(continuation.encode()), 1) for continuation in question.endings]
        count += 1
        right += _best(scores) == question.answer
        right_norm += _best([score / size for score, size in zip(scores, lengths, strict=True)]) == question.answer
    if not count:
        raise ValueError("no questions in the file")
    return {"questions": count, "accuracy": right / count, "accuracy_norm": right_norm / count}


def ending_score(
    before: str, continuation: str, logits: Callable[[Tensor], Tensor], encode: Callable[[str], Any], context: int
) -> float:
    """Log probability, nats, of the ending's tokens after `before`."""
    head, whole = list(encode(before)), list(encode(before + continuation))
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


StageOrder = tuple[int, ...]
_SEED = 0
_MOST_ORDERS = 12
"""Judged for one point of a curve: all where there are no more, else so many drawn."""


def stages_of(config: Config, model: nn.Module) -> Sequence[Piece]:
    """The run's stages; if its model was not cut, its blocks. ValueError for a model without blocks."""
    if config.pipeline.stages > 1:
        return planned_cut(config).pieces
    layers = len(cuttable(sharing(model)).blocks)
    return pieces(range(1, layers), layers, loss_at_origin=False)


def asked_order(
    stages: int, *, drop: Sequence[int] = (), leave: int | None = None, order: Sequence[int] = ()
) -> StageOrder:
    """The stages that run: all but `drop`; those up to `leave`; or `order`. ValueError, with the option, for an order
    that is invalid for `stages` stages, or for several options at once.
    """
    if sum((bool(drop), leave is not None, bool(order))) > 1:
        raise ValueError("--drop-stages, --early-exit and --order each say which stages run: give one of them")
    if drop:
        check_order("--drop-stages", drop, stages, "stage")
    if leave is not None:
        check_order("--early-exit", [leave], stages, "stage")
        return tuple(range(leave + 1))
    made = tuple(order) if order else tuple(stage for stage in range(stages) if stage not in drop)
    check_order("--order", made, stages, "stage")
    if made[:1] != (0,):
        raise ValueError("stage 0 makes the stream of the tokens: it runs, and runs first")
    return made


def order_loss(
    model: nn.Module, batches: Iterable[Tensor], blocks: Sequence[int], autocast: AbstractContextManager[object]
) -> float:
    """Validation loss of `model` with only `blocks`, in their order."""

    def loss(tokens: Tensor) -> Tensor:
        return next_token_loss(logits_in_order(model, tokens[:, :-1], blocks), targets_of(tokens))

    return validation_loss(model, batches, autocast, loss)


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """Losses in nats over orders of one kind: dropped, exchanged (neighbours), or left early, so many of the stages."""

    kind: str
    count: int
    losses: tuple[float, ...]

    @property
    def mean(self) -> float:
        return sum(self.losses) / len(self.losses)


def curves(stages: int, loss: Callable[[StageOrder], float]) -> list[CurvePoint]:
    """The loss by number of dropped, exchanged and left out stages. loss: of an order of stages."""
    orders = {
        "dropped": [dropped(stages, count) for count in range(stages)],
        "exchanged": [exchanged(stages, count) for count in range((stages - 1) // 2 + 1)],
        "left early": [[tuple(range(stages - count))] for count in range(stages)],
    }
    return [
        CurvePoint(kind=kind, count=count, losses=tuple(map(loss, chosen)))
        for kind, by_count in orders.items()
        for count, chosen in enumerate(by_count)
    ]


def dropped(stages: int, count: int) -> list[StageOrder]:
    """Orders without `count` of the stages after the first: all of them, or some that are drawn."""
    later = range(1, stages)
    if comb(stages - 1, count) <= _MOST_ORDERS:
        left_out: Iterable[Sequence[int]] = combinations(later, count)
    else:
        rng = random.Random(_SEED)
        left_out = _different(lambda: tuple(sorted(rng.sample(later, count))))
    return [tuple(stage for stage in range(stages) if stage not in out) for out in left_out]


def exchanged(stages: int, count: int) -> list[StageOrder]:
    """Orders in which `count` pairs of neighbours after the first stage are exchanged; no stage is in two of them."""
    starts = [
        pairs
        for pairs in islice(combinations(range(1, stages - 1), count), 1 << 12)
        if all(later - before > 1 for before, later in pairwise(pairs))
    ]
    if len(starts) > _MOST_ORDERS:
        starts = random.Random(_SEED).sample(starts, _MOST_ORDERS)
    made = []
    for pairs in starts:
        order = list(range(stages))
        for first in pairs:
            order[first], order[first + 1] = order[first + 1], order[first]
        made.append(tuple(order))
    return made


def _different(draw: Callable[[], StageOrder]) -> list[StageOrder]:
    found: dict[StageOrder, None] = {}
    while len(found) < _MOST_ORDERS:
        found.setdefault(draw())
    return list(found)
