"""int4, fp4 (E3M0) and sign: grids, error bounds, packing."""

from __future__ import annotations

import itertools
from itertools import product

import pytest
import torch

from isles.comm.codecs import codec
from isles.comm.codecs.integers import pack_halves, pairs_of, unpack_halves
from tests.comm.test_codecs import LENGTHS, block_max, noise, through

E3M0 = [0.0, *(2.0**e for e in range(-6, 1))]


@pytest.mark.parametrize("scale", [1e-30, 1e-7, 1.0, 1e30])
def test_int4_error_is_half_a_step(scale: float) -> None:
    """|x - decoded| <= s / 2 with s = max|block of 64| / 7; every code of the grid comes back to the bit."""
    for n in LENGTHS[1:]:
        x = noise(n, scale=scale)
        assert ((through(codec("int4"), x) - x).abs() <= block_max(x, 64) / 14 * (1 + 1e-5)).all()
    grid = (torch.arange(64) % 15 - 7).float()
    assert torch.equal(through(codec("int4"), grid * 2.0**-20), grid * 2.0**-20)


def test_int2_takes_the_nearest_of_its_four_levels() -> None:
    """s = 1.5 rms of the block of 64: |x - decoded| <= s/2 up to 2 s, and the outer level beyond; 0.435 of the norm of
    gaussian numbers; zeros stay zeros; lengths that fill no byte.
    """
    for n, scale in product(LENGTHS[1:], (1e-30, 1.0, 1e30)):
        x = noise(n, scale=scale)
        y = through(codec("int2"), x)
        for block, decoded in zip(x.split(64), y.split(64), strict=True):
            s = 1.5 * scale * (block / scale).square().mean().sqrt()
            inside = block.abs() <= 2 * s
            assert ((decoded - block).abs() <= s / 2 * (1 + 1e-5))[inside].all()
            torch.testing.assert_close(decoded.abs()[~inside], (1.5 * s).expand(int((~inside).sum())))
    x = noise(1 << 18)
    assert float((through(codec("int2"), x) - x).norm() / x.norm()) == pytest.approx(0.435, rel=0.03)
    assert not through(codec("int2"), torch.zeros(99)).any()


@pytest.mark.long
@pytest.mark.parametrize("name", ["int8:stochastic", "int4:stochastic"])
def test_stochastic_rounding_is_unbiased(name: str) -> None:
    """Over 10,000 exchanges the mean error of every entry is within 4 standard errors (a fixed draw;
    of 256 entries one in a hundred runs would have one outside); each is off by less than a step; two workers draw
    apart, the same exchange draws the same, and no generator moves.
    """
    form, x = codec(name), noise(256)
    before = torch.get_rng_state()
    step = (x - through(codec(name.partition(":")[0]), x)).abs().max() * 2
    total, squares = torch.zeros(256, dtype=torch.float64), torch.zeros(256, dtype=torch.float64)
    for salt in range(10_000):
        error = (through(form.salted(salt, 1), x) - x).double()
        total += error
        squares += error.square()
        assert salt or float(error.abs().max()) < 1.02 * float(step)
    deviation = (squares / 10_000).sqrt()
    assert bool((total.abs() / 10_000 <= 4.5 * deviation / 100 + 1e-9).all())
    assert float((total.abs() / 10_000 > 2 * deviation / 100).float().mean()) < 0.1
    y = noise(1000)
    assert torch.equal(through(form.salted(3, 0), y), through(form.salted(3, 0), y))
    assert not torch.equal(through(form.salted(3, 0), y), through(form.salted(3, 1), y))
    whole, cut = through(form.salted(3, 0), y), [through(form.salted(3, 0), part) for part in y.split(512)]
    assert torch.equal(whole, torch.cat(cut)), "however a vector is cut at blocks"
    assert torch.equal(torch.get_rng_state(), before)


def test_relative_errors_on_gaussian_numbers() -> None:
    """int8 block 256 0.0070, int4 block 64 0.108, sign 0.60 of the input's norm."""
    x = noise(1 << 18)
    for name, error in (("int8", 0.0070), ("int4", 0.108), ("sign", 0.60)):
        assert float((through(codec(name), x) - x).norm() / x.norm()) == pytest.approx(error, rel=0.03)


def test_fp4_takes_the_nearest_of_its_sixteen_values() -> None:
    """Against a search through all values, at any scale, ties left out: none of 20,000 entries is off by a code."""
    values = torch.tensor([sign * value for value in E3M0 for sign in (1, -1)])
    x = noise(256 * 80)
    for scale in (1e-30, 1.0, 1e30):
        y = through(codec("fp4"), x * scale)
        top = block_max(x * scale, 256)
        ratio = (x * scale / top).double()
        nearest = values[(ratio[:, None] - values.double()).abs().argmin(1)]
        zero = ratio.abs() <= 2.0**-7
        assert torch.equal(y, torch.where(zero, 0.0, nearest) * top)
        assert ((y - x * scale).abs() <= x.abs() * scale / 3 * (1 + 1e-5))[ratio.abs() >= 2.0**-6].all()


def test_fp4_thresholds() -> None:
    """A tie goes down: 1.5 * 2**e to 2**e, 2**-7 to zero; the next float above goes up."""
    for e in range(-6, 0):
        tie = torch.tensor(1.5 * 2.0**e)
        above = torch.nextafter(tie, torch.tensor(2.0))
        x = torch.stack([tie, above, -tie, -above, torch.tensor(1.0), torch.tensor(0.0), torch.tensor(-0.0)])
        wanted = torch.tensor([2.0**e, 2.0 ** (e + 1), -(2.0**e), -(2.0 ** (e + 1)), 1.0, 0.0, 0.0])
        assert torch.equal(through(codec("fp4"), x), wanted)
    least = torch.tensor(2.0**-7)
    x = torch.stack([least, torch.nextafter(least, torch.tensor(1.0)), torch.tensor(1.0)])
    assert torch.equal(through(codec("fp4"), x), torch.tensor([0.0, 2.0**-6, 1.0]))


@pytest.mark.parametrize("name", ["int8", "int4", "fp4", "sign"])
def test_twice_is_once_and_odd(name: str) -> None:
    """Q(Q(x)) = Q(x) up to the scale's rounding, Q(-x) = -Q(x), for odd lengths too (sign: zeros are positive)."""
    for n in LENGTHS[1:]:
        x = noise(n)
        once = through(codec(name), x)
        torch.testing.assert_close(through(codec(name), once), once, rtol=3e-7, atol=0)
        assert torch.equal(through(codec(name), -x), -once)


def test_sign_keeps_signs_and_the_mean_magnitude() -> None:
    """Every entry comes back as +-mean|x| of its block."""
    x = noise(256 * 3 + 19)
    y = through(codec("sign"), x)
    assert torch.equal(y < 0, x < 0)
    for part, decoded in zip(x.split(256), y.split(256), strict=True):
        if part.numel() == 256:
            torch.testing.assert_close(decoded.abs(), part.abs().mean().expand(256))


def test_halves_round_trip() -> None:
    """All 256 pairs of codes, in both orders."""
    codes = torch.tensor(list(itertools.chain(*itertools.product(range(16), repeat=2))), dtype=torch.uint8)
    packed = torch.empty(256, dtype=torch.uint8)
    pack_halves(codes, packed)
    assert packed.unique().numel() == 256
    back = torch.empty(512)
    unpack_halves(packed, pairs_of([float(code) for code in range(16)]), back)
    assert torch.equal(back, codes.float())
