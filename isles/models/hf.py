"""Hugging Face: train a causal LM of transformers, and export Isles' decoder as transformers' Llama.

Training needs the extra `hf`; the export does not need transformers. Everything is local: nothing is downloaded.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from isles.base.durable import plain_mode
from isles.base.marks import FIRST, ids_of, targets_of
from isles.models.blocks import blocks_of, module_at
from isles.models.decoder import BASE, NORM_EPS, Block, Decoder, Output, next_token_loss, output_of

_WRITERS = ("self_attn.o_proj", "mlp.down_proj")


class HuggingFaceLM(nn.Module):
    """A causal LM of transformers with the interface of `Decoder`: windows (B, T+1) in, loss and logits out."""

    loss_tokens = 0
    """See `isles.models.decoder.output_of`."""
    has_plain_head = True
    """Whether that may be done: see `ends_in_head`."""
    isolates = False
    """As `Decoder.isolates`, by the positions that transformers gets; `isles.models.factory.check_marks` tries it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = model

    @torch.no_grad()
    def ends_in_head(self) -> bool:
        """Whether its scores are its head of the last hidden state, and nothing else; of a sketch: has it one."""
        head, mode = self.model.get_output_embeddings(), self.model.training
        if head is None or self.model.device.type == "meta":  # transformers reads values for its masks
            return head is not None
        ids = torch.arange(4, dtype=torch.int64, device=self.model.device)[None]  # several: one may be of padding
        self.model.eval()
        scores, ours = self.logits(ids), head(self._hidden(ids))
        self.model.train(mode)
        return ours.shape == scores.shape and torch.equal(ours, scores)

    @property
    def blocks(self) -> nn.ModuleList:
        """Its layers, if the model has them in one list."""
        return self.model.base_model.get_submodule(blocks_of(self.model.base_model)[0])

    @property
    def writers(self) -> tuple[str, ...]:
        """Names of the matrices of a layer that write to the stream. ValueError unless layers are those of a Llama."""
        if all(module_at(layer, name) for layer in self.blocks for name in _WRITERS):
            return _WRITERS
        raise ValueError(
            f'pipeline.boundary.kind = "subspace": layers of a {type(self.model).__name__} have no '
            f'{" and ".join(_WRITERS)}, by which those of a Llama write to the stream; choose "dct:0.75"'
        )

    @property
    def entry(self) -> str:
        """The path of its token embedding."""
        embedding = self.model.get_input_embeddings()
        return next(path for path, module in self.named_modules() if module is embedding)

    def forward(self, tokens: Tensor) -> Output:
        """As Decoder.forward. It does not use the model's own loss, which may shift or mask differently."""
        if 0 < self.loss_tokens < tokens[:, 1:].numel():
            if self.has_plain_head:
                head, x_BTD = self.model.get_output_embeddings(), self._hidden(tokens[:, :-1])
                return output_of(head, x_BTD, targets_of(tokens), self.loss_tokens)
            kind = type(self.model).__name__
            warnings.warn(f"model.logits_megabytes: not held, as a {kind} does more than its head", stacklevel=2)
        logits_BTV = self.logits(tokens[:, :-1])
        return Output(next_token_loss(logits_BTV, targets_of(tokens)), logits_BTV)

    def _inputs(self, tokens_BT: Tensor) -> dict[str, Any]:
        """What the model is called with. Where positions begin anew, transformers ends attention."""
        inputs = {"input_ids": ids_of(tokens_BT), "use_cache": False}
        if self.isolates:
            places = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
            inputs["position_ids"] = places - (places * (tokens_BT < -FIRST)).cummax(1).values
        return inputs

    def _hidden(self, tokens_BT: Tensor) -> Tensor:
        return self.model.base_model(**self._inputs(tokens_BT)).last_hidden_state

    def logits(self, tokens_BT: Tensor) -> Tensor:
        """Scores (B, T, V) for the token after each of `tokens_BT`, int64."""
        return self.model(**self._inputs(tokens_BT)).logits


def load_hf(
    path: str, *, seed: int, dtype: torch.dtype, device: torch.device, vocab: int | None = None
) -> HuggingFaceLM:
    """Load the model in the folder `path`, ready to train: its weights (safetensors) if there are any, else fresh ones
    drawn from `seed`.

    vocab: token ids of a fresh model; None: as in config.json. On the meta device the model has only shapes.
    ValueError, one line, if transformers is not installed, the folder has no configuration of a causal LM, or its
    weights have another `vocab`.
    """
    config = _read_config(path)
    from transformers import AutoModelForCausalLM

    text, folder = config.get_text_config(), Path(path).expanduser()
    has_weights = any(folder.glob("*.safetensors"))
    if vocab is not None and vocab != text.vocab_size:
        if has_weights:
            raise ValueError(f"model.vocab = {vocab}, but the weights of model.hf have {text.vocab_size}: take it out")
        text.vocab_size = vocab
    try:
        if has_weights and device.type != "meta":
            model = AutoModelForCausalLM.from_pretrained(
                folder, config=config, dtype=dtype, local_files_only=True, use_safetensors=True
            ).to(device)
        else:
            with torch.random.fork_rng(devices=[]):  # transformers draws from the global generator
                torch.default_generator.manual_seed(seed)
                with torch.device("meta" if device.type == "meta" else "cpu"):
                    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
            model = model.to(device)
    except (ValueError, KeyError, OSError) as error:
        raise ValueError(f"model.hf = {path!r}: {str(error).splitlines()[0]}") from error
    return HuggingFaceLM(model.train())  # from_pretrained leaves dropout off


def hf_limits(path: str) -> tuple[int | None, int]:
    """(longest sequence or None, number of token ids) of the model at `path`. ValueError as in `load_hf`."""
    config = _read_config(path).get_text_config()
    return getattr(config, "max_position_embeddings", None), config.vocab_size


def _read_config(path: str) -> Any:
    try:
        from transformers import AutoConfig
        from transformers.utils.logging import disable_progress_bar
    except ImportError as error:
        raise ValueError('model.hf needs transformers: pip install ".[hf]"') from error
    disable_progress_bar()  # the workers' bars would overwrite the run's own output
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        hub = f"of the hub: `hf download {path} --local-dir {folder.name}`"
        raise ValueError(f"model.hf = {path!r}: no config.json there; name the folder of a saved model; {hub}")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        raise ValueError(f"model.hf = {path!r}: {str(error).splitlines()[0]}") from error


def save_as_llama(model: Decoder, folder: Path) -> None:
    """Write `model` as config.json and model.safetensors of a LlamaForCausalLM with equal logits.

    Llama's rotary embedding in transformers pairs entries (i, i + C/2) of a head, Isles' decoder (2i, 2i+1). So the
    rows of the query and key matrices are reordered within each head. All products of queries and keys stay the same.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in llama_state(model).items()}
    with plain_mode(folder / "model.safetensors"):
        save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    text = json.dumps(llama_config(model), indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def llama_config(model: Decoder) -> dict[str, Any]:
    """The config.json that describes `model` to transformers."""
    shape = model.shape
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.d_model,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.context,
        "rope_theta": BASE,
        "rms_norm_eps": NORM_EPS,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": shape.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": str(model.embed.weight.dtype).removeprefix("torch."),
    }


def llama_state(model: Decoder) -> dict[str, Tensor]:
    """The weights of `model` under LlamaForCausalLM's names."""
    shape = model.shape
    state = {"model.embed_tokens.weight": model.embed.weight, "model.norm.weight": model.norm.weight}
    if not shape.tie_embeddings:
        state["lm_head.weight"] = model.head.weight
    for index, block in enumerate(cast(Iterable[Block], model.blocks)):
        query, key, value = block.attention.qkv.weight.split(shape.d_model)
        state |= {
            f"model.layers.{index}.{name}.weight": weight
            for name, weight in {
                "input_layernorm": block.attention_norm.weight,
                "self_attn.q_proj": _halves(query, shape.heads),
                "self_attn.k_proj": _halves(key, shape.heads),
                "self_attn.v_proj": value,
                "self_attn.o_proj": block.attention.out.weight,
                "post_attention_layernorm": block.mlp_norm.weight,
                "mlp.gate_proj": block.mlp.gate.weight,
                "mlp.up_proj": block.mlp.up.weight,
                "mlp.down_proj": block.mlp.down.weight,
            }.items()
        }
    return state


def _halves(weight_DD: Tensor, heads: int) -> Tensor:
    """Reorder the rows of each head from neighbouring pairs to two halves: all first members, then all second ones."""
    return weight_DD.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


class HuggingFacePieces(HuggingFaceLM):
    """`HuggingFaceLM` in pieces: its token embedding, the layers of its list, and the modules after them. This changes
    `model`, its transformers model: pass that of `sharing(lm)`.

    To run a layer, the base model runs on `inputs_embeds` with only that layer in its list, so transformers computes
    masks and rotary angles. Modules after the list (the last norm) run in `leave`. Some models do more in their forward
    pass (GPT-2 adds positions, Gemma scales embeddings); their bits differ, and `isles.models.stages.check_stages`
    refuses them. ValueError if the base model has no list of layers.
    """

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
        return self.model.base_model._modules[self._list]

    def enter(self, tokens_BT: Tensor) -> Tensor:
        """The stream (B, T, D) of tokens (B, T), int64."""
        return self.model.get_input_embeddings()(tokens_BT)

    def through(self, block: nn.Module, x_BTD: Tensor) -> Tensor:
        modules = self.model.base_model._modules
        layers = modules[self._list]
        modules[self._list] = nn.ModuleList([block])
        try:
            return self.model.base_model(inputs_embeds=x_BTD, use_cache=False).last_hidden_state
        finally:
            modules[self._list] = layers

    def leave(self, x_BTD: Tensor) -> Tensor:
        """Scores (B, T, V) of the stream after the last layer."""
        for _, module in self._behind:
            x_BTD = module(x_BTD)
        return self.model.get_output_embeddings()(x_BTD)


class _Later(nn.Module):
    """The identity in place of a module, whose parameters keep their names."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._modules, self._parameters, self._buffers = module._modules, module._parameters, module._buffers

    def forward(self, x: Tensor) -> Tensor:
        return x
