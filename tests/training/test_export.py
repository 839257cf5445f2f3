"""`isles export`: a folder that transformers reads, with the same logits and ids, and a card of the run."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from isles.cli.model import evaluate, export
from isles.data.tokenizer import ByteTokenizer, load_tokenizer
from isles.models.decoder import Decoder
from isles.models.hf import save_as_llama
from isles.models.sizes import Shape
from isles.plan.run_plan import refuse
from isles.training.config.reading import parse_toml, read_config, resolve
from isles.training.records.saved_run import encoded, load_saved
from tests.training.runs import run, tiny, write_text

TEXT = "  Hello,\tWörld\r\n\x00 🙂 don't   1234 \u00a0 end \n\n"
EVERY_BYTE = "".join(map(chr, range(0x800))) + "\uffff\U0010ffff"  # each leading and following byte that UTF-8 has


@pytest.fixture(scope="module")
def auto() -> Any:
    return pytest.importorskip("transformers", reason="needs the extra hf: pip install '.[hf]'")


def words_tokenizer(folder: Path, words: int) -> Path:
    """A word tokenizer of so many ids, with an end of text, in `folder`."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({f"w{number}": number for number in range(words)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    return folder


def test_bytes_come_out_as_a_tokenizer_with_the_same_ids(tmp_path: Path, auto: Any) -> None:
    held = f"data.validation_path={write_text(tmp_path / 'held.txt', seed=1)}"
    config = tiny(write_text(tmp_path / "text.txt"), held, method="diloco", workers=2)
    summary = run(config, tmp_path / "run")
    export(tmp_path / "run")
    folder = tmp_path / "run" / "export-hf"
    tokenizer, model = auto.AutoTokenizer.from_pretrained(folder), auto.AutoModelForCausalLM.from_pretrained(folder)
    for text in (TEXT, EVERY_BYTE, "", " ", "\n"):
        ids = tokenizer(text).input_ids
        assert ids == list(text.encode()) == list(ByteTokenizer().encode(text))
        assert tokenizer.decode(ids) == text
    assert len(tokenizer) == 256 and sorted(tokenizer.get_vocab().values()) == list(range(256))
    saved, tokens = load_saved(tmp_path / "run"), encoded(ByteTokenizer(), TEXT)[None, :16]
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, saved.logits(tokens), rtol=0, atol=1e-5)
    assert model.generation_config.do_sample and model.generation_config.temperature == 0.8
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n") and "tags: [isles, diloco]" in card
    for row in ("| method | diloco |", "| workers | 2 |", "| steps | 6 |", f"| val_loss | {summary['val_loss']} |"):
        assert row in card
    told = resolve(parse_toml(card.partition("```toml\n")[2].partition("```")[0]))
    assert (told.model, told.replicas, told.inner) == (config.model, config.replicas, config.inner)
    assert (told.data.path, told.data.validation_path) == ("text.txt", "held.txt")
    assert str(tmp_path) not in card  # no path of this machine


def test_a_tokenizer_of_ones_own_goes_with_the_model(tmp_path: Path, auto: Any) -> None:
    """With, and without, a tokenizer_config.json beside it; it says what ends a text."""
    own = words_tokenizer(tmp_path / "words", 40)
    text = write_text(tmp_path / "text.txt")
    text.write_text(" ".join(f"w{number % 40}" for number in range(3000)))
    for name, end in (("bare", None), ("ended", 7)):
        if end is not None:
            told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": f"w{end}"}
            (own / "tokenizer_config.json").write_text(json.dumps(told))
        run(tiny(text, f"data.tokenizer={own}", "model.vocab=40", method="none", steps=2), tmp_path / name)
        export(tmp_path / name, out=tmp_path / f"{name}-out")
        read = auto.AutoTokenizer.from_pretrained(tmp_path / f"{name}-out")
        ids = read("w3 w39 w12").input_ids
        assert ids == [3, 39, 12] == list(load_tokenizer(str(own)).encode("w3 w39 w12")) and read.eos_token_id == end
        settings = json.loads((tmp_path / f"{name}-out" / "generation_config.json").read_text())
        assert settings["eos_token_id"] == end


def test_ids_beyond_the_vocabulary_are_refused_before_training(tmp_path: Path, auto: Any) -> None:
    """Of the decoder, and of a model of transformers."""
    own, text = words_tokenizer(tmp_path / "words", 300), write_text(tmp_path / "text.txt")
    with pytest.raises(ValueError, match=r"model\.vocab = 256 is smaller than the tokenizer's 300 ids: set"):
        refuse(tiny(text, f"data.tokenizer={own}"))
    save_as_llama(
        Decoder(Shape(d_model=16, layers=1, heads=2, ffn=24, vocab=200, context=16, tie_embeddings=True)), own
    )
    settings = [f"model.hf={own}", "run.steps=5", "world.backend=virtual", "replicas.sync_every=2", f"data.path={text}"]
    with pytest.raises(ValueError, match=r"model\.vocab = 200 is smaller than the tokenizer's 300 ids"):
        refuse(read_config(None, {}, settings))
    with pytest.raises(ValueError, match=r"model\.vocab = 200 is smaller than the tokenizer's 256 ids"):
        refuse(read_config(None, {}, [*settings, "data.tokenizer=bytes"]))


def test_tasks_need_lm_eval_and_nothing_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    run(tiny(write_text(tmp_path / "text.txt"), method="none", workers=1, steps=2), tmp_path / "run")
    with pytest.raises(ValueError, match=r"--tasks: lm-eval \(pip install lm-eval\) cannot be imported"):
        evaluate(tmp_path / "run", tasks="hellaswag")
    for others in ({"data": "text.txt"}, {"questions": tmp_path / "q.jsonl"}, {"curves": True}, {"order": "0"}):
        with pytest.raises(ValueError, match="--questions and --tasks are asked of the whole model"):
            evaluate(tmp_path / "run", tasks="hellaswag", **others)


TASK = """task: own
dataset_path: json
dataset_kwargs: {{data_files: {{test: {questions}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{ctx}}}}"
doc_to_choice: endings
doc_to_target: label
metric_list: [{{metric: acc}}]
"""


@pytest.mark.long
def test_lm_eval_scores_as_isles_does(tmp_path: Path) -> None:
    """The same multiple choice, asked by `--questions` and by a task of lm-eval: the same share is right."""
    pytest.importorskip("lm_eval")
    run(tiny(write_text(tmp_path / "text.txt", 20_000), workers=1, steps=300, method="none"), tmp_path / "run")
    draw, words = random.Random(0), ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "again"]
    rows = []
    for _ in range(60):
        endings = [draw.choice(words), *("".join(draw.choices("abcdefghij", k=draw.randrange(2, 6))) for _ in range(3))]
        label = draw.randrange(4)
        endings[0], endings[label] = endings[label], endings[0]
        rows.append(json.dumps({"ctx": draw.choice(words), "endings": endings, "label": label}))
    (tmp_path / "q.jsonl").write_text("\n".join(rows) + "\n")
    (tmp_path / "own.yaml").write_text(TASK.format(questions=tmp_path / "q.jsonl"))
    shares = []
    for option, word in (("--questions", "accuracy "), ("--tasks", "own  acc ")):
        file = "q.jsonl" if option == "--questions" else "own.yaml"
        words_typed = [sys.executable, "-m", "isles", "eval", "run", option, file]
        environment = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(words_typed, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        shares += [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith(word)]
    assert shares[0] == pytest.approx(shares[1], abs=1e-4) and 0.3 < shares[0] < 1.0
