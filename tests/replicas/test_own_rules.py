"""Outer rules with numbers of their own, or whole matrices: against plain loops, and kept wherever vectors are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isles
from isles.base.modes import torch_threads
from isles.comm.codecs import codec
from isles.comm.mesh import Mesh
from isles.membership.messages import View
from isles.replicas.flat import copied
from isles.replicas.loop.outer import adopt, donor_state, enter, land_missed
from isles.replicas.parts.choices import EveryH, Everyone, Replace
from isles.replicas.parts.interfaces import Answer, Composition, OuterRule, RuleState
from tests.replicas.changing import ChangingRoster
from tests.replicas.own_rules import LearnedAdam, LearnedOuterAdam, OuterMuon, OuterMuonMethod, orthogonal
from tests.replicas.workers import HALVES, LINKS, Net, bits, checkpointed, learned, loss_of, sgd, train_step, weights

HERE = "tests.replicas.own_rules"
METHODS = (f"{HERE}:LearnedOuterAdam", f"{HERE}:OuterMuonMethod")
OFFSETS = (0, 2)  # of two fragments in rounds of 3 steps: 0, and 1.5 rounded to even
Step = Callable[[str, int, Tensor, int], Tensor]


def by_hand(steps: int, workers: int, begun: Callable[[int, dict[str, Tensor]], None], step_of: Step) -> list[Tensor]:
    """The loop in full: H = 3 plain SGD steps of each worker, then for each fragment that is due the mean of anchor -
    theta, `begun` with them by name, and anchor - `step_of` (name, fragment, gradient, round) everywhere. The weights
    of each worker.
    """
    nets = [Net(dtype=torch.float64) for _ in range(workers)]
    anchors = {name: own.detach().clone() for name, own in nets[0].named_parameters()}
    for step in range(1, steps + 1):
        for worker, net in enumerate(nets):
            gradients = torch.autograd.grad(loss_of(net, worker, step), list(net.parameters()))
            with torch.no_grad():
                for own, gradient in zip(net.parameters(), gradients, strict=True):
                    own -= 0.1 * gradient
        for number, (names, offset) in enumerate(zip(HALVES, OFFSETS, strict=True)):
            if step < 3 or (step - offset) % 3:
                continue
            lives = [dict(net.named_parameters()) for net in nets]
            with torch.no_grad():
                means = {name: sum(anchors[name] - live[name] for live in lives) / workers for name in names}
                begun(number, means)
                for name in names:
                    anchors[name] -= step_of(name, number, means[name], (step - offset) // 3)
                    for live in lives:
                        live[name].copy_(anchors[name])
    return [weights(net) for net in nets]


def trained(world: Mesh, kind: type[isles.OuterSync], steps: int) -> tuple[Tensor, str, list[dict[str, float]]]:
    model = Net(dtype=torch.float64)
    optimizer: Any = kind(model, sgd(model), world.outer, sync_every=3, fragments=HALVES)
    for step in range(1, steps + 1):
        train_step(optimizer, world.rank, step)
    anchors = torch.cat([fragment.anchor for fragment in optimizer.fragments])
    return weights(model), bits(anchors), [dict(fragment.scalars) for fragment in optimizer.fragments]


@pytest.mark.parametrize("workers", [1, 2])
def test_an_adam_that_learns_its_rate_is_the_plain_loop(workers: int) -> None:
    """Rates of both fragments and all weights after 14 steps, five and four rounds, in float64."""
    rule = LearnedAdam()
    (b1, b2), rates, rates_now = rule.betas, [rule.lr] * 2, [rule.lr] * 2
    m, v, before = ({name: torch.zeros(()) for names in HALVES for name in names} for _ in range(3))

    def begun(number: int, means: dict[str, Tensor]) -> None:
        dot = sum(float((gradient * before[name]).sum()) for name, gradient in means.items())
        rates_now[number], rates[number] = rates[number], rates[number] + rule.kappa * dot

    def step_of(name: str, number: int, g: Tensor, round: int) -> Tensor:
        m[name], v[name], before[name] = b1 * m[name] + (1 - b1) * g, b2 * v[name] + (1 - b2) * g * g, g.clone()
        size = (v[name] / (1 - b2**round)).sqrt() + rule.tau
        return rates_now[number] * m[name] / (1 - b1**round) / size

    expected = by_hand(14, workers, begun, step_of)
    results = isles.run_virtual(trained, workers, links=LINKS, args=(LearnedOuterAdam, 14))
    for (found, anchors, scalars), own in zip(results, expected, strict=True):
        torch.testing.assert_close(found, own, rtol=1e-12, atol=1e-12)
        assert [one["rate"] for one in scalars] == pytest.approx(rates, rel=1e-12)
        assert (anchors, scalars) == results[0][1:]
    assert len({rule.lr, *rates}) == 3, "both fragments have learned, each its own"


@pytest.mark.parametrize("workers", [1, 2])
def test_a_muon_of_whole_matrices_is_the_plain_loop(workers: int) -> None:
    """`first` by singular values, where the rule iterates; `bias` and `second`, which is named, by plain steps."""
    rule, momentum = OuterMuon(), {"first": torch.zeros(11, 5, dtype=torch.float64)}

    def step_of(name: str, number: int, g: Tensor, round: int) -> Tensor:
        if name != "first":
            return rule.lr * g
        momentum[name] = rule.momentum * momentum[name] + g
        return rule.lr * orthogonal(momentum[name])

    expected = by_hand(14, workers, lambda number, means: None, step_of)
    results = isles.run_virtual(trained, workers, links=LINKS, args=(OuterMuonMethod, 14))
    for (found, anchors, scalars), own in zip(results, expected, strict=True):
        torch.testing.assert_close(found, own, rtol=1e-9, atol=1e-9)
        assert (anchors, scalars) == (results[0][1], [{}, {}])


class Large(nn.Module):
    """A matrix of more than a block, in columns; a few small ones that share a block; a scalar."""

    def __init__(self) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(0)
        self.large = nn.Parameter(torch.randn(450, 400, generator=drawn).t())
        self.small = nn.ParameterList([torch.randn(3, 2, 2, generator=drawn), torch.randn(7, generator=drawn)])
        self.scale = nn.Parameter(torch.ones(()))

    def pull(self, seed: int) -> Tensor:
        """A loss whose gradients are drawn from `seed`."""
        drawn = torch.Generator().manual_seed(seed)
        return torch.stack([(own * torch.randn(own.shape, generator=drawn)).sum() for own in self.parameters()]).sum()


@dataclass(frozen=True, kw_only=True)
class Centred(OuterRule):
    """anchor <- anchor - (g - the mean of g over the first dimension), of what has one; counts what it sees."""

    whole = True
    scalars = ("entries",)

    def apply(self, anchor: Tensor, answer: Answer, state: RuleState, round: int) -> None:
        g = answer.mean
        anchor.sub_(g - g.mean(0) if g.dim() else g)
        state.scalars["entries"] += g.numel()


def composed(rule: OuterRule, **parts: Any) -> type[isles.OuterSync]:
    class Method(isles.FedAvg):
        def compose(self) -> Composition:
            usual = {"cadence": EveryH(1), "mixing": Everyone(), "codec": codec("none"), "landing": Replace()}
            return Composition(**{**usual, "rule": rule, **parts})

    return Method


def test_whole_parameters_come_in_their_shapes_whatever_their_memory() -> None:
    """A step of SGD with rate 1 moves by the gradient, which is then the outer gradient, centred."""

    def worker(world: Mesh) -> float:
        model, expected = Large(), {}
        before = {name: own.detach().clone() for name, own in model.named_parameters()}
        optimizer: Any = composed(Centred())(model, sgd(model, 1.0), world.outer)
        model.pull(1).backward()
        for name, own in model.named_parameters():
            assert own.grad is not None
            expected[name] = before[name] - (own.grad - own.grad.mean(0) if own.dim() else own.grad)
        optimizer.step()
        for name, own in model.named_parameters():
            torch.testing.assert_close(own.detach(), expected[name], rtol=1e-5, atol=1e-5)
        assert not model.large.is_contiguous()
        return float(optimizer.fragments[0].scalars["entries"])

    assert isles.run_virtual(worker, 1) == [450 * 400 + 12 + 7 + 1]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("noloco", {}),  # with the anchors of the pair
        ("sparta", {"fraction": 0.3}),  # with what did not travel
        ("custom", {"reading": "eager", "outer_delay": 1, "rule": "heavy_ball"}),  # with the own share
    ],
)
def test_entry_by_entry_whole_parameters_have_the_bits_of_blocks(name: str, options: dict[str, Any]) -> None:
    def worker(world: Mesh, whole: bool) -> list[str]:
        model, found = Large(), []

        class Method(isles.method(name)):  # type: ignore[misc]
            def compose(self) -> Composition:
                parts = super().compose()
                kind = type("Kind", (type(parts.rule),), {"whole": whole})
                return replace(
                    parts, rule=kind(**{one.name: getattr(parts.rule, one.name) for one in fields(parts.rule)})
                )

        optimizer = Method(model, sgd(model), world.outer, sync_every=2, **options)
        for step in range(1, 9):
            model.pull(10 * world.rank + step).backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(bits(weights(model)))
        return found

    blocks, parameters = (isles.run_virtual(worker, 2, links=LINKS, args=(whole,)) for whole in (False, True))
    assert blocks == parameters


def test_bits_do_not_hang_on_the_number_of_threads() -> None:
    """Nor on the world: alone, and as one of two that learned the same."""

    def worker(world: Mesh, rule: OuterRule, threads: int) -> tuple[str, dict[str, float]]:
        model = Large()
        with torch_threads(threads):
            optimizer: Any = composed(rule)(model, sgd(model, 0.1), world.outer)
            for step in range(3):
                model.pull(step).backward()
                optimizer.step()
                optimizer.zero_grad()
        return bits(weights(model)), dict(optimizer.fragments[0].scalars)

    for rule in (LearnedAdam(kappa=1e-7), OuterMuon(iterations=3)):
        found = [isles.run_virtual(worker, 1, args=(rule, threads))[0] for threads in (1, 2)]
        found += isles.run_virtual(worker, 2, args=(rule, 1))
        assert all(one == found[0] for one in found)


# Where the state goes.


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("options", [{}, {"codec": "int8", "error_feedback": "local"}, {"outer_delay": 1}])
def test_a_run_goes_on_from_a_checkpoint_with_the_same_bits(name: str, options: dict[str, Any]) -> None:
    def run(*args: Any) -> list[Any]:
        return isles.run_virtual(resumed, 2, links=LINKS, args=(name, options, *args))

    plain, went_on = run(None, None), run(4, None)
    restored = run(None, [result["file"] for result in went_on])
    for rank in range(2):
        assert went_on[rank]["log"][4:] == restored[rank]["log"]
        assert learned(went_on[rank]["log"]) == learned(plain[rank]["log"])


def resumed(
    world: Mesh, name: str, options: dict[str, Any], save_at: int | None, files: list[bytes] | None
) -> dict[str, Any]:
    with named(name, {"sync_every": 3, **options}) as known:
        return checkpointed(world, known, 11, save_at, files)


@contextmanager
def named(method: str, options: dict[str, Any]) -> Iterator[str]:
    from tests.replicas.workers import RUNS

    key = f"{method} {options}"
    RUNS[key] = method, options
    yield key


@pytest.mark.parametrize("kind", [LearnedOuterAdam, OuterMuonMethod])
def test_a_joiner_with_a_donors_state_has_its_bits(kind: type[isles.OuterSync]) -> None:
    """Member 2 is not there in rounds 4 to 6 and comes back with member 0's state, its numbers among it."""
    views = [View(0, 1, (0, 1, 2)), View(1, 4, (0, 1)), View(2, 7, (0, 1, 2))]
    handed: dict[str, Any] = {}

    def worker(world: Mesh) -> Any:
        model, roster = Net(seed=world.rank), ChangingRoster(world.world, views)
        optimizer: Any = kind(model, sgd(model), roster, sync_every=3)
        beside = replace(world.world, ranks=(0, 2), view=99) if world.rank in (0, 2) else None
        while optimizer.steps < 27:
            if world.rank == 2 and optimizer.steps == 9:
                assert beside is not None
                beside.barrier()
                model.load_state_dict(handed["model"])
                adopt(optimizer, handed["state"])
                enter(optimizer, 7, 18)
            train_step(optimizer, world.rank, optimizer.steps + 1)
            if world.rank == 0 and optimizer.steps == 18:
                assert beside is not None
                handed.update(state=copied(donor_state(optimizer)), model=copied(dict(model.state_dict())))
                beside.barrier()
        (fragment,) = optimizer.fragments
        return bits(weights(model)), dict(fragment.scalars), fragment.landed

    deadlines = isles.Deadlines(outer=20, control=20, eval=20)
    first, second, joiner = isles.run_virtual(worker, 3, links=LINKS, deadlines=deadlines)
    assert first == second == joiner and first[2] == 9


def test_a_missed_round_is_landed_with_its_numbers() -> None:
    def worker(world: Mesh) -> None:
        both = [(model, LearnedOuterAdam(model, sgd(model), world.outer, sync_every=3)) for model in (Net(), Net())]
        (_, optimizer), (_, late) = both
        (fragment,), (other,) = optimizer.fragments, late.fragments
        fragment.retain_until = 9
        for step in range(1, 10):
            train_step(optimizer, 0, step)
            if step % 3 == 0:
                assert fragment.landed_mean is not None
                assert land_missed(late, step // 3, fragment.landed_mean, 1, whole=True) == fragment.digest
        assert dict(fragment.scalars) == dict(other.scalars) and fragment.scalars["rate"] != LearnedAdam().lr

    isles.run_virtual(worker, 1)


def test_a_skipped_round_leaves_the_numbers() -> None:
    """`end` is called for what lands, and for nothing else."""

    def worker(world: Mesh) -> list[Any]:
        model = Net()
        optimizer: Any = composed(Counting())(model, sgd(model), world.outer)
        for step in range(1, 5):
            if step == 2 and world.rank == 0:
                optimizer.parameters[0].data.fill_(float("nan"))
            train_step(optimizer, world.rank, step)
        return [optimizer.skipped, dict(optimizer.fragments[0].scalars)]

    with pytest.warns(UserWarning, match="is skipped by all"):
        assert isles.run_virtual(worker, 2, links=LINKS) == [[1, {"ends": 3.0, "entries": 3.0 * 143}]] * 2


@dataclass(frozen=True, kw_only=True)
class Counting(OuterRule):
    """Plain steps; how often it ended, and how many entries it was called with."""

    scalars = ("ends", "entries")

    def apply(self, anchor: Tensor, answer: Answer, state: RuleState, round: int) -> None:
        anchor.sub_(answer.mean)
        state.scalars["entries"] += anchor.numel()

    def end(self, scalars: Any, round: int) -> None:
        scalars["ends"] += 1
        assert scalars["ends"] == round


@pytest.mark.parametrize("rule", [Counting(), Centred()])
@pytest.mark.parametrize("workers", [1, 2])
def test_what_is_frozen_is_in_no_sum(rule: OuterRule, workers: int) -> None:
    """`second`, 77 of 143 entries, is frozen after two rounds, and counts in those and in the one it was trained in."""

    def worker(world: Mesh) -> tuple[float, bool]:
        model = Net()
        optimizer: Any = composed(rule)(model, sgd(model), world.outer)
        for step in range(1, 5):
            if step == 3:
                model.second.requires_grad_(False)
                before = model.second.detach().clone()
            train_step(optimizer, world.rank, step)
        return optimizer.fragments[0].scalars["entries"], torch.equal(model.second, before)

    assert isles.run_virtual(worker, workers) == [(2.0 * 143 + 2 * 66, True)] * workers


def test_a_new_rules_state_is_not_taken_from_another() -> None:
    def worker(world: Mesh) -> None:
        model = Net()
        first = composed(Counting())(model, sgd(model), world.outer)
        second = composed(LearnedAdam())(model, sgd(model), world.outer)
        with pytest.raises(ValueError, match="the state has no 'mean', which the outer rule keeps"):
            second.load_state_dict(first.state_dict())

    isles.run_virtual(worker, 1)


def test_what_a_rule_must_not_name() -> None:
    class Twice(LearnedAdam):
        vectors = ("mean", "square", "before", "dot")

    class Unknown(Counting):
        def end(self, scalars: Any, round: int) -> None:
            scalars["end"] = 1.0

    def worker(world: Mesh) -> None:
        model = Net()
        with pytest.raises(ValueError, match="rule own: 'dot' is a vector and a scalar"):
            composed(Twice())(model, sgd(model), world.outer)
        optimizer = composed(Unknown())(model, sgd(model), world.outer)
        with pytest.raises(ValueError, match="the outer rule has no scalar 'end': add it to"):
            train_step(optimizer, 0, 1)

    isles.run_virtual(worker, 1)


@pytest.mark.parametrize(
    ("rule", "why"), [(LearnedAdam(), r"keeps scalars \(rate, dot\)"), (OuterMuon(), "takes whole")]
)
def test_rows_of_an_island_are_refused(rule: OuterRule, why: str) -> None:
    def worker(world: Mesh) -> None:
        mesh, model = isles.mesh(outer=1, inner=2), Net()
        inside = isles.DDP(model, sgd(model), mesh.inner)
        with pytest.raises(ValueError, match=f"{type(rule).__name__}: it {why}.* rows of each parameter") as refusal:
            composed(rule)(model, inside, mesh.outer)
        assert "\n" not in str(refusal.value) and "world.inner = 1" in str(refusal.value)

    isles.run_virtual(worker, 2)
