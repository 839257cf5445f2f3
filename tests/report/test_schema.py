"""The keys of metrics.jsonl and summary.json have one home: what is read and shown is what is written."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

from isles.base.schema import (
    BACKENDS,
    COURSE,
    TOTALS,
    USAGE,
    ElasticSummary,
    Metrics,
    SpreadMetrics,
    Summary,
    backend_of,
)
from isles.report.comparison import COLUMNS
from isles.report.page import FIELDS
from isles.running.run import launch
from isles.training.config.reading import read_config


def names(cls: type) -> list[str]:
    return [field.name for field in fields(cls)]


def test_the_page_shows_every_key_of_the_summary() -> None:
    of_swarms = ["begun", "deaths"]
    assert sorted(key for key, _, _ in FIELDS) == sorted([*names(Summary), *names(ElasticSummary), *of_swarms, *USAGE])
    assert {key for key, _, _ in COLUMNS} <= set(names(Summary))
    assert TOTALS == ("tokens", "bytes_sent", "bytes_received", "blocked_seconds", "compute_seconds")


def test_a_run_writes_these_keys_in_this_order(tmp_path: Path) -> None:
    """With islands and without; lines of metrics hold the method's gauges behind them."""
    for inner, extra in ((1, ["islands", "replicas", "bytes_across_per_worker"]), (2, [])):
        flags = {"replicas.method": "diloco", "world.backend": "virtual", "world.workers": 2, "world.inner": inner}
        flags |= {"run.steps": 2, "run.log_every": 1, "replicas.sync_every": 1, "data.batch_size": 2}
        flags |= {"data.path": "isles/network", "inner.warmup_steps": 1, "data.validation_sequences": 2}
        out = tmp_path / str(inner)
        config = read_config(None, flags, ['replicas.codec="int8"', 'replicas.error_feedback="local"'])
        summary = launch(config, out, lambda line: None, lambda text: None)
        assert json.loads((out / "summary.json").read_text()) == summary
        staged = ["stages", "pipeline_bubble", "priced_as", "priced_bytes_per_worker"]
        assert list(summary) == [name for name in names(Summary) if name not in (*extra, *staged, "memory")]
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        own, shared = ([line for line in lines if ("worker" in line) == has] for has in (True, False))
        metrics = names(Metrics)
        assert all(
            set(line) - {"feedback_ratio", "skipped_rounds", "healed", "refused"} <= set(metrics) for line in own
        )
        assert all(set(line) | {"val_loss", *USAGE} >= set(metrics) for line in own)
        assert all(set(COURSE) <= set(line) for line in own)
        assert not any(key in line for key in USAGE[1:] for line in own)  # no GPU
        assert all(list(line) == names(SpreadMetrics) for line in shared)


def test_the_backend_of_a_file_that_says_nothing_of_use() -> None:
    for config in ({}, {"world": 3}, {"world": {}}, {"world": {"backend": "gone"}}, {"world": {"backend": 1}}):
        assert backend_of(config) is BACKENDS["distributed"]
    assert backend_of({"world": {"backend": "virtual"}}).is_simulated
