"""Messages of any length, and places as bytes: what a sparse gradient is made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import isles
from isles.comm.codecs.sparse import FORMS, indices_bytes, pack, smallest, unpack
from isles.comm.collectives.basic import Headers, Stamp, gather_ragged, ragged_bytes
from isles.comm.errors import Malformed
from isles.comm.mesh import Mesh
from isles.comm.transport import Steps

LINKS = isles.Links(bandwidth=1e8, latency=0.01)
BLOCK = 1 << 16


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("elements", [1, 7, 8, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
def test_indices_come_back(form: str, elements: int) -> None:
    """None, all, one at each end, the edges of blocks, and a random hundredth: the same places, and the length that
    was promised.
    """
    draw = torch.Generator().manual_seed(elements)
    edges = torch.tensor([0, BLOCK - 1, BLOCK, 2 * BLOCK - 1, 2 * BLOCK, elements - 1])
    cases = [
        torch.empty(0, dtype=torch.int64),
        torch.arange(elements),
        edges[edges < elements].unique(),
        (torch.rand(elements, generator=draw) < 0.01).nonzero().view(-1),
    ]
    for places in cases:
        packed = pack(form, places, elements)
        assert packed.dtype == torch.uint8 and len(packed) == indices_bytes(form, len(places), elements)
        assert torch.equal(unpack(form, packed, elements), places)
        shifted = torch.cat((torch.zeros(3, dtype=torch.uint8), packed))[3:]  # where no number may begin
        assert torch.equal(unpack(form, shifted, elements), places)


def test_the_smallest_form_is_taken() -> None:
    """A handful, some, an eighth and more of 100 blocks; and blocks that do not add up are told."""
    elements = 100 * BLOCK
    picked = [smallest(count, elements) for count in (5, elements // 1000, elements // 10)]
    assert picked == ["indices", "blocks", "bitmap"]
    for count in (0, 1, 50, 100, elements // 20, elements // 16, elements):
        chosen = indices_bytes(smallest(count, elements), count, elements)
        assert chosen == min(4 * count, 2 * count + 400, elements // 8)
    with pytest.raises(Malformed, match="announces 3 indices but has 2"):
        unpack("blocks", torch.tensor([3, 0, 0, 0, 1, 0, 2, 0], dtype=torch.uint8), 10)


def test_messages_of_any_length_come_in_group_order() -> None:
    """Lengths 0, 1000, 2000: everyone has all three, and has sent (40 + its own length) to two others; of a member
    that is broken, nobody has any.
    """
    for rank, (gathered, left, sent) in enumerate(isles.run_virtual(gathers, 3, links=LINKS)):
        assert [(position, len(wire)) for position, wire in gathered.items()] == [(0, 0), (1, 1000), (2, 2000)]
        assert all(bool((wire == value).all()) for value, wire in gathered.items())
        assert list(left) == [0, 2] and all(torch.equal(wire, gathered[position]) for position, wire in left.items())
        assert sent == 2 * (40 + 1000 * rank) == ragged_bytes(1000 * rank, 3)


def gathers(world: Mesh) -> tuple[dict[int, Tensor], dict[int, Tensor], int]:
    group = world.outer
    wire = torch.full((1000 * world.rank,), world.rank, dtype=torch.uint8)
    before = world.world.traffic["outer"].bytes_sent
    gathered = group.start(gather_ragged(group.call(round=1), wire, Stamp(5), 2000)).wait()
    sent = world.world.traffic["outer"].bytes_sent - before
    broken = Stamp(6, broken=world.rank == 1)
    return gathered, group.start(gather_ragged(group.call(round=2), wire, broken, 2000)).wait(), sent


def test_a_length_that_cannot_be_is_no_message() -> None:
    """A member that announces more than there can be, or less than nothing, is on another protocol: Malformed."""

    def announces(call: Any, nbytes: int) -> Steps[tuple[int, ...]]:
        headers = Headers(call, Stamp(1), 0, note=nbytes)
        return (yield from headers.compare())

    def worker(world: Mesh, nbytes: int) -> None:
        group = world.outer
        wire = torch.zeros(4, dtype=torch.uint8)
        call = group.call(round=1)
        group.start(announces(call, nbytes) if world.rank else gather_ragged(call, wire, Stamp(1), 100)).wait()

    for nbytes in (101, -1):
        errors = isles.run_virtual(worker, 2, links=LINKS, args=(nbytes,), return_errors=True)
        assert isinstance(errors[0], Malformed) and errors[0].peer == 1
        assert f"it announces {nbytes} bytes, 100 are possible" in str(errors[0])
