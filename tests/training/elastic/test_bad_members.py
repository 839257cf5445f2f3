"""A member whose shares cannot be: they are not used, and after three of them it is shut out; the others go on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from isles.comm.tags import Tag
from isles.membership.p2p.transport import ElasticTransport
from tests.training.elastic.runs import Run
from tests.training.elastic.test_runs import EVERY, events, leisurely, small

__all__ = ["leisurely"]


def not_numbers(sent: Tensor) -> Tensor:
    return torch.full_like(sent, 0xFF)  # as float32: NaN


def giant(sent: Tensor) -> Tensor:
    return torch.full((len(sent) // 4 + 1,), 1e12).view(torch.uint8)[: len(sent)].clone()


def immense(sent: Tensor) -> Tensor:
    return torch.full((len(sent) // 4 + 1,), 1e30).view(torch.uint8)[: len(sent)].clone()


def lies(transport: ElasticTransport, member: int, how: Callable[[Tensor], Tensor], monkeypatch: Any) -> None:
    """From now on what this member sends is not what it has; its headers say that all is well."""
    send = ElasticTransport.send

    def sends(self: ElasticTransport, peer: int, data: Tensor, tag: Tag) -> Any:
        bad = self.rank == member and tag.channel == "outer" and data.numel() > 1000
        return send(self, peer, how(data) if bad else data, tag)

    monkeypatch.setattr(ElasticTransport, "send", sends)


@pytest.mark.usefixtures("leisurely")
@pytest.mark.parametrize(
    ("method", "how", "why"),
    [
        ("noloco", not_numbers, "it is not finite"),
        pytest.param("noloco", giant, "times as large as usual", marks=pytest.mark.long),
        pytest.param("noloco", immense, "it is not finite", marks=pytest.mark.long),
        pytest.param("diloco", not_numbers, "it is not finite", marks=pytest.mark.long),
        pytest.param("diloco", giant, "times as large as usual", marks=pytest.mark.long),
    ],
)
@pytest.mark.filterwarnings("ignore:.*this round is done without it")
def test_it_is_shut_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, how: Callable[[Tensor], Tensor], why: str
) -> None:
    world = Run(small(tmp_path, 60_000, 3, f"replicas.method={method}"), tmp_path / "run")
    numbers = [world.join() for _ in range(3)]
    world.until(lambda: min(map(world.step, numbers)) >= 8 * EVERY)
    bad = world.workers[numbers[2]]
    member = bad.client.member
    lies(bad.transport, member, how, monkeypatch)  # type: ignore[arg-type]
    world.until(lambda: bool(events(world.out, "ban")))
    assert [one["member"] for one in events(world.out, "ban")] == [member]
    world.until(lambda: numbers[2] in world.end_reasons)
    assert bad.client.ended is not None and why in str(bad.client.ended), bad.client.ended
    reached = max(map(world.step, numbers[:2]))
    world.until(lambda: min(map(world.step, numbers[:2])) >= reached + 3 * EVERY)
    for number in numbers[:2]:
        weights = world.workers[number].optimizer.fragments[0].anchor
        assert weights.isfinite().all() and weights.norm() < 1e4
        world.workers[number].leaving.set()
    world.until(lambda: len(world.end_reasons) == 3)
    (row,) = [row for row in world.keeper.refused.table() if row["member"] == member and row["by"] < 0]
    assert row["reason"] == "a share that another worker refuses" and row["times"] >= 3
    said = f"the lighthouse refuses worker {member}: {row['reason']}"
    world.until(lambda: said in world.notices)  # it looks now and then
    world.stop()
    world.rest()
