"""What the workers of an island tell each other: what all do next, what an attempt came to, and refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from isles.comm.errors import DeadlinePassed, Malformed, Refused
from isles.comm.mesh import Mesh
from isles.comm.virtual.cluster import run_virtual
from isles.membership.data_ledger import Batch
from isles.membership.rounds import Decision, IslandGroup, from_bytes, to_bytes
from isles.membership.session import OTHERS, Rejections, merge_rejections, read_rejections


def work(world: Mesh) -> Any:
    refused = Rejections()
    for _ in range(world.rank):
        refused.note(7, "too long")
    refused.note(-1, f"of {world.rank}")
    told = IslandGroup(world).gather_text(json.dumps(refused.rows()).encode())
    return merge_rejections(read_rejections(json.loads(one)) for one in told)


def test_what_all_places_refuse_is_counted_together() -> None:
    results = run_virtual(work, 3, links="lan")
    assert results == [[(-1, "of 0", 1), (-1, "of 1", 1), (-1, "of 2", 1), (7, "too long", 3)]] * 3


def test_reasons_of_many_places_do_not_fill_the_memory() -> None:
    rows = merge_rejections([[(member, f"why {number}", 2) for number in range(200)] for member in range(3)])
    assert len(rows) <= 257 and sum(times for *_, times in rows) == 1200 and (-1, OTHERS) in {row[:2] for row in rows}
    assert read_rejections(json.loads(json.dumps(rows))) == rows


TRAIN = Decision(kind="train", round=3, steps=8, slices=(Batch(7, (2, 1), 0, 1),), left_out={4: 2}, wait=0.5)


def test_a_decision_comes_as_it_was_made() -> None:
    assert from_bytes(to_bytes(TRAIN)) == TRAIN and from_bytes(to_bytes(Decision(kind="end"))) == Decision(kind="end")
    assert to_bytes(Decision(kind="idle")) == b'{"kind":"idle"}'


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"kind": "explode"}', "kind"),
        ('{"kind": "train", "round": "3"}', "round"),
        ('{"kind": "train", "round": 3.5}', "round"),
        ('{"kind": "train", "path": "/etc"}', "path"),
        ('{"kind": "exchange", "seconds": Infinity}', "seconds"),
        ('{"kind": "train", "slices": [[1, [2], 0]]}', "slices"),
        ('{"round": 3}', "kind"),
        ("[]", "object"),
        ('{"kind": "train"', "JSON"),
    ],
)
def test_what_is_no_decision_is_refused(text: str, named: str) -> None:
    with pytest.raises(ValueError, match=named) as told:
        from_bytes(text.encode())
    assert "\n" not in str(told.value)


def deciding(world: Mesh) -> list[Any]:
    """Two decisions of the leader, which alone is asked; then what three places have of an attempt."""
    island_size, asked = IslandGroup(world), list[str]()

    def made(kind: Any) -> Decision:
        asked.append(kind)
        return Decision(kind=kind, round=len(asked))

    said = [island_size.next_decision(lambda: made("train")), island_size.next_decision(lambda: made("keep"))]
    failed = list[tuple[int, int]]()
    island_size.failed = lambda round, attempt: failed.append((round, attempt))
    whole = island_size.combine(5, 0, 40 + island_size.island_rank, None, 9.0)
    late = island_size.combine(
        5,
        1,
        7 if island_size.island_rank else None,
        None if island_size.island_rank else DeadlinePassed(3, "outer", 9.0),
        9,
    )
    bad = island_size.combine(
        5, 2, 7 if island_size.island_rank else None, None if island_size.island_rank else Refused(3, "nan", -1), 9.0
    )
    lost = island_size.combine(5, 3, 7 if island_size.island_rank else None, None, 9.0)
    return [said, asked, failed, whole, late[0], type(late[1]), type(bad[1]), lost]


def test_all_places_get_what_the_leader_decides_and_one_outcome() -> None:
    results = run_virtual(deciding, 3, links="lan")
    both = [Decision(kind="train", round=1), Decision(kind="keep", round=2)]
    assert [one[0] for one in results] == [both] * 3
    assert [one[1] for one in results] == [["train", "keep"], [], []]
    assert [one[2] for one in results] == [[(5, 1), (5, 2), (5, 3)], [], []]  # where there was no answer
    assert len({str(one[3:]) for one in results}) == 1
    (digest, error), *rest = results[0][3:]
    assert isinstance(digest, int) and error is None
    assert rest == [None, DeadlinePassed, Refused, (None, None)]


def unfit(world: Mesh) -> str:
    """The leader says something that is none, as an older version of it would."""
    island_size = IslandGroup(world)
    if island_size.island_rank == 0:
        group, text = island_size._group, b'{"act": "train"}'
        assert group is not None
        group.broadcast(torch.tensor([len(text)], dtype=torch.int64))
        group.broadcast(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        return ""
    with pytest.raises(Malformed, match="an invalid decision: kind") as told:
        island_size.next_decision(lambda: Decision(kind="end"))
    return str(told.value)


def test_a_leader_that_says_something_else_is_named() -> None:
    assert "worker 0" in run_virtual(unfit, 2, links="lan")[1]
