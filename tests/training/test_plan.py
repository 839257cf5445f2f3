"""`isles train --dry-run`: what is said beforehand is what happens."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from isles.comm.codecs import codec
from isles.comm.collectives.mean import working_bytes
from isles.comm.mesh import Mesh
from isles.comm.virtual.cluster import run_virtual
from isles.models import SIZES, Decoder, ModelConfig, build, flops_per_token, sketch
from isles.network.exchange_plan import fed
from isles.plan.memory_fit import counted_flops
from isles.plan.record import MemoryFit, RunPlan
from isles.plan.run_plan import plan_run
from isles.replicas.sync import ReplicaSync
from isles.training.config.reading import read_config
from isles.training.config.sections import Config
from isles.training.worker import train_worker, trainer_of
from tests.cli.command import Command
from tests.covers import share
from tests.training.own_models import Bigram
from tests.training.runs import ON_VIRTUAL, TINY, run, tiny, write_text

MORE = {
    "ddp-buckets": ("ddp", ["replicas.bucket_megabytes=0.005", "replicas.codec=int8"]),
    "ddp-low-rank": ("ddp", ["replicas.codec=powersgd:2", "replicas.error_feedback=local"]),
    "dct-dp-late": ("dct-dp", ["replicas.warmup_dense_steps=3", "replicas.bucket_megabytes=0.02"]),
    "diloco-bf16": ("diloco", ["replicas.codec=bf16"]),
    "noloco-single": ("noloco", ["replicas.exchange=single_vector"]),
    "noloco-late-anchors": ("noloco", ["replicas.prefetch_phi=false", "replicas.anchor_codec=int8"]),
    "muon": ("diloco", ["inner.optimizer=muon"]),
    "ist-muon": ("ist", ["inner.optimizer=muon", "replicas.split=ffn"]),
    "own-model": ("noloco", ["model.factory=tests.training.own_models:build"]),
}
CASES = {**{name: (name, []) for name in ON_VIRTUAL}, **MORE}
TELLING = ("ddp-low-rank", "dct-dp-late", "noloco-late-anchors", "ist-muon", "own-model")  # of MORE
# Each of these sends in a pattern of its own; the others send in that of one of them.
UNLIKE = ("ddp", "dct-dp", "diloco", "streaming-diloco", "noloco", "demo", "ist", "dilocox")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


def of_case(text: Path, case: str, *more: str, workers: int, steps: int) -> Config:
    name, settings = CASES[case]
    if case != "own-model":
        return tiny(text, *settings, *more, method=name, workers=workers, steps=steps)
    no_decoder = [a for a in TINY if not a.startswith("model.") or a.startswith("model.context")]
    flags = {"replicas.method": name, "world.workers": workers, "run.steps": steps}
    return read_config(None, flags, [f"data.path={text}", "replicas.sync_every=3", *no_decoder, *settings, *more])


def sizes() -> Iterator[Any]:
    """Five workers for each pattern, two for some settings that change it; all of them are long."""
    for case, workers, steps in itertools.product(CASES, (1, 2, 5), (6, 7)):
        alone = workers == 1 and steps == 6 and case in ("ddp", "noloco")
        few = ((workers, steps) == (5, 7) and case in UNLIKE) or ((workers, steps) == (2, 7) and case in TELLING)
        yield pytest.param(case, workers, steps, marks=() if few or alone else pytest.mark.long)


@pytest.mark.parametrize(("case", "workers", "steps"), list(sizes()))
def test_bytes_are_those_that_the_run_counts(text: Path, case: str, workers: int, steps: int) -> None:
    """Worker by worker, headers and the common start included; with a last, shorter round (7) and without."""
    config = of_case(text, case, workers=workers, steps=steps)
    planned = plan_run(config)
    results = run_virtual(train_worker, workers, args=(config,))
    assert planned.bytes_sent == tuple(result["bytes_sent"] for result in results)
    assert planned.ddp_bytes == results[0]["ddp_bytes"]
    assert planned.parameters == results[0]["parameters"]
    assert planned.tokens_per_step * steps == sum(result["tokens"] for result in results)


def owned(optimizer: ReplicaSync) -> int:
    """Bytes of all tensors that hang on the optimizer, but for the model, gradients and the inner optimizer's state."""
    skip = {tensor.untyped_storage().data_ptr() for tensor in optimizer.parameters}
    seen: set[int] = set()
    storages: dict[int, int] = {}

    def walk(thing: Any) -> None:
        if id(thing) in seen:
            return
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            storage = thing.untyped_storage()
            if storage.data_ptr() not in skip:
                storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(thing, dict):
            for value in thing.values():
                walk(value)
        elif isinstance(thing, list | tuple | set):
            for value in thing:
                walk(value)
        elif type(thing).__module__.startswith(("isles.replicas", "isles.comm.collectives.averaging")):
            names = [field.name for field in fields(thing)] if is_dataclass(thing) else vars(thing)
            for name in names:
                if name not in ("inner", "model", "group", "transfer", "gradient_norm", "_slots", "_occupants"):
                    walk(getattr(thing, name))

    walk(optimizer)
    return sum(storages.values())


@pytest.mark.parametrize("case", share(CASES, 0, 3, ("ddp", "diloco", "muon", "noloco")))
def test_memory_is_what_the_method_allocates(text: Path, case: str) -> None:
    """Counted between rounds on the running method, buffer by buffer; and the inner optimizer's state, exactly."""
    config = of_case(text, case, workers=2, steps=12)
    planned = plan_run(config)
    kept = [held for held in planned.fullest.memory.held if held.when != "end" and held.what != "messages under way"]

    def worker(world: Mesh) -> tuple[int, int, int, int]:
        trainer = trainer_of(config, world)
        for _ in range(7):
            trainer.step()
        optimizer = trainer.optimizer
        inner = sum(value.nbytes for state in optimizer.inner.state.values() for value in state.values())
        weights = sum(t.nbytes for t in trainer.model.parameters())
        assert [one for one in optimizer.memory() if one.when != "pinned"] == list(
            planned.fullest.memory.held
        )  # on a GPU all of it
        held = owned(optimizer)
        optimizer.finish()
        return held, inner, weights, sum(p.nbytes for p in optimizer.parameters)

    for held, inner, weights, gradients in run_virtual(worker, 2):
        assert held == sum(one.nbytes for one in kept)
        memory = planned.fullest.memory
        assert (inner, weights, gradients) == (memory.inner, memory.weights, memory.gradients)


_WIDE = 34_560
"""Bytes of `own_models.wide`: 256 x 8, 8 x 24, 256 x 24 and 256 entries."""


@pytest.mark.parametrize(
    ("method", "more", "pinned"),
    [
        ("diloco", [], 65_536),  # torch takes a power of two
        ("diloco", ["model.dtype=bfloat16"], 32_768),
        ("ddp", [], 65_536 - _WIDE),  # what is left of the block in which the bucket lies
        ("ddp", ["model.dtype=bfloat16"], 32_768),  # beside the bucket, which is of float32
        # Half of the units and two moments: 3 x 12,672 bytes. What all hold: 9,216.
        ("ist", ["replicas.split=all"], 65_536 + 16_384),
        ("diloco", ["world.workers=4", "world.inner=2"], 32_768 + 65_536 - _WIDE),  # half of the rows; the bucket
        ("demo", [], 0),
    ],
)
def test_on_gpus_pinned_copies_are_counted(text: Path, method: str, more: list[str], pinned: int) -> None:
    own = [f"data.path={text}", "model.factory=tests.training.own_models:wide", "model.context=16"]
    flags = {"replicas.method": method, "world.workers": 2, "run.steps": 6}
    every = ["replicas.sync_every=3"] if method in ("diloco", "ist") else []
    there, here = (
        plan_run(read_config(None, flags, [*own, *every, *more, f"model.device={device}"])).fullest.memory
        for device in ("cuda", "cpu")
    )
    new = [held for held in there.held if held.when == "pinned"]
    assert sum(held.nbytes for held in new) == there.peak - here.peak == pinned
    assert [held for held in there.held if held.when != "pinned"] == list(here.held)


@pytest.mark.parametrize("name", ["none", "bf16", "int8"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_messages_under_way_are_bounded_by_two_segments(name: str, size: int) -> None:
    """However big the model; and never less than what a small one receives."""
    one, small, big = codec(name), 10_000, 2 * 10**8
    assert working_bytes(big, torch.float32, one, size) <= 2 * 3 * 2**24
    received = 0 if size == 1 else one.wire_bytes(small, torch.float32) * (size - 1) // size
    assert working_bytes(small, torch.float32, one, size) >= received


@pytest.mark.parametrize("size", range(1, 18))
def test_a_broadcast_reaches_everyone_once(size: int) -> None:
    assert sum(len(fed(position, size)) for position in range(size)) == size - 1


@pytest.mark.parametrize(
    "case", ["diloco", "eager", pytest.param("streaming-diloco", marks=pytest.mark.long), "noloco"]
)
def test_at_the_rate_that_is_wanted_workers_compute_so_much(text: Path, case: str) -> None:
    """The rate is that of the method's own schedule: a method that waits for every round wants one that carries a round
    in 5 % of the time, eager one that carries it while the next round is computed.
    """

    def planned(rate: str) -> RunPlan:
        links = f'world.virtual.links="{rate}, 5ms"'
        return plan_run(of_case(text, case, links, "world.virtual.step_seconds=1.0", workers=4, steps=120))

    found = planned("20Mbit/s")
    assert found.time is not None and found.time.wanted is not None and found.outline is not None
    there = planned(f"{found.time.wanted / 1e6:.9f}Mbit/s").time
    assert there is not None and there.utilisation == pytest.approx(0.95, abs=0.005)
    bits = 8 * max(found.outline.sent) / found.outline.rounds
    if case == "diloco":
        assert 3 / (3 + bits / found.time.wanted + 2 * 0.005) == pytest.approx(0.95, abs=0.002)
    if case == "eager":
        assert found.time.wanted == pytest.approx(bits / 3, rel=0.1)


def test_no_rate_is_enough_where_latency_costs_more(text: Path) -> None:
    late = of_case(
        text, "diloco", "world.virtual.links=datacentres", "world.virtual.step_seconds=0.01", workers=4, steps=30
    )
    found = plan_run(late).time
    assert found is not None and found.wanted is None


def test_start_up_is_the_weights_over_the_slowest_line(text: Path) -> None:
    """Of two workers one sends all, and both exchange hashes before and after it."""
    links = 'world.virtual.links="2Mbit/s, 25ms"'
    planned = plan_run(of_case(text, "diloco", links, workers=2, steps=6))
    weights = 8 * 4 * planned.parameters / 2e6
    assert planned.startup is not None and weights < planned.startup < weights + 4 * 0.025


def test_what_does_not_fit_is_said_with_what_would_make_it_fit(text: Path, tmp_path: Path) -> None:
    """Weights, gradients and two moments of float32 are 16 bytes a parameter; bfloat16 halves them."""

    def fit(nbytes: float) -> MemoryFit:
        (tmp_path / "small.toml").write_text(f'base = "H100"\ndevice_bytes = {nbytes}\n')
        found = plan_run(config, machine=str(tmp_path / "small.toml")).fit
        assert found is not None
        return found

    config = of_case(text, "diloco", workers=2, steps=6)
    memory = plan_run(config).fullest.memory
    large = fit(1e9)
    assert large.fits and large.activations and not large.suggestions
    assert large.device_bytes == memory.computing + large.activations
    assert large.host_bytes == memory.peak - memory.computing
    states = memory.weights + memory.gradients + memory.inner
    assert states == pytest.approx(16 * 6_320, rel=0.01)
    small = fit(large.device_bytes - states // 4)
    assert not small.fits and 'model.dtype = "bfloat16"' in small.suggestions
    assert "pipeline.stages = 2" in small.suggestions
    assert 'model.dtype = "bfloat16"' not in fit(states // 4).suggestions


def test_the_first_stage_keeps_most_and_recomputing_keeps_one_pass(tmp_path: Path) -> None:
    """Of two stages the second has the head's matrix, and so most states; the first keeps more passes. Where stages run
    them again, one has its activations, and of each other what came and what went, two float32 streams, waits.
    """
    context, width = 64, 128

    def fit(in_flight: int, recompute: bool, machine: str = "RTX 3060") -> MemoryFit:
        more = [f"pipeline.in_flight={in_flight}", f"pipeline.recompute={str(recompute).lower()}"]
        more += ["pipeline.stages=2", "pipeline.microbatches=4", "data.batch_size=4", "model.tie_embeddings=false"]
        more += [f"model.d_model={width}", "model.layers=4", f"model.context={context}"]
        more += ["replicas.method=none", "world.workers=2", "world.backend=virtual", "model.ffn=64"]
        found = plan_run(read_config(None, {}, more), machine=machine).fit
        assert found is not None and found.activations is not None
        return found

    one, three, again = fit(1, False), fit(3, False), fit(3, True)
    assert again.activations == one.activations + 2 * 2 * 4 * context * width < three.activations
    (tmp_path / "small.toml").write_text(f'base = "H100"\ndevice_bytes = {again.device_bytes}\n')
    small = fit(3, False, str(tmp_path / "small.toml"))
    assert not small.fits and "pipeline.recompute = true" in small.suggestions
    assert fit(3, True, str(tmp_path / "small.toml")).fits


def test_a_model_that_fits_nowhere_is_planned_here() -> None:
    """6.8 billion parameters and 25,000 steps, in seconds: nothing is allocated."""
    config = read_config(None, {}, ["model.size=noloco-large", "run.steps=25000", "replicas.sync_every=50"])
    planned = plan_run(config)
    assert planned.parameters > 6.8e9
    assert planned.outline.rounds == 500
    assert planned.fullest.memory.peak > 4 * 8 * planned.parameters


def test_data_parallel_plans_millions_of_exchanges(text: Path) -> None:
    """Buckets times steps are counted, not listed. (On the virtual clock some of them are played as well.)"""
    real = "world.backend=distributed"
    few, many = (plan_run(of_case(text, "ddp-buckets", real, workers=3, steps=steps)) for steps in (3, 10**6))
    assert [10**6 * sent for sent in few.outline.sent] == [3 * sent for sent in many.outline.sent]


def test_flops_of_another_model_are_counted_as_ours() -> None:
    """torch's counter, as used for models of one's own, on the decoder: within the embedding's share of the formula."""
    config = ModelConfig()
    own = ModelConfig(factory="tests.training.test_plan:decoder", context=128)
    assert counted_flops(own, sketch(config), 128) == pytest.approx(flops_per_token(SIZES["0.12M"]), rel=0.01)
    assert counted_flops(config, sketch(config), 128) == flops_per_token(SIZES["0.12M"])


def test_a_worker_of_ist_is_planned_narrow(text: Path) -> None:
    """Weights, gradients, Adam's state and FLOPs are those of its part; parameters and data parallel's bytes are those
    of the model.
    """
    alone, four = (plan_run(of_case(text, "ist", workers=workers, steps=6)) for workers in (1, 4))
    d, ffn, context, vocab = 16, 24, 16, 256
    products, mlp = 4 * d * d, 3 * d * ffn
    assert four.flops == 3 * (2 * (products + mlp // 4 + vocab * d) + 4 * d * context)
    assert alone.parameters == four.parameters and alone.flops == flops_per_token(tiny(text).model.shape())
    one, part = alone.fullest.memory, four.fullest.memory
    assert one.gradients - part.gradients == 4 * (mlp - mlp // 4) == one.weights - part.weights
    assert one.inner - part.inner == 2 * (one.gradients - part.gradients)


def decoder() -> Decoder:
    return Decoder(SIZES["0.12M"])


def needs_numbers() -> Bigram:
    """A factory that looks at its weights, and so cannot be built without them."""
    model = Bigram(8, True)
    assert float(model.embed.weight.detach().abs().sum()) > 0
    return model


@pytest.mark.parametrize("factory", ["tests.training.own_models:build", "tests.training.test_plan:needs_numbers"])
def test_a_sketch_of_a_users_model_keeps_what_is_tied_and_frozen(factory: str) -> None:
    planned = sketch(ModelConfig(factory=factory, context=4, dtype="bfloat16"))
    real = build(ModelConfig(factory=factory, context=4, dtype="bfloat16"), seed=0)
    assert all(tensor.is_meta for tensor in planned.state_dict().values())
    for (name, one), (there, other) in zip(planned.named_parameters(), real.named_parameters(), strict=True):
        assert (name, one.shape, one.dtype, one.requires_grad) == (there, other.shape, other.dtype, other.requires_grad)


def test_a_sketch_has_the_shapes_of_the_model() -> None:
    config = ModelConfig()
    pairs = zip(sketch(config).named_parameters(), build(config, seed=0).named_parameters(), strict=True)
    for (name, planned), (there, real) in pairs:
        assert (name, planned.shape, planned.dtype) == (there, real.shape, real.dtype) and planned.is_meta


def test_json_has_the_numbers(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from isles.cli.plan_printer import show

    show(of_case(text, "noloco", workers=4, steps=12), probe=False, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["outline"]["first"][0]["groups"] and len(found["bytes_sent"]) == 4


@pytest.mark.long
def test_the_command_says_it_and_leaves_nothing(text: Path, tmp_path: Path) -> None:
    """No file, no process."""
    less = ["--set", f"data.path={text}", "--steps", "60"]
    command = Command("train", "--dry-run", "--json", *less, folder=tmp_path)
    code, out, err = command.end()
    assert code == 0, err
    found = json.loads(out)
    assert found["outline"]["first"][0]["groups"] and len(found["bytes_sent"]) == 4
    assert not command.left() and not list(tmp_path.iterdir())


def test_words(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from isles.cli.plan_printer import show

    show(of_case(text, "noloco", "world.virtual.step_seconds=1.0", workers=5, steps=30), probe=False, as_json=False)
    words = capsys.readouterr().out
    for said in ("alone", "anchor", "10 rounds in all, one every 3 steps", "for 95 % computing", "at the peak"):
        assert said in words, words
    show(of_case(text, "ddp", "world.backend=distributed", workers=2, steps=3), probe=True, as_json=False)
    assert "measured here" in capsys.readouterr().out
    show(of_case(text, "dct-dp", workers=2, steps=3), probe=False, as_json=False)
    assert "bytes       about " in capsys.readouterr().out
    show(of_case(text, "none", "world.backend=distributed", workers=2, steps=3), probe=False, as_json=False)
    assert "rounds" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["replicas.sync_every=7"], "choose sync_every <= 6"),
        (["data.path=/not/there"], "does not exist"),
        (["model.vocab=100"], "model.vocab = 100 is smaller"),
        (["data.batch_mode=global", "data.batch_size=3"], "does not divide by 2 workers"),
        (["replicas.group_size=3"], "group_size = 3"),
    ],
)
def test_it_refuses_what_the_run_would(text: Path, tmp_path: Path, more: list[str], says: str) -> None:
    config = tiny(text, *more)
    with pytest.raises(ValueError) as planned:
        plan_run(config)
    with pytest.raises(ValueError) as ran:
        run(config, tmp_path / "run")
    assert says in str(planned.value) and str(planned.value) == str(ran.value)


def test_a_method_that_says_nothing_is_told_so(text: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "silent_method.py").write_text(
        "from isles.replicas.sync import ReplicaSync\n"
        "class Silent(ReplicaSync):\n    level = 'parameter'\n    agrees = False\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "silent_method", raising=False)
    planned: RunPlan = plan_run(tiny(text, method="silent_method:Silent"))
    assert any("does not say what it exchanges" in notice for notice in planned.notices)


def test_a_network_that_is_not_played_is_a_notice() -> None:
    """The same configuration runs on the virtual clock, where it says how long a message takes."""
    told = "world.virtual.links and world.virtual.step_seconds: of the virtual clock"
    for backend, count in (("distributed", 1), ("virtual", 0)):
        config = read_config(
            None, {"world.backend": backend}, ["world.virtual.links=worldwide", "world.virtual.step_seconds=2"]
        )
        assert len([notice for notice in plan_run(config).notices if told in notice]) == count
    assert not any("virtual clock" in notice for notice in plan_run(read_config(None, {}, [])).notices)
