"""Rotary positions: only the distance counts, lengths stay, and both spellings agree."""

from __future__ import annotations

from unittest import mock

import torch

from isles.models.decoder import Rotary


def turned_products(q_C: torch.Tensor, k_C: torch.Tensor, context: int) -> torch.Tensor:
    """The product of q at position t with k at position s, for every (t, s)."""
    rotary = Rotary(len(q_C), context, dtype=q_C.dtype)
    q_TC, k_TC = (rotary(x.expand(1, context, 1, -1))[0, :, 0] for x in (q_C, k_C))
    return q_TC @ k_TC.T


def test_products_depend_on_the_distance_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(8, generator=generator, dtype=torch.float64) for _ in range(2))
    products = turned_products(q, k, 12)
    for distance in range(-11, 12):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert products[0].std() > 0.1  # and they do depend on it


def test_turning_keeps_lengths_and_the_first_position() -> None:
    x = torch.randn(2, 5, 3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = Rotary(8, 16, dtype=torch.float64)(x)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(y[:, 0], x[:, 0])


def test_the_compiled_spelling_is_the_same() -> None:
    x = torch.randn(2, 5, 3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rotary = Rotary(8, 5, dtype=torch.float64)
    with mock.patch("torch.compiler.is_compiling", return_value=True):
        spelled_out = rotary(x)
    torch.testing.assert_close(rotary(x), spelled_out)


def test_bf16_heads_are_turned_with_a_float32_table() -> None:
    rotary = Rotary(8, 1024, dtype=torch.bfloat16)
    assert rotary.table.dtype == torch.float32
    x = torch.randn(1, 1024, 1, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(rotary(x), rotary(x.float()).bfloat16())
    assert rotary.to(torch.bfloat16)(x).dtype == torch.bfloat16  # a table cast down still turns
