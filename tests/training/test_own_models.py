"""`model.factory` and `model.hf`: everything that the decoder can do, a model of the user's own can do too."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from isles.cli.model import evaluate, export
from isles.models import ModelConfig, build, limits
from isles.running.run import launch
from isles.training.config.reading import read_config, to_toml
from isles.training.config.sections import Config
from isles.training.records.saved_run import load_saved
from tests.cli.command import isles
from tests.training.own_models import save_gpt2
from tests.training.runs import (
    EVERY_3,
    OWN_SETTINGS,
    TINY,
    Told,
    metrics,
    run,
    write_text,
)

DOCS = Path(__file__).resolve().parents[2] / "docs" / "own-model.md"
FACTORY = ["model.factory=tests.training.own_models:build", "model.context=16"]
OF_RUN = [assignment for assignment in TINY if not assignment.startswith("model.")]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    pytest.importorskip("transformers", reason="needs the extra hf")
    return [f"model.hf={save_gpt2(tmp_path_factory.mktemp('hf') / 'gpt2')}", "data.tokenizer=bytes"]


def tiny(text: Path, model: list[str], *more: str, method: str = "noloco", workers: int = 2, steps: int = 6) -> Config:
    every = ["replicas.sync_every=3"] if method in EVERY_3 else []
    every += OWN_SETTINGS[method] if method == "dct-dp" else []  # which sends small tensors whole
    every += ["replicas.fragments=whole"] if method.startswith("streaming") else []  # the models have no list of blocks
    flags = {"replicas.method": method, "world.workers": workers, "run.steps": steps}
    return read_config(None, flags, [f"data.path={text}", *OF_RUN, *model, *every, *more])


@pytest.mark.parametrize("kind", ["factory", "gpt2"])
def test_it_learns_resumes_and_is_judged(
    text: Path, tmp_path: Path, gpt2: list[str], kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Loss falls below chance; from a checkpoint the same bits come out; eval's loss is the summary's."""
    model = FACTORY if kind == "factory" else gpt2
    config = tiny(text, model, "run.checkpoint_every=10", "run.keep_checkpoints=0", "inner.lr=0.03", steps=40)
    whole, copy = tmp_path / "whole", tmp_path / "copy"
    summary = run(config, whole)
    assert summary["val_loss"] < 0.8 * math.log(256)
    assert read_config(str(whole / "config.toml"), {}, []) == config
    shutil.copytree(whole, copy)
    (copy / "summary.json").unlink()
    told = Told()
    launch(config, copy, told.lines.append, told.notices.append, resume=20)
    assert sorted(map(str, metrics(copy))) == sorted(map(str, metrics(whole)))
    assert (copy / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()

    evaluate(whole, None, None)
    assert f"{summary['val_loss']:.4f}" in capsys.readouterr().out
    saved = load_saved(whole)
    scores = saved.logits(torch.tensor([[1, 2, 3]]))
    assert scores.shape == (1, 3, 256 if kind == "factory" else 300)
    assert torch.equal(scores[:, :2], saved.logits(torch.tensor([[1, 2]])))  # nothing looks ahead
    assert not saved.model.training


@pytest.mark.long
def test_the_example_of_the_docs_works_when_copied(tmp_path: Path) -> None:
    """docs/own-model.md, its two files and its commands, with fewer steps and less text."""
    page = DOCS.read_text()
    for kind, name in (("python", "my_model.py"), ("toml", "my_run.toml")):
        (tmp_path / name).write_text(re.findall(rf"```{kind}\n(.*?)```", page, re.S)[0])
    less = ("--steps", "25", "--set", f"data.path={write_text(tmp_path / 'text.txt', 9000)}")
    code, _, err = isles("train", "my_run.toml", *less, "--out", "run", folder=tmp_path)
    assert code == 0, err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["val_loss"] < 4.5 and (summary["workers"], summary["steps"]) == (2, 25)
    code, out, err = isles("generate", "run", "--prompt", "def ", "--tokens", "5", folder=tmp_path)
    assert code == 0 and out.startswith("def "), err


def test_a_transformers_model_exports_to_where_it_came_from(text: Path, tmp_path: Path, gpt2: list[str]) -> None:
    """`isles export` writes a folder that transformers reads, with equal logits, and that can be trained again."""
    transformers = pytest.importorskip("transformers")
    summary, folder = run(tiny(text, gpt2), tmp_path / "run"), tmp_path / "theirs"
    export(tmp_path / "run", "hf", folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(theirs(tokens).logits, load_saved(tmp_path / "run").logits(tokens))
    again = run(tiny(text, [f"model.hf={folder}", *gpt2[1:]], "inner.lr=1e-9", steps=3), tmp_path / "again")
    assert again["val_loss"] == pytest.approx(summary["val_loss"], abs=1e-4)


def save_dataset(folder: Path, rows: list[str]) -> Path:
    """The files of `datasets.Dataset.save_to_disk`."""
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra data")
    folder.mkdir()
    table, name = pyarrow.table({"text": rows}), "data-00000-of-00001.arrow"
    with pyarrow.OSFile(str(folder / name), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    features = {"text": {"dtype": "string", "_type": "Value"}}
    (folder / "dataset_info.json").write_text(json.dumps({"features": features}))
    state = {"_data_files": [{"filename": name}], "_fingerprint": "0", "_format_columns": None, "_format_kwargs": {}}
    state |= {"_format_type": None, "_output_all_columns": False, "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    return folder


def test_tokenizer_files_and_saved_datasets_train(tmp_path: Path, gpt2: list[str]) -> None:
    """[data] with a tokenizer.json and a folder of datasets' save_to_disk, into a transformers model."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra hf")
    words = write_text(tmp_path / "text.txt", 6000).read_text()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    tokenizer.train_from_iterator([words], tokenizers.trainers.BpeTrainer(vocab_size=290, special_tokens=["<unk>"]))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    data = [f"data.path={tmp_path / 'text.txt'}", f"data.tokenizer={tmp_path / 'tokenizer.json'}", "model.context=8"]
    summary = run(tiny(tmp_path / "unused", gpt2, *data), tmp_path / "a")
    assert summary["tokens"] == 6 * 2 * 2 * 8
    # What is exported has the tokenizer, which is taken where the folder is trained again and nothing else is said.
    export(tmp_path / "a", "hf", tmp_path / "theirs")
    again, told = [f"model.hf={tmp_path / 'theirs'}"], Told()
    taken = tiny(tmp_path / "unused", again, data[0], data[2], "inner.lr=1e-9", steps=3)
    assert taken.data.tokenizer == str(tmp_path / "theirs")
    assert run(taken, tmp_path / "again", told)["val_loss"] == pytest.approx(summary["val_loss"], abs=1e-4)
    left = tiny(tmp_path / "unused", [*again, "data.tokenizer=bytes"], data[0], data[2], "inner.lr=1e-9", steps=3)
    run(left, tmp_path / "left", told)
    assert [notice for notice in told.notices if "tokenizer" in notice] == [
        'data.tokenizer = "bytes": the folder of model.hf has a tokenizer; leave this key out to use it'
    ]

    pytest.importorskip("datasets", reason="needs the extra hf")
    data[0] = f"data.path={save_dataset(tmp_path / 'set', [words[at : at + 200] for at in range(0, len(words), 200)])}"
    assert run(tiny(tmp_path / "unused", gpt2, *data), tmp_path / "b")["val_loss"] is not None


def test_the_weights_follow_the_seed_and_leave_the_generator_alone(gpt2: list[str]) -> None:
    for model in (FACTORY, gpt2):
        config = read_config(None, {}, model).model
        before = torch.get_rng_state()
        first, again, other = (build(config, seed=seed) for seed in (1, 1, 2))
        assert torch.equal(torch.get_rng_state(), before)
        pairs = [list(one.state_dict().values()) for one in (first, again, other)]
        assert all(map(torch.equal, pairs[0], pairs[1]))
        assert not all(map(torch.equal, pairs[0], pairs[2]))
        assert first.training


def test_limits_come_from_the_model(gpt2: list[str]) -> None:
    """context and vocab of config.json, and what overrides them."""
    path = gpt2[0].partition("=")[2]
    assert limits(ModelConfig(hf=path)) == (32, 300)
    assert limits(ModelConfig(hf=path, context=8, vocab=260)) == (8, 260)
    assert build(ModelConfig(hf=path, vocab=260), seed=0).logits(torch.zeros(1, 2, dtype=torch.int64)).shape[2] == 260
    assert limits(ModelConfig(factory="a:b", context=9)) == (9, None)
    assert limits(ModelConfig()) == (128, 256)


def test_options_survive_toml_and_the_command_line() -> None:
    """Nested ones too: what was resolved reads back to the same."""
    config = read_config(None, {}, [*FACTORY, "model.options.width=4", 'model.options.deep={a = 1, b = ["x", 2.5]}'])
    assert config.model.options == {"width": 4, "deep": {"a": 1, "b": ["x", 2.5]}}


@pytest.mark.parametrize("options", [{"width": 4}, {"deep": {"a": {"b": 1}}, "flag": True, "names": ["x"]}])
def test_a_resolved_configuration_keeps_options(tmp_path: Path, options: dict[str, object]) -> None:
    path = tmp_path / "config.toml"
    config = read_config(None, {}, FACTORY)
    model = ModelConfig(factory="my_model:build", context=4, options=options)
    path.write_text(to_toml(Config(method=config.method, replicas=config.replicas, model=model)))
    assert read_config(str(path), {}, []).model == model


OWN = "tests.training.own_models"
REFUSED = [
    (["model.factory=a:b", "model.hf=x", "model.context=4"], "remove one of them"),
    (["model.factory=a:b"], "model.context is missing"),
    (["model.factory=nocolon", "model.context=4"], "write package.module:function"),
    (["model.factory=a:b", "model.context=0"], "model.context = 0"),
    *(
        ([*FACTORY, f"model.{key}=2"], f"model.{key} is a setting of Isles' own")
        for key in ("d_model", "layers", "heads", "ffn")
    ),
    ([*FACTORY, "model.size=2M"], "model.size is a setting of Isles' own"),
    ([*FACTORY, "model.tie_embeddings=true"], "model.tie_embeddings is a setting of Isles' own"),
    (["model.options.width=4"], "model.options are the arguments of model.factory"),
    (["model.hf=x", "model.options.width=4"], "model.options are for model.factory"),
    ([*FACTORY, "model.options=4"], "model.options = 4"),
    (["model.hf=/nowhere"], "no config.json there"),
    (["model.factory=not_there:build", "model.context=4"], "cannot be imported: No module named 'not_there'"),
    ([f"model.factory={OWN}:not_there", "model.context=4"], "cannot be imported: module"),
    ([f"model.factory={OWN}:no_module", "model.context=4"], "returns a int"),
    ([f"model.factory={OWN}:nothing_to_train", "model.context=4"], "without trainable parameters"),
    ([f"model.factory={OWN}:no_loss", "model.context=4"], "returns a Tensor without a scalar .loss"),
    ([f"model.factory={OWN}:two_losses", "model.context=4"], "a .loss that is no scalar"),
    ([f"model.factory={OWN}:cut_off", "model.context=4"], "no gradient flows"),
    ([f"model.factory={OWN}:falls", "model.context=4"], "its model fails on tokens (1, 5): RuntimeError"),
    ([*FACTORY, "model.options.widht=4"], "unexpected keyword argument 'widht' (factory.py, line"),
    ([*FACTORY, "model.vocab=100"], "model.vocab = 100 is smaller than the tokenizer's 256 ids"),
]


@pytest.mark.parametrize(("model", "says"), REFUSED)
def test_what_cannot_be_is_said_in_one_line(text: Path, tmp_path: Path, model: list[str], says: str) -> None:
    told = Told()
    with pytest.raises(ValueError) as caught:
        run(tiny(text, model), tmp_path / "out", told)
    assert says in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists() and not told.lines


def test_what_transformers_cannot_be_given_is_said_too(text: Path, tmp_path: Path, gpt2: list[str]) -> None:
    with pytest.raises(ValueError, match=r"model\.context = 33 is more than the 32 of model\.hf"):
        run(tiny(text, gpt2, "model.context=33"), tmp_path / "a")
    build(read_config(None, {}, gpt2).model, seed=0).model.save_pretrained(tmp_path / "weights")
    with pytest.raises(ValueError, match=r"the weights of model\.hf have 300: take it out"):
        run(tiny(text, [f"model.hf={tmp_path / 'weights'}", *gpt2[1:], "model.vocab=256"]), tmp_path / "b")


def test_what_a_model_cannot_give_is_refused_later(text: Path, tmp_path: Path) -> None:
    """One without scores trains; generation says what is missing. Its weights are exported under their own names."""
    path = tmp_path / "run"
    assert run(tiny(text, [*FACTORY, "model.options.scores=false"]), path)["val_loss"] > 0
    with pytest.raises(ValueError, match=r"returns no \.logits"):
        load_saved(path).logits(torch.tensor([[1]]))
    with pytest.raises(ValueError, match=r"model\.factory; write it with --format safetensors"):
        export(path, "hf", None)
    export(path, "safetensors", tmp_path / "weights")
    assert "embed.weight" in load_file(tmp_path / "weights" / "model.safetensors")
