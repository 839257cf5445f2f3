"""Codecs: round trips, error bounds, wire lengths, and that what is not finite stays noticed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from isles.comm.codecs import codec, form
from isles.comm.codecs.base import Codec, as_bytes
from isles.comm.codecs.kinds import CODECS, FORMS, KINDS, CodecKind

LENGTHS = (0, 1, 2, 5, 255, 256, 257, 1003, 4095, 4096, 4097, 9000)
WIRE = {  # bytes of n entries of an item size, written down anew
    "none": lambda n, item: n * item,
    "bf16": lambda n, item: 2 * n,
    "fp16": lambda n, item: 2 * n + 4 * ((n + 4095) // 4096),
    "int8": lambda n, item: n + 4 * ((n + 255) // 256),
    "int4": lambda n, item: (n + 1) // 2 + 4 * ((n + 63) // 64),
    "int8:stochastic": lambda n, item: n + 4 * ((n + 255) // 256),
    "int4:stochastic": lambda n, item: (n + 1) // 2 + 4 * ((n + 63) // 64),
    "int2": lambda n, item: (n + 3) // 4 + 4 * ((n + 63) // 64),
    "fp4": lambda n, item: (n + 1) // 2 + 4 * ((n + 255) // 256),
    "sign": lambda n, item: (n + 7) // 8 + 4 * ((n + 255) // 256),
}
names = pytest.mark.parametrize("name", sorted(CODECS))
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


def noise(n: int, dtype: torch.dtype = torch.float32, scale: float = 1.0, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed + n), dtype=dtype) * scale


def through(form: Codec, x: Tensor) -> Tensor:
    """x as a receiver sees it: decoded from a copy of the wire."""
    return form.decode(form.encode(x).clone(), x.numel(), x.dtype)


def block_max(x: Tensor, block: int) -> Tensor:
    """max|x| of the block that each entry belongs to."""
    return torch.cat([part.abs().max().expand(part.numel()) for part in x.split(block)]) if x.numel() else x


def test_the_table_is_complete() -> None:
    """Every codec is covered here, carries its own name, and only `none` claims to lose nothing."""
    assert set(WIRE) == set(CODECS)
    for name in CODECS:
        assert codec(name).name == name and codec(name).lossless == (name == "none")


def test_every_form_says_what_it_loses() -> None:
    """A name loses what its kind loses, and stands in the table at its class."""
    for name in {*CODECS, *FORMS}:
        kind, made = KINDS[name.partition(":")[0]], form(name)
        assert (made.lossless, made.biased, made.shared_mask) == (kind.lossless, kind.biased, kind.shared_mask)
    assert [kind for kind, message in KINDS.items() if message.lossless] == ["none"]
    assert [kind for kind, message in KINDS.items() if message.shared_mask] == ["randk"]
    biased = {kind for kind, message in KINDS.items() if message.biased}
    assert biased == {"int2", "sign", "topk", "dct_topk", "randk", "powersgd"}
    with pytest.raises(TypeError, match="lossless"):  # a default would be a guess
        CodecKind("isles.comm.codecs.scaled:Identity")  # type: ignore[call-arg]


def test_an_unknown_codec_is_refused_with_a_hint() -> None:
    with pytest.raises(ValueError, match="did you mean 'int8'"):
        codec("int-8")


@names
@dtypes
def test_wire_is_packed_bytes_of_the_promised_length(name: str, dtype: torch.dtype) -> None:
    """uint8, flat, contiguous, and as long as the formula says, for every length; encoding leaves x alone."""
    form = codec(name)
    for n in LENGTHS:
        x = noise(n, dtype)
        before = x.clone()
        wire = form.encode(x)
        assert wire.dtype is torch.uint8 and wire.dim() == 1 and wire.is_contiguous()
        assert wire.numel() == form.wire_bytes(n, dtype) == WIRE[name](n, dtype.itemsize)
        back = through(form, x)
        assert back.shape == x.shape and back.dtype is dtype
        assert torch.equal(x, before)


@names
@dtypes
def test_cutting_at_blocks_changes_no_bits(name: str, dtype: torch.dtype) -> None:
    """Shards and segments are cut at multiples of `block`: the pieces decode to the bits of the whole."""
    form = codec(name)
    x = noise(3 * form.block + 17, dtype)
    pieces = [through(form, piece) for piece in x.split(form.block)]
    assert torch.equal(torch.cat(pieces), through(form, x))


@dtypes
def test_none_keeps_every_bit(dtype: torch.dtype) -> None:
    """Signed zeros, denormals and what is not finite included."""
    odd = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 5e-324, 1e-45, 3e38], dtype=dtype)
    for x in (odd, *(noise(n, dtype) for n in LENGTHS)):
        assert torch.equal(as_bytes(through(codec("none"), x)), as_bytes(x))


@dtypes
def test_bf16_rounds_to_nearest(dtype: torch.dtype) -> None:
    """Relative error at most 2**-8, over the whole range of exponents."""
    for scale in (1e-30, 1e-7, 1.0, 1e30):
        x = noise(5000, dtype, scale)
        assert ((through(codec("bf16"), x) - x).abs() <= x.abs() * 2.0**-8).all()


@dtypes
def test_fp16_error_bound_at_any_scale(dtype: torch.dtype) -> None:
    """Half a unit of float16 relative to the entry, or 2**-25 of the block's largest: tiny gradients survive."""
    for scale in (1e-30, 1e-7, 1.0, 1e30):
        x = noise(9000, dtype, scale)
        bound = torch.maximum(x.abs() * 2.0**-11, block_max(x, 4096) * 2.0**-25)
        assert ((through(codec("fp16"), x) - x).abs() <= bound * (1 + 1e-3)).all()
        assert (through(codec("fp16"), x)[x.abs() > 1e-4 * x.abs().max()] != 0).all()


@dtypes
def test_int8_error_is_half_a_step(dtype: torch.dtype) -> None:
    """|x - decoded| <= s / 2 with s = max|block| / 127, at any scale, with blocks of very different sizes."""
    for n in LENGTHS[1:]:
        for scale in (1e-30, 1e-7, 1.0, 1e30):
            x = noise(n, dtype, scale)
            x[: n // 2] *= 1e3
            step = block_max(x, 256) / 127
            assert ((through(codec("int8"), x) - x).abs() <= step / 2 * (1 + 1e-5)).all()


@dtypes
def test_int8_is_exact_on_its_grid(dtype: torch.dtype) -> None:
    """All 255 multiples q * s, |q| <= 127, come back to the bit, and the largest entry of a block always does."""
    grid = torch.cat([torch.arange(-127, 128, dtype=dtype), torch.zeros(1, dtype=dtype)])
    for step in (2.0**-20, 1.0, 2.0**10):
        x = torch.cat([grid * step, -grid * step * 4])
        assert torch.equal(through(codec("int8"), x), x)
    halves = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, 126.49], dtype=dtype)
    assert through(codec("int8"), halves).tolist() == [127, 0, 2, 2, 0, -2, -2, 126, 126]  # ties to even
    x = noise(256, dtype)
    top = x.abs().argmax()
    assert torch.isclose(through(codec("int8"), x)[top], x[top], rtol=1e-6)


@names
def test_zero_blocks_stay_zero(name: str) -> None:
    """No 0/0: zero blocks decode to zeros, also between others."""
    form = codec(name)
    x = noise(3 * form.block + 9)
    x[form.block : 2 * form.block] = 0
    back = through(form, x)
    assert back.isfinite().all() and (back[form.block : 2 * form.block] == 0).all()
    assert (through(form, torch.zeros(777)) == 0).all()


@names
@dtypes
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")], ids=["nan", "inf", "-inf"])
def test_what_is_not_finite_comes_out_not_finite(name: str, dtype: torch.dtype, bad: float) -> None:
    """At the entry itself, so that it is noticed; blocks without such an entry are as if it were not there."""
    form = codec(name)
    x = noise(3 * form.block + 5, dtype)
    clean = through(form, x)
    at = form.block + form.block // 2
    x[at] = bad
    back = through(form, x)
    assert not back[at].isfinite()
    outside = torch.ones(x.numel(), dtype=torch.bool)
    outside[form.block : 2 * form.block] = False
    assert torch.equal(back[outside], clean[outside])


@names
def test_denormals_do_not_blow_up(name: str) -> None:
    """Entries whose scale is no normal number lose at most 2**-126, and turn into nothing else."""
    for size in (1e-45, 1e-43, 1e-40, 1e-38):
        x = noise(600, scale=1.0).clamp(-1, 1) * size
        back = through(codec(name), x)
        assert back.isfinite().all() and ((back - x).abs() <= 1.2e-38).all()


def test_as_bytes_shares_memory_or_refuses() -> None:
    """A view, never a copy: what is received into a copy would be lost."""
    x = torch.arange(6.0).view(2, 3)
    as_bytes(x).zero_()
    assert (x == 0).all()
    assert as_bytes(torch.tensor(1.0)).numel() == 4 and as_bytes(torch.empty(0, 3)).numel() == 0
    with pytest.raises(ValueError, match="not contiguous"):
        as_bytes(x.t())
