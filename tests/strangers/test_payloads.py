"""A peer that takes part and sends what cannot be a share: it is named, by all, and nobody else takes the blame."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isles
from isles.comm.codecs import codec
from isles.comm.collectives.basic import HEADER_BYTES, Stamp
from isles.comm.collectives.mean import mean, refusal_wire, refused_rank
from isles.comm.errors import CommError, Malformed, Refused, WorkerFailed, from_plain, to_plain
from isles.comm.mesh import Mesh
from isles.comm.tags import Tag
from isles.comm.trust import PeerTrust, mean_square
from isles.models import Decoder, Shape
from isles.pipeline.compute import refuse_own
from tests.gloo import run_gloo
from tests.replicas.workers import LINKS, sgd

SHORT = isles.Deadlines(control=20.0, outer=20.0, inner=20.0)
ROUND = 4  # the first in which the hostile worker lies


def nan(wire: Tensor) -> Tensor:
    return torch.full_like(wire, 0xFF)


def noise(wire: Tensor) -> Tensor:
    return torch.randint(0, 256, wire.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def huge(wire: Tensor) -> Tensor:
    return (wire.clone().view(torch.float32) * 50).view(torch.uint8)


def lie(world: Mesh, change: Callable[[Tensor], Tensor], to: int | None = None, second: bool | None = None) -> None:
    """From round ROUND on, what this worker sends in outer rounds is changed on its way. second: only in the second
    shot of a mean, or only in the first.
    """
    transport: Any = world.transport
    send = transport.send

    def hostile(peer: int, data: Tensor, tag: Tag) -> Any:
        counts = tag.channel == "outer" and (tag.round or 0) >= ROUND and (to is None or peer == to)
        shot = second is None or (tag.phase >= 8) == second
        return send(peer, change(data) if counts and shot and data.numel() > HEADER_BYTES else data, tag)

    transport.send = hostile


class Line(nn.Module):
    """A model of 3,000 entries, so that shards of it are no handful."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(3000) / 50)


def rounds(world: Mesh, method: str, options: dict[str, Any], lies: tuple[Any, ...], steps: int = 24) -> Any:
    """Rounds of 2 steps; worker 2 lies. What this worker ended with, and what it was told."""
    model = Line()
    optimizer: Any = isles.method(method)(model, sgd(model), world.outer, **options)
    if world.rank == 2 and lies:
        lie(world, *lies)
    draw = torch.Generator().manual_seed(world.rank)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            for _ in range(steps):
                ((model.weight - torch.randn(3000, generator=draw) / 50) ** 2).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            optimizer.finish()
        except CommError as error:
            return error
    return {
        "steps": optimizer.steps,
        "lost": sorted(getattr(optimizer, "lost", ())),
        "refused": world.outer.ledger.trust.refused,
        "finite": bool(model.weight.isfinite().all()),
        "told": [str(warning.message) for warning in told],
    }


DILOCO = {"sync_every": 2, "outer_momentum": 0.5}
CASES: dict[str, tuple[str, dict[str, Any], tuple[Any, ...]]] = {
    "NaN": ("diloco", DILOCO, (nan,)),
    "NaN for one of them": ("diloco", DILOCO, (nan, 0)),
    "noise": ("diloco", DILOCO, (noise,)),
    "50 times as large": ("diloco", DILOCO, (huge, 1, False)),
    "a shard of the mean": ("diloco", DILOCO, (huge, None, True)),
    "NaN, int8": ("diloco", {**DILOCO, "codec": "int8"}, (nan,)),
    "NaN, low rank": ("diloco", {**DILOCO, "codec": "powersgd:2", "error_feedback": "local"}, (nan,)),
    "NaN, fragments": ("streaming-diloco", {"sync_every": 2, "fragments": (("weight",),)}, (nan,)),
    "NaN, a group": ("noloco", {"sync_every": 2, "group_size": 4}, (nan,)),
}


@pytest.mark.parametrize("name", CASES)
def test_all_end_with_one_error_that_names_the_sender(name: str) -> None:
    """Also who was sent nothing wrong: the shard's owner tells."""
    method, options, lies = CASES[name]
    results = isles.run_virtual(rounds, 4, links=LINKS, deadlines=SHORT, args=(method, options, lies))
    for rank in (0, 1, 3):
        assert isinstance(results[rank], (Refused, Malformed)) and results[rank].peer == 2, (rank, results[rank])


@pytest.mark.parametrize("method", ["ddp", "demo", "dct-dp"])
def test_gradients_too(method: str) -> None:
    options = {"dct-dp": {"sparsity": 0.5}, "demo": {"check_every": 0}}.get(method, {})
    results = isles.run_virtual(rounds, 4, links=LINKS, deadlines=SHORT, args=(method, options, (nan,)))
    for rank in (0, 1, 3):
        assert isinstance(results[rank], CommError) and getattr(results[rank], "peer", None) == 2, results


@pytest.mark.parametrize("change", [nan, noise, huge])
def test_solo_goes_on_without_it(change: Callable[[Tensor], Tensor]) -> None:
    """Each round with it is done alone, with a word; after three it is gone. The honest ones finish all steps."""
    options = {"sync_every": 2, "on_peer_failure": "solo"}
    results = isles.run_virtual(rounds, 4, links=LINKS, deadlines=SHORT, args=("noloco", options, (change,), 60))
    honest = [results[rank] for rank in (0, 1, 3)]
    for seen in honest:
        assert seen["steps"] == 60 and seen["finite"] and set(seen["lost"]) <= {2}, seen
        assert len([text for text in seen["told"] if "worker 2" in text and "done without it" in text]) <= 4
        assert (2 in seen["lost"]) == (seen["refused"] >= 3) and seen["refused"] <= 4  # one may be under way
    assert any(seen["lost"] for seen in honest)


def test_a_header_of_another_round_ends_nobody_in_solo() -> None:
    def worker(world: Mesh) -> Any:
        if world.rank == 2:
            send: Any = world.transport.send

            def hostile(peer: int, data: Tensor, tag: Tag) -> Any:
                if tag.channel == "outer" and (tag.round or 0) >= ROUND and data.numel() == HEADER_BYTES:
                    data = data.clone()
                    data[8] += 3  # the round
                return send(peer, data, tag)

            world.transport.send = hostile  # type: ignore[method-assign]
        return rounds(world, "noloco", {"sync_every": 2, "on_peer_failure": "solo"}, (), 60)

    results = isles.run_virtual(worker, 4, links=LINKS, deadlines=SHORT)
    assert all(results[rank]["steps"] == 60 and set(results[rank]["lost"]) <= {2} for rank in (0, 1, 3)), results
    assert any(results[rank]["lost"] for rank in (0, 1, 3))


def test_on_real_processes() -> None:
    """The first of the cases; nobody is blamed for another."""
    method, options, lies = CASES["NaN for one of them"]
    results = run_gloo(rounds, 3, args=(method, options, lies), deadlines=SHORT)
    assert all(isinstance(results[rank], Refused) and results[rank].peer == 2 for rank in (0, 1)), results


FORMS = ("none", "bf16", "fp16", "int8", "int4", "int2", "fp4", "sign", "topk:4", "dct_topk:4+int4", "randk:0.01")


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("entries", [64, 5000])
def test_a_verdict_is_no_mean_in_any_form(name: str, entries: int) -> None:
    back = codec(name).back
    wire = refusal_wire((4, 7, 9), 7, back.wire_bytes(entries, torch.float32))
    assert refused_rank(wire, (4, 7, 9)) == (7 if wire.numel() >= 24 else -1)
    try:
        decoded = back.decode(wire, entries, torch.float32)
    except Malformed:
        return
    assert not mean_square(decoded) < float("inf")


def test_what_is_no_verdict() -> None:
    assert refused_rank(torch.zeros(100, dtype=torch.uint8), (0, 1)) is None
    assert refused_rank(refusal_wire((0, 1), 5, 100), (0, 1)) == -1
    assert refused_rank(refusal_wire((0, 1, 5), 5, 100), (0, 1)) is None  # it names nobody of these
    assert str(from_plain(to_plain(Refused(3, "it is not finite")))) == (
        "worker 3's payload is refused: it is not finite"
    )


def test_what_is_usual() -> None:
    """The median of what was accepted, or this worker's own share, times the ratio."""
    trust = PeerTrust(10.0)
    for _ in range(5):
        trust.check("a", {1: 1.0, 2: 4.0}, 1.0, 1000)
    trust.check("a", {1: 99.0}, 0.0, 1000)
    with pytest.raises(Refused, match="worker 1's payload is refused: it is 10\\.1 times"):
        trust.check("a", {1: 10.1**2}, 0.0, 1000)
    trust.check("a", {1: 10.1**2}, 0.0, 1000, leeway=100.0)
    trust.check("a", {1: 10.1**2}, 0.0, 10)
    trust.check("a", {1: 1e6}, 1e6, 1000)  # all have grown
    trust.check("b", {1: 1e6}, 0.0, 1000)  # nothing to compare with
    for bad in (float("nan"), float("inf")):
        with pytest.raises(Refused, match="not finite"):
            PeerTrust(float("inf")).check("a", {1: bad}, 1.0, 1000)
    assert trust.refused == 1


def test_a_large_share_is_taken_with_a_larger_ratio() -> None:
    def worker(world: Mesh) -> float:
        world.outer.ledger.trust.ratio = 1e3
        buffer = torch.full((3000,), 100.0**world.rank)
        world.outer.start(mean(world.outer.call(round=1), buffer, codec("none"), Stamp(1)), "outer").wait()
        return float(buffer[0])

    assert isles.run_virtual(worker, 2, links=LINKS) == [50.5, 50.5]


# ---------------------------------------------------------------------------------------------------------------------
# What is no share of a mean: units of ist, messages between stages, fsdp's rows


def between(change: Callable[[Tensor], Tensor], nbytes: int, after: int) -> Callable[[Mesh], None]:
    """What worker 1 sends of `nbytes` or more is changed on its way, but for the first `after` messages."""

    def lies(world: Mesh) -> None:
        transport: Any = world.transport
        send, count = transport.send, [0]

        def hostile(peer: int, data: Tensor, tag: Tag) -> Any:
            if tag.channel in ("outer", "pipeline") and data.numel() >= nbytes:
                count[0] += 1
                data = change(data) if count[0] > after else data
            return send(peer, data, tag)

        transport.send = hostile

    return lies


SHAPE = Shape(d_model=32, layers=2, heads=4, ffn=64, vocab=64, context=16, tie_embeddings=True)


def divided(world: Mesh, change: Callable[[Tensor], Tensor]) -> Any:
    model = Decoder(SHAPE, seed=1)
    optimizer = isles.IST(model, torch.optim.AdamW(model.parameters(), lr=1e-3), world.outer, sync_every=2)
    if world.rank == 1:
        between(change, 1024, 8)(world)
    return stepped(world, model, optimizer)


def stepped(world: Mesh, model: nn.Module, optimizer: Any) -> Any:
    draw = torch.Generator().manual_seed(world.rank)
    try:
        for _ in range(12):
            model(torch.randint(64, (2, 17), generator=draw)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    except CommError as error:
        return error
    return "finished"


def staged(world: Mesh, change: Callable[[Tensor], Tensor]) -> Any:
    from tests.pipeline import workers

    cell = workers.Cell(2, 1, 4)
    run = workers.executor(world, cell)
    if world.rank == 1:
        between(change, 512, 5)(world)
    try:
        for step in range(1, 6):
            run.stage.zero_grad()
            run.step(step, workers.own_text(cell, world.rank, step))
    except CommError as error:
        return error
    return "finished"


def far(wire: Tensor) -> Tensor:
    """A payload 10,000 times as large; what lies behind it stays."""
    whole = wire[: wire.numel() // 4 * 4].clone()
    return torch.cat([(whole.view(torch.float32) * 1e4).view(torch.uint8), wire[whole.numel() :]])


@pytest.mark.parametrize("change", [nan, far])
def test_units_and_gradients_of_stages_too(change: Callable[[Tensor], Tensor]) -> None:
    """The one who was sent it names the sender; whoever waits for it hears of that."""
    for worker, size in ((divided, 3), (staged, 2)):
        results = isles.run_virtual(worker, size, links=LINKS, deadlines=SHORT, args=(change,))
        assert any(isinstance(result, Refused) and result.peer == 1 for result in results), (worker, results)
        assert all(isinstance(results[rank], CommError) for rank in range(size) if rank != 1), (worker, results)


def test_a_stage_whose_own_numbers_end_says_so_itself() -> None:
    def worker(world: Mesh) -> Any:
        from tests.pipeline import workers

        cell = workers.Cell(2, 1, 4)
        run = workers.executor(world, cell)
        if world.rank == 0:
            next(run.stage.parameters()).data.fill_(torch.nan)
        try:
            run.step(1, workers.own_text(cell, world.rank, 1))
        except CommError as error:
            return error

    first, second = isles.run_virtual(worker, 2, links=LINKS, deadlines=SHORT)
    assert isinstance(first, WorkerFailed) and "lower the learning rate" in str(first), first
    assert not isinstance(second, Refused), second


def test_a_stage_in_half_precision_is_not_taken_for_broken() -> None:
    """Its entries are finite although their sum is no float16."""
    own: Any = SimpleNamespace(transport=SimpleNamespace(rank=0))
    whole = torch.ones(100_000, dtype=torch.float16)
    refuse_own(own, "its activations", whole)
    whole[7] = torch.inf
    with pytest.raises(WorkerFailed, match="its activations are not finite"):
        refuse_own(own, "its activations", whole)


def sharded(world: Mesh, change: str, closed: bool) -> Any:
    """What stopped it, and whether the weights were finite by then."""
    model = isles.shard(Decoder(SHAPE, seed=1), world.outer)
    optimizer = isles.FSDP(model, torch.optim.AdamW(model.parameters(), lr=1e-3), world.outer)
    if world.rank == 1 and change != "gradient":
        between({"nan": nan, "far": far}[change], 1024, 40)(world)
    draw = torch.Generator().manual_seed(world.rank)

    def backward() -> Tensor:
        optimizer.zero_grad()
        broken = change == "gradient" and world.rank == 1 and optimizer.steps == 5
        loss = model(torch.randint(64, (2, 17), generator=draw)).loss * (torch.nan if broken else 1)
        loss.backward()
        return loss

    stopped = "finished"
    for _ in range(12):
        try:
            optimizer.step(backward) if closed else (backward(), optimizer.step())
        except CommError as error:
            stopped = error
            break
    return stopped, all(bool(weights.isfinite().all()) for weights in optimizer.weights().values())


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "closed"), [("nan", False), ("far", False), ("gradient", False), ("gradient", True)]
)
def test_rows_of_fsdp_too(change: str, closed: bool) -> None:
    """Before they are used, also where a closure brings them."""
    (stopped, finite), _ = run_gloo(sharded, 2, args=(change, closed), deadlines=isles.Deadlines(outer=5.0))
    assert isinstance(stopped, Refused) and stopped.peer == 1 and finite, stopped
