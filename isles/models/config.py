"""The `[model]` section: the model, its device and its number format. Importable without torch."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Literal, get_args

from isles.base.errors import as_typed, demand
from isles.base.imports import is_import_target
from isles.models.sizes import Shape, shape_of, size_name

Autocast = Literal["none", "bf16", "fp16"]
CompileMode = Literal["reduce-overhead", "max-autotune"]
DType = Literal["float32", "bfloat16", "float64"]

DEFAULT_SIZE = "0.12M"

_SHAPE_KEYS = ("d_model", "layers", "heads", "ffn", "vocab", "context", "tie_embeddings")
_DECODER_KEYS = ("size", "d_model", "layers", "heads", "ffn", "tie_embeddings")  # for Isles' decoder only


def check_device(device: object, key: str = "model.device") -> None:
    """ValueError unless `device` is the name of a device. This machine need not have it."""
    if not (isinstance(device, str) and re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", device)):
        mac = "; the GPU of a Mac is not used: auto trains on its CPU" if device == "mps" else ""
        raise ValueError(f"{key} = {device!r} is not known; use one of auto, cpu, cuda, cuda:N{mac}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What is trained. Every impossible value raises a ValueError of one line that names the key and the mend."""

    size: str | None = None
    """A named shape of Isles' decoder, see `isles.models.sizes.SIZES`; default "0.12M". The next five keys and
    tie_embeddings override parts of it; None keeps the size's value.
    """
    d_model: int | None = None
    """Width of the residual stream."""
    layers: int | None = None
    """Blocks."""
    heads: int | None = None
    """Attention heads."""
    ffn: int | None = None
    """Inner width of the gated MLP."""
    vocab: int | None = None
    """Number of token ids (256 for bytes; must cover the tokenizer's). With hf, the default is that of config.json."""
    context: int | None = None
    """Longest sequence, in tokens. With hf, the default is the limit in config.json; with factory, it is required."""
    tie_embeddings: bool | None = None
    """Embedding and head share one matrix."""
    factory: str | None = None
    """A model of your own instead of the decoder, package.module:function; see docs/own-model.md."""
    hf: str | None = None
    """A causal LM of transformers instead of the decoder: the path of a folder with config.json, and with weights
    (safetensors) if training should start from them.
    """
    compile: bool | CompileMode = False
    """Run the model through torch.compile; pays on GPUs, costs seconds to minutes at the first step. true: its default
    mode; "reduce-overhead": CUDA graphs, for small batches; "max-autotune": also tries kernels, for minutes.
    """
    autocast: Autocast = "none"
    """Number format of the matrix products while weights stay in `dtype`: none, bf16, or fp16 (CUDA only; its gradients
    underflow without a torch.amp.GradScaler).
    """
    device: str = "auto"
    """cpu; cuda (a machine's workers take its GPUs in turn); cuda:1 (all take that one); auto (a GPU, else the CPU)."""
    dtype: DType = "float32"
    """Format of the weights, and so of the gradients and of the optimizer's state."""
    logits_megabytes: float = 512.0
    """Of how many logits (in float32) the loss may hold at a time; of more it is computed in chunks of tokens, whose
    logits are computed once more in the backward pass. 0: no bound.
    """
    options: dict[str, Any] | None = None
    """Keyword arguments of the factory, as a table: [model.options]."""

    def __post_init__(self) -> None:
        check_device(self.device)
        for key, choices in (("autocast", Autocast), ("dtype", DType)):
            value = getattr(self, key)
            if value not in get_args(choices):
                raise ValueError(f"model.{key} = {value!r} is not known; use one of {', '.join(get_args(choices))}")
        if not isinstance(self.compile, bool) and self.compile not in get_args(CompileMode):
            modes = '", "'.join(get_args(CompileMode))
            raise ValueError(f'model.compile = {as_typed(self.compile)} is not known; use true, false, "{modes}"')
        demand(self, "logits_megabytes", lambda x: 0 <= x < math.inf, "choose 0 (no bound) or more")
        if self.autocast == "fp16" and self.device == "cpu":
            raise ValueError('model.autocast = "fp16" needs a GPU; use "bf16" or "none" with model.device = "cpu"')
        if self.autocast != "none" and self.dtype != "float32":
            raise ValueError(
                f'model.autocast = "{self.autocast}" works on float32 weights, not on model.dtype = "{self.dtype}"; '
                'set model.autocast = "none" or model.dtype = "float32"'
            )
        if self.own is not None:
            self._check_own(self.own)
            return
        if self.options is not None:
            raise ValueError("model.options are the arguments of model.factory: set a factory, or remove them")
        # So that a saved configuration names it.
        object.__setattr__(self, "size", DEFAULT_SIZE if self.size is None else size_name(self.size))
        self.shape()  # refuses impossible numbers

    @property
    def own(self) -> Literal["factory", "hf"] | None:
        """The key that replaces Isles' decoder by another model; None: there is none."""
        return "factory" if self.factory is not None else "hf" if self.hf is not None else None

    def _check_own(self, key: Literal["factory", "hf"]) -> None:
        if self.factory is not None and self.hf is not None:
            raise ValueError("model.factory and model.hf each define a model: remove one of them")
        for name in _DECODER_KEYS:
            if getattr(self, name) is not None:
                raise ValueError(
                    f"model.{name} is a setting of Isles' own decoder and has no effect with model.{key}: remove it"
                )
        for name in ("vocab", "context"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"model.{name} = {value} is impossible; use a whole number of at least 1")
        if key == "hf":
            if self.options is not None:
                raise ValueError("model.options are for model.factory: remove them, and edit model.hf's config.json")
            return
        assert self.factory is not None
        if self.logits_megabytes != type(self).logits_megabytes:
            raise ValueError("model.logits_megabytes: a model of your own calls isles.models.output_of; leave it out")
        if not is_import_target(self.factory):
            raise ValueError(f"model.factory = {self.factory!r}: write package.module:function")
        if self.context is None:
            raise ValueError(
                "model.context is missing: beside model.factory, say how long a sequence is, in tokens, such as 128"
            )

    def loss_tokens(self, vocab: int) -> int:
        """Of how many tokens the loss may hold the logits of `vocab` ids at a time; 0: of all."""
        return max(int(self.logits_megabytes * 1e6) // (4 * vocab), 1) if self.logits_megabytes else 0

    @property
    def name(self) -> str:
        """The name of its size; if keys override parts of the size, layers and width instead."""
        shape, named = self.shape(), shape_of(self.size or DEFAULT_SIZE)
        same = all(getattr(shape, key) == getattr(named, key) for key in ("d_model", "layers", "heads", "ffn"))
        return str(self.size) if same else f"{shape.layers} layers of {shape.d_model}"

    def shape(self) -> Shape:
        """The decoder's shape: its size, with the overrides of this section."""
        assert self.size is not None, "only Isles' own decoder has a shape"
        named = shape_of(self.size)
        overrides = {key: getattr(self, key) for key in _SHAPE_KEYS}
        return Shape(**{key: getattr(named, key) if value is None else value for key, value in overrides.items()})
