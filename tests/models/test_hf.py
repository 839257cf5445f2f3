"""Hugging Face: our decoder read back by transformers gives our logits; their models train here. Nothing is fetched."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from isles.models.decoder import Decoder
from isles.models.hf import load_hf, save_as_llama
from isles.models.sizes import Shape

transformers = pytest.importorskip("transformers", reason="needs the extra isles[hf]")


@pytest.mark.parametrize("tied", [True, False])
def test_the_exported_llama_gives_equal_logits(tmp_path: Path, tied: bool) -> None:
    """config.json and safetensors load into LlamaForCausalLM; logits agree in float64 to rounding."""
    shape = Shape(d_model=24, layers=2, heads=3, ffn=40, vocab=50, context=16, tie_embeddings=tied)
    ours = Decoder(shape, seed=3, dtype=torch.float64)
    save_as_llama(ours, tmp_path)
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, local_files_only=True)
    tokens = torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, ours.logits(tokens), rtol=0, atol=1e-6)


def test_a_configuration_alone_trains_from_the_seed(tmp_path: Path) -> None:
    """Fresh weights are a function of the seed; the global generator is untouched; the loss is ours."""
    shape = Shape(d_model=16, layers=1, heads=2, ffn=24, vocab=30, context=8, tie_embeddings=True)
    save_as_llama(Decoder(shape), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    before = torch.get_rng_state()
    first, again = (load_hf(str(tmp_path), seed=5, dtype=torch.float32, device=torch.device("cpu")) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    tokens = torch.randint(30, (2, 9), generator=torch.Generator().manual_seed(0))
    output = first(tokens)
    expected = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert torch.equal(output.loss, expected)


def test_saved_weights_are_used(tmp_path: Path) -> None:
    """A folder with weights gives those weights."""
    shape = Shape(d_model=16, layers=1, heads=2, ffn=24, vocab=30, context=8, tie_embeddings=False)
    ours = Decoder(shape, seed=9)
    save_as_llama(ours, tmp_path)
    loaded = load_hf(str(tmp_path), seed=0, dtype=torch.float32, device=torch.device("cpu"))
    assert torch.equal(loaded.model.get_input_embeddings().weight, ours.embed.weight)


def test_what_is_no_model_is_said_in_one_line(tmp_path: Path) -> None:
    """A folder without config.json, and one that transformers does not know."""
    with pytest.raises(ValueError, match=r"^model\.hf = .*no config\.json"):
        load_hf(str(tmp_path), seed=0, dtype=torch.float32, device=torch.device("cpu"))
    (tmp_path / "config.json").write_text('{"model_type": "nothing-known"}')
    with pytest.raises(ValueError, match=r"^model\.hf = .*") as caught:
        load_hf(str(tmp_path), seed=0, dtype=torch.float32, device=torch.device("cpu"))
    assert "\n" not in str(caught.value)
