"""Gates that need no training: c-BTM's clusters, and the ridge gate."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from isles.data import ByteTokenizer
from isles.experts.ensemble import Joining, Speaker
from isles.experts.hdee import RidgeGate
from isles.experts.jobs import JobProgress
from isles.experts.routing import ByClusters, Clusters, assign, clustered, route
from tests.experts.small import made, write_domains

KINDS = ("cat dog cow hen", "red blue green grey", "one two three four")


def texts(count: int, seed: int = 0) -> tuple[list[str], np.ndarray]:
    """Lines of words of one kind each, and their kinds."""
    draw = random.Random(seed)
    kinds = [draw.randrange(3) for _ in range(count)]
    return [" ".join(draw.choices(KINDS[kind].split(), k=6)) for kind in kinds], np.array(kinds)


def test_clusters_find_the_kinds_and_are_balanced_in_training(tmp_path: Path) -> None:
    lines, made_of = texts(90)
    clusters = clustered(lines, 3, seed=0)
    found = assign(-clusters.distances(lines), "unbalanced")
    assert len({(kind, expert) for kind, expert in zip(made_of.tolist(), found.tolist(), strict=True)}) == 3
    assert np.bincount(assign(-clusters.distances(lines))).tolist() == [30, 30, 30]
    clusters.save(tmp_path / "clusters.safetensors")
    back = Clusters.load(tmp_path / "clusters.safetensors")
    again = clustered(lines, 3, seed=0)
    for one in (back, again):
        assert np.array_equal(one.distances(lines), clusters.distances(lines))
    with pytest.raises(ValueError, match="no clusters can be read"):
        Clusters.load(tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="give more text"):
        clustered(lines[:2], 3, seed=0)


def test_clusters_read_the_prefix_alone() -> None:
    clusters = clustered(texts(60)[0], 3, seed=0)
    gate, tokenizer = ByClusters(clusters, ByteTokenizer()), ByteTokenizer()
    tokens = torch.tensor(np.stack([tokenizer.encode(line[:16]) for line in texts(8, seed=1)[0]]).astype(np.int64))
    changed = tokens.clone()
    changed[:, 12:] = 97
    assert torch.equal(route(gate, tokens, 12), route(gate, changed, 12))
    chances_EN = gate.log_chances(gate.scores(tokens, 12))
    distances_NE = torch.from_numpy(clusters.distances([tokenizer.decode(row[:12].numpy()) for row in tokens]))
    torch.testing.assert_close(chances_EN, (-distances_NE.T / 0.1).log_softmax(0))
    torch.testing.assert_close(chances_EN.exp().sum(0), torch.ones(8, dtype=torch.float64))


def test_the_ridge_gate_is_the_closed_form() -> None:
    draw = np.random.default_rng(0)
    embeddings = draw.normal(size=(20, 4))
    own = [draw.integers(5 * kind, 5 * kind + 8, size=(30, 6)) for kind in range(3)]
    gate = RidgeGate(embeddings)
    for kind in range(3):
        gate.add(str(kind), own[kind])
    x_TF = np.concatenate([np.append(embeddings, np.ones((20, 1)), 1)[one.ravel()] for one in own])
    y_TE = np.repeat(np.eye(3), 180, axis=0)
    by_hand = np.linalg.solve(x_TF.T @ x_TF + 1e-2 * np.eye(5), x_TF.T @ y_TE)
    np.testing.assert_allclose(gate.weights(), by_hand / np.linalg.norm(by_hand, axis=0), rtol=1e-9)
    votes = (x_TF[:6] @ gate.weights()).argmax(1)
    assert gate.route(own[0][:1])[0] == np.bincount(votes, minlength=3).argmax()
    with pytest.raises(ValueError, match="no text to know it by"):
        gate.add("none", own[0][:0])


def test_experts_by_clusters_from_end_to_end(tmp_path: Path) -> None:
    system = made("smalltalk", write_domains(tmp_path), tmp_path / "out", "smalltalk.gate=clusters")
    told = system.evaluate(JobProgress())
    loads = told["by_seed"][0]["routing"]["loads_training"]
    assert told["mean"]["trained"]["all"]["oracle"] <= told["mean"]["trained"]["all"]["mixture"]
    assert max(loads) - min(loads) <= 1
    assert "score_bytes_sent" not in told["bytes"] and not (tmp_path / "out" / "seed-0" / "routers").exists()
    path = tmp_path / "out" / "seed-0" / "forests" / "smalltalk.json"
    assert "routed with a probability of" in Speaker(path, Joining()).voice("some words").note
