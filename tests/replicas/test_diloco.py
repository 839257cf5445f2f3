"""DiLoCo, LocalSGD and no exchange at all, against calculations by hand and plain loops."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isles
from isles.comm.mesh import Mesh
from isles.replicas.flat import BLOCK, FlatParameters
from tests.covers import cover
from tests.replicas.workers import LINKS, Net, adamw, bits, loss_of, sgd, train_step, weights, wrap


class One(nn.Module):
    """One weight, 1.0."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.ones((), dtype=torch.float64))


@pytest.mark.parametrize(
    ("sync_every", "outer_lr", "momentum", "values"),
    [(6, 2.0, 0.0, [-23.0]), (3, 2.0, 0.0, [-11.0]), (6, 0.7, 0.9, [-14.96, -37.724])],
)
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_hand_oracle(sync_every: int, outer_lr: float, momentum: float, values: list[float], workers: int) -> None:
    """By hand: one weight 1.0, constant gradient 2, inner SGD of rate 1."""

    def worker(world: Mesh) -> list[float]:
        model, seen = One(), []
        options = {"sync_every": sync_every, "outer_lr": outer_lr, "outer_momentum": momentum}
        optimizer = wrap(world, "diloco", model, lambda m: sgd(m, 1.0), **options)
        for _ in range(sync_every * len(values)):
            model.x.grad = torch.full((), 2.0, dtype=torch.float64)
            optimizer.step()
            seen.append(float(model.x.detach()))
        return seen[sync_every - 1 :: sync_every]

    for seen in isles.run_virtual(worker, workers, links=LINKS):
        assert seen == pytest.approx(values, abs=1e-12)


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("method", ["diloco", "localsgd"])
def test_replicas_in_a_list(method: str, workers: int) -> None:
    """k replicas in one process, float64, outer torch.optim.SGD(nesterov=True); 1e-12 at every step."""
    rounds, every = 5, 3
    options = {"sync_every": every, "outer_lr": 0.7, "outer_momentum": 0.8} if method == "diloco" else {}

    def worker(world: Mesh) -> list[Tensor]:
        model = Net(dtype=torch.float64)
        optimizer = wrap(world, method, model, **(options or {"sync_every": every}))
        log = []
        for step in range(1, rounds * every + 1):
            train_step(optimizer, world.rank, step)
            log.append(weights(model))
        return log

    logs = isles.run_virtual(worker, workers, links=LINKS)

    replicas = [Net(dtype=torch.float64) for _ in range(workers)]
    inner = [adamw(replica) for replica in replicas]
    anchor = [parameter.detach().clone().requires_grad_() for parameter in replicas[0].parameters()]
    outer = torch.optim.SGD(anchor, lr=0.7, momentum=0.8, nesterov=True)
    if method == "localsgd":
        outer = torch.optim.SGD(anchor, lr=1.0)
    for step in range(1, rounds * every + 1):
        for rank, replica in enumerate(replicas):
            loss_of(replica, rank, step).backward()
            inner[rank].step()
            inner[rank].zero_grad()
        if step % every == 0:
            for index, slow in enumerate(anchor):
                live = [list(replica.parameters())[index] for replica in replicas]
                slow.grad = torch.stack([slow.detach() - fast.detach() for fast in live]).mean(0)
            outer.step()
            for replica in replicas:
                for fast, slow in zip(replica.parameters(), anchor, strict=True):
                    fast.data.copy_(slow.detach())
        for rank, replica in enumerate(replicas):
            torch.testing.assert_close(logs[rank][step - 1], weights(replica), rtol=0, atol=1e-12)


AGREE = ["ddp", "ddp, small buckets", "ddp, bf16", "localsgd", "diloco", "diloco, int8", "diloco, fp16"]


@pytest.mark.parametrize(("name", "workers"), cover(AGREE, (2, 3, 4, 5), each=1))
def test_replicas_are_bitwise_equal_after_every_exchange(name: str, workers: int) -> None:
    """6.2: one hash on all workers after every exchange, whatever the codec, from different initial weights."""

    def worker(world: Mesh) -> list[str]:
        model = Net(seed=world.rank)
        optimizer = wrap(world, name, model)
        log = [bits(weights(model))]
        for step in range(1, 10):
            train_step(optimizer, world.rank, step)
            if step % 3 == 0 or optimizer.level == "gradient":
                log.append(bits(weights(model)))
        return log

    first, *others = isles.run_virtual(worker, workers, links=LINKS)
    assert len(set(first)) == len(first)
    assert all(other == first for other in others)


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("name", ["diloco", "localsgd", "ddp", "noloco, single vector", "noloco, theta only"])
def test_workers_with_the_same_data_equal_one(name: str, workers: int) -> None:
    """6.2: (x + x) / 2 = x, so a power of two of equal workers computes one worker's bits."""

    def worker(world: Mesh) -> list[Any]:
        model = Net()
        optimizer = wrap(world, name, model)
        return [(train_step(optimizer, 0, step), bits(weights(model))) for step in range(1, 11)]

    one = isles.run_virtual(worker, 1, links=LINKS)[0]
    assert isles.run_virtual(worker, workers, links=LINKS) == [one] * workers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_sweep_alone_equals_two_in_company(dtype: torch.dtype) -> None:
    """A worker alone forms and lands block by block, and holds nothing that travels: the same bits, anchor hash
    included, over several blocks, small tensors that share one, and a strided one.
    """

    def worker(world: Mesh) -> tuple[list[str], int, list[str]]:
        start = torch.randn(2 * BLOCK + 777, generator=torch.Generator().manual_seed(0)).to(dtype)
        model = nn.ParameterList([nn.Parameter(part.clone()) for part in start.split([5, BLOCK - 3, BLOCK + 775])])
        model.append(nn.Parameter(start[: 20 * 30].view(20, 30).t()))
        optimizer = wrap(world, "diloco", model, lambda m: sgd(m, 0.1), sync_every=1)
        for _ in range(3):
            for parameter in model:
                parameter.grad = parameter.detach().sin()
            optimizer.step()
        held = [held.what for held in optimizer.memory()]
        fragment = optimizer.fragments[0]  # type: ignore[attr-defined]
        return [bits(weights(model)), bits(fragment.anchor)], fragment.digest, held

    (one,), (two, _) = (isles.run_virtual(worker, workers, links=LINKS) for workers in (1, 2))
    assert one[:2] == two[:2]
    assert "payload" in two[2] and "payload" not in one[2]


@pytest.mark.parametrize("name", ["none", "localsgd", "ddp", "ddp, small buckets"])
def test_one_worker_is_plain_training_bit_for_bit(name: str) -> None:
    """6.2: nothing to average changes no bit."""

    def worker(world: Mesh) -> list[str]:
        model = Net(seed=3)
        optimizer = wrap(world, name, model)
        losses = [train_step(optimizer, 0, step) for step in range(1, 11)]
        optimizer.consolidate()
        return [*losses, bits(weights(model))]

    model = Net(seed=3)
    inner = adamw(model)
    losses = []
    for step in range(1, 11):
        loss = loss_of(model, 0, step)
        loss.backward()
        inner.step()
        inner.zero_grad()
        losses.append(float(loss.detach()))
    assert isles.run_virtual(worker, 1, links=LINKS)[0] == [*losses, bits(weights(model))]


def test_one_worker_with_a_unit_outer_step_is_within_one_ulp() -> None:
    """6.2: anchor - (anchor - theta) = theta to 1 ulp of max(|anchor|, |theta|) an entry, every round."""

    def worker(world: Mesh) -> None:
        model = Net()
        optimizer = wrap(world, "diloco", model, sync_every=2, outer_lr=1.0, outer_momentum=0.0)
        saved: list[Tensor] = []
        optimizer.inner.register_step_post_hook(lambda *_: saved.append(weights(model)))
        for step in range(1, 41):
            anchor = optimizer.fragments[0].anchor.clone()  # type: ignore[attr-defined]
            train_step(optimizer, 0, step)
            if step % 2 == 0:
                largest = torch.maximum(anchor.abs(), saved[-1].abs())
                ulp = torch.nextafter(largest, torch.tensor(torch.inf)) - largest
                assert bool(((weights(model) - saved[-1]).abs() <= ulp).all())

    isles.run_virtual(worker, 1, links=LINKS)


def trained(workers: int, name: str, inner: Any = sgd, steps: int = 12, **options: Any) -> list[Tensor]:
    def worker(world: Mesh) -> Tensor:
        model = Net()
        optimizer = wrap(world, name, model, inner, **options)
        for step in range(1, steps + 1):
            train_step(optimizer, world.rank, step)
        return weights(model)

    return isles.run_virtual(worker, workers, links=LINKS)


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_special_cases_of_one_inner_step(workers: int) -> None:
    """6.2: H = 1, outer SGD(1) = parameter averaging within 3e-7; with inner SGD = data parallel within 1.2e-7 a step
    (values of order 1).
    """
    unit = {"sync_every": 1, "outer_lr": 1.0, "outer_momentum": 0.0}
    for inner in (sgd, adamw):
        diloco, local = (
            trained(workers, n, inner, 1, **o) for n, o in (("diloco", unit), ("localsgd", {"sync_every": 1}))
        )
        assert float((diloco[0] - local[0]).abs().max()) <= 3e-7
    parallel = trained(workers, "ddp", steps=1)[0]
    for name, options in (("diloco", unit), ("localsgd", {"sync_every": 1})):
        assert float((trained(workers, name, steps=1, **options)[0] - parallel).abs().max()) <= 1.2e-7
        assert float((trained(workers, name, **options)[0] - trained(workers, "ddp")[0]).abs().max()) <= 12 * 1.2e-7


def test_momentum_without_inner_progress_goes_on() -> None:
    """Nesterov's buffer belongs to the anchor: with zero gradients it decays by mu a round, lr mu^2 v, and so on."""

    def worker(world: Mesh) -> list[float]:
        model, seen = One(), []
        optimizer = wrap(world, "diloco", model, lambda m: sgd(m, 1.0), sync_every=1, outer_lr=0.5, outer_momentum=0.5)
        for gradient in (1.0, 0.0, 0.0):
            model.x.grad = torch.full((), gradient, dtype=torch.float64)
            optimizer.step()
            seen.append(float(model.x.detach()))
        return seen

    # v: 1, .5, .25;  step lr (g + mu v): .75, .125, .0625
    assert isles.run_virtual(worker, 2, links=LINKS)[0] == pytest.approx([0.25, 0.125, 0.0625], abs=1e-12)


def test_no_exchange_within_a_run_sends_no_byte() -> None:
    """6.2: H beyond the run is no communication, and plain training, until `finish`."""

    def worker(world: Mesh) -> tuple[int, str]:
        model = Net()
        optimizer = wrap(world, "diloco", model, sync_every=1000)
        for step in range(1, 8):
            train_step(optimizer, world.rank, step)
        return world.world.traffic["outer"].bytes_sent, bits(weights(model))

    alone = [bits(w) for w in trained(3, "none", adamw, 7)]
    assert isles.run_virtual(worker, 3, links=LINKS) == [(0, w) for w in alone]


# Precision, and models of odd make.


class Odd(nn.Module):
    """Tied, frozen, strided, empty, scalar, unused and coarse parameters, and buffers of several types."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
        self.tied = nn.Parameter(draw(6, 6))
        self.again = self.tied
        self.frozen = nn.Parameter(draw(6), requires_grad=False)
        self.strided = nn.Parameter(draw(4, 6).t())
        self.empty = nn.Parameter(draw(0, 3))
        self.scalar = nn.Parameter(draw(1)[0])
        self.unused = nn.Parameter(draw(5))
        self.coarse = nn.Parameter(draw(6).bfloat16())
        self.register_buffer("count", torch.tensor([seed], dtype=torch.int64))
        self.register_buffer("average", draw(3))
        self.register_buffer("mask", torch.tensor([bool(seed % 2), True]))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(x @ self.tied) @ self.again + self.frozen + self.coarse.float()
        return hidden @ self.strided * self.scalar + self.empty.sum()


def odd_step(optimizer: isles.ReplicaSync, rank: int, step: int) -> float:
    generator = torch.Generator().manual_seed(100 * rank + step)
    loss = optimizer.model(torch.randn(3, 6, generator=generator)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


@pytest.mark.parametrize("name", ["none", "ddp", "ddp, small buckets", "localsgd", "diloco", "noloco"])
def test_odd_models_train(name: str) -> None:
    """Tied weights once, frozen ones never, strided ones whole; all start as rank 0, buffers too."""

    def worker(world: Mesh) -> Any:
        model = Odd(seed=world.rank)
        optimizer = wrap(world, name, model, lambda m: sgd(m, 0.05))
        assert sum(p.numel() for p in optimizer.parameters) == 36 + 24 + 0 + 1 + 5 + 6
        started = {key: value.clone() for key, value in model.state_dict().items()}
        for step in range(1, 7):
            odd_step(optimizer, world.rank, step)
        assert model.tied is model.again and model.strided.stride() == (1, 6)
        assert model.coarse.dtype == torch.bfloat16
        optimizer.consolidate()
        return started, model.state_dict()

    reference = Odd(seed=0).state_dict()
    results = isles.run_virtual(worker, 3, links=LINKS)
    for started, ended in results:
        for key, value in reference.items():
            assert torch.equal(started[key], value), key
            assert torch.equal(ended[key], results[0][1][key]), key
        for key in ("frozen", "count", "mask"):
            assert torch.equal(ended[key], reference[key]), key
        for key in ("average", "unused"):  # (x + x + x) / 3 is x up to rounding
            torch.testing.assert_close(ended[key], reference[key])
        assert not torch.equal(ended["strided"], reference["strided"])


@pytest.mark.parametrize("name", ["diloco", "noloco", "noloco, single vector", "noloco, theta only"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_coarse_weights_make_no_phantom_progress(name: str, dtype: torch.dtype) -> None:
    """With zero inner progress the outer gradient is exactly 0, although anchors are finer than the weights."""

    def worker(world: Mesh) -> None:
        model = Net(dtype=dtype)
        optimizer = wrap(world, name, model, sgd, sync_every=1)
        fragment = optimizer.fragments[0]  # type: ignore[attr-defined]
        rule = optimizer.parts.rule  # type: ignore[attr-defined]
        for step in range(1, 5):
            train_step(optimizer, world.rank, step)
        assert fragment.anchor.dtype == torch.float32
        assert not torch.equal(fragment.anchor, fragment.anchor.to(dtype).float())  # there is something to mistake
        assert torch.equal(fragment.anchor.to(dtype), weights(model))
        seen = optimizer._snapshot(fragment, fragment.flat.new())  # type: ignore[attr-defined]
        nothing = {"diloco": torch.zeros_like(seen), "noloco": torch.zeros_like(seen)}.get(name, fragment.anchor)
        gamma = rule.gamma if name == "noloco, single vector" else 1.0
        torch.testing.assert_close(seen, nothing * gamma, rtol=1e-6, atol=0)
        if name in ("diloco", "noloco"):
            assert not seen.any()

    isles.run_virtual(worker, 2, links=LINKS)


def test_coarse_weights_learn_through_a_fine_anchor() -> None:
    """bf16 weights: the anchor keeps what is too small for them, so repeated small pushes arrive."""

    def worker(world: Mesh) -> float:
        model = nn.Linear(1, 1, bias=False).bfloat16()
        with torch.no_grad():
            model.weight.fill_(1.0)
        optimizer = wrap(world, "diloco", model, lambda m: sgd(m, 1.0), sync_every=1, outer_lr=0.1, outer_momentum=0.0)
        for _ in range(50):
            model.weight.grad = torch.full((1, 1), 2.0**-6, dtype=torch.bfloat16)  # 2 ulp of the weight below 1
            optimizer.step()
        return float(optimizer.fragments[0].anchor)  # type: ignore[attr-defined]

    assert isles.run_virtual(worker, 2, links=LINKS)[0] == pytest.approx(1 - 50 * 0.1 * 2.0**-6, rel=0.2)


def test_several_parameter_groups_keep_their_settings() -> None:
    """Groups of the inner optimizer are its own business: a group of rate 0 moves with the mean alone."""

    def worker(world: Mesh) -> Tensor:
        model = Net()
        start = model.bias.detach().clone()
        groups = [{"params": [model.first, model.second]}, {"params": [model.bias], "lr": 0.0}]
        optimizer = isles.LocalSGD(model, torch.optim.SGD(groups, lr=0.1), world.outer, sync_every=2)
        for step in range(1, 5):
            train_step(optimizer, world.rank, step)
        assert torch.equal(model.bias, start)
        return weights(model)

    a, b = isles.run_virtual(worker, 2, links=LINKS)
    assert torch.equal(a, b)


FEW = ["ddp", "localsgd", "diloco, int8", "noloco"]


@pytest.mark.parametrize(("name", "entries", "workers"), cover(FEW, (1, 2, 3, 7), (2, 3, 4, 5), each=1))
def test_fewer_parameters_than_workers(name: str, entries: int, workers: int) -> None:
    """Shards of nothing are legal."""

    class Few(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.x = nn.Parameter(torch.full((entries,), value))

    def worker(world: Mesh) -> Tensor:
        model = Few(1.0)
        optimizer = (
            wrap(world, name, model, lambda m: sgd(m, 1.0), sync_every=1)
            if name != "ddp"
            else wrap(world, name, model, lambda m: sgd(m, 1.0))
        )
        model.x.grad = torch.full((entries,), float(world.rank))
        optimizer.step()
        optimizer.consolidate()
        return model.x.detach()

    results = isles.run_virtual(worker, workers, links=LINKS)
    assert all(torch.equal(result, results[0]) for result in results)
    moved = {"ddp": 1.0, "localsgd": 1.0, "diloco, int8": 0.7 * 1.5, "noloco": 0.7}[name]
    expected = 1 - moved * (workers - 1) / 2
    torch.testing.assert_close(results[0], torch.full((entries,), expected), rtol=0, atol=0.05)


def test_a_large_model_is_cut_into_blocks_and_segments() -> None:
    """More than one block (32 Ki entries) and more than one segment (4 Mi): equal to a model in one piece, bitwise."""

    def worker(world: Mesh, pieces: list[int]) -> tuple[str, int]:
        generator = torch.Generator().manual_seed(0)
        start = torch.randn(sum(pieces), generator=generator)
        model = nn.ParameterList([nn.Parameter(part.clone()) for part in start.split(pieces)])
        optimizer = wrap(world, "diloco", model, lambda m: sgd(m, 0.1), sync_every=1)
        gradient = torch.randn(sum(pieces), generator=generator.manual_seed(world.rank))
        for _ in range(2):
            for parameter, part in zip(model, gradient.split(pieces), strict=True):
                parameter.grad = part.clone()
            optimizer.step()
        return bits(weights(model)), optimizer.fragments[0].digest  # type: ignore[attr-defined]

    total = (1 << 22) + 12345
    whole = isles.run_virtual(worker, 2, links=LINKS, args=([total],))
    cut = isles.run_virtual(worker, 2, links=LINKS, args=([5, 70_001, 32_768, total - 102_774],))
    assert whole[0] == whole[1] and cut[0] == cut[1]
    assert whole[0][0] == cut[0][0]


def test_digest_sees_every_bit_of_every_block() -> None:
    """The hash that rides in the header changes with any flipped bit and any two swapped blocks."""
    count = 3 * BLOCK + 5
    parameter = nn.Parameter(torch.randn(count, generator=torch.Generator().manual_seed(0)))
    flat = FlatParameters([parameter])

    vector = flat.read(flat.new())
    first = flat.digest(vector)
    for entry, bit in itertools.product((0, 1, BLOCK - 1, BLOCK, count - 2, count - 1), (0, 13, 31)):
        changed = vector.clone()
        changed.view(torch.int32)[entry] ^= 1 << bit if bit < 31 else -(1 << 31)
        assert flat.digest(changed) != first
    swapped = vector.clone()
    (to_one, to_two, *_), (one, two, *_) = flat.parts(swapped), flat.parts(vector)
    to_one.copy_(two)
    to_two.copy_(one)
    assert flat.digest(swapped) != first
    assert flat.digest(vector) == first


def test_a_flipped_bit_in_an_anchor_is_noticed_in_the_next_round() -> None:
    """The hash of the anchor rides in the next transfer's header: Diverged names the worker."""

    def worker(world: Mesh) -> None:
        optimizer = wrap(world, "diloco", Net())
        for step in range(1, 10):
            if world.rank == 2 and step == 5:
                optimizer.fragments[0].anchor[3] += 1e-6  # type: ignore[attr-defined]
                optimizer.fragments[0].digest += 1  # type: ignore[attr-defined]
            train_step(optimizer, world.rank, step)

    errors = isles.run_virtual(worker, 3, links=LINKS, return_errors=True)
    assert all(isinstance(error, isles.Diverged) for error in errors[:2])
    assert [error.peer for error in errors[:2]] == [2, 2]
