"""Free composition: the verdict of every combination of parts, and legal ones that train, resume and count."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from itertools import combinations, product
from typing import Any

import pytest
import torch

import isles
from isles.comm.mesh import Mesh
from isles.replicas.methods.custom.config import CustomConfig
from isles.replicas.parts.legal import AXES, refusal, warnings
from tests.replicas.workers import HALVES, Net, bits, counted, load, save, train_step, weights

Choice = dict[str, str]
LINKS = isles.Links(bandwidth=2e6, latency=0.15, jitter=0.7)  # what is sent is still under way after the next step
STEPS, SAVE_AT = 6, 4
CADENCES: dict[str, dict[str, Any]] = {
    "every_h": {},
    "fragments": {"fragments": HALVES},
    "overlap": {"fragments": HALVES, "overlap_steps": 1},
    "one_round": {"outer_delay": 1},
    "more_rounds": {"outer_delay": 2},
}
FORMS = {"topk": "topk:40", "dct_topk": "dct_topk:40+int4", "randk": "randk:0.3", "powersgd": "powersgd:1+int8"}


def everything() -> Iterator[Choice]:
    return (dict(zip(AXES, members, strict=True)) for members in product(*AXES.values()))


def settings(choice: Choice) -> dict[str, Any]:
    """What a user writes for a choice."""
    own = {axis: choice[axis] for axis in ("mixing", "error_feedback", "reading", "rule", "landing")}
    codec = FORMS.get(choice["codec"], choice["codec"])
    return {"sync_every": 2, "codec": codec, **CADENCES[choice["cadence"]], **own}


def makes_sense(c: Choice) -> bool:
    """Design section 3, said once more in other words: what the table has to agree with."""
    late, lossy = c["cadence"] in ("overlap", "one_round", "more_rounds"), c["codec"] != "none"
    if c["mixing"] == "nobody" and (lossy or late or c["rule"] == "noloco"):
        return False
    if c["codec"] == "powersgd" and (c["mixing"] != "all" or c["reading"] == "eager"):
        return False
    if c["reading"] == "eager" and (c["cadence"] not in ("one_round", "more_rounds") or c["landing"] == "carry"):
        return False
    if c["landing"] == "carry" and c["cadence"] != "one_round":
        return False
    if c["error_feedback"] == "global" and c["cadence"] == "more_rounds":
        return False
    average_may = not late and c["error_feedback"] == "none" and c["codec"] in ("none", "randk")
    return c["rule"] != "average" or average_may


def test_every_combination_has_its_verdict() -> None:
    """All of them: refused exactly where the parts make no sense together, at the border, in one line that says what to
    choose; the others are settings that are accepted.
    """
    verdicts = {True: 0, False: 0}
    for choice in everything():
        line, sense = refusal(choice), makes_sense(choice)
        assert (line is None) == sense, choice
        verdicts[sense] += 1
        try:
            assert dict(CustomConfig(**settings(choice)).choice) == choice and sense
        except ValueError as error:
            assert not sense and str(error) == line
            assert "\n" not in line and "; choose " in line
    assert verdicts == {True: 3788, False: 12412}


def test_what_is_warned_about() -> None:
    """One choice for every row that warns, and none for DiLoCo, Streaming, Eager, NoLoCo, LocalSGD."""
    plain = {axis: members[0] for axis, members in AXES.items()} | {"rule": "nesterov"}
    for calm in (
        {},
        {"cadence": "overlap", "codec": "fp4", "landing": "blend"},
        {"cadence": "one_round", "reading": "eager"},
        {"mixing": "groups", "rule": "noloco"},
        {"rule": "average"},
        {"rule": "average", "codec": "randk"},
        {"codec": "powersgd", "error_feedback": "local"},
    ):
        assert warnings(plain | calm) == []
    for risky, word in (
        ({"mixing": "groups"}, "drift apart"),
        ({"codec": "sign"}, "never comes back"),
        ({"error_feedback": "global"}, "for nothing"),
        ({"rule": "noloco"}, "all anchors are equal"),
        ({"mixing": "groups", "rule": "noloco", "cadence": "one_round"}, "a round old"),
        ({"codec": "int4", "error_feedback": "local", "cadence": "more_rounds"}, "no more than one round"),
    ):
        (line,) = warnings(plain | risky)
        assert word in line and "; choose " in line and refusal(plain | risky) is None


@pytest.mark.parametrize(
    ("given", "reported"),
    [
        ({"group_size": 2}, "group_size = 2 has nothing to act on"),
        ({"rule": "average", "outer_lr": 0.7}, "outer_lr = 0.7 has nothing to act on"),
        ({"gamma": 0.7}, "choose rule = noloco"),
        ({"merge_alpha": 0.5}, "choose landing = blend"),
        ({"landing": "blend", "merge_alpha": 2}, "merge_alpha = 2"),
        ({"overlap_steps": 2, "outer_delay": 1}, "set one of them"),
        ({"overlap_steps": 50}, "overlap_steps = 50"),
        ({"every_step_until": 5, "overlap_steps": 1}, "every_step_until"),
        ({"rule": "noloco", "anchor_codec": "int4"}, "anchor_codec"),
        ({"rule": "nesterof"}, "nesterov"),
        ({"mixing": "pairs"}, "mixing"),
        ({"codec": "powersgd:0"}, "codec = powersgd:0: choose a rank of at least 1"),
        ({"codec": "powersgd"}, "did you mean 'powersgd:16'"),
        ({"first_sync": "offset"}, "several fragments only"),
        ({"rule": "sgd", "outer_lr": float("inf")}, "outer_lr = inf"),
        ({"codec": "powersgd:x"}, "a number behind the colon"),
        ({"layers_per_fragment": 1}, "layers_per_fragment = 1"),
    ],
)
def test_a_setting_acts_or_is_refused(given: dict[str, Any], reported: str) -> None:
    with pytest.raises(ValueError, match=reported):
        CustomConfig(**given)


@cache
def legal() -> list[Choice]:
    return [choice for choice in everything() if refusal(choice) is None]


def pairs(choice: Choice) -> set[tuple[tuple[str, str], tuple[str, str]]]:
    return set(combinations(sorted(choice.items()), 2))


@cache
def cover() -> list[Choice]:
    """Legal choices that hold every legal pair of members."""
    draw = random.Random(0)
    left = {pair for choice in legal() for pair in pairs(choice)}
    chosen: list[Choice] = []
    while left:
        best = max(draw.sample(legal(), 60), key=lambda choice: len(pairs(choice) & left))
        if not pairs(best) & left:
            wanted = min(left)
            best = next(choice for choice in legal() if wanted in pairs(choice))
        chosen.append(best)
        left -= pairs(best)
    return chosen


def run(world: Mesh, options: dict[str, Any], files: list[bytes] | None) -> dict[str, Any]:
    """STEPS steps; a checkpoint after SAVE_AT, or going on from one."""
    model = Net(seed=world.rank if files is None else 99)
    inner = torch.optim.AdamW(model.parameters(), lr=0.02)
    optimizer = isles.Custom(model, inner, world.outer, **options)
    log: list[Any] = []
    result: dict[str, Any] = {"planned": sum(each.bytes_sent[world.rank] for each in optimizer.schedule(STEPS))}
    opening = counted(world)["sent"]
    if files is not None:
        load(optimizer, files[world.rank])
    while optimizer.steps < STEPS:
        loss = train_step(optimizer, world.rank, optimizer.steps + 1)
        if optimizer.steps == SAVE_AT:
            result["file"] = save(optimizer)
        log.append((optimizer.steps, loss, world.transport.now(), counted(world), bits(weights(model))))
    optimizer.finish()
    result["sent"] = counted(world)["sent"] - opening
    log.append((world.transport.now(), counted(world), bits(weights(model))))
    assert weights(model).isfinite().all()
    return result | {"log": log}


def check(choice: Choice) -> None:
    options = settings(choice)
    first = isles.run_virtual(run, 4, links=LINKS, args=(options, None))
    again = isles.run_virtual(run, 4, links=LINKS, args=(options, [result["file"] for result in first]))
    for went_on, restored in zip(first, again, strict=True):
        assert went_on["log"][SAVE_AT:] == restored["log"], choice
        assert went_on["sent"] == went_on["planned"], choice


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in range(1, 8))])
def test_every_legal_pair_trains_resumes_and_counts(part: int) -> None:
    """Of two members: 6 steps on 4 virtual workers; from a checkpoint with transfers in flight losses, clocks, bytes
    and weights go on to the bit; bytes are as scheduled.
    """
    for choice in cover()[part::8]:
        check(choice)


@pytest.mark.long
@pytest.mark.parametrize("part", range(64))
def test_all_legal_ones_train_resume_and_count(part: int) -> None:
    """The same of every legal combination."""
    for choice in legal()[part::64]:
        check(choice)
