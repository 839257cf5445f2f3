"""The counts of sizes.py against the real model, torch's FLOP counter and the papers' own numbers."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from isles.models import SIZES, Decoder, Shape, flops_per_token, non_embedding_parameters, parameters, shape_of
from isles.models.sizes import like_size

EAGER = {"35M": 35e6, "100M": 100e6, "200M": 200e6, "300M": 300e6, "500M": 500e6, "1B": 1e9, "4B": 4e9}
SMALL = ["0.12M", "0.53M", "2M", "10M"]
TINY = Shape(d_model=24, layers=2, heads=3, ffn=40, vocab=31, context=16, tie_embeddings=True)


def real_counts(shape: Shape, device: str) -> tuple[int, int]:
    """(all, without embedding and head) parameters that the module holds."""
    model = Decoder(shape, device=device)
    counts = {name: parameter.numel() for name, parameter in model.named_parameters()}
    inner = sum(count for name, count in counts.items() if not name.startswith(("embed.", "head.")))
    return sum(counts.values()), inner


@pytest.mark.parametrize("size", SIZES)
def test_parameter_counts_equal_the_modules(size: str) -> None:
    shape = SIZES[size]
    device = "cpu" if size in SMALL else "meta"
    assert real_counts(shape, device) == (parameters(shape), non_embedding_parameters(shape))


def test_untied_small_and_tied_large_counts_too() -> None:
    for size in ("0.12M", "noloco-small"):
        turned = replace(SIZES[size], tie_embeddings=not SIZES[size].tie_embeddings)
        assert real_counts(turned, "meta") == (parameters(turned), non_embedding_parameters(turned))


@pytest.mark.parametrize("size", [size for size in SIZES if size[0].isdigit()])
def test_a_name_that_is_a_number_is_that_of_the_parameters(size: str) -> None:
    label = float(size[:-1]) * {"M": 1e6, "B": 1e9}[size[-1]]
    assert real_counts(SIZES[size], "meta")[0] == pytest.approx(label, rel=0.03)


@pytest.mark.parametrize("size", EAGER)
def test_eager_sizes_land_on_their_labels_when_counted_as_the_paper_does(size: str) -> None:
    shape = SIZES[f"eager-{size}"]
    d, L = shape.d_model, shape.layers
    assert (shape.ffn, shape.head_dim, shape.vocab) == (4 * d, 64, 32_000)
    paper = 12 * d * d * L + 32_000 * d
    assert paper == pytest.approx(EAGER[size], rel=0.28)  # the 1B is 1.27B in the paper's own counting
    # What the gate adds to the paper's MLP of two matrices, and the norms' gains.
    assert parameters(shape) == paper + 4 * d * d * L + (2 * L + 1) * d


def test_35m_exactly() -> None:
    assert 12 * 512**2 * 6 + 32_000 * 512 == 35_258_368
    assert parameters(SIZES["eager-35M"]) == 41_556_480


def test_noloco_sizes_are_those_of_its_table() -> None:
    rows = {"small": (768, 12, 16, 3072), "medium": (2048, 24, 32, 8192), "large": (4096, 32, 32, 16384)}
    for name, row in rows.items():
        shape = SIZES[f"noloco-{name}"]
        assert (shape.d_model, shape.layers, shape.heads, shape.ffn) == row
        assert (shape.vocab, shape.context) == (128_000, 1024)


@pytest.mark.parametrize("shape", [TINY, replace(TINY, tie_embeddings=False), SIZES["0.12M"]])
def test_flops_equal_torchs_counter(shape: Shape) -> None:
    model = Decoder(shape)
    tokens = torch.zeros(2, shape.context + 1, dtype=torch.int64)
    # The math backend spells attention out; the fused ones recompute in the backward pass, which is not model work.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as forward:
        loss = model(tokens).loss
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as backward:
        loss.backward()
    count = 2 * shape.context
    assert forward.get_total_flops() == count * flops_per_token(shape, backward=False)
    assert forward.get_total_flops() + backward.get_total_flops() == count * flops_per_token(shape)


def test_flops_of_a_shorter_sequence() -> None:
    saved = flops_per_token(TINY, backward=False) - flops_per_token(TINY, backward=False, sequence=TINY.context // 2)
    assert saved == 4 * TINY.layers * TINY.d_model * TINY.context // 2
    with pytest.raises(ValueError, match="sequence = 0"):
        flops_per_token(TINY, sequence=0)


def test_an_unknown_size_names_the_closest() -> None:
    with pytest.raises(ValueError, match=r"model\.size = 'noloco-smal' .*did you mean 'noloco-small'\?") as error:
        shape_of("noloco-smal")
    assert "\n" not in str(error.value)
    assert shape_of("35m") == SIZES["35M"]
    with pytest.raises(ValueError, match="did you mean 'noloco-medium'"):
        shape_of("2B")  # by its parameters
    with pytest.raises(ValueError, match="known: choose one of"):
        shape_of("big")


@pytest.mark.parametrize("size", ["0.53M", "10M", "35M"])
@pytest.mark.parametrize("share", [1.0, 0.6, 0.4])
def test_a_smaller_decoder_of_so_many_parameters(size: str, share: float) -> None:
    """Within half a step of ffn of the wanted count, heads as wide as before; the shape itself for its own count."""
    shape = SIZES[size]
    small = like_size(shape, round(share * parameters(shape)))
    step = 3 * small.d_model * small.layers
    assert abs(parameters(small) - share * parameters(shape)) <= step / 2 + 1
    assert small.head_dim == shape.head_dim and small.vocab == shape.vocab
    assert small == shape if share == 1 else small.d_model < shape.d_model
    with pytest.raises(ValueError, match="no decoder with heads of"):
        like_size(shape, 1000)


def test_counting_needs_no_torch() -> None:
    code = (
        "import sys; from isles.models import ModelConfig, SIZES, flops_per_token, parameters;"
        "ModelConfig().shape(); parameters(SIZES['1B']); flops_per_token(SIZES['1B']);"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
