"""A causal LM of transformers in pieces: its token embedding, the layers of its own list, and what comes after them.

A layer runs by way of the base model, fed with `inputs_embeds`, with that layer alone in its list: masks and rotary
angles are then transformers' own. What stands behind the list (the last norm) waits for `leave`. Models that do more in
their forward pass than that (GPT-2 adds positions, Gemma scales embeddings) differ in bits and are refused by
`isles.models.stages.check_stages`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from isles.models.blocks import blocks_of
from isles.models.hf import HuggingFaceLM


def in_pieces(model: HuggingFaceLM) -> HuggingFacePieces:
    """`model` in pieces; it is changed, so give a twin of what a user holds. ValueError where its layers are hidden."""
    return HuggingFacePieces(model.model)


class HuggingFacePieces(HuggingFaceLM):
    """`HuggingFaceLM` with its forward pass in pieces: see `in_pieces`."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.model: Any
        base = model.base_model
        name, layers = blocks_of(base)
        if not layers or "." in name:
            raise ValueError(
                f"a {type(model).__name__} keeps its layers where stages do not find them (no nn.ModuleList of its "
                "base model): train it with pipeline.stages = 1"
            )
        self._list = name
        behind = list(base._modules)[list(base._modules).index(name) + 1 :]
        self._behind = tuple(
            (key, base._modules[key]) for key in behind if any(True for _ in base._modules[key].parameters())
        )
        for key, module in self._behind:
            base._modules[key] = _Later(module)

    @property
    def blocks(self) -> nn.ModuleList:
        """The layers."""
        return self.model.base_model._modules[self._list]

    def enter(self, tokens_BT: Tensor) -> Tensor:
        """The stream (B, T, D) of tokens (B, T), int64."""
        return self.model.get_input_embeddings()(tokens_BT)

    def through(self, block: nn.Module, x_BTD: Tensor) -> Tensor:
        """The stream after one of the layers."""
        modules = self.model.base_model._modules
        every = modules[self._list]
        modules[self._list] = nn.ModuleList([block])
        try:
            return self.model.base_model(inputs_embeds=x_BTD, use_cache=False).last_hidden_state
        finally:
            modules[self._list] = every

    def leave(self, x_BTD: Tensor) -> Tensor:
        """Scores (B, T, V) of the stream after the last layer."""
        for _, module in self._behind:
            x_BTD = module(x_BTD)
        return self.model.get_output_embeddings()(x_BTD)


class _Later(nn.Module):
    """Passes on what it is given, while the parameters of what stands here keep their names."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._modules, self._parameters, self._buffers = module._modules, module._parameters, module._buffers

    def forward(self, x: Tensor) -> Tensor:
        return x
