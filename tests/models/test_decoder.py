"""The decoder: causality, loss, tying, initialisation, formats."""

from __future__ import annotations

import math
import threading
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from isles.base.modes import torch_threads
from isles.memory.meter import MemoryMeter
from isles.models import SIZES, Decoder, Shape, decoder, next_token_loss
from isles.models.decoder import Block, initialise

SHAPE = Shape(d_model=24, layers=2, heads=3, ffn=40, vocab=31, context=16, tie_embeddings=True)


def tokens(batch: int = 2, length: int = 17, seed: int = 0) -> Tensor:
    return torch.randint(31, (batch, length), generator=torch.Generator().manual_seed(seed))


def test_a_token_changes_nothing_before_itself() -> None:
    model = Decoder(SHAPE, dtype=torch.float64)
    before, t = tokens(length=16), 9
    after = before.clone()
    after[:, t] = (after[:, t] + 1) % 31
    change_T = (model.logits(before) - model.logits(after)).abs().amax(dim=(0, 2))
    assert change_T[:t].max() == 0
    assert change_T[t:].min() > 1e-6


def test_output_shapes_and_the_loss_by_hand() -> None:
    model = Decoder(SHAPE, dtype=torch.float64)
    window = tokens()
    output = model(window)
    assert output.logits.shape == (2, 16, 31)
    torch.testing.assert_close(output.logits, model.logits(window[:, :-1]))
    by_hand = 0.0
    for b in range(2):
        for t in range(16):
            scores = output.logits[b, t].tolist()
            by_hand += math.log(sum(map(math.exp, scores))) - scores[window[b, t + 1]]
    assert output.loss.item() == pytest.approx(by_hand / 32, rel=1e-12)
    assert output.loss.shape == ()


def reference_logits(model: Decoder, tokens_BT: Tensor) -> Tensor:
    """The same model once more, spelled out token by token and head by head in plain loops."""
    shape = model.shape
    C, D = shape.head_dim, shape.d_model

    def norm(x: Tensor, gain: Tensor) -> Tensor:
        return x / (x.square().mean() + 1e-5).sqrt() * gain

    def turn(x: Tensor, t: int) -> Tensor:
        y = x.clone()
        for i in range(C // 2):
            angle = t * 10_000.0 ** (-2 * i / C)
            a, b = x[2 * i], x[2 * i + 1]
            y[2 * i] = a * math.cos(angle) - b * math.sin(angle)
            y[2 * i + 1] = a * math.sin(angle) + b * math.cos(angle)
        return y

    rows = []
    for row in tokens_BT:
        xs = [model.embed.weight[token] for token in row]
        for block in model.blocks:
            qkv = [block.attention.qkv.weight @ norm(x, block.attention_norm.weight) for x in xs]
            mixed = []
            for t in range(len(xs)):
                heads = []
                for h in range(shape.heads):
                    q = turn(qkv[t][h * C :][:C], t)
                    keys = torch.stack([turn(qkv[s][D + h * C :][:C], s) for s in range(t + 1)])
                    values = torch.stack([qkv[s][2 * D + h * C :][:C] for s in range(t + 1)])
                    heads.append(torch.softmax(keys @ q / math.sqrt(C), 0) @ values)
                mixed.append(torch.cat(heads))
            xs = [x + block.attention.out.weight @ m for x, m in zip(xs, mixed, strict=True)]
            for t, x in enumerate(xs):
                n = norm(x, block.mlp_norm.weight)
                gate = block.mlp.gate.weight @ n
                xs[t] = x + block.mlp.down.weight @ (gate * torch.sigmoid(gate) * (block.mlp.up.weight @ n))
        rows.append(torch.stack([model.head.weight @ norm(x, model.norm.weight) for x in xs]))
    return torch.stack(rows)


def test_logits_equal_a_loop_over_tokens_and_heads() -> None:
    model = Decoder(SHAPE, seed=3, dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():  # gains other than 1, so that their place counts
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64), alpha=0.1)
        torch.testing.assert_close(model.logits(tokens(length=7)), reference_logits(model, tokens(length=7)))


def test_a_sequence_beyond_the_context_is_refused() -> None:
    with pytest.raises(ValueError, match=r"17 tokens is longer than model\.context = 16"):
        Decoder(SHAPE).logits(tokens(length=17))


def test_cutting_in_depth_by_hand_gives_the_same_logits() -> None:
    model = Decoder(SHAPE)
    x = model.embed(tokens(length=16))
    for block in model.blocks:
        x = block(x, model.rotary)
    assert torch.equal(model.head(model.norm(x)), model.logits(tokens(length=16)))


def test_tied_weights_are_one_tensor_counted_once() -> None:
    tied, untied = Decoder(SHAPE), Decoder(replace(SHAPE, tie_embeddings=False))
    assert tied.head.weight is tied.embed.weight
    assert sum(p is tied.embed.weight for p in tied.parameters()) == 1
    assert len(list(untied.parameters())) == len(list(tied.parameters())) + 1
    assert untied.head.weight.data_ptr() != untied.embed.weight.data_ptr()


def test_no_buffer_is_saved() -> None:
    state = Decoder(SHAPE).state_dict()
    assert not [name for name in state if "rotary" in name]


def test_initialisation_depends_on_the_seed_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = Decoder(SHAPE, seed=1).state_dict()
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(6)
    again, other = Decoder(SHAPE, seed=1).state_dict(), Decoder(SHAPE, seed=2).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embed.weight"], other["embed.weight"])
    assert not torch.equal(first["blocks.0.mlp.up.weight"], first["blocks.1.mlp.up.weight"])


def test_matrices_are_drawn_by_as_many_threads_as_torch_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for another one that draws: with one thread nobody would come. The numbers are those of one."""
    shape, spread, both = replace(SHAPE, tie_embeddings=False), decoder._init_std, threading.Barrier(2)
    alone = Decoder(shape, seed=1).state_dict()
    assert sum(weight.ndim > 1 for weight in alone.values()) == 12

    def met(name: str, fan_in: int, layers: int) -> float:
        both.wait(10.0)
        return spread(name, fan_in, layers)

    monkeypatch.setattr(decoder, "_init_std", met)
    with torch_threads(2):
        together = Decoder(shape, seed=1).state_dict()
    assert all(torch.equal(weight, together[name]) for name, weight in alone.items())


def test_initialisation_has_the_stated_spread() -> None:
    shape = SIZES["10M"]
    model = Decoder(shape)
    d, f, L = shape.d_model, shape.ffn, shape.layers
    block = model.blocks[0]
    for weight, std in (
        (model.embed.weight, d**-0.5),
        (block.attention.qkv.weight, d**-0.5),
        (block.attention.out.weight, 0.1 * (2 * L * d) ** -0.5),
        (block.mlp.down.weight, 0.1 * (2 * L * f) ** -0.5),
    ):
        assert weight.std().item() == pytest.approx(std, rel=0.02)
        assert abs(weight.mean().item()) < 0.02 * std
    assert torch.equal(block.mlp_norm.weight, torch.ones(d))


def test_a_stage_draws_the_numbers_of_the_whole_model() -> None:
    whole = Decoder(SHAPE, seed=4)
    stage = nn.Module()
    stage.blocks = nn.ModuleDict({"1": Block(SHAPE)})  # the parameter names of the whole model
    initialise(stage, SHAPE, seed=4)
    for name, parameter in stage.named_parameters():
        assert torch.equal(parameter, whole.get_parameter(name))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_formats_start_from_the_same_numbers(dtype: torch.dtype) -> None:
    plain, other = Decoder(SHAPE), Decoder(SHAPE, dtype=dtype)
    assert torch.equal(plain.embed.weight.to(dtype), other.embed.weight)
    output = other(tokens())
    assert output.logits.dtype == dtype
    assert output.loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert output.loss.item() == pytest.approx(
        plain(tokens()).loss.item(), rel=1e-6 if dtype == torch.float64 else 0.02
    )
    output.loss.backward()
    assert all(
        p.grad is not None and torch.isfinite(p.grad).all() and p.grad.dtype == dtype for p in other.parameters()
    )


def test_gradients_are_right() -> None:
    model = Decoder(replace(SHAPE, layers=1), dtype=torch.float64)
    weight = model.blocks[0].attention.qkv.weight
    model(tokens()).loss.backward()
    assert weight.grad is not None
    with torch.no_grad():
        for i, j in ((0, 0), (30, 5), (71, 23)):  # a query, a key and a value row
            old, step, losses = weight[i, j].item(), 1e-5, []
            for sign in (1, -1):
                weight[i, j] = old + sign * step
                losses.append(model(tokens()).loss.item())
            weight[i, j] = old
            assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(weight.grad[i, j].item(), rel=1e-4, abs=1e-9)


def test_the_loss_of_bf16_logits_is_summed_in_float32() -> None:
    logits = torch.randn(1, 4, 31, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets = tokens(1, 4)
    assert torch.equal(next_token_loss(logits, targets), next_token_loss(logits.float(), targets))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_loss_in_chunks_is_the_loss(dtype: torch.dtype) -> None:
    """Of 32 tokens, 1, 5 or 31 at a time: loss and gradients but for the order of sums. All at once: to the bit."""
    model, window = Decoder(SHAPE, dtype=dtype), tokens()
    close = {torch.float32: 1e-6, torch.float64: 1e-14}[dtype]

    def run(loss_tokens: int) -> list[Tensor]:
        model.loss_tokens = loss_tokens
        output = model(window)
        output.loss.backward()
        assert (output.logits is None) == (0 < loss_tokens < 32)
        with torch.no_grad():
            assert torch.equal(model(window).loss, output.loss)
        made = [output.loss.detach(), *(p.grad for p in model.parameters())]
        model.zero_grad()
        return made

    whole = run(0)
    assert all(torch.equal(*pair) for pair in zip(run(32), whole, strict=True))
    for loss_tokens in (1, 5, 31):
        for found, expected in zip(run(loss_tokens), whole, strict=True):
            assert (found - expected).norm() <= close * expected.norm()


def test_a_loss_in_chunks_holds_the_logits_of_a_chunk() -> None:
    """512 tokens of 1,000 ids are 2 MB of logits, which the plain loss has three times; of 16 tokens they are 64 kB."""
    model = Decoder(Shape(d_model=8, layers=1, heads=1, ffn=8, vocab=1000, context=128, tie_embeddings=True))
    window, peaks = torch.zeros(4, 129, dtype=torch.int64), []
    for loss_tokens in (0, 16):
        model.zero_grad()
        model.loss_tokens, meter = loss_tokens, MemoryMeter()
        with meter:
            model(window).loss.backward()
        peaks.append(meter.peak)
    assert peaks[0] > 3 * 2_048_000 and peaks[1] < peaks[0] / 10


def test_it_learns() -> None:
    model = Decoder(SHAPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    window = tokens(4)
    first = model(window).loss.item()
    for _ in range(30):
        optimizer.zero_grad()
        loss = model(window).loss
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.5 * first
