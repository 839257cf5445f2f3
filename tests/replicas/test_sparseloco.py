"""SparseLoCo against its update rule, written out."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import isles
from isles.comm.codecs import codec
from isles.comm.mesh import Mesh
from tests.replicas.workers import LINKS, sgd

ENTRIES, CHUNK = 2 * 4096 + 100, 4096


def test_it_is_its_update_rule() -> None:
    """Four rounds of three workers with given gradients: anchors to 1e-6 of a loop over the paper's two lines; 64
    values of 2 bits and their places travel of each 4096.
    """

    def gradient(worker: int, round: int) -> torch.Tensor:
        return torch.randn(ENTRIES, generator=torch.Generator().manual_seed(10 * round + worker))

    def worker(world: Mesh) -> list[torch.Tensor]:
        model = nn.Module()
        model.w = nn.Parameter(torch.zeros(ENTRIES))
        optimizer: Any = isles.SparseLoCo(model, sgd(model, 1.0), world.outer, sync_every=1)
        before, log = world.world.traffic["outer"].bytes_sent, []
        for round in range(1, 5):
            model.w.grad = gradient(world.rank, round)
            optimizer.step()
            log.append(optimizer.fragments[0].anchor.clone())
        sent = world.world.traffic["outer"].bytes_sent - before
        payload = 3 * (64 * 2 // 8 + 96 + 4)  # three chunks: codes, places of 12 bits, one scale
        assert sent == 4 * 2 * (payload + 32)
        return log

    form = codec("topk:64+int2")
    errors, anchor = [torch.zeros(ENTRIES) for _ in range(3)], torch.zeros(ENTRIES)
    for round, seen in enumerate(isles.run_virtual(worker, 3, links=LINKS)[0], 1):
        shares = []
        for rank, error in enumerate(errors):
            sum_ = gradient(rank, round) + error
            shares.append(form.decode(form.encode(sum_), ENTRIES, torch.float32))
            errors[rank] = 0.95 * (sum_ - shares[-1])
        anchor = anchor - 0.4 * sum(shares) / 3
        torch.testing.assert_close(seen, anchor, rtol=1e-6, atol=1e-6)
        assert 64 <= int((seen != 0)[:CHUNK].sum()) <= 64 * 3 * round
