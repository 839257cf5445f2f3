"""Islands: an outer method across, DDP or FSDP inside; each worker exchanges its share alone."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import isles
from isles.comm.mesh import Mesh
from isles.comm.transport import Deadlines
from tests.gloo import run_gloo
from tests.replicas.island_workers import RUNS, STEPS, Blocks, Case, train_all
from tests.replicas.workers import LINKS, adamw, batch

INSIDE = [Case(name, inside) for inside in ("ddp", "fsdp") for name in RUNS]
INSIDE += [Case("diloco", inside, max_norm=0.05) for inside in ("ddp", "fsdp")]
INSIDE += [Case("eager", inside, stop=4) for inside in ("ddp", "fsdp")]
FEW = [Case("noloco", "ddp"), Case("streaming, int4", "fsdp"), Case("diloco", "fsdp", max_norm=0.05)]
FEW += [Case("eager", "ddp"), Case("eager", "ddp", stop=4)]


def chosen(cases: list[Case]) -> list[Any]:
    """As parameters: the others than FEW are long."""
    return [pytest.param(case, marks=() if case in FEW else pytest.mark.long, id=str(case)) for case in cases]


def ran(case: Case) -> tuple[list[Any], list[Any]]:
    """The results of the case on each of two islands' two real workers, and on two that have an island's batch each."""
    cases = FEW if case in FEW else INSIDE
    i = cases.index(case)
    return [own[i] for own in islands(len(cases))], [own[i] for own in replicas(len(cases))]


@cache
def islands(count: int) -> list[Any]:
    return run_gloo(train_all, 4, args=(_cases(count),))


@cache
def replicas(count: int) -> list[Any]:
    alone = [Case(case.name, inner=1, island=2, max_norm=case.max_norm) for case in _cases(count)]
    return isles.run_virtual(train_all, 2, links=LINKS, args=(alone,))


def _cases(count: int) -> list[Case]:
    return FEW if count == len(FEW) else INSIDE


@pytest.mark.parametrize("case", chosen(INSIDE))
def test_an_island_is_one_replica_with_its_workers_batches(case: Case) -> None:
    """The final model, the judged anchors and the spread; int4 has other blocks in shares than in whole matrices."""
    apart = 2e-2 if "int4" in case.name else 1e-6
    together, alone = ran(case)
    for rank, own in enumerate(together):
        replica = alone[rank // 2]
        torch.testing.assert_close(own["weights"], replica["weights"], rtol=0, atol=apart)
        assert own["loss"] == pytest.approx(replica["loss"], abs=apart)
        assert own["std"] == pytest.approx(replica["std"], abs=apart)
    assert len({own["bits"] for own in together}) == 1


@pytest.mark.parametrize("case", chosen([case for case in INSIDE if case.name in ("diloco", "noloco")]))
def test_a_worker_of_an_island_sends_its_share_across(case: Case) -> None:
    """An island's entries cross once, so its two workers together send what the replica did, but for headers."""
    together, alone = ran(case)
    headers = 3 * 32 * (2 if case.name == "noloco" else 1)
    for island in (together[:2], together[2:]):
        assert sum(own["sent"]["outer"] for own in island) == alone[0]["sent"]["outer"] + headers


@pytest.mark.parametrize("case", chosen([case for case in INSIDE if case.stop is None]))
def test_the_plan_knows_every_byte(case: Case) -> None:
    """Across, inside and at the start; judging is counted apart."""
    for result in ran(case)[0]:
        assert result["planned"] == sum(result["sent"][channel] for channel in ("outer", "inner", "control"))


@pytest.mark.parametrize("inside", ["ddp", pytest.param("fsdp", marks=pytest.mark.long)])
def test_a_checkpoint_goes_on_with_the_same_bits(inside: str) -> None:
    stopped, whole = (ran(Case("eager", inside, stop=stop))[0] for stop in (4, None))
    assert [own["bits"] for own in stopped] == [own["bits"] for own in whole]


def test_shards_hold_their_rows_only() -> None:
    """Weights and inner state of a worker: with FSDP about half (rows do not divide), with DDP everything."""
    whole = sum(p.numel() for p in Blocks().parameters())
    for inside, least, most in (("ddp", 1.0, 1.04), ("fsdp", 0.45, 0.6)):
        name = next(case.name for case in FEW if case.inside == inside)
        for own in ran(Case(name, inside))[0]:
            assert least * whole <= own["held"] <= most * whole
            assert own["state"] <= 2 * most * whole


def test_virtual_and_gloo_are_equal_to_the_bit() -> None:
    cases = [case for case in FEW if case.inside == "ddp" and case.stop is None]
    virtual = isles.run_virtual(train_all, 4, links=LINKS, args=(cases,))
    for rank, own in enumerate(virtual):
        for case, result in zip(cases, own, strict=True):
            real = ran(case)[0][rank]
            assert {key: result[key] for key in ("bits", "loss", "sent", "std")} == {
                key: real[key] for key in ("bits", "loss", "sent", "std")
            }, str(case)


def refusals(world: Mesh) -> list[str]:
    """The lines of everything that islands cannot be."""
    islands = isles.mesh(inner=2)
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
        lambda: isles.mesh(inner=3),
        lambda: across(isles.NoLoCo, inside(), on_peer_failure="solo"),
    ]
    found = []
    for attempt in tries:
        with pytest.raises(ValueError) as caught:
            attempt()
        found.append(str(caught.value))
    return found


def test_what_islands_cannot_be_is_refused_with_the_hint() -> None:
    wanted = [
        "needs a process for each worker",
        "call model = isles.shard",
        "inside islands use DDP or FSDP",
        "across islands use an outer method",
        "give it to the method inside",
        "give world.inner and world.outer",
        "inner=3",
        'choose "raise"',
    ]
    for reported in isles.run_virtual(refusals, 4, links=LINKS):
        for line, part in zip(reported, wanted, strict=True):
            assert part in line and "\n" not in line, line


def moved_alone(world: Mesh) -> None:
    islands = isles.mesh(inner=1)
    model = Blocks()
    optimizer = isles.LocalSGD(model, isles.DDP(model, adamw(model), islands.inner), islands.outer, sync_every=1)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()


def test_a_model_that_was_moved_is_refused_in_an_island_of_one_too() -> None:
    with pytest.raises(ValueError, match="move it before"):
        isles.run_virtual(moved_alone, 2, links=LINKS)


def halves(world: Mesh) -> list[dict[str, float]]:
    """DiLoCoX across islands: one worker's share of the only matrix learns a direction, the other's all of them."""
    islands = isles.mesh(inner=2)
    model = nn.Linear(24, 64, bias=False)
    inside = isles.DDP(model, torch.optim.SGD(model.parameters(), lr=0.05), islands.inner)
    settings = {"sync_every": 4, "rank": 4, "start_compress": 1, "window": 1}
    optimizer = isles.DiLoCoX(model, inside, islands.outer, **settings)
    seen = []
    for step in range(1, 25):
        draw = torch.Generator().manual_seed(1000 * world.rank + step)
        x = torch.randn(16, 24, generator=draw)
        target = torch.cat((x[:, :1].expand(16, 32), torch.randn(16, 32, generator=draw)), 1)
        F.mse_loss(model(x), target, reduction="sum").div(16).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(optimizer.gauges())
    return seen


def test_ranks_and_rounds_are_the_islands() -> None:
    """Workers that chose H by themselves would wait for each other in different steps."""
    results = isles.run_virtual(halves, 4, links=LINKS)
    for own in results:
        assert [gauges["rank"] for gauges in own] == [gauges["rank"] for gauges in results[0]]
        assert [gauges["sync_every"] for gauges in own] == [gauges["sync_every"] for gauges in results[0]]


def planned_and_patient(world: Mesh) -> tuple[bool, float, list[str]]:
    islands = isles.mesh(outer=2, inner=2, deadlines=Deadlines(outer=900.0))
    model = Blocks()
    inside = isles.DCTDP(model, adamw(model), islands.inner, exclude_below=8)
    optimizer = isles.DiLoCo(model, inside, islands.outer, sync_every=2)
    held = [held.what for held in optimizer.memory()]
    return optimizer.outline(4).about, islands.inner.deadlines.inner, held


def test_an_island_waits_as_long_as_its_members_do_and_says_what_it_holds() -> None:
    """A member may be waiting across islands; its own must not call it lost meanwhile."""
    for about, patience, held in isles.run_virtual(planned_and_patient, 4, links=LINKS):
        assert about and patience == 900.0
        assert held.count("weights and their mean") == held.count("shares of the island") == 1


class Own(nn.Module):
    """One's own kind of model: no rows for a second worker, strides, a block called twice, two that share a weight, a
    list in a list; returns a `kind`.
    """

    def __init__(self, kind: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.one = nn.Parameter(torch.randn(1, 5))
        self.turned = nn.Parameter(torch.randn(9, 5).T)
        again = nn.Linear(9, 9)
        self.blocks = nn.ModuleList([again, again, *(nn.Linear(9, 9) for _ in range(3))])
        self.blocks.append(nn.ModuleList([nn.Linear(9, 9)]))
        self.blocks[3].weight = self.blocks[2].weight  # type: ignore[assignment]
        self.end = nn.Linear(9, 7)
        self.register_buffer("seen", torch.tensor([True, False]))

    def forward(self, x: Tensor) -> Any:
        x = (x + self.one) @ self.turned
        for block in self.blocks:
            x = x + torch.tanh(block[0](x) if isinstance(block, nn.ModuleList) else block(x))
        return self.kind(out=self.end(x))


class Hidden:
    def __init__(self, out: Tensor) -> None:
        self.out = out


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 9), nn.Linear(9, 7, dtype=torch.float64)


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


def strange(world: Mesh) -> tuple[float, int, list[str]]:
    """How far `Own` is from plain training, bytes that the plan did not know, and what is told of models that fsdp
    cannot take.
    """
    model = isles.shard(Own(dict), world.outer)
    optimizer, plain = isles.FSDP(model, adamw(model), world.outer), Own(dict)
    theirs, before = adamw(plain), world.world.traffic["outer"].bytes_sent
    for step in range(2):
        x, y = batch(world.rank, step)
        F.mse_loss(optimizer.model(x)["out"], y).backward()
        optimizer.step()
        optimizer.zero_grad()
        x, y = (torch.cat(parts) for parts in zip(*(batch(worker, step) for worker in range(2)), strict=True))
        F.mse_loss(plain(x)["out"], y).backward()
        theirs.step()
        theirs.zero_grad()
    unknown = world.world.traffic["outer"].bytes_sent - before - optimizer.outline(2).sent[world.rank]
    mine = optimizer.consolidate().state_dict()
    reported = []
    for attempt in (Mixed, Scalar, lambda: Own(Hidden)):
        with pytest.raises(ValueError) as caught:
            isles.shard(attempt(), world.outer)(batch(0, 0)[0])
        reported.append(str(caught.value))
    apart = max(float((mine[name].double() - held.double()).abs().max()) for name, held in plain.state_dict().items())
    return apart, unknown, reported


def test_fsdp_takes_strange_models_or_says_why_not() -> None:
    for apart, unknown, reported in run_gloo(strange, 2):
        assert apart < 1e-5 and unknown == 0
        for line, part in zip(reported, ["in one format", "give it the shape (1,)", "return a tensor"], strict=True):
            assert part in line and "\n" not in line


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


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.long), 3])
def test_fsdp_alone_is_plain_training_on_all_batches(workers: int) -> None:
    """Accumulation, clipping, weights that are kept after the forward pass, rows that three workers do not divide."""
    for apart, _ in run_gloo(sharded_alone, workers):
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
