"""Marked tokens in the models: which targets are learned, and that documents of a window do not see each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isles.base.marks import FIRST, documents_of, ids_of, targets_of
from isles.models import Output, build, next_token_loss
from isles.models.config import ModelConfig
from isles.models.decoder import Decoder
from isles.models.factory import check_marks
from isles.models.sizes import Shape
from isles.models.stages import logits_in_order

VOCAB, CONTEXT = 50, 24
SHAPE = Shape(d_model=16, layers=2, heads=2, ffn=24, vocab=VOCAB, context=CONTEXT, tie_embeddings=False)
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
}
GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "vocab_size": VOCAB,
    "n_positions": CONTEXT,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
STATES = {
    "model_type": "mamba",
    "architectures": ["MambaForCausalLM"],
    "hidden_size": 16,
    "state_size": 4,
    "num_hidden_layers": 2,
    "vocab_size": VOCAB,
}


def _decoder(**more: Any) -> Decoder:
    model = Decoder(SHAPE, dtype=torch.float64)
    with torch.no_grad():
        for block in model.blocks:
            block.attention.out.weight.mul_(30)  # so that a token that it should not see is seen
    vars(model).update(more)
    return model


def _hf(folder: Path, config: dict[str, Any], **more: Any) -> Any:
    pytest.importorskip("transformers")
    (folder / "config.json").write_text(json.dumps(config))
    return build(ModelConfig(hf=str(folder), context=CONTEXT, device="cpu", **more), 0, isolates=True).eval()


def _masked(batch: int = 3, share: float = 0.5) -> Tensor:
    draw = torch.Generator().manual_seed(batch)
    tokens = torch.randint(0, VOCAB, (batch, CONTEXT + 1), generator=draw)
    return torch.where(torch.rand(tokens.shape, generator=draw) < share, ~tokens, tokens)


def _packed(lengths: list[int]) -> tuple[list[Tensor], Tensor]:
    """Documents, and the window that holds them."""
    draw = torch.Generator().manual_seed(1)
    documents = [torch.randint(0, VOCAB, (length,), generator=draw) for length in lengths]
    marked = [torch.cat((~one[:1] - FIRST, one[1:])) for one in documents]
    return documents, torch.cat(marked)[None]


@pytest.mark.parametrize("loss_tokens", [0, 7])
def test_the_loss_is_the_mean_over_learned_targets(loss_tokens: int) -> None:
    model, tokens = _decoder(loss_tokens=loss_tokens), _masked()
    own = model(tokens).loss
    logits = model.logits(ids_of(tokens)[:, :-1])
    losses = [
        F.cross_entropy(logits[row, at], tokens[row, at + 1])
        for row in range(len(tokens))
        for at in range(CONTEXT)
        if tokens[row, at + 1] >= 0
    ]
    expected = torch.stack(losses).mean()
    torch.testing.assert_close(own, expected, rtol=1e-12, atol=0)
    mine, theirs = (torch.autograd.grad(loss, [*model.parameters()]) for loss in (own, expected))
    torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)
    nothing = model(~ids_of(tokens))
    assert nothing.loss.item() == 0
    assert not any(one.any() for one in torch.autograd.grad(nothing.loss, [*model.parameters()]))


def test_without_marks_the_bits_are_those_of_the_plain_mean() -> None:
    model = Decoder(SHAPE)
    tokens = ids_of(_masked(5))
    logits = model.logits(tokens[:, :-1])
    for loss in (model(tokens).loss, next_token_loss(logits, targets_of(tokens))):
        plain = F.cross_entropy(model.logits(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        assert torch.equal(loss, plain)
        mine, theirs = (torch.autograd.grad(one, [*model.parameters()]) for one in (loss, plain))
        assert all(map(torch.equal, mine, theirs))


@pytest.mark.parametrize("kind", ["decoder", "llama", "gpt2"])
def test_documents_of_a_window_are_what_they_are_alone(kind: str, tmp_path: Path) -> None:
    documents, window = _packed([5, 1, 9, 3])
    if kind == "decoder":
        model: Any = _decoder(isolates=True)
    else:
        model = _hf(tmp_path, LLAMA if kind == "llama" else GPT2, dtype="float64")
    together, at = model.logits(window)[0], 0
    for one in documents:
        alone = model.logits(one[None])[0]
        torch.testing.assert_close(together[at : at + len(one)], alone, rtol=1e-6, atol=1e-6)
        at += len(one)
    if kind == "decoder":
        in_order = logits_in_order(model, window, [0, 1])[0]
        assert torch.equal(in_order, together)
    else:
        with pytest.raises(
            ValueError, match=r"^data\.isolate_documents: some stages of a model\.hf do not .*; run all$"
        ):
            logits_in_order(model, window, [0])
    model.isolates = False  # which sees more
    seen = (model.logits(window)[0] - together).abs().amax(-1)
    assert not seen[: len(documents[0])].any() and (seen[len(documents[0]) :] > 1e-6).all()


@pytest.mark.parametrize("kind", ["decoder", "llama"])
def test_no_gradient_crosses_into_another_document(kind: str, tmp_path: Path) -> None:
    _, window = _packed([7, 9])
    window[0, 1:7] = ~window[0, 1:7]  # only the second one is learned
    model = _decoder(isolates=True) if kind == "decoder" else _hf(tmp_path, LLAMA, dtype="float64")
    found = list[Tensor]()
    embedding = model.embed if kind == "decoder" else model.model.get_input_embeddings()
    embedding.register_forward_hook(lambda module, args, out: (out.retain_grad(), found.append(out))[1])
    model(window).loss.backward()
    assert found[0].grad is not None
    by_token = found[0].grad[0].abs().sum(-1)
    assert not by_token[:7].any() and (by_token[7:] > 0).all()


def test_autocast_keeps_documents_apart() -> None:
    documents, window = _packed([8, 8])
    model = Decoder(SHAPE)
    model.isolates = True
    with torch.autocast("cpu", torch.bfloat16):
        together, alone = model.logits(window)[0, 8:], model.logits(documents[1][None])[0]
    torch.testing.assert_close(together, alone, rtol=2e-2, atol=2e-2)


class Own(nn.Module):
    """A model of a user: `reads` says what it makes of marks."""

    def __init__(self, reads: str) -> None:
        super().__init__()
        self.reads, self.embed, self.head = reads, nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)

    def forward(self, tokens: Tensor) -> Output:
        if self.reads == "nothing":
            ids, targets = tokens[:, :-1], tokens[:, 1:]
        else:
            ids = ids_of(tokens)[:, :-1]
            targets = ids_of(tokens)[:, 1:] if self.reads == "ids" else targets_of(tokens)
        hidden = self.embed(ids).cumsum(1)
        if self.reads == "documents":
            one = F.one_hot(documents_of(tokens[:, :-1])).float()
            hidden = (one[..., None] * (one[..., None] * self.embed(ids)[:, :, None]).cumsum(1)).sum(2)
        logits = self.head(torch.tanh(hidden))
        return Output(next_token_loss(logits, targets), logits)


def test_a_model_of_ones_own_reads_marks_or_is_refused() -> None:
    torch.manual_seed(0)
    check_marks(Own("targets"), CONTEXT, isolates=False)
    check_marks(Own("documents"), CONTEXT, isolates=True)
    check_marks(_decoder(isolates=True), CONTEXT, isolates=True)
    for reads, isolates, match in (
        ("nothing", False, r"^data: this Own does not obey labels and loss_mask, or see .*: it fails \(IndexError: "),
        ("ids", False, r"does not obey labels and loss_mask, .*: losses that must be equal are \d.* and \d"),
        ("targets", True, r"does not keep documents apart; set data\.isolate_documents = false, or see docs/own-model"),
    ):
        with pytest.raises(ValueError, match=match) as caught:
            check_marks(Own(reads), CONTEXT, isolates=isolates)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_of_transformers_that_cannot_is_refused(dtype: str, tmp_path: Path) -> None:
    check_marks(_hf(tmp_path, LLAMA, dtype=dtype), CONTEXT, isolates=True)
    check_marks(_hf(tmp_path, GPT2, dtype=dtype), CONTEXT, isolates=True)
    model = _hf(tmp_path, GPT2, dtype=dtype)
    model.isolates = False
    with pytest.raises(ValueError, match=r"does not keep documents apart.*: losses that must be equal"):
        check_marks(model, CONTEXT, isolates=True)
    if dtype == "float32":
        with pytest.raises(ValueError, match=r"this MambaForCausalLM does not keep documents apart"):
            check_marks(_hf(tmp_path, STATES), CONTEXT, isolates=True)
