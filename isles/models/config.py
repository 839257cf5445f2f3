"""The `[model]` section: which decoder, on which device, in which number format. Importable without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from .sizes import Shape, shape_of

Autocast = Literal["none", "bf16", "fp16"]
Device = Literal["auto", "cpu", "cuda"]
DType = Literal["float32", "bfloat16", "float64"]

_SHAPE_KEYS = ("d_model", "layers", "heads", "ffn", "vocab", "context", "tie_embeddings")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What is trained. Every impossible value raises a ValueError of one line that names the key and the mend.

    size: a named shape, see `isles.models.sizes.SIZES`. The next seven override parts of it; None keeps the size's own.
    d_model: width of the residual stream. layers: blocks. heads: attention heads. ffn: inner width of the gated MLP.
    vocab: token ids (256 for bytes; must cover the tokenizer's). context: longest sequence, in tokens.
    tie_embeddings: embedding and head share one matrix.
    compile: run the model through torch.compile; pays on GPUs, costs seconds to minutes at the first step.
    autocast: number format of the matrix products while weights stay in `dtype`: none, bf16, or fp16 (CUDA only; its
        gradients underflow without a torch.amp.GradScaler).
    device: "auto" is a GPU if torch sees one, else the CPU; several workers may share a GPU.
    dtype: format of the weights, and so of the gradients and of the optimizer's state.
    """

    size: str = "0.13M"
    d_model: int | None = None
    layers: int | None = None
    heads: int | None = None
    ffn: int | None = None
    vocab: int | None = None
    context: int | None = None
    tie_embeddings: bool | None = None
    compile: bool = False
    autocast: Autocast = "none"
    device: Device = "auto"
    dtype: DType = "float32"

    def __post_init__(self) -> None:
        for key, choices in (("autocast", Autocast), ("device", Device), ("dtype", DType)):
            value = getattr(self, key)
            if value not in get_args(choices):
                raise ValueError(f"model.{key} = {value!r} is not known; use one of {', '.join(get_args(choices))}")
        if not isinstance(self.compile, bool):
            raise ValueError(f"model.compile = {self.compile!r} is not known; use true or false")
        if self.autocast == "fp16" and self.device == "cpu":
            raise ValueError('model.autocast = "fp16" needs a GPU; use "bf16" or "none" with model.device = "cpu"')
        if self.autocast != "none" and self.dtype != "float32":
            raise ValueError(
                f'model.autocast = "{self.autocast}" works on float32 weights, not on model.dtype = "{self.dtype}"; '
                'set model.autocast = "none" or model.dtype = "float32"'
            )
        self.shape()  # refuses an unknown size and impossible numbers

    def shape(self) -> Shape:
        """The size with the overrides laid over it."""
        named = shape_of(self.size)
        given = {key: getattr(self, key) for key in _SHAPE_KEYS}
        return Shape(**{key: getattr(named, key) if value is None else value for key, value in given.items()})
