"""Formation against every grouping, cuts against every cut, and what cannot be."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from isles.network.clusters import ClusterCutter, ClusterNode, ModelLoad, NodeCluster, form_clusters, read_nodes


def drawn(count: int, seed: int) -> list[ClusterNode]:
    draw = random.Random(seed)
    return [
        ClusterNode(
            name=f"n{number}",
            memory=draw.choice([30.0, 60.0, 90.0, 200.0]),
            speed=draw.choice([1.0, 2.0, 3.0, 7.0]),
            bandwidth=draw.choice([8.0, 80.0]),
            latency=draw.choice([0.0, 0.01, 0.1]),
        )
        for number in range(count)
    ]


def load(blocks: int, seed: int = 0) -> ModelLoad:
    draw = random.Random(100 + seed)
    return ModelLoad(
        flops=tuple(draw.uniform(1, 3) for _ in range(blocks)),
        weights=tuple(draw.uniform(2, 5) for _ in range(blocks)),
        saved=tuple(draw.uniform(1, 2) for _ in range(blocks)),
        stream=1.0,
    )


def by_hand(model: ModelLoad, nodes: Sequence[ClusterNode], cuts: Sequence[int]) -> tuple[list[float], list[float]]:
    """Seconds and shares of memory of each stage, as the module's words say."""
    bounds, stages = [0, *cuts, model.blocks], len(nodes)
    seconds, fills = [], []
    for stage, node in enumerate(nodes):
        own = range(bounds[stage], bounds[stage + 1])
        last = stage == stages - 1
        neighbours = (stage > 0) + (not last)
        passes = 3 if last else 4
        flops = sum(model.flops[block] for block in own)
        seconds.append(passes * flops / node.speed + neighbours * 8 * model.stream / node.bandwidth)
        weights = sum(model.weights[block] for block in own)
        held = weights * (stages - stage + 3) + (stages - stage) * model.stream + sum(model.saved[b] for b in own)
        fills.append(held / node.memory)
    return seconds, fills


def every_cut(blocks: int, stages: int) -> list[tuple[int, ...]]:
    return list(itertools.combinations(range(1, blocks), stages - 1))


@pytest.mark.parametrize("seed", range(12))
def test_a_split_is_the_best_of_all_cuts(seed: int) -> None:
    model, nodes = load(7, seed), drawn(1 + seed % 4, seed)
    legal = []
    for cuts in every_cut(7, len(nodes)):
        seconds, fills = by_hand(model, nodes, cuts)
        if max(fills) <= 1:
            legal.append((max(seconds), max(fills)))
    found = {by: ClusterCutter(model, by).split(nodes) for by in ("time", "memory")}
    if not legal:
        assert found == {"time": None, "memory": None}
        return
    for place, by in enumerate(("time", "memory")):
        split = found[by]
        assert split is not None
        seconds, fills = by_hand(model, nodes, split.cuts)
        assert split.seconds == pytest.approx(seconds) and split.fills == pytest.approx(fills)
        assert (max(seconds), max(fills))[place] == pytest.approx(min(pair[place] for pair in legal))


def value(nodes: Sequence[ClusterNode], clusters: Sequence[NodeCluster]) -> tuple[float, ...]:
    """What a formation is worth; less is better."""
    seconds = [cluster.seconds for cluster in clusters]
    ways = [0.0] + [
        nodes[a].latency + nodes[b].latency for cluster in clusters for a, b in itertools.combinations(cluster.nodes, 2)
    ]
    return -len(clusters), round(max(seconds) / min(seconds), 9), max(ways), max(seconds)


def every_value(nodes: Sequence[ClusterNode], model: ModelLoad, most: int) -> list[tuple[float, ...]]:
    """Of all assignments of nodes to numbers, each grouping many times over."""
    found = []
    for numbers in itertools.product(range(most), repeat=len(nodes)):
        clusters = []
        for number in set(numbers):
            inside = [node for node, own in enumerate(numbers) if own == number]
            inside.sort(key=lambda node: (-nodes[node].memory, node))
            split = ClusterCutter(model).split([nodes[node] for node in inside])
            clusters.append(None if split is None else NodeCluster(tuple(inside), split))
        if None not in clusters:
            found.append(value(nodes, [cluster for cluster in clusters if cluster is not None]))
    return found


@pytest.mark.parametrize("seed", range(6))
def test_formation_is_the_best_of_all_groupings(seed: int) -> None:
    nodes, model, most = drawn(1 + seed, seed), load(4, seed), 3
    values = every_value(nodes, model, most)
    if not values:
        with pytest.raises(ValueError, match="one copy of the model takes"):
            form_clusters(nodes, model, most=most)
        return
    made = form_clusters(nodes, model, most=most)
    assert value(nodes, made) == pytest.approx(min(values))
    assert sorted(node for cluster in made for node in cluster.nodes) == list(range(len(nodes)))


@pytest.mark.long
@pytest.mark.parametrize("count", [7, 8])
@pytest.mark.parametrize("seed", range(8))
def test_formation_of_up_to_eight_nodes_is_the_best_of_all(count: int, seed: int) -> None:
    """And the local search finds as good a one."""
    nodes, model = drawn(count, 50 + seed), load(5, seed)
    values = every_value(nodes, model, 3)
    exact = form_clusters(nodes, model, most=3)
    assert value(nodes, exact) == pytest.approx(min(values))
    evolved = form_clusters(nodes, model, most=3, method="search", seed=seed)
    assert value(nodes, evolved) == pytest.approx(min(values))


@pytest.mark.long
def test_above_eight_nodes_a_seed_gives_the_same_clusters() -> None:
    nodes, model = drawn(12, 3), load(8)
    first, again = (form_clusters(nodes, model, seed=5) for _ in range(2))
    assert first == again and len(first) > 1
    assert max(fill for cluster in first for fill in cluster.split.fills) <= 1


def test_three_equal_nodes_are_three_clusters() -> None:
    """Of which the public code makes one or three, by luck."""
    nodes = [ClusterNode(name=name, memory=1e3, speed=1.0, bandwidth=1e6) for name in "abc"]
    assert [cluster.nodes for cluster in form_clusters(nodes, load(4))] == [(0,), (1,), (2,)]


@pytest.mark.parametrize(
    ("memory", "blocks", "count", "words"),
    [(1.0, 4, 3, "3 nodes offer"), (1e9, 1, 6, "6 nodes in 5 clusters at most"), (30.0, 4, 4, "no cut between its 4")],
)
def test_what_cannot_hold_the_model_is_reported_in_a_line(memory: float, blocks: int, count: int, words: str) -> None:
    nodes = [ClusterNode(name=f"n{n}", memory=memory, speed=1.0, bandwidth=1e6) for n in range(count)]
    with pytest.raises(ValueError, match=words) as error:
        form_clusters(nodes, load(blocks))
    assert "\n" not in str(error.value)


def test_a_description_is_read_back(tmp_path: Path) -> None:
    nodes = [ClusterNode(name="desk", memory=16e9, speed=1.2e11, bandwidth=4e7, latency=0.012)]
    nodes.append(ClusterNode(name="attic", memory=8e9, speed=4e10, bandwidth=1e7))
    path = tmp_path / "nodes.toml"
    path.write_text("".join(node.to_toml() for node in nodes))
    assert read_nodes(str(path)) == nodes


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no node: write [[node]]"),
        ("speed = 3", "speed: write [[node]]"),
        ('[[node]]\nname = "a"', "node 1.memory is missing"),
        ('[[node]]\nname = "a"\nmemory = "1GB"\nspeed = "1G"\nbandwidth = "0bit/s"', "node 1: bandwidth = 0bit/s"),
        ('[[node]]\nname = "a"\nmemory = 0\nspeed = "1G"\nbandwidth = "1Mbit/s"', "node 1: memory = 0.0: choose"),
        (2 * '[[node]]\nname = "a"\nmemory = "1GB"\nspeed = "1G"\nbandwidth = "1Mbit/s"\n', "'a' stands for 2"),
    ],
)
def test_a_slip_in_a_description_is_one_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "nodes.toml"
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        read_nodes(str(path))
    assert str(error.value).startswith(f"{path}: ") and words in str(error.value)
    assert "\n" not in str(error.value)
