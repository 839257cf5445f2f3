"""IST: subnets are narrow in fact, merging is exact, what travels is counted by the formula, and the theory holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import isles
from isles.comm.mesh import Mesh
from isles.models import Decoder, Shape, flops_per_token
from isles.models.subnet import Axes, Axis, put, reads, take
from isles.papers.ist import homogeneous, stationary_mean
from isles.replicas.methods.config import SAMPLERS
from isles.replicas.methods.ist.store import partition, sizes
from tests.covers import cover
from tests.replicas.workers import LINKS, Net, adamw, batch, bits, counted, loss_of, sgd, train_step, weights, wrap

SHAPE = Shape(d_model=32, layers=2, heads=4, ffn=64, vocab=64, context=16, tie_embeddings=True)


def mlp() -> nn.Module:
    """Widths of 8, 16, 16 and 4: with two and with four workers every server gives every subnet equally much."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16, bias=False), nn.Tanh(), nn.Linear(16, 4))


def of(
    world: Mesh, model: nn.Module, inner: Callable[[nn.Module], torch.optim.Optimizer] = adamw, **options: Any
) -> Any:
    return isles.IST(model, inner(model), world.outer, **{"sync_every": 2, **options})


def learn(optimizer: Any, seed: int) -> None:
    """A step of an MLP on random rows, of the decoder on random tokens."""
    draw = torch.Generator().manual_seed(seed)
    if isinstance(optimizer.model, Decoder):
        loss = optimizer.model(torch.randint(64, (2, 17), generator=draw)).loss
    else:
        loss = optimizer.model(torch.randn(6, 8, generator=draw)).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


# What a worker holds.


def held_by(world: Mesh) -> dict[str, float]:
    """Parameters, bytes of Adam's state, FLOPs of a forward pass: of a worker of IST."""
    model = Decoder(SHAPE)
    optimizer = of(world, model)
    learn(optimizer, 0)
    return cost_of(model, optimizer.inner)


def cost_of(model: nn.Module, inner: torch.optim.Optimizer) -> dict[str, float]:
    # The counter does not know the CPU's fused attention.
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model(torch.zeros(1, SHAPE.context + 1, dtype=torch.int64))
    state = sum(tensor.nbytes for own in inner.state.values() for tensor in own.values())
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "state": state,
        "flops": counter.get_total_flops() / SHAPE.context,
    }


def test_a_worker_holds_and_computes_its_fraction() -> None:
    """Parameters, Adam's state and FLOPs fall to what the formulas say, within 2 %. A full-size model under a mask,
    which computes the same, would not.
    """
    d, layers = SHAPE.d_model, SHAPE.layers
    products, attention = layers * (4 * d * d + 3 * d * SHAPE.ffn), 4 * layers * d * SHAPE.context
    shared = SHAPE.vocab * d + (2 * layers + 1) * d

    def expected(workers: int) -> dict[str, float]:
        count = shared + products / workers
        flops = 2 * (products / workers + SHAPE.vocab * d) + attention / workers
        return {"parameters": count, "state": 8 * count, "flops": flops}

    assert expected(1)["flops"] == flops_per_token(SHAPE, backward=False)
    for workers in (2, 4):
        for found in isles.run_virtual(held_by, workers, links=LINKS):
            assert found == pytest.approx(expected(workers), rel=0.02)
    full = Decoder(SHAPE)
    inner = adamw(full)
    full(torch.zeros(1, 17, dtype=torch.int64)).loss.backward()
    inner.step()
    assert all(value > 1.5 * expected(4)[key] for key, value in cost_of(full, inner).items())  # what a mask would cost


def test_shapes_never_change_while_it_trains() -> None:
    """Weights and moments are the same tensors in every round, with other values."""

    def worker(world: Mesh) -> None:
        model = Net()
        optimizer = wrap(world, "ist", model)
        train_step(optimizer, world.rank, 1)

        def entries() -> list[int]:
            state = [t.data_ptr() for own in optimizer.state.values() for t in own.values()]
            return [parameter.data_ptr() for parameter in model.parameters()] + state

        first, round = entries(), weights(model)
        for step in range(2, 8):
            train_step(optimizer, world.rank, step)
        assert entries() == first and not torch.equal(weights(model), round)

    isles.run_virtual(worker, 3, links=LINKS)


# Merging.


@pytest.mark.parametrize("state", ["travel", "reset"])
def test_one_worker_trains_as_without_it(state: str) -> None:
    """n = 1: bit for bit local training, for the live, the judged and the consolidated weights. With reset, as with a
    new inner optimizer every round.
    """

    def worker(world: Mesh) -> None:
        model, plain = Net(), Net()
        optimizer, inner = wrap(world, "ist", model, optimizer_state=state), adamw(plain)
        for step in range(1, 9):
            train_step(optimizer, 0, step)
            loss_of(plain, 0, step).backward()
            inner.step()
            inner.zero_grad()
            if state == "reset" and step % 3 == 0:
                inner = adamw(plain)
            assert torch.equal(weights(model), weights(plain))
            with optimizer.evaluation_weights() as judged:
                assert torch.equal(weights(judged), weights(plain))
        optimizer.consolidate()
        assert torch.equal(weights(model), weights(plain))

    isles.run_virtual(worker, 1, links=LINKS)


@pytest.mark.parametrize(("sampler", "server"), cover(SAMPLERS, ("central", "partitioned"), each=1, of=2))
def test_a_rate_of_zero_changes_no_byte(sampler: str, server: str) -> None:
    """Divided, merged, divided again, with workers that do not divide the units: all divided parameters as before."""

    def worker(world: Mesh) -> None:
        for model in (Decoder(SHAPE), mlp(), Net()):
            before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
            options = {"sampler": sampler, "server": server, "sync_every": 1, "eval_scale": "none"}
            optimizer = of(world, model, lambda m: torch.optim.AdamW(m.parameters(), lr=0.0), **options)
            for step in range(2):
                train_step(optimizer, 0, step) if isinstance(model, Net) else learn(optimizer, step)
            optimizer.consolidate()
            for name in optimizer.division.axes:
                assert torch.equal(dict(model.named_parameters())[name], before[name]), name

    isles.run_virtual(worker, 3, links=LINKS)


def test_a_merged_step_is_the_sum_of_masked_gradients() -> None:
    """One hidden layer, SGD, H = 1, the same batch for all: theta - lr sum_i (gradient of the network with all units
    but those of i masked, where i holds them). Oracle in float64, by masks on the full network.
    """
    rate = 0.1

    def worker(world: Mesh) -> tuple[Tensor, list[Tensor]]:
        model = Net(dtype=torch.float64)
        optimizer = of(world, model, lambda m: sgd(m, rate), sync_every=1, eval_scale="none")
        units = [optimizer.division.trained("net.hidden", i, 0) for i in range(world.size)]
        train_step(optimizer, 0, 1)
        optimizer.consolidate()
        return weights(model), units

    results = isles.run_virtual(worker, 3, links=LINKS)
    full = Net(dtype=torch.float64)
    expected = weights(full)
    for units in results[0][1]:
        mask = torch.zeros(11, dtype=torch.float64)
        mask[units] = 1
        masked = Net(dtype=torch.float64)
        masked.first.data *= mask[:, None]
        masked.bias.data *= mask
        masked.second.data *= mask
        loss_of(masked, 0, 1).backward()
        trained = torch.cat([mask[:, None].expand(11, 5).reshape(-1), mask, mask.expand(7, 11).reshape(-1)])
        gradient = torch.cat([p.grad.reshape(-1) for p in masked.parameters()])  # type: ignore[union-attr]
        expected -= rate * trained * gradient
    for found, _ in results:
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_what_all_hold_is_averaged_and_what_rests_is_saved() -> None:
    """The output's bias is the mean of the workers'; entries between the units of different subnets keep their bytes
    for the round, all others were trained.
    """

    def worker(world: Mesh) -> Any:
        model = mlp()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer = of(world, model, sgd, eval_scale="none")
        learn(optimizer, world.rank)
        trained = optimizer.division.trained_units("2.weight", world.rank, 0)
        own = model[4].bias.detach().clone()
        with optimizer.evaluation_weights() as full:
            changed = full[2].weight != before["2.weight"]
            mean = full[4].bias.detach().clone()
        return trained, own, mean, changed

    results = isles.run_virtual(worker, 4, links=LINKS)
    trained = torch.zeros(16, 16, dtype=torch.bool)
    for (rows, columns), _, mean, _ in results:
        torch.testing.assert_close(mean, torch.stack([own for _, own, _, _ in results]).mean(0))
        trained[rows[:, None], columns] = True
    assert int(trained.sum()) == 4 * 4 * 4 and all(torch.equal(changed, trained) for *_, changed in results)


def test_moments_travel_with_their_units() -> None:
    """Adam's two moments of a unit are at its next trainer what they were at its last one; what all hold stays local.
    With reset there are none after a round.
    """

    def worker(world: Mesh, state: str) -> Any:
        model = mlp()
        optimizer = of(world, model, sync_every=3, optimizer_state=state)
        seen: list[Any] = []
        for step in range(3):
            if step == 2:
                trained = optimizer.division.trained("0.hidden", world.rank, 0)
                # What the step that ends the round makes of them, seen before they leave.
                optimizer.inner.register_step_post_hook(
                    lambda *_: seen.append({k: v.clone() for k, v in optimizer.state[model[0].bias].items()})
                )
            learn(optimizer, 10 * step + world.rank)
        after = optimizer.state[model[0].bias] if state == "travel" else dict(optimizer.state)
        return trained, seen[0], optimizer.division.trained("0.hidden", world.rank, 1), after

    results = isles.run_virtual(worker, 4, links=LINKS, args=("travel",))
    for slot in ("exp_avg", "exp_avg_sq"):
        whole = torch.zeros(16)
        for trained, last, _, _ in results:
            whole[trained] = last[slot]
        assert all(torch.equal(after[slot], whole[trained]) for _, _, trained, after in results)
    assert all(after == {} for *_, after in isles.run_virtual(worker, 4, links=LINKS, args=("reset",)))


@pytest.mark.parametrize("scale", ["keep_fraction", "none"])
def test_the_full_model_reads_a_mean_of_subnets(scale: str) -> None:
    """Columns that read divided units are 1/n of what subnets hold, if so asked; nothing else is scaled; and the
    consolidated model is what was judged last.
    """

    def worker(world: Mesh) -> None:
        optimizer = of(world, Decoder(SHAPE), eval_scale=scale)
        for step in range(2):
            learn(optimizer, step)
        assert optimizer.merged == 2
        with optimizer.evaluation_weights() as model:
            judged = {name: p.detach().clone() for name, p in model.named_parameters()}
        live = {name: p.detach().clone() for name, p in model.named_parameters()}
        for name, axes in optimizer.division.axes.items():
            units = optimizer.division.trained_units(name, world.rank, 1)
            part = take(judged[name], axes, units)
            factor = 4 if scale == "keep_fraction" and reads(axes) else 1
            assert torch.equal(part * factor, live[name])  # a power of two: to the bit
        one = optimizer.consolidate()
        assert all(torch.equal(p, judged[name]) for name, p in one.named_parameters())
        with optimizer.evaluation_weights() as again:
            assert again is one
        with pytest.raises(ValueError, match="the model was consolidated and is no subnet any more"):
            optimizer.step()

    isles.run_virtual(worker, 4, links=LINKS)


class Normed(Net):
    """With a BatchNorm in training mode behind the division."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(super().forward(x), None, None, training=True)


def test_a_norm_by_the_batch_makes_the_scale_no_matter() -> None:
    """For such networks eval_scale = "none" is right too; for others it doubles what two workers' units add up to."""

    def worker(world: Mesh, model: Net) -> list[Tensor]:
        optimizer = of(world, model, sgd)
        train_step(optimizer, world.rank, 1)
        found = []
        for scale in ("keep_fraction", "none"):
            optimizer.config = replace(optimizer.config, eval_scale=scale)
            with optimizer.evaluation_weights() as whole, torch.no_grad():
                found.append(whole(batch(9, 9, rows=16)[0]))
        return found

    for scaled, plain in isles.run_virtual(lambda world: worker(world, Normed()), 2, links=LINKS):
        torch.testing.assert_close(plain, scaled, rtol=0.01, atol=1e-3)
    for scaled, plain in isles.run_virtual(lambda world: worker(world, Net()), 2, links=LINKS):
        torch.testing.assert_close(plain, 2 * scaled)


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("seed", range(3))
def test_scaling_decides(seed: int) -> None:
    """A language of counting by ones, 4 workers: the full model is at least 0.1 nats better with its reading columns
    scaled than without, and not worse than a subnet by more than that.
    """

    def windows(seed: int, rows: int) -> Tensor:
        draw = torch.Generator().manual_seed(seed)
        return (torch.randint(64, (rows, 1), generator=draw) + torch.arange(17)) % 64

    def judged(optimizer: Any, scale: str) -> float:
        optimizer.config = replace(optimizer.config, eval_scale=scale)
        with optimizer.evaluation_weights() as model, torch.no_grad():
            return float(model(windows(9999, 64)).loss)

    def worker(world: Mesh, seed: int) -> tuple[float, float, float]:
        model = Decoder(SHAPE, seed=seed)
        optimizer = of(world, model, lambda m: torch.optim.AdamW(m.parameters(), lr=3e-3), sync_every=5)
        for step in range(150):
            model(windows(1000 * seed + 10 * step + world.rank, 8)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            own = float(model(windows(9999, 64)).loss)
        return judged(optimizer, "keep_fraction"), judged(optimizer, "none"), own

    results = isles.run_virtual(worker, 4, links=LINKS, args=(seed,))
    scaled, unscaled, _ = results[0]
    subnets = sum(own for *_, own in results) / 4
    assert scaled < unscaled - 0.1 and scaled < subnets + 0.1, (scaled, unscaled, subnets)


# Servers, samplers, bytes.


def sent_in_a_round(world: Mesh, server: str, sampler: str, state: str) -> Any:
    model = mlp()
    optimizer = of(world, model, server=server, sampler=sampler, optimizer_state=state, sync_every=1)
    before = counted(world)["sent"]
    learn(optimizer, world.rank)
    return counted(world)["sent"] - before, bits(weights(optimizer.consolidate())), optimizer.division.digest(1)


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("state", ["travel", "reset"])
def test_bytes_are_those_of_the_formula(workers: int, state: str) -> None:
    """b [d0 d1/n + d1 d2/n^2 + d2 d3/n + biases/n] a worker each way, (1 + 2) b where Adam's moments travel, to and
    from the central server; of the partitioned one the n-th part stays at home. The output's bias is averaged on top.
    No index travels, and the server changes no bit.
    """
    n, slots = workers, 3 if state == "travel" else 1
    formula = 4 * slots * (8 * 16 // n + 16 * 16 // n**2 + 16 * 4 // n + 16 // n)
    averaged = 4 * 2 * (n - 1) * 4 // n + 32 * (n - 1)
    runs = {
        server: isles.run_virtual(sent_in_a_round, n, links=LINKS, args=(server, "stratified", state))
        for server in ("central", "partitioned")
    }
    central, partitioned = ([sent for sent, _, _ in runs[server]] for server in ("central", "partitioned"))
    assert central == [(n - 1) * formula + averaged, *[formula + averaged] * (n - 1)]
    assert partitioned == [2 * formula * (n - 1) // n + averaged] * n
    assert len({(one, digest) for run in runs.values() for _, one, digest in run}) == 1


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize(("units", "workers"), [(16, 4), (11, 3), (4, 4), (7, 1), (18, 4)])
def test_a_division_gives_each_unit_to_one_worker(sampler: str, units: int, workers: int) -> None:
    """In every round; as many units to a worker as in any other round; keyed by seed, round and layer."""
    rounds = [partition("a.ffn", units, workers, sampler, 5, round) for round in range(6)]
    for parts in rounds:
        assert torch.cat(parts).sort().values.tolist() == list(range(units))
        assert [len(part) for part in parts] == sizes(units, workers)
        assert all(part.tolist() == sorted(part.tolist()) for part in parts)
    again = [partition("a.ffn", units, workers, sampler, 5, round) for round in range(6)]
    assert all(torch.equal(a, b) for one, two in zip(rounds, again, strict=True) for a, b in zip(one, two, strict=True))
    if workers > 1:
        same = [all(map(torch.equal, one, two)) for one, two in pairwise(rounds)]
        assert all(same) if sampler == "fixed" else not all(same)
    if sampler in ("random", "stratified") and units == 16:
        others = [partition("b.ffn", units, workers, sampler, 5, 0), partition("a.ffn", units, workers, sampler, 6, 0)]
        assert not any(all(map(torch.equal, rounds[0], other)) for other in others)


@pytest.mark.parametrize(("units", "workers"), [(16, 4), (32, 4), (11, 3), (4, 4), (18, 4), (27, 3)])
def test_a_stratified_division_takes_equally_from_every_server(units: int, workers: int) -> None:
    """units / n^2 from each of the n runs, or the two whole numbers around it."""
    edges = torch.tensor([0, *sizes(units, workers)]).cumsum(0)
    for round in range(20):
        for part in partition("a.ffn", units, workers, "stratified", 0, round):
            taken = torch.histc(part.float(), workers, -0.5, units - 0.5) if units % workers == 0 else torch.tensor(
                [int(((part >= low) & (part < high)).sum()) for low, high in pairwise(edges.tolist())])  # fmt: skip
            assert taken.max() - taken.min() <= (0 if units % workers**2 == 0 else 2 if units % workers else 1)


def test_coverage() -> None:
    """An entry between two hidden layers is held at least once in R rounds with probability 1 - (1 - 1/n)^R."""
    units, n, repeats = 32, 4, 40
    for rounds in (1, 3, 6):
        shares = []
        for seed in range(repeats):
            met = torch.zeros(units, units, dtype=torch.bool)
            for round in range(rounds):
                pair = (partition(layer, units, n, "random", seed, round) for layer in ("a.hidden", "b.hidden"))
                for rows, columns in zip(*pair, strict=True):
                    met[rows[:, None], columns] = True
            shares.append(met.float().mean())
        assert float(torch.stack(shares).mean()) == pytest.approx(1 - (1 - 1 / n) ** rounds, abs=0.01)


# Quadratics: what dividing does to where training settles, by the library's own taking apart and putting together.


class Point(nn.Module):
    """x (d,), each coordinate a unit that is read."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(size, dtype=torch.float64))

    def split_axes(self) -> dict[str, Axes]:
        return {"x": (Axis(layer="point.coordinates", units=len(self.x), reads=True),)}


def quadratics(size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A curvature (d, d) and a slope (d,)."""
    draw = torch.Generator().manual_seed(seed)
    root = torch.randn(size, size, dtype=torch.float64, generator=draw) / size**0.5
    return root @ root.T / 2 + torch.eye(size), torch.randn(size, dtype=torch.float64, generator=draw)


def test_one_coordinate_each_settles_where_curvature_is_diagonal() -> None:
    """n = d: x goes to b / diag(L), whatever is drawn; and the scaled sketch of the theory, n times the mean of the
    pieces, to b / diag(L) / n, which is what `eval_scale` makes of it.
    """
    curvature, slope = quadratics(4)

    def worker(world: Mesh) -> tuple[Tensor, Tensor]:
        model = Point(4)
        optimizer = of(world, model, lambda m: sgd(m, 0.5), sync_every=1)
        for _ in range(45):
            mine = optimizer.division.trained("point.coordinates", world.rank, optimizer.round)
            loss = model.x @ curvature[mine[:, None], mine] @ model.x / 2 - slope[mine] @ model.x
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        mine = optimizer.division.trained("point.coordinates", world.rank, optimizer.round)
        assert torch.allclose(model.x, slope[mine] / curvature.diag()[mine], rtol=0, atol=1e-12)
        return optimizer.consolidate().x

    for found in isles.run_virtual(worker, 4, links=LINKS):
        torch.testing.assert_close(found.detach(), slope / curvature.diag() / 4, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("size", "workers"), [(4, 2), (6, 2), (6, 3)])
def test_the_mean_settles_where_the_theory_says(size: int, workers: int) -> None:
    """One step of every subnet on its own block, taken apart and put together again by the library, averaged over all
    divisions: its fixed point is the closed form, to 1e-10.
    """
    curvature, slope = quadratics(size)
    axes = Point(size).split_axes()["x"]
    even = dict.fromkeys(range(workers), size // workers)
    divisions = [owners for owners in product(range(workers), repeat=size) if Counter(owners) == even]

    def mean_step(x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for owners in divisions:
            merged = torch.full_like(x, torch.nan)
            for worker in range(workers):
                units = (torch.tensor(owners) == worker).nonzero()[:, 0]
                part = take(x, axes, (units,))
                part = part - 0.1 * (curvature[units[:, None], units] @ part - slope[units])
                put(merged, axes, (units,), part)
            total += merged
        return total / len(divisions)

    offset = mean_step(torch.zeros(size, dtype=torch.float64))
    matrix = torch.stack([mean_step(unit) - offset for unit in torch.eye(size, dtype=torch.float64)], dim=1)
    settled = torch.linalg.solve(torch.eye(size, dtype=torch.float64) - matrix, offset)
    expected = stationary_mean(homogeneous(curvature.numpy(), slope.numpy(), workers), "masks")
    torch.testing.assert_close(settled, torch.from_numpy(expected), rtol=0, atol=1e-10)


# Company, mistakes.


def test_a_round_that_fails_leaves_what_is_saved() -> None:
    """A worker is gone when the others merge: they name it, and keep the bytes of the round before."""

    def worker(world: Mesh) -> bool | None:
        optimizer: Any = wrap(world, "ist", Net())
        for step in range(1, 4):
            if world.rank == 1 and step == 2:
                return None
            stored = {key: tensor.clone() for key, tensor in optimizer.store.stored.items()}
            if step < 3:
                train_step(optimizer, world.rank, step)
        with pytest.raises(isles.PeerLost) as lost:
            train_step(optimizer, world.rank, 3)
        assert lost.value.rank in (0, 1, 2)
        return all(torch.equal(tensor, stored[key]) for key, tensor in optimizer.store.stored.items())

    assert isles.run_virtual(worker, 3, links=LINKS) == [True, None, True]


@pytest.mark.parametrize(
    ("model", "options", "says"),
    [
        (Net, {"sampler": "dice"}, "unknown sampler 'dice'"),
        (Net, {"server": "cloud"}, "unknown server 'cloud'"),
        (Net, {"optimizer_state": "local"}, "unknown optimizer_state 'local'"),
        (Net, {"eval_scale": "half"}, "unknown eval_scale 'half'"),
        (Net, {"sync_every": 0}, "sync_every = 0: choose 1 or more"),
        (Net, {"split": "heads"}, "this model has no 'heads' to divide; its units: hidden"),
        (lambda: Decoder(SHAPE), {"split": "block"}, "no 'block' to divide; its units: heads, ffn"),
        (lambda: Decoder(SHAPE), {}, "split: blocks.0.heads has 4 units for 5 workers: leave 'heads' out"),
        (lambda: nn.Linear(2, 2), {}, "Isles cannot divide a Linear"),
    ],
)
def test_mistakes_are_one_line_with_the_hint(model: Callable[[], nn.Module], options: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        isles.run_virtual(lambda world: of(world, model(), **options), 5, links=LINKS)


def test_what_is_frozen_travels_without_moments() -> None:
    """It is divided and merged like the rest, and keeps its bytes; its neighbours learn."""

    def worker(world: Mesh) -> None:
        model = Net()
        model.first.requires_grad_(False)
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        optimizer = wrap(world, "ist", model, eval_scale="none")
        for step in range(1, 8):
            train_step(optimizer, world.rank, step)
        optimizer.consolidate()
        same = {name: torch.equal(parameter, before[name]) for name, parameter in model.named_parameters()}
        assert same == {"first": True, "bias": False, "second": False}

    isles.run_virtual(worker, 2, links=LINKS)


class Counting(torch.optim.SGD):
    """An optimizer with an attribute of its own, which torch does not copy."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.taken = 0

    def step(self, closure: Any = None) -> Any:
        self.taken += 1
        return super().step(closure)


@pytest.mark.parametrize(
    ("inner", "says"),
    [
        (torch.optim.Adafactor, "Adafactor's row_var is of whole rows or columns and cannot travel with units"),
        (Counting, 'a step of a copy of it, which failed .*: set optimizer_state = "reset"'),
    ],
)
def test_state_that_cannot_travel_is_refused(inner: Any, says: str) -> None:
    """Left behind, it would be of other units from the second round on. Without it rounds go on."""

    def worker(world: Mesh) -> None:
        with pytest.raises(ValueError, match=says):
            of(world, mlp(), lambda m: inner(m.parameters(), lr=0.01))
        optimizer = of(world, mlp(), lambda m: inner(m.parameters(), lr=0.01), optimizer_state="reset")
        for step in range(5):
            learn(optimizer, step)

    isles.run_virtual(worker, 2, links=LINKS)


def test_an_optimizer_that_has_stepped_is_refused() -> None:
    """Its state would be of the full widths."""

    def worker(world: Mesh) -> None:
        model = Net()
        inner = adamw(model)
        loss_of(model, 0, 1).backward()
        inner.step()
        with pytest.raises(ValueError, match="wrap it before its first step"):
            isles.IST(model, inner, world.outer)

    isles.run_virtual(worker, 1, links=LINKS)


def test_a_graph_of_the_full_model_is_refused() -> None:
    """torch would fail in the first backward pass, speaking of shapes. What is judged later leaves no such graph."""

    def worker(world: Mesh) -> None:
        model = Net()
        loss = loss_of(model, 0, 1)
        with pytest.raises(ValueError, match="wrap the model first, or delete it"):
            wrap(world, "ist", model)
        del loss
        optimizer = wrap(world, "ist", model := Net())
        with optimizer.evaluation_weights() as judged:
            loss = loss_of(judged, 0, 1)
        train_step(optimizer, world.rank, 1)
        assert not loss.requires_grad and all(p.requires_grad for p in model.parameters())

    isles.run_virtual(worker, 2, links=LINKS)


def test_advice() -> None:
    """The dense model to beat, thin layers, no round at all; alone there is nothing to divide."""

    @cache
    def reported(split: str, workers: int, sampler: str = "random") -> list[str]:
        made = isles.run_virtual(
            lambda world: of(world, Decoder(SHAPE), split=split, sampler=sampler).advise(10), workers, links=LINKS
        )
        assert len(set(map(tuple, made))) == 1
        return made[0]

    assert reported("all", 1) == ["one worker holds all units: nothing is divided"]
    thin, dense = reported("ffn", 2)
    assert "a subnet has 32 ffn units a layer" in thin
    assert "--method ddp --set model.ffn=32 is a subnet's shape" in dense
    assert "--set model.d_model=" in reported("all", 4)[-1] and "has a subnet's size" in reported("all", 4)[-1]

    def deep(world: Mesh) -> None:
        assert any("never meet" in line for line in of(world, mlp(), sampler="rolling").advise(10))
        with pytest.raises(ValueError, match="no exchange falls into a run of 1 steps; choose sync_every <= 1"):
            of(world, mlp()).advise(1)

    isles.run_virtual(deep, 2, links=LINKS)
