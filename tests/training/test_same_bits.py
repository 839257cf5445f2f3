"""One table of runs that must end with the same bits: methods, worlds, plans of memory, backends, stops.

A row is a run that differs from the plain run of its method and world in where it computes, where its tensors lie, or
when it was stopped. None of these may change a bit. The plain run: on the virtual backend, without a plan, never
stopped. `make test` takes rows in which any two values of two columns meet; `make test-long` more, so that every method
meets every value.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from isles.replicas import METHODS, method
from isles.replicas.loop.outer import OuterSync
from isles.training.config.reading import read_config
from isles.training.config.sections import Config
from isles.training.records.checkpoint import Checkpoints
from tests.covers import pairs
from tests.training.own_models import save_gpt2
from tests.training.runs import EVERY_3, LATE, OWN_SETTINGS, TINY, Told, metrics, run, without_clocks, write_text

OUTER = {name for name in METHODS if issubclass(method(name), OuterSync)}
FEW = ["ddp", "streaming-diloco", "dilocox", "noloco", "ist"]

STAGES = ["pipeline.stages=2", "pipeline.microbatches=2"]
UNTIED = ["model.layers=3", "pipeline.loss_at=last", "model.tie_embeddings=false"]
CHUNKED = "model.logits_megabytes=0.008"  # of 8 tokens
FACTORY = "model.factory=tests.training.own_models"
WORLDS: dict[str, tuple[int, list[str]]] = {
    "whole": (2, ["model.layers=2"]),
    "three": (3, ["model.layers=2", "inner.accumulation=2", CHUNKED]),
    "muon": (2, ["model.layers=2", "inner.optimizer=muon"]),
    "unclipped": (2, ["model.layers=2", "inner.max_norm=0"]),
    "islands": (4, ["model.layers=2", "world.inner=2"]),
    "dropped": (4, ["model.layers=2", "world.inner=2", "world.drop_outer=0.5"]),
    "shards": (4, ["model.layers=2", "world.inner=2", "world.inside=fsdp"]),
    "stages": (4, [*STAGES, *UNTIED, CHUNKED]),
    "random": (4, [*STAGES, "model.layers=2", "pipeline.routing=random"]),
    "factory": (2, [f"{FACTORY}:build", "model.context=16"]),
    "gpt2": (2, ["model.hf={gpt2}", "model.context=16", "data.tokenizer=bytes"]),
    "wide": (2, [f"{FACTORY}:wide", "model.context=16", "replicas.split=hidden"]),
}
"""How replicas are held: workers, settings."""
OWN = ("factory", "gpt2", "wide")  # models of users

PLANNED = ["memory.machine=RTX 3060", "memory.device_budget=190kB"]
MEMORY: dict[str, list[str]] = {
    "none": [],
    "plan": ["memory.method=auto", *PLANNED],
    "shared": ["memory.method=auto", "memory.shard=true", *PLANNED],
    "early": ["memory.method=auto", "memory.update=early", *PLANNED],
    "recompute": ["memory.method=checkpoint"],
    "vectors": ["memory.vectors=disk", "memory.disk={folder}"],
}
BACKENDS = ["virtual", "distributed"]
STEPS, STOPS = 7, [0, 2, 4, 6]  # 0: never; rounds have three steps, so a stop is before one, within one, between two
ALWAYS = ["run.checkpoint_every=2", "run.keep_checkpoints=0", "run.log_every=1"]
SUMMED = ("val_loss", "val_loss_replicas", "replica_std", "bytes_sent_per_worker", "bytes_received_per_worker")


class Row(NamedTuple):
    """A run that must end as the plain one does. stop: the step after which it was stopped and resumed."""

    method: str
    world: str
    memory: str
    backend: str
    stop: int

    def __str__(self) -> str:
        return "-".join(map(str, self))

    @property
    def plain(self) -> Row:
        """The run to hold it against. What torch shards needs processes."""
        processes = self.world == "shards" or self.method == "fsdp"
        return Row(self.method, self.world, "none", BACKENDS[processes], 0)


def fits(row: Row) -> bool:
    """Whether there is such a run that is not the plain one. What is refused has tests of its own."""
    name, world, memory, backend, stop = row
    plans = memory in ("plan", "shared", "early")
    methods = {  # of worlds that not all methods know
        "islands": OUTER - {"sparta", "dilocox", "custom"},
        "dropped": {"diloco", "noloco", "localsgd"},
        "shards": OUTER - {"sparta", "dilocox", "custom"},
        "stages": {"ddp", *OUTER},
        "random": {"ddp", *OUTER},
        "unclipped": {"ddp"},
        "wide": {"ist"},
    }
    worlds = {"fsdp": ("whole", "three"), "ist": ("whole", "three", "wide")}
    memories = {  # and plans that not all worlds know; states go on among as many sharers alone
        "plan": world in ("whole", "islands", "stages"),
        "shared": world == "whole" and name == "ddp" and not stop,
        "early": world == "unclipped",
        "recompute": world != "random",
        "vectors": name in OUTER and world not in (*OWN, "shards"),
    }
    return (
        row != row.plain
        and name in methods.get(world, METHODS)
        and world in worlds.get(name, WORLDS)
        and (memory == "none" or (memories[memory] and world not in OWN))
        and not (name == "ist" and (plans or memory == "recompute"))
        and not (name == "fsdp" and (plans or world == "muon"))
        and not (world == "muon" and (plans or memory == "recompute" or name == "demo"))
        and not (plans and backend == "distributed")
        and not (world == "gpt2" and backend == "distributed")  # each process would load transformers
        and (backend == "distributed" or row.plain.backend == "virtual")
    )


def is_quick(row: Row) -> bool:
    """Of `make test`: what is made again or lies in files is so in any world, so cut models and whole ones meet it; and
    where nothing of that kind is asked for, one run is both elsewhere and stopped. Shards cost much, and meet all at
    once.
    """
    if row.world == "shards":
        return fits(row) and row.memory == "recompute" and row.stop > 0 and row.method == "streaming-diloco"
    if row.memory in ("recompute", "vectors"):
        return fits(row) and row.world in ("whole", "stages")
    apart = row.memory != "none" or row.world in ("whole", "gpt2")
    return fits(row) and (apart or (row.backend == "distributed" and row.stop > 0))


def _table(
    fits: Callable[[Row], bool], methods: list[str], stops: list[int], alone: list[tuple[int, int]]
) -> list[Row]:
    columns = (methods, list(WORLDS), list(MEMORY), BACKENDS, stops)
    return [Row(*one) for one in pairs(columns, lambda values: fits(Row(*values)), alone)]


# Of methods on processes, see tests/replicas/test_same_bits.py.
QUICK = _table(is_quick, FEW, [0, 4], alone=[(0, 1), (0, 3)])
MORE = sorted(set(_table(fits, list(METHODS), STOPS, alone=[])) - set(QUICK))


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Row], tuple[Path, Config]]:
    """Of a row: the folder of its plain run, and its own configuration."""
    folder = tmp_path_factory.mktemp("plain")
    text = write_text(folder / "text.txt")

    def config(row: Row) -> Config:
        workers, more = WORLDS[row.world]
        own = row.world in OWN
        words = [word for word in TINY if not (own and word.startswith("model."))] + ALWAYS
        words += [] if row.world == "wide" else OWN_SETTINGS.get(row.method, [])
        words += ["replicas.sync_every=3"] if row.method in EVERY_3 else []
        words += ["replicas.fragments=whole"] if own and row.method.startswith("streaming") else []  # no list of blocks
        words += [word.format(folder=folder, gpt2=gpt2()) for word in [*more, *MEMORY[row.memory]]]
        flags = {"replicas.method": row.method, "world.workers": workers, "run.steps": STEPS}
        return read_config(None, flags, [*words, f"data.path={text}", f"world.backend={row.backend}"])

    @cache
    def gpt2() -> Path:
        return save_gpt2(folder / "gpt2")

    @cache
    def made(row: Row) -> Path:
        run(config(row), folder / str(row))
        return folder / str(row)

    return lambda row: (made(row.plain), config(row))


@pytest.mark.parametrize("row", [*QUICK, *(pytest.param(row, marks=pytest.mark.long) for row in MORE)], ids=str)
def test_it_is_the_plain_run_to_the_bit(given: Any, row: Row, tmp_path: Path) -> None:
    """Losses, validation, bytes sent and the model; without a stop also every tensor of every checkpoint."""
    if row.world == "gpt2":
        pytest.importorskip("transformers", reason="needs the extra isles[hf]")
    plain, config = given(row)
    out, told = tmp_path / "out", Told()
    if row.stop:  # goes on from the plain run's checkpoint, whatever held and computed that
        shutil.copytree(plain, out)
        (out / "summary.json").unlink()
        (out / "model.safetensors").unlink()
    run(config, out, told, row.stop or None)
    assert min(line["step"] for line in told.lines) == row.stop + 1
    assert (out / "model.safetensors").read_bytes() == (plain / "model.safetensors").read_bytes()
    assert _left(out, row) == _left(plain, row)
    if row.memory != "shared":
        for step in Checkpoints(plain).steps():
            for shard in (plain / "checkpoints" / f"step-{step}").glob("*.safetensors"):
                found, right = (
                    {name: tensor for name, tensor in load_file(path).items() if name != "__structure__"}  # and times
                    for path in (out / shard.relative_to(plain), shard)
                )
                assert found.keys() == right.keys(), shard
                for name, tensor in right.items():
                    assert found[name].shape == tensor.shape and found[name].dtype == tensor.dtype, (shard, name)
                    assert torch.equal(found[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))
    if row.memory in ("plan", "shared", "early") and row.world != "stages":
        assert {"R", "H"} & set(json.loads((out / "summary.json").read_text())["memory"]["plan"])


def _left(out: Path, row: Row) -> tuple[list[str], dict[str, Any]]:
    """Lines of metrics and values of the summary that must be equal: clocks too where neither processes nor a plan's
    lanes have any of their own; bytes by line where they leave in step with computing, and where no states are shared.
    """
    lines, summary = metrics(out), json.loads((out / "summary.json").read_text())
    if row.backend == "distributed" or row.memory not in ("none", "vectors"):
        lines = [without_clocks(line) for line in lines]
    if row.method in LATE or row.backend == "distributed" or row.memory == "shared":
        lines = [{key: value for key, value in line.items() if not key.startswith("bytes_")} for line in lines]
    values = {key: summary[key] for key in SUMMED if row.memory != "shared" or not key.startswith("bytes_")}
    return sorted(map(str, lines)), values


def test_every_value_has_a_row() -> None:
    assert {row.method for row in QUICK + MORE} == set(METHODS)
    for column, values in ((1, WORLDS), (2, MEMORY), (3, BACKENDS), (4, STOPS[::2])):
        assert {row[column] for row in QUICK} == set(values)
