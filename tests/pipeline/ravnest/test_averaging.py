"""Averages over clusters of different cuts: the arithmetic mean everywhere, its bytes, and what a loss leaves."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isles
from isles.comm.codecs import codec
from isles.comm.collectives.mean import sent_bytes
from isles.pipeline.ravnest.averaging import SharedSegment, refinement
from tests.gloo import run_gloo
from tests.pipeline.ravnest import averages, nodes
from tests.pipeline.ravnest.averages import THREE, Killed, Plan
from tests.pipeline.ravnest.nodes import Wet

LONG = pytest.mark.long
FAST = isles.Links(bandwidth=1e8, latency=0.01)


def virtual(plan: Plan, **options: Any) -> list[Any]:
    return isles.run_virtual(averages.train, plan.workers, links=FAST, args=(plan,), step_seconds=0.0, **options)


def by_cluster(done: list[dict[str, Any]], what: str) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for node in done:
        found.setdefault(node["cluster"], {}).update(node[what])
    return found


def test_the_refinement_of_three_cuts() -> None:
    clusters = [{0: "abc", 1: "def"}, {2: "ab", 3: "cde", 4: "f"}, {5: "abcdef"}]
    found = refinement([{rank: list(names) for rank, names in one.items()} for one in clusters])
    assert found == [
        SharedSegment((0, 2, 5), ("a", "b")),
        SharedSegment((0, 3, 5), ("c",)),
        SharedSegment((1, 3, 5), ("d", "e")),
        SharedSegment((1, 4, 5), ("f",)),
    ]
    with pytest.raises(ValueError, match="do not hold the same"):
        refinement([{0: ["a", "b"]}, {1: ["a"]}])
    with pytest.raises(ValueError, match="holds 'a' at nodes 1 and 2"):
        refinement([{0: ["a"]}, {1: ["a"], 2: ["a"]}])


CUTS = [THREE, ((1,), (3,)), ((), (2,), (1, 3), (1, 2, 3)), ((2,),)]
LONG_MEANS = [pytest.param(cuts, weights, marks=LONG) for cuts in CUTS for weights in ("equal", "samples")]


@pytest.mark.parametrize(("cuts", "weights"), [(THREE, "equal"), (CUTS[2], "samples"), *LONG_MEANS], ids=str)
def test_every_cluster_has_the_mean(cuts: tuple[tuple[int, ...], ...], weights: str) -> None:
    """Of weights and of the optimizer's state, whatever the cuts; odd shapes."""
    plan = Plan(cuts, moved=True, weights=weights, with_state=True, optimizer="adamw")  # type: ignore[arg-type]
    done = virtual(plan)
    counts = [averages.samples(plan, number) if weights == "samples" else 1 for number in range(len(cuts))]

    def mean(name: str, shape: torch.Size, start: Tensor | float = 0.0) -> Tensor:
        shares = [count * averages.moved(name, number, shape).double() for number, count in enumerate(counts)]
        return start + torch.stack(shares).sum(0) / sum(counts)

    apart = by_cluster(done, "weights")
    assert all(own.keys() == apart[0].keys() for own in apart.values()) and len(apart) == len(cuts)
    for name, start in Wet(0.0).named_parameters():
        expected = mean(name, start.shape, start.detach().double())
        for own in apart.values():
            assert torch.equal(own[name], apart[0][name])
            assert (own[name].double() - expected).abs().max() <= 1e-7 * max(1.0, float(expected.abs().max()) * 4)
    for name, moments in by_cluster(done, "moments")[0].items():
        assert torch.allclose(moments[0].double(), mean(name + "m", moments[0].shape), rtol=0, atol=1e-6)


@pytest.mark.parametrize("cuts", [THREE, *(pytest.param(cuts, marks=LONG) for cuts in CUTS[1:3])], ids=str)
def test_bytes_are_those_of_the_formula(cuts: tuple[tuple[int, ...], ...]) -> None:
    """2 (C - 1) / C of what a node holds; beside it a header for each segment, the heads of
    messages, and two agreements with each other node: (who speaks, who is lost), then (the same, done).
    """
    plan, clusters = Plan(cuts, moved=True), len(cuts)
    held = [
        {rank: [n for n, _ in stage.named_parameters()] for rank, stage in zip(ranks, own, strict=True)}
        for ranks, own in zip(plan.ranks, averages.parts(plan), strict=True)
    ]
    sizes = {name: parameter.numel() for name, parameter in Wet(0.0).named_parameters()}
    for rank, node in enumerate(virtual(plan)):
        own = [segment for segment in refinement(held) if rank in segment.holders]
        counts = [sum(sizes[name] for name in segment.names) for segment in own]
        all_coordinates = [segment.holders.index(rank) for segment in own]
        exact = [
            sent_bytes(count, torch.float32, codec("none"), clusters, coordinates)
            for count, coordinates in zip(counts, all_coordinates, strict=True)
        ]
        assert node["sent"] == sum(exact)
        volume = 2 * (clusters - 1) / clusters * 4 * sum(counts)
        rounding = len(own) * (32 * (clusters - 1) + 8 * clusters)
        assert abs(node["sent"] - volume) <= rounding
        shots = 2 if clusters > 2 else 1  # beside the header of each mean
        heads = 80 * sum((1 + shots) * (clusters - 1) for _ in own)
        fields = [8 * numbers * (1 + plan.workers) for numbers in (2, 3)]  # its own, then everybody's
        assert node["told"] == heads + (plan.workers - 1) * sum(2 * 80 + word for word in fields)


@pytest.mark.parametrize("cuts", [THREE, pytest.param(((), ()), marks=LONG)], ids=str)
def test_every_step_averaged_is_data_parallel(cuts: tuple[tuple[int, ...], ...]) -> None:
    """With SGD, whose step is linear in the gradient (no momentum is averaged here: it is linear too)."""
    plan = Plan(cuts, rounds=6)
    model = Wet(0.0)
    optimizer = nodes.stepper("sgd", list(model.parameters()))
    for number in range(plan.rounds):
        for cluster in range(len(cuts)):
            text = averages.text(cluster, number)
            x = model.enter(text[:, :-1])
            for block in model.blocks:
                x = model.through(block, x)
            loss = nn.functional.cross_entropy(model.leave(x).flatten(0, 1), text[:, 1:].flatten())
            (loss / len(cuts)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for own in by_cluster(virtual(plan), "weights").values():
        for name, weight in model.named_parameters():
            assert (own[name] - weight).abs().max() <= 1e-6, name


def survivors(plan: Plan, done: list[Any]) -> list[dict[str, Any]]:
    """What those came to who train at the end: the same seats, weights and clusters everywhere; the victim alone has
    ended with an error, the rest of its cluster stands idle, unless one who stood by has taken its place.
    """
    assert plan.victim is not None
    assert [rank for rank, one in enumerate(done) if isinstance(one, Exception)] == [plan.victim], done
    retained = [one for one in done if not isinstance(one, Exception)]
    assignment = retained[0]["assignment"]
    lost = next((number for number, ranks in enumerate(plan.ranks) if plan.victim in ranks), None)
    left = [number for number in range(len(plan.cuts)) if number != lost or plan.aside]
    assert all(one["assignment"] == assignment for one in retained) and assignment.whole == left
    trained = [one for one in retained if one["trains"]]
    assert len(trained) == sum(len(plan.cuts[number]) + 1 for number in left)
    apart = by_cluster(trained, "weights")
    assert sorted(apart) == left
    for own in apart.values():
        assert own.keys() == apart[left[0]].keys()
        assert all(torch.equal(own[name], weight) for name, weight in apart[left[0]].items())
    return trained


MOMENTS = [(0, 7), (2, 9), (5, 13), *(pytest.param(*one, marks=pytest.mark.long) for one in ((1, 14), (4, 6)))]


@pytest.mark.parametrize(("victim", "after"), MOMENTS)
def test_a_lost_node_takes_its_cluster_out(victim: int, after: int) -> None:
    """At that message of its: in training, in an average, in its verdict. The others agree, and go on."""
    plan = Plan(THREE, rounds=3, each=2, victim=victim, after=after)
    survivors(plan, virtual(plan, return_errors=True))


def test_the_mean_after_a_loss_is_that_of_the_clusters_that_are_left() -> None:
    """Of two, where the first of three is lost in the first average: start + (x1 + x2) / 2."""
    plan = Plan(THREE, rounds=2, moved=True, victim=0, after=5)
    for own in by_cluster(survivors(plan, virtual(plan, return_errors=True)), "weights").values():
        for name, start in Wet(0.0).named_parameters():
            one, other = (averages.moved(name, cluster, start.shape) for cluster in (1, 2))
            torch.testing.assert_close(own[name], start.detach() + (one + other) / 2, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("victim", "after"), [(0, 7), (6, 12), *(pytest.param(*one, marks=LONG) for one in [(1, 14), (4, 6), (5, 13)])]
)
def test_a_cluster_is_whole_again_with_who_stood_by(victim: int, after: int) -> None:
    """It goes on from the others' weights, and averages with them; one that stands by may be lost as well."""
    plan = Plan(THREE, rounds=3, each=2, optimizer="adamw", victim=victim, after=after, aside=2)
    trained = survivors(plan, virtual(plan, return_errors=True))
    moments = by_cluster(trained, "moments")
    assert all(torch.isfinite(value).all() for own in moments.values() for values in own.values() for value in values)


def test_who_takes_a_place_holds_the_others_bits() -> None:
    """Weights and the optimizer's state, in a cluster of another cut; those of its cluster who were left as well."""
    plan = Plan(THREE, rounds=1, each=3, optimizer="adamw", victim=1, after=4, aside=1)
    trained = survivors(plan, virtual(plan, return_errors=True))
    assert trained[0]["assignment"].clusters == ((0, 6, 2), (3, 4), (5,)) and len(trained) == 6
    moments = by_cluster(trained, "moments")
    for name, values in moments[1].items():
        assert all(torch.equal(own, other) for own, other in zip(moments[0][name], values, strict=True)), name


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("aside", [0, 1])
@pytest.mark.parametrize("victim", range(6))
def test_a_node_lost_at_any_message_takes_its_cluster_out(victim: int, aside: int) -> None:
    for after in range(400):
        plan = Plan(THREE, rounds=3, each=2, victim=victim, after=after, aside=aside)
        done = virtual(plan, return_errors=True)
        if not any(isinstance(one, Exception) for one in done):
            assert after > 20  # it had sent all it had to
            return
        if not isinstance(done[victim], Killed):
            raise AssertionError(done[victim])
        if not is_late(plan, done):
            survivors(plan, done)
    raise AssertionError("it never came to its end")


@LONG
@pytest.mark.parametrize("seed", range(30))
def test_after_two_losses_those_who_are_left_agree(seed: int) -> None:
    """Of any two of eight workers, at any two moments: the same seats, and the same bits in all clusters that are
    whole.
    """
    draw, plan = random.Random(seed), Plan(THREE, rounds=4, each=2, aside=2)
    victims = {rank: draw.randint(8, 70) for rank in draw.sample(range(8), 2)}
    done = isles.run_virtual(
        averages.train_and_lose, 8, links=FAST, args=(plan, victims), step_seconds=0.0, return_errors=True
    )
    assert all(isinstance(one, Killed) for one in done if isinstance(one, Exception)), done
    retained = [one for one in done if not isinstance(one, Exception)]
    assert all(one["assignment"] == retained[0]["assignment"] for one in retained)
    apart = by_cluster([one for one in retained if one["trains"]], "weights")
    for name in Wet(0.0).state_dict():
        first, *others = (own[name] for own in apart.values() if name in own)
        assert all(torch.equal(first, other) for other in others), name


def is_late(plan: Plan, done: list[Any]) -> bool:
    """Whether the victim's last average counts and nobody has asked for it since: its end is not known to all yet."""
    retained = [one for one in done if not isinstance(one, Exception)]
    return plan.victim not in retained[0]["assignment"].lost and all(
        one["assignment"] == retained[0]["assignment"] for one in retained
    )


@LONG
@pytest.mark.parametrize(("victim", "after"), [(1, 5), (4, 8)])
@pytest.mark.parametrize("aside", [0, 1])
def test_a_killed_process_takes_its_cluster_out(victim: int, after: int, aside: int) -> None:
    plan = Plan(THREE, rounds=3, each=2, victim=victim, after=after, aside=aside)
    done = isles.run_local(averages.train, plan.workers, args=(plan, "kill"), return_errors=True)
    survivors(plan, done)


@LONG
def test_gloo_has_the_same_bits() -> None:
    plan = Plan(THREE, rounds=2, each=3, optimizer="adamw", with_state=True)
    for ours, theirs in zip(run_gloo(averages.train, 6, args=(plan,)), virtual(plan), strict=True):
        assert ours["sent"] == theirs["sent"]
        assert all(torch.equal(weight, theirs["weights"][name]) for name, weight in ours["weights"].items())
