"""The optimizer of a run: the configured method around the inner optimizer of `[inner]`, and the bytes of its state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from isles.base.errors import in_section
from isles.base.imports import describe
from isles.base.parts import make, names_code
from isles.base.tables import non_defaults
from isles.base.wrapping import SeveralOptimizers, each_of, innermost
from isles.comm.group import Group
from isles.comm.mesh import Mesh
from isles.comm.roster import Roster, as_roster
from isles.memory.disk import disk_vectors
from isles.models import choose_device
from isles.models.blocks import blocks_of
from isles.models.subspace import held_inside
from isles.pipeline.rowwise import RowwiseAdamW, by_rows, settled
from isles.replicas import method
from isles.replicas.replica import Plain, StageCopy, SuppliedNorm
from isles.replicas.sync import ReplicaSync
from isles.training.config.inner import InnerConfig, inner_kind, inner_notices
from isles.training.config.sections import Config
from isles.training.setup import has_own_gpu


def inner_optimizer(model: nn.Module, config: InnerConfig, usual: Literal["adamw", "sgd"]) -> Optimizer:
    """The configured optimizer of the trainable parameters; no weight decay on vectors (norm gains). usual: the kind of
    "auto". Full-size weights in a subspace stay in it, see `isles.pipeline.rowwise`. Muon steps the matrices of the
    blocks, AdamW all others (embeddings, head, norms). ValueError if the model or this torch has no place for it.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    kind = inner_kind(config, usual)
    hidden = _hidden(model) if kind == "muon" else set[int]()
    first = [] if not hidden else [_muon([p for p in trained if id(p) in hidden], config)]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2 and id(p) not in hidden], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if names_code("optimizer", kind):
        return settled(own_optimizer(config, groups), model)
    rows, sgd, is_sketch = by_rows(groups, model), kind == "sgd", any(parameter.is_meta for parameter in trained)
    if is_sketch:
        made = torch.optim.SGD if sgd else torch.optim.AdamW if rows is None else RowwiseAdamW
        rest = [_sketched(made, groups if sgd or rows is None else rows, config.lr)] if groups else []
    elif sgd:
        rest = [torch.optim.SGD(groups, lr=config.lr, fused=True)]
    elif rows is not None:
        return RowwiseAdamW(rows, lr=config.lr, betas=config.betas)
    else:
        rest = [torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)] if groups else []
    each = first + rest
    chosen = each[0] if len(each) == 1 else SeveralOptimizers(each)
    return chosen if is_sketch else settled(chosen, model)


def own_optimizer(config: InnerConfig, groups: list[dict[str, Any]]) -> Optimizer:
    """The user's class, called with parameter groups, lr and [inner.options]. ValueError if that fails, or if the class
    cannot do what [inner] asks for.
    """
    options = {"lr": config.lr, **(config.options or {})}
    made: Optimizer = make("optimizer", config.optimizer, options, groups)
    stated = f'optimizer = "{config.optimizer}"'
    if "weight_decay" not in made.defaults and config.weight_decay != InnerConfig.weight_decay:
        raise ValueError(f"weight_decay = {config.weight_decay:g}: {stated} has no weight decay; leave it out")
    if hasattr(made, "train") and hasattr(made, "eval"):
        raise ValueError(f"{stated} wants train() and eval() around evaluations: use it in a loop of your own")
    return made


def check_own_optimizer(config: InnerConfig) -> None:
    """ValueError as `own_optimizer`, or if it cannot step a matrix and a vector of zeros."""
    zeros = [torch.zeros(2, 2, device="cpu", dtype=torch.float32), torch.zeros(2, device="cpu", dtype=torch.float32)]
    groups = [{"params": [nn.Parameter(own)], "weight_decay": config.weight_decay} for own in zeros]
    made = own_optimizer(config, groups)
    for group, own in zip(groups, zeros, strict=True):
        group["params"][0].grad = torch.zeros_like(own)
    try:
        made.step()
    except Exception as error:  # the class is the user's: whatever it raises
        raise ValueError(f'optimizer = "{config.optimizer}" fails in a step: {describe(error)}') from error


def _hidden(model: nn.Module) -> set[int]:
    """The matrices of the blocks, by id: all but embeddings."""
    if any(True for _ in held_inside(model)):
        raise ValueError('inner.optimizer = "muon" would leave the subspace of pipeline.boundary.kind; choose "adamw"')
    tables = {id(own) for one in model.modules() if isinstance(one, nn.Embedding) for own in one.parameters()}
    inside = [parameter for block in blocks_of(model)[1] for parameter in block.parameters()]
    found = {id(own) for own in inside if own.ndim == 2 and own.requires_grad} - tables
    if not found:
        raise ValueError(
            'inner.optimizer = "muon": the model has no nn.ModuleList of blocks with matrices; use "adamw"'
        )
    return found


def _muon(matrices: list[nn.Parameter], config: InnerConfig) -> Optimizer:
    """With the size of AdamW's updates (`adjust_lr_fn`), so that lr and weight_decay mean the same for both."""
    kind = getattr(torch.optim, "Muon", None)
    if kind is None:
        raise ValueError(
            f'inner.optimizer = "muon" needs torch 2.9 or later, this is {torch.__version__}: update torch'
        )
    options = {"weight_decay": config.weight_decay, "adjust_lr_fn": "match_rms_adamw", **(config.options or {})}
    if any(parameter.is_meta for parameter in matrices):
        return _sketched(kind, [{"params": matrices, **options}], config.lr)
    return kind(matrices, lr=config.lr, **options)


def _sketched(kind: type[Optimizer], groups: list[dict[str, Any]], lr: float) -> Optimizer:
    """An optimizer of parameters without values, which cannot step. Torch's own constructor would load its compiler,
    which takes a second.
    """
    made = kind.__new__(kind)
    usual = {key: one.default for key, one in signature(kind).parameters.items() if one.default is not one.empty}
    if kind is torch.optim.AdamW:
        usual["decoupled_weight_decay"] = True  # set by torch's constructor, not in its signature
    if "fused" in usual:
        usual["fused"] = False
    made.defaults, made.state = usual | {"lr": lr}, defaultdict(dict)
    made.param_groups = [made.defaults | group for group in groups]
    return made


def moments(optimizer: Optimizer) -> dict[int, int]:
    """By parameter (its id), how many tensors of its size are in the optimizer's state: AdamW 2, Muon 1, SGD 0; for
    one's own as many as for AdamW.
    """
    counts = {"SGD": 0, "Muon": 1}
    each = [(counts.get(type(one).__name__, 2), one.param_groups) for one in each_of(innermost(optimizer))]
    return {id(own): count for count, groups in each for group in groups for own in group["params"]}


def inner_bytes(parameters: Iterable[Tensor], optimizer: Optimizer) -> int:
    """Bytes of the optimizer's state: `moments` of each trainable parameter, and beside two a float32 step count."""
    counts = moments(optimizer)
    trained = [(parameter.nbytes, counts[id(parameter)]) for parameter in parameters if parameter.requires_grad]
    return sum(count * nbytes + 4 * (count == 2) for nbytes, count in trained)


def wrapped(
    config: Config,
    model: nn.Module,
    group: Group | Roster,
    world: Mesh | None = None,
    manage: Callable[[nn.Module, Optimizer], Optimizer] = lambda model, inner: inner,
    *,
    norm: Callable[[], float] | None = None,
    here: int | None = None,
) -> tuple[ReplicaSync, list[str]]:
    """The run's optimizer around `model`, and notices for the user. group: the replicas' workers that hold this part of
    the model. world: this worker's mesh, with its island and its replica's stages; None: it has none. manage: wraps the
    inner optimizer. norm: returns the norm of the whole gradient, if the runner knows it. here: workers of a machine,
    in a run that is only planned. ValueError, with the key, for settings that cannot be obeyed.
    """
    island = None if world is None else world.inner
    kind, max_norm = method(config.method), config.inner.max_norm or None
    replicas = as_roster(group).founders
    try:
        if island is None or island.size == 1:
            part = kind.local_part(model, replicas, config.replicas)
            inner = _stepped(config, part, kind, world, manage)
            if norm is not None:
                assert isinstance(inner, Optimizer)
                inner = SuppliedNorm(part, inner, norm)
            elif config.pipeline.skippipe.plan:
                assert world is not None and isinstance(inner, Optimizer)
                by_stage = config.pipeline.clip == "stage"
                inner = (
                    Plain(part, inner, charged=True) if by_stage else StageCopy(part, inner, world.world, replicas.size)
                )
        else:
            if not kind.spans_islands:
                raise ValueError(
                    f"world.inner = {config.world.inner}: {config.method} does not exchange between islands; take an "
                    "outer method, such as diloco, or leave world.inner out"
                )
            inside = method(config.world.inside)
            part = inside.local_part(model, island, inside.Config())
            settings = inside.Config(**_native(config, part, here))
            inner = inside(part, _stepped(config, part, kind, world, manage), island, settings, max_norm=max_norm)
            inner.batches = config.inner.accumulation
            max_norm = None  # the island clips
        weighs_samples(config)  # raises ValueError if they cannot be weighed
        vectors = disk_vectors(config.memory.disk) if config.memory.vectors == "disk" else None
        optimizer = kind(part, inner, group, config.replicas, max_norm=max_norm, vectors=vectors)
        if config.world.drop_outer:
            optimizer.drop_outer(config.world.drop_outer, config.run.seed)
        optimizer.batches, optimizer.scales_loss = config.inner.accumulation, config.model.autocast == "fp16"
        notices = inner_notices(config.inner, kind.usual_inner, config.run.steps)
        notices += _unseen(config) + _unplayed(config) + what_is_left_out(config)
        return optimizer, notices + optimizer.advise(config.run.steps)
    except ValueError as error:
        keys = [field.name for field in fields(config.replicas)]
        raise ValueError(in_section("replicas", str(error), keys)) from error


def _native(config: Config, model: nn.Module, here: int | None) -> dict[str, str]:
    """Settings of `ddp` inside an island: torch's own sums, over NCCL, if each worker has its own GPU."""
    own = has_own_gpu(config, next(model.parameters()).device, here) and config.memory.method in ("none", "checkpoint")
    return {"reduction": "native"} if own and config.world.inside == "ddp" else {}


def _unseen(config: Config) -> list[str]:
    """A notice if `world.trust_ratio` is set, but cannot check payloads, as they go through torch's collectives."""
    ratio = config.world.trust_ratio
    if ratio == type(config.world).trust_ratio:
        return []
    if getattr(config.replicas, "reduction", "") == "native":
        return [f'world.trust_ratio = {ratio:g}: torch sums with reduction = "native", so no payload can be checked']
    if (config.method == "fsdp" or config.world.inner > 1) and choose_device(config.model).type == "cuda":
        return [f"world.trust_ratio = {ratio:g}: the sums of an island's GPUs are torch's and cannot be checked"]
    return []


def what_is_left_out(config: Config) -> list[str]:
    """Notices if boundaries are lossy, or there is no validation text."""
    lossy = config.pipeline.boundary.lossy
    notices = [f"lossy between stages: {', '.join(lossy)}"] if lossy else []
    if config.data.validation_fraction == 0:
        notices.append("data.validation_fraction = 0: there will be no validation loss")
    return notices


def _unplayed(config: Config) -> list[str]:
    """Notices on settings without effect: of the virtual clock in a real run, a deadline of stages without stages; and
    if a model's own tokenizer is not used.
    """
    world = config.world
    keys = [f"world.virtual.{key}" for key, _ in non_defaults(world.virtual) if key in ("links", "step_seconds")]
    notices = []
    hf = Path(config.model.hf or "", "tokenizer.json").expanduser()
    if config.model.hf and config.data.tokenizer == "bytes" and hf.is_file():
        notices.append('data.tokenizer = "bytes": the folder of model.hf has a tokenizer; leave this key out to use it')
    if keys and not world.is_simulated:
        notices.append(
            f"{' and '.join(keys)}: of the virtual clock, without effect on real links and "
            'steps; set world.backend = "virtual" to use it'
        )
    if config.pipeline.stages == 1 and world.pipeline_deadline != type(world).pipeline_deadline:
        notices.append(f"world.pipeline_deadline = {world.pipeline_deadline:g}: there are no stages that wait")
    return notices


def weighs_samples(config: Config) -> bool:
    """Whether means are weighted by the workers' numbers of sequences. ValueError if a replica has several workers."""
    if getattr(config.replicas, "weights", "equal") == "equal":
        return False
    if config.world.inner > 1 or config.pipeline.stages > 1:
        raise ValueError('replicas.weights = "samples": shares are of single workers; choose "equal", or no islands')
    return True


def _stepped(
    config: Config,
    part: nn.Module,
    kind: type[ReplicaSync],
    world: Mesh | None,
    manage: Callable[[nn.Module, Optimizer], Optimizer],
) -> Optimizer | Plain:
    """The inner optimizer of `part`; in a pipeline within `Plain`, which clips over the stages."""
    inner = manage(part, inner_optimizer(part, config.inner, kind.usual_inner))
    if world is None or not config.pipeline.is_grid or world.stage.size == 1:
        return inner
    over = "peers" if config.pipeline.clip == "model" else "own"
    return Plain(part, inner, peers=world.stage, clip_over=over, charged=True)
