"""Checkpoints of torch.distributed.checkpoint: what `isles export --format dcp` writes, torch reads; what others write,
on one rank or several, `run.start` takes, and nothing that it says is run.
"""

from __future__ import annotations

import os
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from isles.cli.model import export
from isles.comm.mesh import Mesh
from isles.training.records.dcp import load_dcp
from isles.training.records.saved_run import load_weights, start_file
from tests.gloo import run_gloo
from tests.training.runs import metrics, run, tiny, write_text

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Model(nn.Module):
    """Several types and shapes, one without axes, a buffer, and two names of one tensor."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.head = self.embed = nn.Parameter(torch.randn(6, 4, generator=draw))
        self.short = nn.Parameter(torch.randn(5, generator=draw).to(torch.bfloat16))
        self.scale = nn.Parameter(torch.randn((), generator=draw, dtype=torch.float64))
        self.register_buffer("steps", torch.randint(0, 9, (2, 3), generator=draw))


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def written(folder: Path, state: Any) -> Path:
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.parametrize("prefix", ["", "model"])
def test_what_another_loop_wrote_is_taken_by_name(tmp_path: Path, prefix: str) -> None:
    """Under the names themselves, or below "model" beside an optimizer's state."""
    one, other = Model(1), Model(2)
    optimizer = {
        "state": {"a": torch.ones(3)},
        "groups": [{"lr": 0.1, "betas": (0.9, 1)}],
        "large": 1 << 40,
        "none": None,
    }
    state = {"model": one.state_dict(), "optimizer": optimizer, "step": 7} if prefix else one.state_dict()
    load_dcp(other, written(tmp_path, state))
    assert equal(one.state_dict(), other.state_dict())


def sharded(world: Mesh, folder: str) -> bool:
    """Each rank has rows of the matrix; the rest is on both."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    state: dict[str, Any] = dict(Model(1).state_dict())
    mesh = init_device_mesh("cpu", (2,))
    for name in ("embed", "head", "short"):
        state[name] = distribute_tensor(state[name], mesh, [Shard(0)])
    dcp.save(state, checkpoint_id=folder)
    return True


def test_pieces_in_several_files_are_put_together(tmp_path: Path) -> None:
    """A matrix in four pieces, by hand; the fourth is missing from the second list."""
    folder, model = written(tmp_path / "ck", Model(1).state_dict()), Model(2)
    metadata, whole = dcp.FileSystemReader(folder).read_metadata(), Model(1).embed.detach()
    entry = metadata.state_dict_metadata["embed"]
    entry.chunks = []
    for row, column in ((0, 0), (0, 3), (2, 0), (2, 3)):
        piece = whole[row : row + (4 if row else 2), column : column + (1 if column else 3)].clone()
        at, file = torch.Size((row, column)), folder / f"__{row}_{column}x.distcp"
        torch.save(piece, file)
        entry.chunks.append(ChunkStorageMetadata(offsets=at, sizes=piece.shape))
        metadata.storage_data[MetadataIndex("embed", at)] = _StorageInfo(file.name, 0, file.stat().st_size)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    load_dcp(model, folder)
    assert equal(model.state_dict(), Model(1).state_dict())
    entry.chunks.pop()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    refused(
        folder,
        "embed is torch.float32 torch.Size([6, 4]) of 20 entries, in the model torch.float32 torch.Size([6, 4]) of 24",
    )
    entry.chunks += [entry.chunks[1]] * 2  # 24 entries, of which two are there thrice
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    refused(folder, "is no number any more")  # of the embedding, or the head that is tied to it


@pytest.mark.long
def test_what_two_ranks_wrote_is_put_together(tmp_path: Path) -> None:
    assert run_gloo(sharded, 2, args=(str(tmp_path / "ck"),)) == [True, True]
    assert len([*(tmp_path / "ck").glob("*.distcp")]) == 2
    model = Model(2)
    load_dcp(model, tmp_path / "ck")
    assert equal(model.state_dict(), Model(1).state_dict())


def test_a_run_goes_out_and_begins_another(tmp_path: Path) -> None:
    """Read without Isles, under the names of model.safetensors; to begin there is to begin at the run."""
    text = write_text(tmp_path / "text.txt")
    run(tiny(text, "model.tie_embeddings=false", method="ddp", steps=2), tmp_path / "run")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's remarks are not for who exports a run
        export(tmp_path / "run", format="dcp", device="cpu")
    folder, weights = tmp_path / "run" / "export-dcp", load_file(tmp_path / "run" / "model.safetensors")
    state = {name: torch.full_like(tensor, torch.nan) for name, tensor in weights.items()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    assert equal(state, weights)
    losses = []
    for number, start in enumerate((tmp_path / "run", folder)):
        config = tiny(text, "model.tie_embeddings=false", f"run.start={start}", "run.seed=5", method="none", workers=1)
        run(config, tmp_path / str(number))
        losses.append([line["loss"] for line in metrics(tmp_path / str(number))])
    assert losses[0] == losses[1] and len(losses[0]) == 3


def test_what_does_not_fit_is_one_line(tmp_path: Path) -> None:
    fits = Model(1).state_dict()
    wrong = {
        "short is missing; 1 names differ": {name: one for name, one in fits.items() if name != "short"},
        "more is too much; 2 names differ": fits | {"more": torch.ones(1), "other": torch.ones(1)},
        "scale is torch.float64 torch.Size([1]) of 1 entries, in the model torch.float64 torch.Size([]) of 1": fits
        | {"scale": torch.ones(1, dtype=torch.float64)},
        "steps is torch.int32 torch.Size([2, 3]) of 6 entries, in the model torch.int64 torch.Size([2, 3]) of 6": fits
        | {"steps": fits["steps"].int()},
        "short is no number any more": fits | {"short": fits["short"] * torch.nan},
    }
    for number, (line, state) in enumerate(wrong.items()):
        refused(written(tmp_path / str(number), state), line)
    with pytest.raises(ValueError, match=r"^run\.start = .*: no model\.safetensors there; name a finished run"):
        start_file(str(tmp_path))


def refused(folder: Path, line: str) -> None:
    with pytest.raises(ValueError) as caught:
        load_weights(Model(2), start_file(str(folder)), "[model], which run.start must be of")
    assert str(caught.value).startswith(f"{folder / '.metadata'}: ") and "\n" not in str(caught.value)
    assert line in str(caught.value)


@pytest.mark.parametrize("keep", [0, 1, 2, 3, 5, 8])
def test_what_is_damaged_is_one_line(tmp_path: Path, keep: int) -> None:
    """Cut at eighths of the one file or the other, or one byte of it changed."""
    whole = written(tmp_path / "whole", Model(1).state_dict())
    for name in (".metadata", "__0_0.distcp"):
        content = (whole / name).read_bytes()
        at = len(content) * keep // 8
        (whole / name).write_bytes(content[:at] if keep < 8 else content[:-900] + b"\x85" * 900)
        refused(whole, "does not fit the model of [model], which run.start must be of; was it changed since? (")
        (whole / name).write_bytes(content)
    (whole / "__0_0.distcp").unlink()
    refused(whole, "No such file")


class Runs:
    """What a hostile pickle says: call this."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.mark}",)


@pytest.mark.parametrize("protocol", range(6))
def test_a_hostile_checkpoint_is_refused_and_nothing_is_run(tmp_path: Path, protocol: int) -> None:
    """As all of the metadata, and in a place that is not looked at. That the payload works: the last lines."""
    mark, folder = tmp_path / "was-run", written(tmp_path / "ck", Model(1).state_dict())
    metadata = dcp.FileSystemReader(folder).read_metadata()
    metadata.planner_data = {"short": Runs(mark)}
    for hostile in (Runs(mark), metadata):
        (folder / ".metadata").write_bytes(pickle.dumps(hostile, protocol))
        refused(folder, "is not what a checkpoint has: do not use it")
        assert not mark.exists()
    if protocol == 4:
        refused(folder, "(STACK_GLOBAL posix.system is not what a checkpoint has: do not use it)")
        dcp.FileSystemReader(folder).read_metadata()
        assert mark.exists()


def test_a_name_in_the_metadata_leads_to_no_file_elsewhere(tmp_path: Path) -> None:
    folder = written(tmp_path / "ck", Model(1).state_dict())
    shutil.move(folder / "__0_0.distcp", tmp_path / "__0_0.distcp")
    metadata = dcp.FileSystemReader(folder).read_metadata()
    for place in metadata.storage_data.values():
        place.relative_path = "../__0_0.distcp"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    refused(folder, "No such file")
