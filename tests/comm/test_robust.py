"""Robust means: by plain loops, the same bits at all, in both variants of the mean, and bounded under a liar."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import isles
from isles.comm.codecs import codec
from isles.comm.collectives import mean as means
from isles.comm.collectives.basic import Stamp
from isles.comm.collectives.mean import mean, working_bytes
from isles.comm.collectives.robust import robust_mean
from isles.comm.mesh import Mesh
from tests.comm.mean_workers import through

RULES = ("clip", "trimmed", "median")


def by_hand(rule: str, shares: list[list[float]]) -> list[float]:
    """Loops over lists, in float64."""
    count, cut = len(shares), 0
    if rule != "clip":
        cut = {"trimmed": (count + 1) // 4, "median": (count - 1) // 2}[rule]
    columns = [sorted(column) for column in zip(*shares, strict=True)]
    if rule != "clip" or count < 3:
        return [sum(column[cut : count - cut]) / (count - 2 * cut) for column in columns]
    agree = []
    for i, own in enumerate(shares):
        products = sorted(sum(x * y for x, y in zip(own, shares[j], strict=True)) for j in range(count) if j != i)
        agree.append(products[len(products) // 2])
    usual = sorted(agree)[(count - 1) // 2]
    shares = [share for share, one in zip(shares, agree, strict=True) if usual <= 0 or one >= usual / 2]
    center, count = by_hand("median", shares), len(shares)
    for _ in range(3):
        far = [sum((x - v) ** 2 for x, v in zip(share, center, strict=True)) ** 0.5 for share in shares]
        most = sorted(far)[(count - 1) // 2]
        factors = [min(1.0, most / length) if length else 0.0 for length in far]
        center = [
            v + sum(factor * (share[at] - v) for factor, share in zip(factors, shares, strict=True)) / count
            for at, v in enumerate(center)
        ]
    return center


def shares(count: int, elements: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """The last one is far from the others."""
    draw = torch.Generator().manual_seed(count)
    made = [torch.randn(elements, generator=draw, dtype=torch.float64).to(dtype) for _ in range(count)]
    made[-1] *= -7
    return made


@pytest.mark.parametrize("wrong", [-5.0, 0.0])
def test_who_does_not_agree_counts_nothing(wrong: float) -> None:
    """One of four goes back, or nowhere, and the others have less in common than apart: the mean is theirs."""
    draw = torch.Generator().manual_seed(4)
    given = [1.0 + 3.0 * torch.randn(30_000, generator=draw, dtype=torch.float64) for _ in range(4)]
    given[3] *= wrong
    out, theirs = torch.empty_like(given[0]), torch.stack(given[:3]).mean(0)
    robust_mean("clip", given, out)
    assert float((out - theirs).norm() / theirs.norm()) < 0.02


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("rule", RULES)
def test_the_rules_by_hand(rule: str, count: int) -> None:
    given = shares(count, 12)
    out = given[0]  # as in a mean, where the result takes the place of the own share
    expected = by_hand(rule, [share.tolist() for share in given])
    robust_mean(rule, given, out)
    assert out.tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_longer_shares_than_what_is_in_cache(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, pieces = torch.empty(50), torch.empty(50)
    robust_mean(rule, shares(4, 50, torch.float32), whole)
    monkeypatch.setattr("isles.comm.collectives.robust.BLOCK", 8)
    robust_mean(rule, shares(4, 50, torch.float32), pieces)
    assert torch.allclose(whole, pieces, rtol=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_a_far_share_moves_it_no_further_than_the_others_are_apart(rule: str) -> None:
    """A mean goes with it to the end of the world."""
    near = shares(4, 200)[:3]
    widest = max(float((one - two).norm()) for one in near for two in near)
    for far in (1e1, 1e6):
        out = torch.empty(200, dtype=torch.float64)
        robust_mean(rule, [*near, torch.full((200,), far, dtype=torch.float64)], out)
        assert float((out - sum(near[1:], near[0]) / 3).norm()) < widest


def exchanged(world: Mesh, rule: str, name: str, elements: int, broken: int) -> tuple[list[float], list[int], int]:
    group, mine = world.world, shares(world.size, elements, torch.float32)[world.rank]
    before = group.traffic.total("bytes_sent")
    call = group.call("outer", round=1)
    stamp = Stamp(1, broken=world.rank == broken)
    usable = group.start(mean(call, mine, codec(name), stamp, robust=rule)).wait()
    return mine.tolist(), list(usable), group.traffic.total("bytes_sent") - before


@pytest.mark.parametrize("name", ["none", "int8"])
@pytest.mark.parametrize(("count", "broken"), [(1, -1), (2, -1), (3, -1), (4, -1), (4, 1), (3, 2)])
@pytest.mark.parametrize("rule", ["clip", "median", "trimmed"])
def test_all_get_the_same_bits(rule: str, name: str, count: int, broken: int) -> None:
    """Of the usable shares; and send as many bytes as for a plain mean."""
    found = isles.run_virtual(exchanged, count, args=(rule, name, 301, broken))
    plain = isles.run_virtual(exchanged, count, args=("none", name, 301, broken))
    assert all(one[:2] == found[0][:2] for one in found)
    assert [one[2] for one in found] == [one[2] for one in plain]
    usable = found[0][1]
    assert usable == [position for position in range(count) if position != broken]
    if name == "none":  # shards of 4 workers: clipping looks at each by itself
        given, got = shares(count, 301, torch.float32), []
        for start, stop in means.cuts(301, count if count > 2 else 1, codec(name).block):
            got += by_hand(rule, [given[position][start:stop].tolist() for position in usable])
        assert found[0][0] == pytest.approx(got, rel=1e-4, abs=1e-5)
    elif len(usable) == 1:
        assert torch.allclose(torch.tensor(found[0][0]), through(name, shares(count, 301, torch.float32)[usable[0]]))


def different(world: Mesh) -> str:
    rule = "clip" if world.rank else "median"
    try:
        world.world.mean(torch.ones(40), codec("none"), robust=rule)
    except Exception as error:
        return str(error)
    return ""


def test_who_has_another_rule_is_named() -> None:
    assert all("exchanges something else" in said for said in isles.run_virtual(different, 2))


def test_memory_is_announced() -> None:
    plain = working_bytes(1000, torch.float32, codec("none"), 4)
    assert working_bytes(1000, torch.float32, codec("none"), 4, "median") == plain
    assert working_bytes(1000, torch.float32, codec("none"), 4, "clip") == plain + 2 * 250 * 4
    pair = working_bytes(999, torch.float32, codec("none"), 2)
    assert working_bytes(999, torch.float32, codec("none"), 2, "clip") == pair
