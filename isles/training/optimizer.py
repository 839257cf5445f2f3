"""The optimizer of a run: the configured method around the inner optimizer of `[inner]`, the schedule of its learning
rate, and the bytes of its state.
"""

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
from torch.optim.lr_scheduler import LambdaLR

from isles.base.errors import in_section
from isles.base.tables import non_defaults
from isles.comm.group import Group
from isles.comm.mesh import Mesh
from isles.comm.roster import Roster, as_roster
from isles.memory.disk import disk_vectors
from isles.models import choose_device
from isles.pipeline.rowwise import RowwiseAdamW, by_rows, settled
from isles.replicas import method
from isles.replicas.replica import Plain, StageCopy, SuppliedNorm
from isles.replicas.sync import ReplicaSync
from isles.training.config.inner import InnerConfig, inner_kind, inner_notices, lr_factor
from isles.training.config.sections import Config
from isles.training.setup import has_own_gpu


def inner_optimizer(model: nn.Module, config: InnerConfig, usual: Literal["adamw", "sgd"]) -> Optimizer:
    """The configured optimizer of the trainable parameters; no weight decay on vectors (norm gains). usual: the kind of
    "auto". Full-size weights in a subspace stay in it, see `isles.pipeline.rowwise`.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    rows, sgd = by_rows(groups, model), inner_kind(config, usual) == "sgd"
    if any(parameter.is_meta for parameter in trained):
        kind = torch.optim.SGD if sgd else torch.optim.AdamW if rows is None else RowwiseAdamW
        return _sketched(kind, groups if sgd or rows is None else rows, config.lr)
    if sgd:
        return settled(torch.optim.SGD(groups, lr=config.lr, fused=True), model)
    if rows is not None:
        return RowwiseAdamW(rows, lr=config.lr, betas=config.betas)
    return settled(torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True), model)


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


def inner_bytes(parameters: Iterable[Tensor], optimizer: Literal["adamw", "sgd"]) -> int:
    """Bytes of the optimizer's state. AdamW: two moments of each trainable parameter, and a float32 step count. SGD:
    none.
    """
    if optimizer == "sgd":
        return 0
    return sum(2 * parameter.nbytes + 4 for parameter in parameters if parameter.requires_grad)


def rate_schedule(optimizer: Optimizer, config: Config) -> LambdaLR:
    """The learning rate schedule, stepped after each inner step. A delayed update has the rate of its own step."""
    late = config.pipeline.swarm.delay_updates
    return LambdaLR(optimizer, lambda done: lr_factor(max(done + 1 - late, 1), config.run.steps, config.inner))


def load_schedule(schedule: LambdaLR, state: dict[str, Any]) -> None:
    """Continue from `state`, also if the run has another last step since: the next step has its schedule's rate."""
    schedule.load_state_dict(state)
    rows = zip(schedule.optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True)
    for group, rate, factor in rows:
        group["lr"] = rate * factor(schedule.last_epoch)


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
