"""The spread of the replicas in metrics.jsonl: exact for small models, near it for large ones, without a message."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from isles.training.records import replica_spread
from isles.training.records.replica_spread import Sample, Spread, variance_of
from tests.training.runs import lines_of, run, spreads, tiny, write_text


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


def replicas(sizes: list[tuple[int, ...]], workers: int, seed: int = 0) -> list[list[torch.Tensor]]:
    """Tensors of each worker: the same ones, and noise of another size in each tensor."""
    draw = torch.Generator().manual_seed(seed)
    common = [torch.randn(size, generator=draw) for size in sizes]
    return [
        [one + 0.01 * (index + 1) * torch.randn(one.shape, generator=draw) for index, one in enumerate(common)]
        for _ in range(workers)
    ]


def spread_of(samples: list[str]) -> float:
    return variance_of(samples) ** 0.5


def exact(held: list[list[torch.Tensor]]) -> float:
    flat = torch.stack([torch.cat([one.reshape(-1) for one in own]) for own in held]).double()
    return float((flat - flat.mean(0)).square().mean().sqrt())


def test_a_small_model_is_read_whole() -> None:
    held = replicas([(7, 5), (3,), (1,), (10, 10)], 3)
    samples = [Sample(own).read() for own in held]
    assert spread_of(samples) == pytest.approx(exact(held), rel=1e-6)
    assert spread_of([samples[0]] * 3) == 0.0  # the mean of three equal numbers is not rounded here


def test_a_large_model_is_estimated() -> None:
    """Also where tensors differ much in size and noise."""
    held = replicas([(200, 300), (300,), (64, 512), (3, 1000)], 4)
    assert sum(one.numel() for one in held[0]) > 40 * replica_spread.WEIGHTS
    assert spread_of([Sample(own).read() for own in held]) == pytest.approx(exact(held), rel=0.1)


def test_coarse_and_shared_numbers_are_read_too() -> None:
    for dtype in (torch.bfloat16, torch.float64):
        held = [[one.to(dtype) for one in own] for own in replicas([(9, 9)], 2)]
        assert spread_of([Sample(own).read() for own in held]) == pytest.approx(exact(held), rel=1e-5)


def test_the_last_sample_of_a_step_gives_the_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers may be far apart; what never becomes whole is forgotten."""
    monkeypatch.setattr(replica_spread, "_PENDING", 3)
    first, second = (Sample(own).read() for own in replicas([(8,)], 2))
    together = Spread({0: 0, 1: 0})
    assert [together.take(step, 0, first, 8) for step in (1, 2, 3, 4, 5)] == [{}] * 5
    last = pytest.approx(spread_of([first, second]), rel=1e-15)
    assert [together.take(step, 1, second, 8) for step in (5, 4)] == [{s: last} for s in (5, 4)]
    assert together.take(1, 1, second, 8) == {}


def test_every_stage_counts_as_much_as_it_has_weights() -> None:
    sizes: list[tuple[int, ...]] = [(30, 7), (11,)]
    held = replicas(sizes, 3)
    together = Spread({2 * replica + stage: stage for replica in range(3) for stage in range(2)})
    found: dict[int, float] = {}
    for replica in range(3):
        for stage in range(2):
            sample = Sample([held[replica][stage]])
            found = together.take(7, 2 * replica + stage, sample.read(), sample.weights)
    assert found == {7: pytest.approx(exact(held), rel=1e-6)}


@pytest.mark.parametrize("name", ["none", "ddp", "localsgd", "noloco"])
def test_a_run_tells_its_spread_at_every_logged_step(text: Path, tmp_path: Path, name: str) -> None:
    """0 where the method has just made replicas equal, growing while nobody talks; the last one is the summary's."""
    config = tiny(text, "run.log_every=1", "replicas.sync_every=3" if name in ("localsgd", "noloco") else "run.seed=0",
                  method=name, workers=3, steps=6)  # fmt: skip
    summary = run(config, tmp_path / "run")
    found = spreads(tmp_path / "run")
    assert list(found) == [1, 2, 3, 4, 5, 6]
    if name == "ddp":
        assert set(found.values()) == {0.0}
    elif name == "localsgd":
        assert found[3] == found[6] == 0.0 and 0 < found[1] < found[2]
    else:
        assert 0 < found[1] < found[2]
        assert found[6] == pytest.approx(summary["replica_std"], rel=0.15)
        assert (found[3] < found[2]) == (name == "noloco")


def test_the_spread_of_replicas_in_stages_is_that_of_all_stages(text: Path, tmp_path: Path) -> None:
    stages = ["model.layers=2", "pipeline.stages=2", "pipeline.microbatches=2"]
    summary = run(tiny(text, *stages, method="none", workers=4, steps=4), tmp_path / "run")
    found = spreads(tmp_path / "run")
    assert list(found) == [2, 4] and found[4] == pytest.approx(summary["replica_std"], rel=0.1)


def test_islands_tell_theirs_too(text: Path, tmp_path: Path) -> None:
    run(tiny(text, "world.inner=2", workers=4, steps=4), tmp_path / "run")
    found = spreads(tmp_path / "run")
    assert list(found) == [2, 4] and found[2] > 0


def test_one_worker_has_none(text: Path, tmp_path: Path) -> None:
    run(tiny(text, workers=1, method="none"), tmp_path / "run")
    assert not spreads(tmp_path / "run") and lines_of(tmp_path / "run" / "metrics.jsonl")
