import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isles.data import ByteTokenizer, DataConfig, load_corpus, load_tokenizer

TEXT = "the quick brown fox jumps over the lazy dog. the dog sleeps; the fox runs.\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as `save_pretrained` leaves it: a small byte-level BPE and its configuration."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    tokenizer.enable_truncation(max_length=5)  # left over from another use; a corpus must not be cut by it
    target = tmp_path / "small"
    target.mkdir()
    tokenizer.save(str(target / "tokenizer.json"))
    (target / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))
    return target


@given(st.text())
def test_bytes_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint8
    assert ids.tobytes() == text.encode()
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids.tolist()) == text


def test_half_a_character_decodes_to_the_replacement_mark() -> None:
    assert ByteTokenizer().decode([0x61, 0xC3]) == "a\ufffd"


def test_hugging_face_folder_and_file(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    ids = tokenizer.encode(TEXT)
    assert tokenizer.name == "small"
    assert tokenizer.vocab_size == len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])
    assert ids.dtype == np.uint16
    assert 5 < len(ids) < len(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.eos_id == 0
    assert load_tokenizer(str(folder / "tokenizer.json")).fingerprint == tokenizer.fingerprint
    (folder / "tokenizer_config.json").unlink()
    assert load_tokenizer(str(folder)).eos_id is None


def test_documents_end_with_the_end_token(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text("the dog")
    (text / "b.txt").write_text("the fox")
    corpus = load_corpus(DataConfig(path=str(text), tokenizer=str(folder), validation_fraction=0))
    assert corpus.tokenizer.decode(corpus.train.tokens) == "the dog<end>the fox<end>"
    assert corpus.train.tokens.dtype == np.uint16
    other = load_corpus(DataConfig(path=str(text), validation_fraction=0))
    assert other.tokenizer.decode(other.train.tokens) == "the dog\nthe fox\n"
    assert other.sha256 != corpus.sha256


def test_tokenizer_errors(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(path: Path | str, match: str) -> None:
        with pytest.raises(ValueError, match=match) as caught:
            load_tokenizer(str(path))
        assert str(caught.value).startswith("data.tokenizer")
        assert "\n" not in str(caught.value)

    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.json").write_text('{"model":\n 3}')
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    refuses("gpt2", 'does not exist; use "bytes"')
    refuses(tmp_path / "empty", "no tokenizer.json; save")
    refuses(tmp_path / "bad.json", "is not a Hugging Face tokenizer.json")
    refuses(tmp_path / "binary.json", "is not a Hugging Face tokenizer.json")
    (folder / "tokenizer_config.json").write_text("[1]")
    refuses(folder, "not a JSON object; correct or remove")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    refuses(folder, r'pip install "\.\[hf\]"')
