"""Islands: an outer method across, DDP or FSDP inside; each worker exchanges its share alone."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
import torch

import isles
from isles.comm.mesh import Mesh
from tests.replicas.island_workers import RUNS, STEPS, Blocks, Case, train_all
from tests.replicas.workers import LINKS, adamw, batch

INSIDE = [Case(name, inside) for inside in ("ddp", "fsdp") for name in RUNS]
INSIDE += [Case("diloco", inside, max_norm=0.05) for inside in ("ddp", "fsdp")]
INSIDE += [Case("eager", inside, stop=4) for inside in ("ddp", "fsdp")]
ALONE = {case: Case(case.name, inner=1, island=2, max_norm=case.max_norm) for case in INSIDE}


@cache
def islands() -> list[Any]:
    """Two islands of two real workers."""
    return isles.run_local(train_all, 4, args=(INSIDE,))


@cache
def replicas() -> list[Any]:
    """Two workers, each with the batch of an island."""
    return isles.run_virtual(train_all, 2, links=LINKS, args=([ALONE[case] for case in INSIDE],))


@pytest.mark.parametrize("case", INSIDE, ids=str)
def test_an_island_is_one_replica_with_its_workers_batches(case: Case) -> None:
    """The final model, the judged anchors and the spread; int4 has other blocks in shares than in whole matrices."""
    i = INSIDE.index(case)
    apart = 2e-2 if "int4" in case.name else 1e-6
    for rank, own in enumerate(islands()):
        replica = replicas()[rank // 2][i]
        torch.testing.assert_close(own[i]["weights"], replica["weights"], rtol=0, atol=apart)
        assert own[i]["loss"] == pytest.approx(replica["loss"], abs=apart)
        assert own[i]["std"] == pytest.approx(replica["std"], abs=apart)
    assert len({own[i]["bits"] for own in islands()}) == 1


@pytest.mark.parametrize("case", [case for case in INSIDE if case.name in ("diloco", "noloco")], ids=str)
def test_a_worker_of_an_island_sends_its_share_across(case: Case) -> None:
    """An island's entries cross once, so its two workers together send what the replica did, but for headers."""
    i, headers = INSIDE.index(case), 3 * 32 * (2 if case.name == "noloco" else 1)
    for island in (islands()[:2], islands()[2:]):
        sent = sum(own[i]["sent"]["outer"] for own in island)
        assert sent == replicas()[0][i]["sent"]["outer"] + headers


@pytest.mark.parametrize("case", [case for case in INSIDE if case.stop is None], ids=str)
def test_the_plan_knows_every_byte(case: Case) -> None:
    """Across, inside and at the start; judging is counted apart."""
    for own in islands():
        result = own[INSIDE.index(case)]
        assert result["planned"] == sum(result["sent"][channel] for channel in ("outer", "inner", "control"))


@pytest.mark.parametrize("inside", ["ddp", "fsdp"])
def test_a_checkpoint_goes_on_with_the_same_bits(inside: str) -> None:
    stopped, whole = INSIDE.index(Case("eager", inside, stop=4)), INSIDE.index(Case("eager", inside))
    for own in islands():
        assert own[stopped]["bits"] == own[whole]["bits"]


def test_shards_hold_their_rows_only() -> None:
    """Weights and inner state of a worker: with FSDP about half (rows do not divide), with DDP everything."""
    whole = sum(p.numel() for p in Blocks().parameters())
    for inside, least, most in (("ddp", 1.0, 1.04), ("fsdp", 0.45, 0.6)):
        i = INSIDE.index(Case("diloco", inside))
        for own in islands():
            assert least * whole <= own[i]["held"] <= most * whole
            assert own[i]["state"] <= 2 * most * whole


def test_virtual_and_gloo_are_equal_to_the_bit() -> None:
    cases = [case for case in INSIDE if case.inside == "ddp" and case.stop is None]
    virtual = isles.run_virtual(train_all, 4, links=LINKS, args=(cases,))
    for rank, own in enumerate(virtual):
        for case, result in zip(cases, own, strict=True):
            real = islands()[rank][INSIDE.index(case)]
            assert {key: result[key] for key in ("bits", "loss", "sent", "std")} == {
                key: real[key] for key in ("bits", "loss", "sent", "std")
            }, str(case)


def refusals(world: Mesh) -> list[str]:
    """The lines of everything that islands cannot be."""
    islands = world.islands(2)
    model = Blocks()

    def inside(**options: Any) -> isles.ReplicaSync:
        return isles.DDP(model, adamw(model), islands.inner, **options)

    def across(kind: Any, own: Any, **options: Any) -> Any:
        return kind(model, own, islands.outer, **options)

    tries = [
        lambda: isles.shard(Blocks(), islands.inner),
        lambda: isles.FSDP(model, adamw(model), islands.inner),
        lambda: across(isles.DiLoCo, isles.DiLoCo(model, adamw(model), islands.inner)),
        lambda: across(isles.DDP, inside()),
        lambda: across(isles.DiLoCo, inside(), max_norm=1.0),
        lambda: isles.DiLoCo(model, inside(), islands.inner),
        lambda: world.islands(3),
    ]
    found = []
    for attempt in tries:
        with pytest.raises(ValueError) as caught:
            attempt()
        found.append(str(caught.value))
    return found


def test_what_islands_cannot_be_is_refused_with_the_mend() -> None:
    wanted = [
        "needs a process for each worker",
        "call model = isles.shard",
        "inside islands use DDP or FSDP",
        "across islands use an outer method",
        "give it to the method inside",
        "give world.inner and world.outer",
        "inner=3",
    ]
    for told in isles.run_virtual(refusals, 4, links=LINKS):
        for line, part in zip(told, wanted, strict=True):
            assert part in line and "\n" not in line, line


def sharded_alone(world: Mesh) -> tuple[float, float]:
    """FSDP over the whole world against plain training on everyone's batches, accumulated in two halves."""
    model = isles.shard(Blocks(), world.outer, reshard_after_forward=False)
    optimizer = isles.FSDP(model, adamw(model), world.outer, reshard_after_forward=False, max_norm=0.1)
    plain = Blocks()
    theirs = adamw(plain)
    for step in range(STEPS):
        for half in range(2):
            x, y = batch(2 * world.rank + half, step)
            loss = (optimizer.model(x) - y).square().mean() / 2
            if half:
                loss.backward()
            else:
                with optimizer.no_sync():
                    loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with optimizer.evaluation_weights() as judged, torch.no_grad():
            shown = judged(batch(9, step)[0])
        pairs = [batch(worker, step) for worker in range(2 * world.size)]
        x, y = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        (plain(x) - y).square().mean().backward()
        torch.nn.utils.clip_grad_norm_([p for p in plain.parameters() if p.requires_grad], 0.1)
        theirs.step()
        theirs.zero_grad()
        assert torch.allclose(shown, plain(batch(9, step)[0]), atol=1e-5)  # judged with the weights of now
    mine = optimizer.consolidate().state_dict()
    return max(float((mine[name] - held).abs().max()) for name, held in plain.state_dict().items()), float(loss)


@pytest.mark.parametrize("workers", [1, 3])
def test_fsdp_alone_is_plain_training_on_all_batches(workers: int) -> None:
    """Accumulation, clipping, weights that are kept after the forward pass, rows that three workers do not divide."""
    for apart, _ in isles.run_local(sharded_alone, workers):
        assert apart < 1e-5


def lost(world: Mesh) -> str:
    """What a worker hears when worker 1 of its island goes away in the middle of a step."""
    model = isles.shard(Blocks(), world.outer)
    optimizer = isles.FSDP(model, adamw(model), world.outer)
    for step in range(3):
        if world.rank == 1 and step == 2:
            raise RuntimeError("gone")
        (model(batch(world.rank, step)[0])).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return "finished"


def test_a_lost_worker_of_fsdp_is_named() -> None:
    results = isles.run_local(lost, 2, return_errors=True)
    assert re.search("worker 1|PeerLost", str(results[0])), results
