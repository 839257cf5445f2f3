"""`replicas.robust` in the methods: what their anchors come to with a wrong share, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import isles
from benchmarks.liars import one_run
from isles.comm.mesh import Mesh
from isles.training.config.reading import gather, resolve
from tests.replicas.workers import Net, wrap

RULES = ("clip", "trimmed", "median")


def learned(world: Mesh, name: str, options: dict[str, Any], liar: int) -> list[Tensor]:
    """Two rounds of one step, in which each weight of a worker falls by 0.1 times its rank + 1; the liar's rises."""
    model = Net(0)
    optimizer = wrap(world, name, model, lambda own: torch.optim.SGD(own.parameters(), lr=0.1), **options)
    for _ in range(2 * options.get("sync_every", 1)):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, -20.0 if world.rank == liar else world.rank + 1.0)
        optimizer.step()
    optimizer.consolidate()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["localsgd", "fedavg"])
def test_one_wrong_share_of_four_hardly_counts(name: str, rule: str) -> None:
    """Steps are -0.1, -0.2, -0.3 and 2.0: the mean rises, and what is robust falls, alike at all."""
    start = [parameter.detach() for parameter in Net(0).parameters()]
    plain = isles.run_virtual(learned, 4, args=(name, {"sync_every": 1}, 3))
    found = isles.run_virtual(learned, 4, args=(name, {"sync_every": 1, "robust": rule}, 3))
    for worker in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], worker, strict=True))
    for before, mean, robust in zip(start, plain[0], found[0], strict=True):
        assert torch.allclose(mean - before, torch.tensor(2 * 0.35), atol=1e-5)
        if rule == "clip":
            assert bool(((robust - before) < -0.1).all()) and bool(((robust - before) > -0.6).all())
        else:
            assert torch.allclose(robust - before, torch.tensor(2 * -0.15), atol=1e-5)


@pytest.mark.parametrize("rule", RULES)
def test_of_pairs_the_last_model_is_robust(rule: str) -> None:
    """A pair has no majority, and exchanges a mean; at the end all four have one."""
    options = {"sync_every": 2, "robust": rule, "on_peer_failure": "raise"}
    plain = isles.run_virtual(learned, 4, args=("noloco", {**options, "robust": "none"}, -1))
    found = isles.run_virtual(learned, 4, args=("noloco", options, -1))
    assert all(torch.equal(one, other) for one, other in zip(found[0], found[3], strict=True))
    assert all(torch.allclose(one, other, atol=0.3) for one, other in zip(found[0], plain[0], strict=True))
    assert any(not torch.equal(one, other) for one, other in zip(found[0], plain[0], strict=True))


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("fedavg", {"codec": "topk:64"}, "are no vectors that can be compared entry by entry"),
        ("diloco", {"codec": "powersgd:2"}, "are no vectors that can be compared entry by entry"),
        ("dilocox", {}, "are no vectors that can be compared entry by entry"),
        ("diloco", {"codec": "int8", "error_feedback": "global"}, "sends again what the rule has left out"),
        ("sparta", {}, "a worker keeps what did not get into the mean"),
        ("eager", {}, "an own share counts at once"),
        ("custom", {"reading": "eager", "outer_delay": 1}, "an own share counts at once"),
        ("diloco", {"weights": "samples"}, "counts all workers alike"),
    ],
)
def test_where_it_is_refused(name: str, options: dict[str, Any], why: str) -> None:
    """By a worker, and before by the configuration: so a lighthouse does not start what every joiner would refuse."""
    settings = [f"replicas.{key}={value}" for key, value in {"method": name, "robust": "median", **options}.items()]
    with pytest.raises(ValueError, match=f"replicas.*({why.removeprefix('an ')}|in such a form)"):
        resolve(gather(None, {}, settings))

    def made(world: Mesh) -> str:
        try:
            wrap(world, name, Net(0), robust="median", **options)
        except ValueError as error:
            return str(error)
        return ""

    assert all('robust = "median"' in said and why in said for said in isles.run_virtual(made, 2))


def test_an_unknown_rule_is_a_line() -> None:
    with pytest.raises(ValueError, match=r"robust.*krum"):
        resolve(gather(None, {}, ["replicas.method=diloco", "replicas.robust=krum"]))


@pytest.mark.long
def test_what_one_liar_of_four_costs() -> None:
    """A part of the job that docs/elastic.md has: a liar that knows the others' shares, and stays near them."""
    without = one_run("none", "none", 0, 60, workers=3)
    assert one_run("clip", "alike", 0, 60) < without + 0.02
