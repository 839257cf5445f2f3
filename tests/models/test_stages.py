"""Models cut in depth: stages hold the whole's parameters under its names, and in turn they are the whole."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor, nn

from isles.models import Decoder, Shape
from isles.models.cuts import Piece, cut_points, decoder_costs, pieces
from isles.models.hf import HuggingFaceLM
from isles.models.stages import Stage, check_stages, decoder_stage, is_tied

CPU = torch.device("cpu")
WINDOW = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(0))


def shape(tied: bool) -> Shape:
    return Shape(d_model=32, layers=4, heads=2, ffn=64, vocab=64, context=16, tie_embeddings=tied)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("cuts", [[], [2], [1, 3], [1, 2, 3]])
def test_stages_in_turn_are_the_whole(tied: bool, cuts: list[int]) -> None:
    whole = Decoder(shape(tied), seed=3)
    check_stages(whole, cuts, WINDOW[:, :-1])
    parts = pieces(cuts, 4, loss_at_origin=tied)
    stages = [decoder_stage(shape(tied), piece, seed=3, device=CPU) for piece in parts]
    own = {name: parameter for stage in stages for name, parameter in stage.named_parameters()}
    assert sum(len(list(stage.named_parameters())) for stage in stages) == len(own)
    theirs = dict(whole.named_parameters())
    assert own.keys() == theirs.keys()
    assert all(torch.equal(own[name], theirs[name]) for name in own)  # drawn alone, the same numbers
    x = WINDOW[:, :-1]
    for stage, piece in zip(stages, parts, strict=True):
        x = stage(x, enter=piece.enters)
    home = next(stage for stage, piece in zip(stages, parts, strict=True) if piece.leaves)
    assert torch.equal(home(x, WINDOW[:, 1:], through=False, leave=True), whole(WINDOW).loss)


def test_a_stage_shares_the_whole_models_parameters_and_leaves_the_whole_as_it_was() -> None:
    whole = Decoder(shape(False), seed=3)
    before = [name for name, _ in whole.named_modules()]
    stage = Stage(whole, pieces([2], 4, loss_at_origin=False)[1])
    theirs = dict(whole.named_parameters())
    assert all(parameter is theirs[name] for name, parameter in stage.named_parameters())
    assert [name for name, _ in whole.named_modules()] == before
    assert stage.state_dict().keys() == {name for name, _ in stage.named_parameters()}
    assert not any(name.startswith(("embed", "blocks.0", "blocks.1")) for name in stage.state_dict())


def test_tied_matrices_are_found() -> None:
    assert is_tied(Decoder(shape(True)))
    assert not is_tied(Decoder(shape(False)))


def test_cut_points_are_the_best_there_are() -> None:
    draw = random.Random(0)
    for _ in range(200):
        layers = draw.randint(1, 8)
        costs = [draw.randint(1, 9) for _ in range(layers)]
        stages = draw.randint(1, layers)
        best = min(slowest(costs, cuts) for cuts in itertools.combinations(range(1, layers), stages - 1))
        assert slowest(costs, cut_points(costs, stages)) == best
    assert cut_points([1, 1, 1, 1], 2) == [2]
    assert cut_points([1, 1, 1, 3], 2) == [3]
    with pytest.raises(ValueError, match="4 blocks, so choose 1 to 4"):
        cut_points([1, 1, 1, 1], 5)


def slowest(costs: list[int], cuts: list[int] | tuple[int, ...]) -> int:
    bounds = [0, *cuts, len(costs)]
    return max(sum(costs[a:b]) for a, b in itertools.pairwise(bounds))


def test_the_heads_cost_counts_where_the_head_is() -> None:
    last, first = (decoder_costs(shape(False)).to_cut(loss_at_origin=home) for home in (False, True))
    assert last[-1] == first[0] == last[0] + 2 * 32 * 64
    with pytest.raises(ValueError, match=r"pipeline.cut = \[2, 2\]"):
        pieces([2, 2], 4, loss_at_origin=False)


class Own(nn.Module):
    """A model of one's own in pieces; `leak`: what its forward pass does beside them."""

    def __init__(self, leak: float = 0.0, shared: bool = False, spare: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(64, 8))
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        if shared:
            self.blocks[2].weight = self.blocks[0].weight
        if spare:
            self.spare = nn.Parameter(torch.zeros(3))
        self.out = nn.Linear(8, 64)
        self.leak = leak

    def enter(self, tokens: Tensor) -> Tensor:
        return self.table[tokens]

    def through(self, block: nn.Module, x: Tensor) -> Tensor:
        return x + block(x)

    def leave(self, x: Tensor) -> Tensor:
        return self.out(x)

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.enter(tokens)
        for block in self.blocks:
            x = self.through(block, x)
        return self.leave(x + self.leak)


def test_a_model_of_ones_own_is_cut_by_its_pieces() -> None:
    check_stages(Own(), [1, 2], WINDOW[:, :-1])
    names = [[n for n, _ in Stage(Own(), piece).named_parameters()] for piece in pieces([2], 3, loss_at_origin=False)]
    assert names == [
        ["table", "blocks.0.weight", "blocks.0.bias", "blocks.1.weight", "blocks.1.bias"],
        ["blocks.2.weight", "blocks.2.bias", "out.weight", "out.bias"],
    ]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Own(leak=1e-3), "in turn differ from the whole by up to"),
        (Own(shared=True), "block 2 shares 'blocks.0.weight'"),
        (Own(spare=True), "'spare' is used by none of the model's pieces"),
        (nn.Linear(3, 3), "cannot be cut into stages"),
    ],
)
def test_what_cannot_be_cut_is_refused(model: nn.Module, words: str) -> None:
    with pytest.raises(ValueError, match=words) as refusal:
        Stage(model, Piece(blocks=range(1), enters=True, leaves=False))
        check_stages(model, [1], WINDOW[:, :-1])
    assert "pipeline.stages = 1" in str(refusal.value)


SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral", "gpt_neox"])
def test_hugging_face_models_are_cut_by_their_layers(kind: str) -> None:
    model = hugging_face(kind, SMALL)
    before = sorted(name for name, _ in model.named_parameters())
    check_stages(model, [1, 2], WINDOW[:, :-1])
    stages = [Stage(model, piece) for piece in pieces([1, 2], 3, loss_at_origin=False)]
    assert sorted(name for stage in stages for name, _ in stage.named_parameters()) == before
    assert sorted(name for name, _ in model.named_parameters()) == before
    loss = stages[2](stages[1](stages[0](WINDOW[:, :-1], enter=True)), WINDOW[:, 1:], leave=True)
    assert torch.equal(loss, model(WINDOW).loss)


def test_gpt2_is_refused_for_it_adds_positions() -> None:
    small = {"n_embd": 32, "n_layer": 3, "n_head": 2, "vocab_size": 64, "n_positions": 32}
    small |= {"tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2}
    with pytest.raises(ValueError, match=r"wpe.weight' is used by none of the model's pieces"):
        check_stages(hugging_face("gpt2", small), [1], WINDOW[:, :-1])


def hugging_face(kind: str, settings: dict[str, object]) -> HuggingFaceLM:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind, **settings)
    torch.manual_seed(0)
    return HuggingFaceLM(transformers.AutoModelForCausalLM.from_config(config))
