"""Hugging Face: our decoder read back by transformers gives our logits; their models train here. Nothing is fetched."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from isles.models import ModelConfig, build, sketch
from isles.models.cuts import pieces
from isles.models.decoder import Decoder, next_token_loss
from isles.models.hf import HuggingFaceLM, load_hf, save_as_llama
from isles.models.sizes import Shape
from isles.models.stages import Stage, check_stages
from isles.models.subspace import Subspace, fold, held_inside, put_inside
from isles.pipeline.boundaries.names import boundary_name
from isles.pipeline.boundaries.scheme import Crossings, scheme_of


@pytest.fixture(scope="module")
def transformers() -> Any:
    """Loaded by who runs these tests, and not by everybody who collects them."""
    return pytest.importorskip("transformers", reason="needs the extra hf: pip install '.[hf]'")


@pytest.mark.parametrize("tied", [True, False])
def test_the_exported_llama_gives_equal_logits(tmp_path: Path, tied: bool, transformers: Any) -> None:
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


def test_a_loss_in_chunks_is_the_loss(tmp_path: Path, transformers: Any) -> None:
    """Where scores are the head of the last hidden state. Gemma 2 bounds them by a tanh, so it keeps the plain loss."""
    small = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
    small |= {"intermediate_size": 24, "num_key_value_heads": 2}
    window = torch.randint(40, (2, 9), generator=torch.Generator().manual_seed(0))
    for kind in ("Llama", "Gemma2"):
        getattr(transformers, f"{kind}Config")(**small).save_pretrained(tmp_path / kind)
        config = ModelConfig(hf=str(tmp_path / kind), dtype="float64", logits_megabytes=0.0009)
        model = build(config, seed=0)
        assert all(parameter.is_meta for parameter in sketch(config).parameters())  # for --dry-run
        with nullcontext() if kind == "Llama" else pytest.warns(UserWarning, match="a Gemma2ForCausalLM does more"):
            output = model(window)
        assert model.loss_tokens == 5 and (output.logits is None) == (kind == "Llama")
        expected = next_token_loss(model.logits(window[:, :-1]), window[:, 1:])
        torch.testing.assert_close(output.loss, expected, rtol=1e-14, atol=0)


def test_saved_weights_are_used(tmp_path: Path) -> None:
    """A folder with weights gives those weights."""
    shape = Shape(d_model=16, layers=1, heads=2, ffn=24, vocab=30, context=8, tie_embeddings=False)
    ours = Decoder(shape, seed=9)
    save_as_llama(ours, tmp_path)
    loaded = load_hf(str(tmp_path), seed=0, dtype=torch.float32, device=torch.device("cpu"))
    assert torch.equal(loaded.model.get_input_embeddings().weight, ours.embed.weight)


def test_what_is_no_model_is_reported_in_one_line(tmp_path: Path) -> None:
    """A folder without config.json, and one that transformers does not know."""
    with pytest.raises(ValueError, match=r"^model\.hf = .*no config\.json"):
        load_hf(str(tmp_path), seed=0, dtype=torch.float32, device=torch.device("cpu"))
    (tmp_path / "config.json").write_text('{"model_type": "nothing-known"}')
    with pytest.raises(ValueError, match=r"^model\.hf = .*") as caught:
        load_hf(str(tmp_path), seed=0, dtype=torch.float32, device=torch.device("cpu"))
    assert "\n" not in str(caught.value)


def llama(**settings: object) -> HuggingFaceLM:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, vocab_size=30, num_key_value_heads=2, **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return HuggingFaceLM(transformers.LlamaForCausalLM(config).double())


def test_a_llama_is_held_in_a_subspace_and_folded_to_a_llama() -> None:
    """By the matrices that write to its stream; stages of it and the folded model compute the same."""
    place, tokens = Crossings(cuts=(1, 2), home=False, width=16, vocab=30), torch.arange(10)[None]
    scheme, model = scheme_of(boundary_name("subspace:4"), place), llama()
    scheme.fit(model)
    scheme.check(model, tokens)
    assert len(list(held_inside(model))) == 5
    with torch.no_grad():
        expected = model.logits(tokens)
        check_stages(model, [1, 2], tokens)
        x = Stage(model, pieces([1, 2], 3, loss_at_origin=False)[0])(tokens, enter=True)
        boundary = scheme.boundary(model)
        across = boundary.decode(boundary.encode(x, torch.arange(11)[None])[0], None, torch.arange(11)[None])
        torch.testing.assert_close(across, x, rtol=0, atol=1e-14)
        plain = llama()
        plain.load_state_dict(fold(model).state_dict())
        torch.testing.assert_close(plain.logits(tokens), expected, rtol=0, atol=1e-6)


def test_what_has_other_layers_than_a_llama_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the bias of 'mlp\.down_proj' carries"):
        put_inside(llama(mlp_bias=True), Subspace(torch.eye(16).double(), None), [0], "coordinates")
    model = llama()
    layer: Any = model.blocks[1].get_submodule("mlp")
    layer.last = layer._modules.pop("down_proj")
    with pytest.raises(ValueError, match=r"LlamaForCausalLM have no self_attn\.o_proj and mlp\.down_proj") as error:
        put_inside(model, Subspace(torch.eye(16).double(), None), [0], "coordinates")
    assert "\n" not in str(error.value)
