from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from isles.memory.costs import Placement, least_peak
from isles.memory.measurement import measured
from isles.memory.profile import SCALARS, _fake_trace, _without_numbers, own_loss, profile, trace_step
from isles.memory.units import units_of
from isles.models.decoder import Decoder
from isles.models.sizes import SIZES, flops_per_token, parameters
from tests.covers import cover
from tests.memory.loops import DECODER, profiled
from tests.memory.models import TASKS

FORMATS = {
    "float32": (torch.float32, "none"),
    "bfloat16": (torch.bfloat16, "none"),
    "autocast": (torch.float32, "bf16"),
}


SIZES_TRIED = ["0.12M", *(pytest.param(size, marks=pytest.mark.long) for size in ("2M", "10M"))]


@pytest.mark.parametrize(("how", "activations"), cover(FORMATS, ("keep", "recompute"), each=1))
@pytest.mark.parametrize("size", SIZES_TRIED)
def test_a_step_without_numbers_takes_the_bytes_of_the_real_one(size: str, how: str, activations: str) -> None:
    dtype, autocast = FORMATS[how]
    model = Decoder(SIZES[size], dtype=dtype)
    units, batch = units_of(model), torch.zeros(2, 65, dtype=torch.int64)
    with FakeTensorMode(allow_non_fake_inputs=True), _without_numbers(model, "cpu", {}):
        empty = torch.empty(2, 65, dtype=torch.int64)
        fake = trace_step(model, units_of(model), empty, autocast=autocast, activations=activations)  # type: ignore[arg-type]
    short = _fake_trace(model, units, batch, own_loss, autocast, activations, False)
    assert all(parameter.grad is None for parameter in model.parameters())
    real = trace_step(model, units, batch.clone(), autocast=autocast, activations=activations)  # type: ignore[arg-type]
    assert fake == real
    assert fake.peak > fake.static
    differences = [one.forward_peak - one.forward_begin for one in real.units]
    assert differences == [one.forward_peak - one.forward_begin for one in short.units]  # of three blocks
    assert [(one.saved, one.casts) for one in real.units] == [(one.saved, one.casts) for one in short.units]
    made = profile(model, batch, autocast=autocast, state_bytes=lambda parameter: 0)
    planned = least_peak(made, (Placement("device", activations),) * len(units))  # type: ignore[arg-type]
    # A block's saved tensors go one by one as its gradients come; plans count both whole.
    assert 0.92 * planned <= real.peak <= planned - SCALARS
    if activations == "recompute":
        assert real.peak == planned - SCALARS


def test_a_profile_needs_neither_numbers_nor_room() -> None:
    shape = type(SIZES["1B"])(
        d_model=5120, layers=40, heads=40, ffn=13824, vocab=32000, context=4096, tie_embeddings=False
    )
    made = profile(Decoder(shape, device="meta"), torch.empty(4, 1025, dtype=torch.int64, device="meta"))
    assert made.params == parameters(shape)
    whole = sum(unit.flops for unit in made.units) + made.ends.flops
    assert whole == pytest.approx(4 * 1024 * flops_per_token(shape, backward=False, sequence=1024))
    stream = 4 * 1024 * 5120 * 4
    assert made.stream == made.units[0].boundary == stream
    assert made.units[0].resident.saved > 10 * stream
    assert len({unit.resident for unit in made.units}) == 1


IN_A_PROCESS_OF_ITS_OWN = """
import resource, time, torch
from isles.memory.profile import profile
from isles.models.decoder import Decoder
from isles.models.sizes import Shape
shape = Shape(d_model=5120, layers=40, heads=40, ffn=13824, vocab=32000, context=4096, tie_embeddings=False)
batch = torch.empty(4, 1025, dtype=torch.int64, device="meta")
began = time.process_time()
made = profile(Decoder(shape, device="meta"), batch, autocast="bf16")
print(made.params, time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.long
def test_a_profile_of_13b_takes_little() -> None:
    words = [sys.executable, "-c", IN_A_PROCESS_OF_ITS_OWN]
    told = subprocess.run(words, capture_output=True, text=True, timeout=600, check=True).stdout
    params, seconds, resident = map(float, told.split())
    assert params > 13e9
    assert seconds < 10  # of computing: other programs of this machine do not count
    assert resident < 2**30


def test_under_autocast_matrices_travel_as_bfloat16() -> None:
    unit, plain = profiled(DECODER, "bf16").units[0], profiled(DECODER, "none").units[0]
    vectors = 2 * 64 * 4
    assert plain.moved == plain.weights
    assert unit.moved == (unit.weights - vectors) // 2 + vectors
    assert unit.resident.casts == unit.moved - vectors
    assert unit.device_copy.casts == plain.resident.casts == 0
    assert unit.resident.saved == unit.device_copy.saved < plain.resident.saved


@pytest.mark.long
def test_operations_of_other_models_are_counted() -> None:
    pytest.importorskip("transformers")
    made = profiled(TASKS["llama", False], "none")
    width, inner, tokens, sequences = 64, 128, 33, 2
    matrices = 2 * width * width + 2 * width * (width // 2) + 3 * width * inner
    attention = 2 * tokens * width
    assert made.units[0].flops == pytest.approx(2 * sequences * tokens * (matrices + attention))
    assert made.ends.flops == pytest.approx(2 * sequences * tokens * width * 256)


_BRIEF = [("llama", False, "none"), ("resnet", False, "bf16")]
_EVERY = [(*task, autocast) for task in TASKS for autocast in ("none", "bf16")]


@pytest.mark.parametrize(
    ("name", "drops", "autocast"), [pytest.param(*e, marks=[] if e in _BRIEF else pytest.mark.long) for e in _EVERY]
)
def test_other_models_save_what_they_save_without_numbers(name: str, drops: bool, autocast: str) -> None:
    """Models of transformers look at their positions; batch norms under autocast have statistics of float32."""
    if name in ("llama", "gpt2"):
        pytest.importorskip("transformers")
    task = TASKS[name, drops]
    real = trace_step(model := task.make().train(), units_of(model), task.batch(0), loss=task.loss, autocast=autocast)
    found = [(one.resident.saved, one.resident.casts) for one in profiled(task, autocast).units]
    assert found == [(one.saved, one.casts) for one in real.units]


def test_seconds_can_be_measured() -> None:
    made = measured(profiled(DECODER, "none"), DECODER.make(), DECODER.batch(0), laps=2)
    assert all(unit.forward > 0 and unit.backward > 0 for unit in made.units)
    assert len({unit.forward for unit in made.units}) == 1


def test_models_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no blocks in an nn\.ModuleList to plan by"):
        units_of(torch.nn.Linear(2, 2))
    model = Decoder(SIZES["0.12M"])
    model.blocks[1].mlp.up.weight = model.blocks[0].mlp.up.weight  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"blocks\.1 shares 'weight' with blocks\.0"):
        units_of(model)
    model = Decoder(SIZES["0.12M"])
    model.head.weight = model.blocks[0].mlp.down.weight  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"blocks\.0 shares 'weight' with the rest of the model"):
        units_of(model)
