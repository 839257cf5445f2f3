"""Build the model of a `[model]` section: device, number format, compilation and autocast. The model is Isles' decoder,
one from a Hugging Face folder, or the user's own by `model.factory = "package.module:function"`.

The contract of the user's function (docs/own-model.md): it returns an `nn.Module`. Called with windows `tokens` (B,
T+1), int64, the module returns an object with `.loss`, the mean cross-entropy in nats of the T tokens after the first
(a scalar with a gradient). If the object also has `.logits` (B, T, V), the scores of those T tokens, generation and
multiple choice work too. `generate` samples the text after a prompt.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

import torch
from torch import Tensor, nn

from isles.base.errors import as_typed
from isles.base.imports import describe, import_target
from isles.base.marks import FIRST
from isles.models.config import ModelConfig
from isles.models.decoder import Decoder
from isles.models.hf import load_hf


def make(target: str, options: Mapping[str, Any], seed: int) -> nn.Module:
    """Call the function at `target` with `options`, and return its model in training mode. The weights depend only on
    the options and `seed` if they are drawn from torch's CPU generator, whose state is then restored. ValueError if the
    function cannot be imported, raises, or does not return a module.
    """
    key = f"model.factory = {target!r}"
    function = import_target(key, target)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            model = function(**options)
    except Exception as error:  # the function is the user's: whatever it raises
        raise ValueError(f"{key} fails: {describe(error)}") from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"{key} returns a {type(model).__name__}: return a torch.nn.Module")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"{key} returns a model without trainable parameters: there is nothing to train")
    return model.train()


def sketch_own(target: str, options: Mapping[str, Any], dtype: torch.dtype) -> nn.Module:
    """As `make`, without numbers: on the meta device, with floating-point tensors in `dtype`. A function that fails on
    the meta device is called on the CPU, and the numbers of its result are dropped.
    """
    try:
        with torch.device("meta"):
            model = make(target, options, 0)
    except ValueError:
        model = make(target, options, 0)
    empty: dict[int, Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = empty.setdefault(id(tensor), _without_numbers(tensor, dtype))  # type: ignore[assignment]
    return model


def _without_numbers(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    dtype = dtype if tensor.is_floating_point() else tensor.dtype
    if tensor.is_meta and tensor.dtype == dtype:
        return tensor
    bare = torch.empty_like(tensor, device="meta", dtype=dtype)
    return nn.Parameter(bare, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else bare


def check_contract(model: nn.Module, target: str, context: int) -> None:
    """Run one sequence forward, before training. ValueError if that fails, or returns no loss to train on."""
    key = f"model.factory = {target!r}"
    device = next(model.parameters()).device
    with torch.random.fork_rng(devices=[]):
        model.eval()
        try:
            output = model(torch.zeros(1, context + 1, dtype=torch.int64, device=device))
        except Exception as error:  # the model is the user's: whatever it raises
            raise ValueError(f"{key}: its model fails on tokens (1, {context + 1}): {describe(error)}") from error
        finally:
            model.train()
    loss = getattr(output, "loss", None)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        fault = f"a {type(output).__name__} without a scalar .loss" if loss is None else "a .loss that is no scalar"
        raise ValueError(
            f"{key}: its model returns {fault}: return an object such as isles.models.Output(loss, logits)"
        )
    if not loss.requires_grad:
        raise ValueError(f"{key}: no gradient flows from its model's .loss: compute it from the parameters, undetached")


@torch.no_grad()
def check_marks(model: nn.Module, context: int, *, isolates: bool) -> None:
    """Run marked tokens (`isles.base.marks`) forward, before training. ValueError unless the loss of a document is the
    same whatever follows it that is not learned, and, if `isolates`, whatever stands before it.
    """
    where, losses, first = next(model.eval().parameters()), list[float](), FIRST * isolates
    document = torch.arange((context + 1) // 2, dtype=torch.int64, device=where.device) % 2
    try:
        for other in (0, 1):
            others = document.new_full((context + 1 - len(document),), ~other)
            document[0], others[0] = -1 - first, ~other - first
            orders = [(document, others), (others, document)][: 1 + isolates]
            losses += [float(model(torch.cat(order)[None]).loss) for order in orders]
        if max(losses) - min(losses) <= max(1e-4, torch.finfo(where.dtype).eps / 2):
            return
        fault = f"losses that must be equal are {min(losses):.6g} and {max(losses):.6g}"
    except Exception as error:  # the model is the user's, or transformers': whatever it raises
        fault = f"it fails ({describe(error)})"
    finally:
        model.train()
    what = "keep documents apart; set data.isolate_documents = false" if isolates else "obey labels and loss_mask"
    kind = type(getattr(model, "model", model)).__name__
    raise ValueError(f"data: this {kind} does not {what}, or see docs/own-model.md: {fault}")


@torch.no_grad()
def next_token_scores(model: Any, tokens_BT: Tensor) -> Tensor:
    """Scores (B, T, V) for the token after each of `tokens_BT`, int64, of any model. ValueError without logits."""
    if callable(getattr(model, "logits", None)):
        return model.logits(tokens_BT)
    window = torch.cat((tokens_BT, tokens_BT[:, -1:]), dim=1)  # the last token is only a placeholder for the target
    logits = getattr(model(window), "logits", None)
    if not isinstance(logits, Tensor) or logits.ndim != 3 or logits.shape[:2] != tokens_BT.shape:
        raise ValueError(
            "this run's model returns no .logits of shape (B, T, V) beside its .loss, and generation and multiple "
            "choice need them: return them, see docs/own-model.md"
        )
    return logits


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def choose_device(config: ModelConfig, rank: int = 0) -> torch.device:
    """The device of worker `rank` of this machine: GPU (rank modulo number of GPUs), so that workers may share one; the
    GPU that `model.device` numbers; or the CPU. ValueError if torch does not see the GPU.
    """
    gpus = 0 if config.device == "cpu" else torch.cuda.device_count()
    kind, _, number = config.device.partition(":")
    index = int(number) if number else rank % max(gpus, 1)
    if index < gpus:
        return torch.device("cuda", index)
    if kind == "cuda":
        raise ValueError(
            f'model.device = "{config.device}" but torch sees {gpus or "no"} GPU{"s" * (gpus > 1)} here; use '
            'model.device = "cpu" or "auto" (or --device), or install a CUDA build of torch'
        )
    return torch.device("cpu")


def take_device(config: ModelConfig, rank: int) -> torch.device:
    """`choose_device`; a GPU also becomes this thread's current one, which torch's fully_shard and NCCL use."""
    device = choose_device(config, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def placement(config: ModelConfig, workers: int) -> str:
    """Describe where this machine's `workers` train, and its shared and idle GPUs. ValueError if they cannot train."""
    _refuse_fp16_on_cpu(config, choose_device(config))
    _refuse_uncompiled(config, choose_device(config))
    used = Counter(str(choose_device(config, rank)) for rank in range(workers))
    most, idle = max(used.values()), torch.cuda.device_count() - len(used.keys() - {"cpu"})
    line = f"{workers} worker{'s' * (workers > 1)} on {', '.join(used)}"
    if most > 1 and "cpu" not in used:
        line += f"; up to {most} share a GPU, whose memory must hold as many models"
    return line + (f"; GPUs idle: {idle} (model.device, or more workers, would use them)" if idle else "")


def build(
    config: ModelConfig, seed: int, rank: int = 0, home: torch.device | None = None, *, isolates: bool = False
) -> nn.Module:
    """Build the model of `config` for worker `rank`, in `model.dtype`, compiled if `model.compile`. home: device of the
    weights; None: the device that computes. isolates: see `Decoder`; a model of `model.factory` reads marks itself.

    The weights depend on the configuration and `seed` alone: every rank and every device starts from the same model,
    and the global random generators stay unchanged. Compilation is in place, so parameter names and the class stay
    those of the plain model. ValueError as in `choose_device`, `autocast`, `load_hf` and `make`.
    """
    device = choose_device(config, rank)
    _refuse_fp16_on_cpu(config, device)
    return compiled(_create(config, seed, home or device, isolates), config)


def compiled(model: nn.Module, config: ModelConfig) -> nn.Module:
    """`model`, compiled in place if `model.compile`: its class and names stay. The compiler runs at the first batch."""
    if config.compile:
        _refuse_uncompiled(config, next(model.parameters()).device)
        model.compile(mode=None if config.compile is True else config.compile)
    return model


def _refuse_uncompiled(config: ModelConfig, device: torch.device) -> None:
    """ValueError if `model.compile` lacks what torch compiles with on `device`."""
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    header = Path(sysconfig.get_path("include"), "Python.h")
    lacks = {"triton": find_spec("triton")} if device.type == "cuda" else {compiler: which(compiler)}
    lacks |= {"Python.h": header.is_file()}
    for name, found in lacks.items():
        if config.compile and not found:
            raise ValueError(
                f"model.compile = {as_typed(config.compile)} needs {name} on this machine: install it, or leave it out"
            )


def sketch(config: ModelConfig, *, isolates: bool = False) -> nn.Module:
    """The model of `config` with shapes but without numbers, on the meta device: it takes no memory."""
    if config.factory is not None:
        return sketch_own(config.factory, config.options or {}, DTYPES[config.dtype])
    return _create(config, 0, torch.device("meta"), isolates)


def _create(config: ModelConfig, seed: int, device: torch.device, isolates: bool) -> nn.Module:
    dtype = DTYPES[config.dtype]
    if config.factory is not None:
        return make(config.factory, config.options or {}, seed).to(device=device, dtype=dtype)
    if config.hf is None:
        decoder = Decoder(config.shape(), seed=seed, device=device, dtype=dtype)
        decoder.loss_tokens, decoder.isolates = config.loss_tokens(decoder.shape.vocab), isolates
        return decoder
    made = load_hf(config.hf, seed=seed, dtype=dtype, device=device, vocab=config.vocab)
    made.loss_tokens = config.loss_tokens(made.model.config.get_text_config().vocab_size)
    made.has_plain_head, made.isolates = made.ends_in_head(), isolates
    return made


def autocast(config: ModelConfig, device: torch.device) -> AbstractContextManager[object]:
    """The context for the forward pass. It does nothing for `model.autocast = "none"`.

        with autocast(config, device):
            loss = model(tokens).loss
        loss.backward()

    "bf16" needs nothing else. "fp16" is for CUDA and needs a `torch.amp.GradScaler`, because small gradients underflow
    without one. ValueError for "fp16" on a CPU; a warning for "bf16" on a GPU that only emulates it.
    """
    if config.autocast == "none":
        return nullcontext()
    _refuse_fp16_on_cpu(config, device)
    if (
        config.autocast == "bf16"
        and device.type == "cuda"
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        warnings.warn(
            'model.autocast = "bf16" is emulated on this GPU and slow; use "fp16" with a GradScaler, or "none"',
            stacklevel=2,
        )
    return torch.autocast(device.type, dtype=AUTOCAST_DTYPES[config.autocast])


def _refuse_fp16_on_cpu(config: ModelConfig, device: torch.device) -> None:
    if config.autocast == "fp16" and device.type == "cpu":
        raise ValueError(
            'model.autocast = "fp16" needs a GPU and this worker computes on the CPU; use "bf16" or "none"'
        )


@torch.no_grad()
def generate(
    logits: Callable[[Tensor], Tensor],
    tokens_T: Tensor,
    *,
    new_tokens: int,
    context: int,
    temperature: float = 0.8,
    top_k: int = 0,
    seed: int = 0,
) -> Iterator[int]:
    """Yield `new_tokens` ids that follow `tokens_T` (T,), int64, at least one.

    logits: maps tokens (B, T) to the scores (B, T, V) of each next token. context: the model sees at most the last
    `context` tokens. temperature: 0 takes the likeliest token. top_k: draw among the k likeliest (0: all). seed: of the
    draws; the global generator is not used.
    """
    if not len(tokens_T):
        raise ValueError("the prompt is empty: give at least one character")
    generator = torch.Generator(device="cpu").manual_seed(seed)
    for _ in range(new_tokens):
        scores_V = logits(tokens_T[-context:][None])[0, -1].float().cpu()
        token = int(scores_V.argmax()) if temperature == 0 else _draw(scores_V / temperature, top_k, generator)
        yield token
        tokens_T = torch.cat((tokens_T, tokens_T.new_tensor([token])))


def _draw(scores_V: Tensor, top_k: int, generator: torch.Generator) -> int:
    if 0 < top_k < len(scores_V):
        least = scores_V.topk(top_k).values[-1]
        scores_V = scores_V.masked_fill(scores_V < least, float("-inf"))
    return int(torch.multinomial(scores_V.softmax(0), 1, generator=generator))
