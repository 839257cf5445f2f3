"""topk, dct_topk and randk: what is kept, packed indices, wire lengths."""

from __future__ import annotations

import math

import pytest
import torch

from isles.comm.codecs import codec
from isles.comm.codecs.sparse import dct_basis, pack_indices, unpack_indices
from tests.comm.test_codecs import noise, through

LENGTHS = (0, 1, 5, 4095, 4096, 4097, 9001)
WIRE = {  # bytes of n entries; chunks of 4096; 12 bits a index
    "topk:4": lambda chunks: chunks * (6 + 8),
    "topk:64": lambda chunks: chunks * (96 + 128),
    "topk:64+int4": lambda chunks: chunks * (96 + 32 + 4),
    "topk:64+none": lambda chunks: chunks * (96 + 256),
    "dct_topk:8": lambda chunks: chunks * (12 + 16),
    "randk:0.01": lambda chunks: chunks * 41 * 4,
}
names = pytest.mark.parametrize("name", WIRE)


@names
def test_wire_is_as_long_as_the_formula(name: str) -> None:
    """Packed bytes, for lengths that are no multiple of a chunk too; x is left alone."""
    form = codec(name)
    assert form.name == name and not form.lossless
    for n in LENGTHS:
        x = noise(n)
        before, wire = x.clone(), form.encode(x)
        assert wire.dtype is torch.uint8 and wire.numel() == form.wire_bytes(n, x.dtype) == WIRE[name](-(-n // 4096))
        assert through(form, x).shape == x.shape and torch.equal(x, before)


@names
def test_cutting_at_chunks_changes_no_bits(name: str) -> None:
    form, x = codec(name), noise(3 * 4096 + 17)
    assert torch.equal(torch.cat([through(form, piece) for piece in x.split(4096)]), through(form, x))


def test_topk_keeps_the_largest_of_each_chunk() -> None:
    """Exactly those, with their values, and zero elsewhere."""
    x = noise(4096 * 2)
    y = through(codec("topk:6+none"), x)
    for part, decoded in zip(x.split(4096), y.split(4096), strict=True):
        saved = decoded != 0
        assert int(saved.sum()) == 6 and torch.equal(decoded[saved], part[saved])
        assert part[saved].abs().min() >= part[~saved].abs().max()


@pytest.mark.parametrize("name", ["topk:4096+none", "dct_topk:4096+none", "randk:1"])
def test_everything_saved_is_everything(name: str) -> None:
    for n in LENGTHS[1:]:
        x = noise(n)
        torch.testing.assert_close(through(codec(name), x), x, rtol=0, atol=2e-6)


def test_dct_is_orthonormal_and_compacts_what_is_smooth() -> None:
    """C C^T = 1 to 1e-6, norms are kept; a slow wave fits into 8 coefficients of 4096 that its entries do not."""
    basis = dct_basis(64)
    torch.testing.assert_close(basis @ basis.t(), torch.eye(64), rtol=0, atol=1e-6)
    rows, columns = torch.meshgrid(torch.arange(64.0), torch.arange(64.0), indexing="ij")
    wave = (torch.cos(math.pi * (2 * rows + 1) * 3 / 128) * torch.cos(math.pi * (2 * columns + 1) / 128)).view(-1)
    errors = [float((through(codec(name), wave) - wave).norm() / wave.norm()) for name in ("dct_topk:8", "topk:8")]
    assert errors[0] < 0.01 < 0.9 < errors[1]


def test_indices_round_trip() -> None:
    """Every index 0..4095 in either half of a pair; two take three bytes."""
    indices = torch.arange(4096)
    for order in (indices, indices.flip(0), indices.view(-1, 2).flip(1).reshape(-1)):
        packed = pack_indices(order)
        assert packed.numel() == 4096 * 3 // 2 and torch.equal(unpack_indices(packed), order)
    assert unpack_indices(pack_indices(indices[:0])).numel() == 0


def test_randk_draws_anew_for_each_exchange() -> None:
    """The same salt, the same indices, on anybody's vector; another salt, others; the mask says which; the global
    generator is left alone.
    """
    form = codec("randk:0.25")
    before = torch.get_rng_state()
    x, y = noise(9000), noise(9000, seed=1)
    one = form.salted(7, 0)
    assert torch.equal(through(one, x) != 0, through(one, y) != 0)
    assert torch.equal(one.mask(9000), through(one, x) != 0)  # type: ignore[attr-defined]
    assert torch.equal(through(one, x)[one.mask(9000)], x[one.mask(9000)])  # type: ignore[attr-defined]
    assert not torch.equal(through(form.salted(8, 1), x) != 0, through(one, x) != 0)
    assert abs(float(one.mask(4096 * 4).float().mean()) - 0.25) < 1e-6  # type: ignore[attr-defined]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["topk:64+int4:stochastic", "dct_topk:64+int4:stochastic"])
def test_values_rounded_at_random_are_drawn_anew(name: str) -> None:
    """Over 40 exchanges of 4 members the mean of what is decoded comes to what is kept, as it does without top-k; drawn
    once and for all, the error of a single one would stay.
    """
    x = noise(4096)
    saved = through(codec(name.replace("int4:stochastic", "none")), x)
    decoded = [through(codec(name).salted(salt, member), x) for salt in range(40) for member in range(4)]
    one, mean = ((decoded[0] - saved).norm(), (torch.stack(decoded).mean(0) - saved).norm())
    assert mean < 0.15 * one  # 1 / sqrt(160) of it is 0.08
    assert torch.equal(through(codec(name).salted(3, 1), x), through(codec(name).salted(3, 1), x))


@pytest.mark.parametrize(
    ("name", "reported"),
    [
        ("dct_topk:11", "dct_topk:11: choose an even number of entries"),
        ("topk", "unknown codec 'topk'"),
        ("topk:", "write a number"),
        ("topk:x", "write a number"),
        ("topk:3", "even number"),
        ("topk:0", "even number"),
        ("topk:5000", "2 to 4096"),
        ("topk:64+zip", "unknown codec"),
        ("randk:0", "above 0, up to 1"),
        ("randk:1.5", "above 0, up to 1"),
        ("randk:0.1+int8", "unknown codec"),
    ],
)
def test_what_cannot_be_is_refused(name: str, reported: str) -> None:
    with pytest.raises(ValueError, match=reported):
        codec(name)
