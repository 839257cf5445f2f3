"""The folder of somebody who comes from Hugging Face: a model, its tokenizer, text."""

from __future__ import annotations

import json
import pydoc_data.topics
from pathlib import Path

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "vocab_size": 512,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def write_folder(folder: Path, documents: int = 80) -> Path:
    """`models/my-llama` with config.json and tokenizer.json, and my-text.jsonl, of Python's own documentation."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from tokenizers.decoders import ByteLevel

    texts = [text[:4000] for text in list(pydoc_data.topics.topics.values())[:documents]]
    (folder / "my-text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    model = folder / "models" / "my-llama"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(CONFIG))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(model / "tokenizer.json"))
    return folder
