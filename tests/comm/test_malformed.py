"""Messages that cannot be what they should be: refused before memory is asked for, with the name of who sent them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import isles
from isles.comm.codecs import codec
from isles.comm.codecs.base import Codec, as_bytes
from isles.comm.codecs.sparse import unpack
from isles.comm.errors import Diverged, Malformed, WorkerFailed, from_plain, sent_by, to_plain
from isles.comm.mesh import Mesh
from isles.comm.transport import Deadlines
from isles.replicas.flat import FlatParameters
from isles.replicas.gradient.config import DCTDPConfig
from isles.replicas.methods.dct_dp import Thresholds
from isles.replicas.methods.demo.momentum import HEADER_BYTES, Bits, Blocks, Packing
from isles.replicas.methods.dilocox.dilocox import Adaptive
from tests.replicas.workers import sgd

FORMS = ("none", "bf16", "fp16", "int8", "int4", "int2", "fp4", "sign", "topk:4", "dct_topk:4+int4", "randk:0.01")


@pytest.mark.parametrize("form", [*map(codec, FORMS), Bits()], ids=lambda form: form.name)
def test_a_wire_of_another_length_is_refused(form: Codec) -> None:
    """One byte more or less, half as long, twice as long; and of a claim of entries, nothing is allocated."""
    wire = torch.zeros(form.wire_bytes(5000, torch.float32), dtype=torch.uint8)
    form.decode(wire, 5000, torch.float32)
    for other in (wire[:-1], torch.cat((wire, wire[:1])), wire[: len(wire) // 2], torch.cat((wire, wire))):
        with pytest.raises(Malformed, match="bytes for 5000 entries"):
            form.decode(other, 5000, torch.float32)
        with pytest.raises(Malformed, match="bytes for 5000 entries"):
            form.decode_into(other, torch.empty(5000))
    with pytest.raises(Malformed):
        form.decode(wire, 1 << 45, torch.float32)


def test_one_entry_is_contiguous_with_any_stride() -> None:
    one = torch.arange(6, dtype=torch.float32)[1::3][:1]
    assert one.stride() == (3,) and one.is_contiguous()
    assert torch.equal(as_bytes(one).view(torch.float32), torch.tensor([1.0]))
    assert as_bytes(one).data_ptr() == one.data_ptr()
    assert as_bytes(torch.ones(1, 1).expand(1, 1)).numel() == 4 and as_bytes(torch.tensor(1.0)).numel() == 4


def thresholds(values: str = "none") -> Thresholds:
    torch.manual_seed(0)
    config = DCTDPConfig(sparsity=0.9, threshold_interval=10, indices="indices", exclude_below=10)
    return Thresholds(
        FlatParameters([nn.Parameter(torch.zeros(100)), nn.Parameter(torch.zeros(3))]), config, codec(values)
    )


@pytest.mark.parametrize("values", ["none", "int8"])
def test_a_count_of_indices_is_not_believed(values: str) -> None:
    """A message that says it holds 2^31 places is refused before there is room for them; so is a place beyond the
    end.
    """
    here = thresholds(values)
    flat = torch.randn(103)
    here.begin(flat, 1)
    good = here._wire
    places, decoded = here._decode(good)
    assert len(places) == len(decoded) == 13
    for count in (1 << 45, 1 << 31, 11, 9, -1, 101):
        word = torch.tensor([count * 3 + 1]).view(torch.uint8)
        with pytest.raises(Malformed, match="indices of 103 in a message of"):
            here._decode(torch.cat((word, good[8:])))
    beyond = good.clone()
    beyond[-4:] = torch.tensor([103], dtype=torch.int32).view(torch.uint8)
    with pytest.raises(Malformed, match="index 103 of 103"):
        here._decode(beyond)
    with pytest.raises(Malformed, match="a message of 5 bytes"):
        here._decode(good[:5])


def test_marks_of_a_bitmap_are_counted() -> None:
    assert len(unpack("bitmap", torch.tensor([7], dtype=torch.uint8), 8)) == 3
    with pytest.raises(Malformed, match="index 65546 of 20"):
        unpack("indices", torch.tensor([10, 0, 1, 0], dtype=torch.uint8), 20)


@pytest.mark.parametrize(("shape", "chunk"), [((12, 12), 12), ((48, 48), 48), ((80, 80), 80)])
def test_indices_beyond_a_block_are_no_message(shape: tuple[int, int], chunk: int) -> None:
    """Blocks of 144, 2,304 and 6,400 entries, of which places take 1, 1.5 and 2 bytes."""
    packing = Packing(Blocks([torch.Size(shape)], chunk, padding=True), 4, "fp32")
    wire = packing.pack(1, 0, torch.ones(4), torch.arange(4))
    packing.unpack(wire)
    wire[HEADER_BYTES + 16 :] = 255
    with pytest.raises(Malformed, match=f"in a block of {shape[0] * shape[1]} entries"):
        packing.unpack(wire)
    with pytest.raises(Malformed, match="bytes for a step of"):
        packing.unpack(wire[:-1])


def test_the_sender_is_named() -> None:
    with pytest.raises(Malformed, match=r"worker 3 sent what cannot be read: 5 bytes") as caught, sent_by(3):
        raise Malformed(-1, "5 bytes")
    there = from_plain(to_plain(caught.value))
    assert isinstance(there, Malformed) and there.peer == 3 and str(there) == str(caught.value)


@pytest.mark.parametrize("name", ["demo", "dct-dp"])
def test_in_a_run_the_sender_is_named(name: str) -> None:
    """Worker 1 sends other bytes than its form has: the line on worker 0 says so."""

    def worker(world: Mesh) -> None:
        torch.manual_seed(world.rank)
        model = nn.Linear(96, 96)
        optimizer = (
            isles.DeMo(model, sgd(model, 0.0), world.outer, compression_topk=4)
            if name == "demo"
            else isles.DCTDP(model, sgd(model), world.outer, exclude_below=0, indices="indices")
        )
        if world.rank == 1 and isinstance(optimizer, isles.DeMo):
            packing = optimizer.momentum.packing
            pack = packing.pack
            packing.pack = lambda *message: pack(*message).fill_(255)  # type: ignore[method-assign]
        elif world.rank == 1:
            reduction = optimizer.buckets[0].reduction
            encode = reduction._encode
            reduction._encode = lambda *message: encode(*message).fill_(255)
        model(torch.ones(1, 96)).square().sum().backward()
        optimizer.step()

    errors = isles.run_virtual(worker, 2, return_errors=True)
    assert isinstance(errors[0], Malformed) and errors[0].peer == 1, errors


def test_a_message_of_another_size_is_malformed() -> None:
    def worker(world: Mesh) -> None:
        world.outer.all_gather(torch.zeros(4 if world.rank else 8))

    errors = isles.run_virtual(worker, 2, return_errors=True)
    assert all(isinstance(error, Malformed) and error.peer == 1 - rank for rank, error in enumerate(errors))


def other_lengths(world: Mesh, codec: str, rank: int | None) -> None:
    """DiLoCoX whose worker 1 has another codec, or another rank from the second round on."""
    torch.manual_seed(0)
    model = nn.Linear(64, 48)
    mine = codec if world.rank else "int4"
    options = {"sync_every": 1, "rank": 4, "start_compress": 0, "delay": "none", "min_compression_rate": 1.0}
    optimizer = isles.DiLoCoX(model, sgd(model), world.outer, codec=mine, **options)  # type: ignore[arg-type]
    if world.rank and rank is not None:
        Adaptive.rank = lambda self, round: rank  # type: ignore[method-assign]
    for step in range(4):
        torch.manual_seed(step)
        model(torch.randn(8, 64)).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize(("form", "rank"), [("none", None), ("int4", 1), ("int4", 40)])
def test_gloo_is_never_sent_another_length(form: str, rank: int | None) -> None:
    """It would end the process: settings are compared at the start, and headers before data where a rank adapts. Both
    workers live on to say what is wrong.
    """
    soon = Deadlines(control=20.0, outer=20.0)
    errors = isles.run_local(other_lengths, 2, args=(form, rank), deadlines=soon, return_errors=True)
    assert not any(isinstance(error, WorkerFailed) for error in errors), errors
    reported = [error for error in errors if isinstance(error, Diverged)]
    assert reported and ("another length" in str(reported[0]) or "settings" in str(reported[0])), errors
