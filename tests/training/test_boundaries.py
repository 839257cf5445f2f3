"""Runs with boundaries of few bytes: their bytes, their checkpoints, their one model, and what is refused."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from isles import cli
from isles.comm.errors import Diverged
from isles.comm.mesh import Mesh
from isles.data import Loader, load_corpus
from isles.models import Decoder
from isles.models.subspace import most_outside
from isles.pipeline.boundaries.scheme import Inside
from isles.plan.run_plan import plan_run
from isles.replicas import METHODS, method
from isles.running.run import launch
from isles.running.virtual import VirtualWorkers
from isles.training import stage_runner
from isles.training.config.reading import read_config
from isles.training.config.sections import Config
from isles.training.kinds import layout_of
from isles.training.records.checkpoint import Checkpoints
from isles.training.records.reshard import cut_notes, first_blocks, prepare, with_boundary, with_stages
from isles.training.records.saved_run import load_saved
from isles.training.step import validation_loss
from isles.training.worker import train_worker, trainer_of
from tests.training.runs import Told, run, tiny, write_text

MORE = ["model.layers=4", "model.tie_embeddings=false", "data.batch_size=4", "pipeline.stages=2"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt", 8000)


def of(text: Path, *more: str, method: str = "diloco", steps: int = 6, workers: int = 4) -> Config:
    return tiny(text, *MORE, *more, method=method, workers=workers, steps=steps)


@pytest.mark.parametrize(
    "more",
    [
        ["pipeline.boundary.kind=dct:0.7", "model.tie_embeddings=true", "pipeline.routing=random"],
        [
            "pipeline.boundary.kind=bottleneck:4",
            "pipeline.boundary.codec=int8",
            "pipeline.boundary.gradient_codec=bf16",
        ],
    ],
)
def test_a_dry_run_knows_the_bytes(text: Path, more: list[str]) -> None:
    """Those of subspaces, which are turned too: tests/training/test_dry_stages.py."""
    config = of(text, "data.validation_fraction=0", *more)
    args = (config, None, None, load_corpus(config.data))
    results = VirtualWorkers(train_worker, 4, config, args).join()
    assert plan_run(config).bytes_sent == tuple(result["bytes_sent"] for result in results)


def test_a_dry_run_counts_basis_and_table_at_every_stage(text: Path) -> None:
    plain, bounded = (plan_run(of(text, f"pipeline.boundary.kind={name}")) for name in ("none", "subspace:4"))
    assert bounded.workers[1].memory.tables - plain.workers[1].memory.tables == 4 * (16 * 4 + 256 * 16)
    tokens, beside = 16, 17 + 4  # of a microbatch: ids of a byte, and the loss
    assert plain.stream_ratio == 1
    assert bounded.stream_ratio == (tokens * 2 * 16 * 4 + beside) / (tokens * 2 * 4 * 4 + beside)


def trained(world: Mesh, config: Config) -> tuple[float, str]:
    """Largest share of a writer outside the subspace in all steps, and the subspace's checksum at the end."""
    trainer = trainer_of(config, world.arranged(layout_of(config)))
    worst = [0.0]
    for _ in range(config.run.steps):
        trainer.step()
        worst.append(most_outside(trainer.model))
    trainer.optimizer.finish()
    worst.append(most_outside(trainer.model))
    stage: Any = trainer.model
    return max(worst), stage.subspace.checksum


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("diloco", ["replicas.codec=int8"]),
        pytest.param("noloco", ["replicas.codec=int8", "pipeline.routing=random"], marks=pytest.mark.long),
        ("noloco", ["pipeline.boundary.form=row-wise"]),
        pytest.param("diloco", ["pipeline.boundary.form=projected"], marks=pytest.mark.long),
    ],
)
def test_replicas_stay_in_their_subspace(text: Path, method: str, more: list[str]) -> None:
    """2 x 2, float32: with and without replicas' exchanges, weights are as far outside as rounding puts them."""
    config = of(text, "pipeline.boundary.kind=subspace:4", *more, method=method, steps=4)
    without = [one for one in more if "replicas" not in one]
    alone = of(text, "pipeline.boundary.kind=subspace:4", *without, method="none", steps=4)
    outside = [max(found[0] for found in VirtualWorkers(trained, 4, one, (one,)).join()) for one in (config, alone)]
    assert 0 < outside[0] < 1e-6
    assert outside[0] < 3 * outside[1]


@pytest.mark.parametrize(
    "more",
    [
        ["pipeline.boundary.kind=subspace:4", "pipeline.boundary.update_every=2", "pipeline.boundary.update_rate=0.2"],
        pytest.param(["pipeline.boundary.kind=subspace:4", "pipeline.boundary.form=row-wise"], marks=pytest.mark.long),
        pytest.param(["pipeline.boundary.kind=maxout:4"], marks=pytest.mark.long),
    ],
)
def test_a_run_goes_on_to_the_bit(text: Path, tmp_path: Path, more: list[str]) -> None:
    whole = tmp_path / "whole"
    told = Told()
    summary = run(of(text, "run.checkpoint_every=3", *more, method="noloco"), whole, told)
    part = shutil.copytree(whole, tmp_path / "part")
    for name in ("summary.json", "model.safetensors"):
        (part / name).unlink()
    again = launch(
        read_config(str(part / "config.toml"), {}, []), part, told.lines.append, told.notices.append, resume=3
    )
    assert again["val_loss"] == summary["val_loss"]
    ours, theirs = load_file(whole / "model.safetensors"), load_file(part / "model.safetensors")
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_a_turned_subspace_is_one_everywhere(text: Path) -> None:
    turning = of(
        text,
        "pipeline.boundary.kind=subspace:4",
        "pipeline.boundary.update_every=2",
        "pipeline.boundary.update_rate=0.3",
    )
    still = of(text, "pipeline.boundary.kind=subspace:4")
    hashes = [{found[1] for found in VirtualWorkers(trained, 4, one, (one,)).join()} for one in (turning, still)]
    assert [len(one) for one in hashes] == [1, 1]
    assert hashes[0] != hashes[1]


def test_a_worker_that_draws_another_subspace_is_named(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Inside.settings

    def drawn_elsewhere(self: Inside, stage: Any) -> str:
        return settings(self, stage) + ("?" if stage.piece.blocks.start else "")

    monkeypatch.setattr(Inside, "settings", drawn_elsewhere)
    config = of(text, "pipeline.boundary.kind=subspace:4", workers=2)
    with pytest.raises(Diverged, match=r"worker 1 .* its subspace is another one"):
        VirtualWorkers(train_worker, 2, config, (config,)).join()


@pytest.mark.parametrize(
    "boundary",
    [
        "dct:0.7 tied",
        "bottleneck:4",
        "subspace:4 turned",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("subspace:4", "dct:0.7", "maxout:8")),
    ],
)
def test_the_one_model_is_what_the_stages_computed(text: Path, tmp_path: Path, boundary: str) -> None:
    """Of one replica: its loss in stages, that of the model put together, and that of the run read back."""
    name, _, how = boundary.partition(" ")
    more = {"tied": ["model.tie_embeddings=true"], "turned": ["pipeline.boundary.update_every=2"]}.get(how, [])
    told = Told()
    summary = run(of(text, f"pipeline.boundary.kind={name}", *more, method="none", workers=2), tmp_path / "run", told)
    assert summary["val_loss"] == pytest.approx(summary["val_loss_replicas"], abs=1e-5)
    saved = load_saved(tmp_path / "run")
    batches = list(Loader(load_corpus(saved.config.data), saved.config.data, context=16).validation_batches())
    assert validation_loss(saved.model, batches, nullcontext()) == pytest.approx(summary["val_loss"], abs=1e-6)
    assert (f'lossy between stages: pipeline.boundary.kind = "{name}"' in told.notices) == ("subspace" not in name)
    if name.startswith("subspace"):
        plain = Decoder(saved.config.model.shape())
        plain.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"))
        assert validation_loss(plain, batches, nullcontext()) == pytest.approx(summary["val_loss"], abs=1e-6)
    if name.startswith("dct"):
        bare = load_saved(tmp_path / "run", masked=False)
        assert abs(validation_loss(bare.model, batches, nullcontext()) - summary["val_loss"]) > 1e-3


class Unnamed(nn.Module):
    """A model in pieces that does not name its writers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(256, 16), nn.Linear(16, 256)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def enter(self, tokens_BT: Any) -> Any:
        """As `Cuttable`."""
        return self.table(tokens_BT)

    def through(self, block: nn.Module, x_BTD: Any) -> Any:
        """As `Cuttable`."""
        return x_BTD + block(x_BTD)

    def leave(self, x_BTD: Any) -> Any:
        """As `Cuttable`."""
        return self.head(x_BTD)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            ["pipeline.boundary.kind=subspace:17"],
            ['pipeline.boundary.kind = "subspace:17"', "only 16 wide", "at most 16"],
        ),
        (["pipeline.boundary.kind=subspace:0"], ['pipeline.boundary.kind = "subspace:0"', "1 number a token or more"]),
        (["pipeline.boundary.kind=subspace"], ['pipeline.boundary.kind = "subspace"', 'such as "subspace:16"']),
        (["pipeline.boundary.kind=topk:4"], ['pipeline.boundary.kind = "topk:4" is not known', '"dct:0.75"']),
        (["pipeline.boundary.kind=dct:1.0"], ['pipeline.boundary.kind = "dct:1.0"', "a share from 0 to below 1"]),
        (["pipeline.boundary.kind=dct:-0.1"], ['pipeline.boundary.kind = "dct:-0.1"', "a share from 0 to below 1"]),
        (["pipeline.boundary.kind=dct:nan"], ['pipeline.boundary.kind = "dct:nan"', "a share from 0 to below 1"]),
        (["pipeline.boundary.kind=maxout:3"], ['pipeline.boundary.kind = "maxout:3"', "divisor of 16"]),
        (["pipeline.boundary.kind=subspace:4", "model.tie_embeddings=true"], ["tie_embeddings = false", "subspace:4"]),
        (
            ["pipeline.boundary.kind=bottleneck:4", "pipeline.loss_at=origin"],
            ["bottleneck:4", "at the origin", "dct:0.75"],
        ),
        (["pipeline.boundary.codec=sign"], ["pipeline.boundary.codec", "int8"]),
        (
            ["pipeline.boundary.kind=subspace:4", "pipeline.boundary.blocks=1"],
            ["pipeline.boundary.blocks = 1", "choose 3 to 4"],
        ),
        (["pipeline.boundary.form=row-wise"], ['pipeline.boundary.form = "row-wise"', "subspace:16"]),
        (
            ["pipeline.boundary.kind=subspace:4", "pipeline.boundary.update_rate=0.2"],
            ["pipeline.boundary.update_rate", "update_every"],
        ),
        (
            [
                "pipeline.boundary.kind=subspace:4",
                "pipeline.boundary.form=projected",
                "pipeline.boundary.update_every=5",
            ],
            ["pipeline.boundary.update_every = 5", 'form = "coordinates"'],
        ),
        (
            ["pipeline.boundary.kind=subspace:4", "pipeline.boundary.form=row-wise", "replicas.codec=int8"],
            ['replicas.codec = "int8"', 'form = "coordinates"'],
        ),
        (
            ["pipeline.boundary.kind=subspace:4", "pipeline.boundary.form=projected", "replicas.method=fedadam"],
            ['replicas.method = "fedadam"', 'form = "coordinates"'],
        ),
        (["pipeline.stages=1", "pipeline.boundary.kind=dct:0.5"], ["pipeline.boundary.kind", "several stages only"]),
    ],
)
def test_a_mistake_is_one_line(
    text: Path, more: list[str], words: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [f"data.path={text}", "world.backend=virtual", *SHAPE, *MORE, *more]
    arguments = [part for one in settings for part in ("--set", one)]
    monkeypatch.setattr("sys.argv", ["isles", "train", "--dry-run", "--method", "diloco", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    error = capfd.readouterr().err
    assert ended.value.code == 2
    assert error.startswith("isles: ") and error.count("\n") == 1
    assert all(word in error for word in words), error


SHAPE = ["model.d_model=16", "model.heads=2", "model.ffn=24", "model.context=16"]


def test_a_model_of_ones_own_must_name_what_writes(text: Path) -> None:
    factory = ["model.factory=tests.training.test_boundaries:Unnamed", "model.vocab=256", "model.context=16"]
    settings = [f"data.path={text}", "pipeline.stages=2", "pipeline.boundary.kind=subspace:4", *factory]
    config = read_config(None, {"replicas.method": "none", "world.workers": 2}, settings)
    with pytest.raises(ValueError, match="Unnamed does not name what writes to its stream"):
        plan_run(config)


def test_a_model_of_ones_own_without_a_forward_pass_is_refused_in_a_line(text: Path) -> None:
    """As it is without stages, though it comes in pieces."""
    factory = ["model.factory=tests.training.test_boundaries:Unnamed", "model.vocab=256", "model.context=16"]
    settings = [f"data.path={text}", "pipeline.stages=2", "data.batch_size=4", *factory]
    config = read_config(None, {"replicas.method": "none", "world.workers": 2}, settings)
    with pytest.raises(ValueError, match=r"Unnamed'?: its model fails on tokens .*forward"):
        stage_runner.hold_against_whole(config, stage_runner.planned_cut(config))


def stopped(text: Path, folder: Path, *more: str) -> tuple[Path, dict[str, torch.Tensor]]:
    """A run that stopped after 3 of 6 steps, and the weights that it would have ended with."""
    run(of(text, "run.checkpoint_every=3", "inner.max_norm=0", *more, method="noloco"), folder)
    weights = load_file(folder / "model.safetensors")
    for name in ("summary.json", "model.safetensors"):
        (folder / name).unlink()
    return folder, weights


@pytest.mark.long
@pytest.mark.parametrize(
    ("more", "then", "stages", "cut", "bound"),
    [
        (["pipeline.boundary.update_every=2"], "", 4, [1, 2, 3], 0),
        pytest.param(["pipeline.cut=[2]"], "", 3, [1, 2], 0, marks=pytest.mark.long),
        pytest.param([], "cut = [1]", 2, [1], 3, marks=pytest.mark.long),
    ],
)
def test_a_subspace_goes_on_in_other_stages(
    text: Path, tmp_path: Path, more: list[str], then: str, stages: int, cut: list[int], bound: int
) -> None:
    """Blocks that were not bound to it are in the last stage then too, and the weights end where they would have."""
    path, expected = stopped(text, tmp_path / "run", "pipeline.boundary.kind=subspace:8", *more)
    toml = path / "config.toml"
    toml.write_text(toml.read_text().replace("cut = []", then) if then else toml.read_text())
    ready = prepare(path, None, stages)
    assert first_blocks(ready.config) == cut and ready.config.pipeline.boundary.blocks == bound
    told = Told()
    launch(ready.config, path, told.lines.append, told.notices.append, resume=ready.step)
    found = load_file(path / "model.safetensors")
    assert max(float((found[name] - own).abs().max()) for name, own in expected.items()) < 1e-5


def test_rows_stay_rows_with_other_replicas(text: Path, tmp_path: Path) -> None:
    """Groups of one weight decay are told apart by the axis along which their rows run; where no weights are in the
    subspace, the optimizer is another one.
    """
    path, _ = stopped(text, tmp_path / "run", "pipeline.boundary.kind=subspace:4", "pipeline.boundary.form=row-wise")

    def groups() -> list[list[dict[str, Any]]]:
        shards = [Checkpoints(path).read_shard(3, worker)["optimizer"]["inner"] for worker in range(2)]
        return [shard["param_groups"] for shard in shards]

    before = groups()
    assert [group.get("mean_axis") for group in before[0]] == [None, 0, 1, None]
    ready, told = prepare(path, 2), Told()
    assert groups() == before
    launch(ready.config, path, told.lines.append, told.notices.append, resume=ready.step)


def test_masks_go_on_where_the_stages_are(text: Path) -> None:
    saved = of(text, "pipeline.boundary.kind=dct:0.5")
    config = with_boundary(saved, with_stages(saved, 4, None))
    assert config.pipeline.boundary.kind == "dct:0.5" and first_blocks(config) == [1, 2, 3]
    assert any("stand behind blocks [0, 1, 2] now" in note for note in cut_notes(saved, config, 3))


@pytest.mark.long
def test_masks_go_on_in_one_stage_as_no_masks(text: Path, tmp_path: Path) -> None:
    path, _ = stopped(text, tmp_path / "run", "pipeline.boundary.kind=dct:0.5")
    ready, told = prepare(path, None, 1), Told()
    assert any("stand behind blocks [] now" in note for note in ready.notes)
    assert launch(ready.config, path, told.lines.append, told.notices.append, resume=ready.step)["val_loss"] < 5.6


@pytest.mark.parametrize(
    ("more", "stages", "says"),
    [
        (["pipeline.boundary.kind=bottleneck:4"], 4, r"has trained layers where the stages begin now: blocks \[3\]"),
        (["pipeline.boundary.kind=subspace:4"], 1, "a whole model has no coordinates"),
        (
            ["pipeline.boundary.kind=subspace:4", "pipeline.cut=[2]"],
            4,
            "first 2 blocks write .* choose at most 3 stages",
        ),
        (
            ["pipeline.boundary.kind=subspace:4", "pipeline.boundary.form=row-wise"],
            4,
            "depends on where the stages begin",
        ),
    ],
)
def test_stages_stay_where_their_boundaries_want_them(text: Path, more: list[str], stages: int, says: str) -> None:
    saved = of(text, *more)
    with pytest.raises(ValueError, match=says) as refusal:
        with_boundary(saved, with_stages(saved, stages, None))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", [name for name in METHODS if method(name).is_linear])
def test_methods_that_scale_and_add_rows_are_taken_with_full_size_forms(text: Path, name: str) -> None:
    """Others are refused (see above)."""
    config = of(text, "pipeline.boundary.kind=subspace:4", "pipeline.boundary.form=row-wise", method=name)
    stage_runner.run_scheme(config, stage_runner.planned_cut(config))
