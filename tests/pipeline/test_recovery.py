"""Lost stages: what they are made of, exactly; which ones are lost; routes whose ends are exchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import isles
from isles.models import Decoder, Shape
from isles.models.cuts import pieces
from isles.models.stages import Stage
from isles.network.routing.events import check_routes, in_flight, orders, visited
from isles.pipeline.config import RecoveryConfig
from isles.pipeline.recovery import Recovery, lost_stages, merged, refuse_neighbours, sources
from isles.pipeline.routers import exchanged_routes

SHAPE = Shape(d_model=8, layers=4, heads=2, ffn=12, vocab=20, context=6, tie_embeddings=True)
ONE, OTHER = torch.randn(2, 1000, generator=torch.Generator().manual_seed(1))


def test_identities_of_the_mean() -> None:
    assert torch.equal(merged(ONE, 0.7, OTHER, 0.7), (ONE + OTHER) / 2)
    assert torch.equal(merged(ONE, 0.3, OTHER, 0.0), ONE)
    assert torch.equal(merged(ONE, 0.0, OTHER, 0.3), OTHER)
    assert torch.equal(merged(ONE, 0.0, OTHER, 0.0), (ONE + OTHER) / 2)
    assert torch.allclose(merged(ONE, 3.0, OTHER, 1.0), 0.75 * ONE + 0.25 * OTHER, rtol=0, atol=1e-6)
    twice = merged(2 * ONE, 0.4, 2 * OTHER, 0.1)
    assert torch.allclose(twice, 2 * merged(ONE, 0.4, OTHER, 0.1), rtol=0, atol=1e-6)  # linear in the weights


def test_what_stages_are_made_of() -> None:
    assert [sources("checkfree", stage, 5) for stage in (1, 2, 3, 4)] == [(0, 2), (1, 3), (2, 4), (3,)]
    assert [sources("checkfree+", stage, 5) for stage in (1, 2, 3, 4)] == [(2,), (1, 3), (2, 4), (3,)]
    assert sources("copy", 2, 5) == (1,) and sources("random", 2, 5) == sources("checkpoint", 2, 5) == ()


def test_two_neighbours_lost_together_are_refused_in_a_line() -> None:
    with pytest.raises(ValueError, match="stages 2 and 3 are both lost after inner step 7") as refusal:
        refuse_neighbours(7, [2, 3], "checkfree", 6)
    assert "\n" not in str(refusal.value)
    refuse_neighbours(7, [2, 4], "checkfree", 6)
    refuse_neighbours(7, [2, 3], "checkpoint", 6)
    refuse_neighbours(7, [1, 2], "random", 6)


def test_losses_come_as_often_as_asked_and_never_to_the_first_stage() -> None:
    lost = [lost_stages(step, 6, 0.02, seed=3) for step in range(4000)]
    assert lost == [lost_stages(step, 6, 0.02, seed=3) for step in range(4000)]
    count = sum(map(len, lost))
    assert 320 < count < 480 and all(0 not in stages for stages in lost)  # 400, standard deviation 20
    assert lost_stages(5, 6, 0.0, seed=3) == []


@pytest.mark.parametrize("stages", [3, 4, 5, 6])
@pytest.mark.parametrize("replicas", [1, 2])
def test_half_of_the_microbatches_see_the_ends_exchanged(stages: int, replicas: int) -> None:
    for microbatches in (4, 8):
        routes = exchanged_routes(replicas, stages, microbatches)
        check_routes(routes, replicas * stages)
        assert set(visited(routes).values()) == {microbatches}
        orders(routes, in_flight("auto", replicas, stages))  # they can finish with so few in flight
        straight = [route for route in routes if list(route.visits) == sorted(route.visits)]
        assert len(straight) == len(routes) // 2
    if stages == 6 and replicas == 1:
        assert routes[1].visits == (0, 2, 1, 3, 5, 4)


def mended(world: Any, kind: str, seed: int, chance: float) -> dict[str, Any]:
    """One worker of 4 stages x 2 whose weights and gradients are numbers of its own."""
    torch.set_num_threads(1)
    mesh = isles.mesh(stage=4)
    parts = pieces((1, 2, 3), 4, loss_at_origin=True)
    at = mesh.coordinate.stage
    stage = Stage(Decoder(SHAPE, seed=1), parts[at])
    adamw = torch.optim.AdamW(stage.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(at)
    for parameter in stage.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    adamw.step()
    settings = RecoveryConfig(stage_loss=chance, kind=kind)  # type: ignore[arg-type]
    fresh = {name: torch.zeros_like(own) for name, own in stage.state_dict().items()}
    recovery = Recovery(stage, mesh, [1, 1, 1, 1], settings, seed, lambda draw: fresh)
    before = [own.detach().clone() for block in stage.blocks for own in block.parameters()]
    lost, factor = recovery.after_step(1, adamw)
    after = [own.detach().clone() for block in stage.blocks for own in block.parameters()]
    return {
        "stage": at,
        "lost": lost,
        "factor": factor,
        "before": before,
        "after": after,
        "norm": recovery.norm,
        "moments": len(adamw.state),
    }


@pytest.mark.parametrize("kind", ["checkfree", "copy", "random"])
def test_a_lost_stage_is_made_of_its_neighbours_with_empty_moments_and_a_higher_rate(kind: str) -> None:
    seed = next(seed for seed in range(1000) if lost_stages(1, 4, 0.2, seed) == [2])
    results = isles.run_virtual(mended, 8, links="lan", args=(kind, seed, 0.2))
    by_stage = {result["stage"]: result for result in results}
    for result in results:
        assert result["lost"] == [2]
        if result["stage"] != 2:
            assert result["factor"] == 1.0 and result["moments"] > 0
            assert all(torch.equal(one, other) for one, other in zip(result["before"], result["after"], strict=True))
            continue
        assert result["factor"] == 1.1 and result["moments"] == 0
        one, other = by_stage[1], by_stage[3]
        for before, after, own in zip(one["before"], other["before"], result["after"], strict=True):
            if kind == "checkfree":
                assert one["norm"] > 0 < other["norm"]
                assert torch.equal(own, merged(before, one["norm"], after, other["norm"]))
            elif kind == "copy":
                assert torch.equal(own, before)
            else:
                assert torch.equal(own, torch.zeros_like(own))


def test_stages_of_unequal_blocks_are_refused() -> None:
    stage = Stage(Decoder(SHAPE, seed=1), pieces((3,), 4, loss_at_origin=True)[0])
    settings = RecoveryConfig(stage_loss=0.1, kind="checkfree")
    with pytest.raises(ValueError, match="stages of 3, 1 blocks cannot stand in"):
        Recovery(stage, isles.mesh(), [3, 1], settings, 0, lambda draw: {})
