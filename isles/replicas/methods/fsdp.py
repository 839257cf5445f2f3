"""Fully sharded data parallel: data parallel training in which every worker holds a share of weights, gradients and
inner state (Zhao et al., 2023, arXiv 2304.11277, through torch's `fully_shard`; ZeRO-3, Rajbhandari et al., 2020).

    every inner step:    grad <- mean_i grad_i, each worker its own rows; the inner optimizer steps on those

For workers with fast links between them: a step moves three times the model (twice with reshard_after_forward = false)
where `ddp` moves it twice. Bytes sent by each of R workers a step: (R - 1) times the share of every unit, for two
gathers and a scatter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from isles.comm.errors import Refused
from isles.comm.group import Group
from isles.network.exchange_plan import MemoryItem, PlannedExchange, Swap, by_size
from isles.replicas.exchange_schedule import everyone, opening_exchanges
from isles.replicas.flat import all_names
from isles.replicas.gradient.config import FSDPConfig
from isles.replicas.island.fsdp import Sharding, as_sharded, gathered, shard, sharding_of, without_meshes
from isles.replicas.island.island import Shards
from isles.replicas.replica import Replica
from isles.replicas.start import bytes_by_format, same_settings
from isles.replicas.sync import MethodConfig, StepsAlike
from isles.replicas.watch import Scaled

_NORM_BYTES = 8  # the square of a gradient's norm, float64


class FSDP(StepsAlike):
    """Takes a model that went through `isles.shard`, and an inner optimizer made after that.

    A killed worker is PeerLost on all others; exact resume with as many workers.
    """

    Config = FSDPConfig
    config: FSDPConfig
    level = "gradient"
    needs_whole = True
    agrees = True

    @classmethod
    @override
    def local_part(cls, model: nn.Module, group: Group, config: MethodConfig) -> nn.Module:
        assert isinstance(config, FSDPConfig)
        return shard(model, group, reshard_after_forward=config.reshard_after_forward)

    def _begin(self) -> None:
        sharding = self.sharding
        if sharding.group.ranks != self.group.ranks:
            raise ValueError("the model is sharded over another group of workers: give both the same")
        if sharding.reshard_after_forward != self.config.reshard_after_forward:
            raise ValueError("reshard_after_forward is not what isles.shard was given: give both the same")
        self.shares = []  # every worker has rows of its own
        if not self.is_sketch:
            self.replica.begin(f"{type(self).__name__} {self.max_norm}")
            same_settings(self.group, self._settings(), all_names(self.model))

    @property
    def sharding(self) -> Sharding:
        return sharding_of(self.model)

    @override
    def as_replica(self) -> Replica:
        return Shards(self)

    @contextmanager
    @override
    def no_sync(self) -> Iterator[None]:
        """Gradients stay whole and are scattered in the last backward pass."""
        self._sync(False)
        try:
            with super().no_sync():
                yield
        finally:
            self._sync(True)

    @override
    def take_step(self, scaled: Scaled | None) -> None:
        """Refused for gradients of a peer that are not finite, unless a scaler is there to skip the step."""
        suspects = [own.suspect for own in self.sharding.messages if getattr(own, "suspect", None) is not None]
        for own in self.sharding.messages:
            own.suspect = None
        if suspects and scaled is None:
            self.group.ledger.trust.refused += 1
            raise Refused(suspects[0], "its gradient is not finite")
        self._reshard()  # a forward pass since the backward pass has gathered what this step changes
        super().take_step(scaled)

    @contextmanager
    @override
    def evaluation_weights(self) -> Iterator[nn.Module]:
        """Sharded, so all workers evaluate the same batches together. Gathers are counted on the channel "eval"."""
        self._reshard()  # weights may have been written to since they were gathered
        for messages in self.sharding.messages:
            messages.channel = "eval"
        try:
            yield self.model
        finally:
            for messages in self.sharding.messages:
                messages.channel = self.group.channel
            self._reshard()

    @override
    def norm(self) -> Tensor:
        """Of the whole gradient, of which every worker has its rows."""
        return self.replica.norm(self.group)

    @override
    def consolidate(self) -> nn.Module:
        """A plain model, whole on every worker."""
        super().consolidate()
        whole = gathered(self.model)
        self._prove(dict(whole.named_parameters()))
        return whole

    @override
    def rounds_done(self) -> str:
        return str(self.steps)

    @override
    def replica_std(self) -> float:
        return 0.0

    @override
    def schedule(self, steps: int) -> list[PlannedExchange]:
        """Weights are gathered for every batch, gradients scattered once a step."""
        size, groups = self.group.size, everyone(self.group.size)
        gathers = self.batches * (2 if self.config.reshard_after_forward else 1)
        each = [
            (index, what, nbytes)
            for index, unit in enumerate(self.sharding.units)
            for what, nbytes in [("weights", unit.held)] * gathers + [("gradient", unit.trained)]
        ]
        each += [(len(self.sharding.units), "norm", _NORM_BYTES)] if self.max_norm is not None else []
        planned = [(index, what, by_size(groups, lambda n, sent=sent: Swap((sent,) * n))) for index, what, sent in each]
        return (
            [
                PlannedExchange(step, step, index, what, groups, pattern, step * len(planned) + number)
                for step in range(1, steps + 1)
                for number, (index, what, pattern) in enumerate(planned)
            ]
            if size > 1
            else []
        )

    @override
    def opening_exchanges(self) -> list[PlannedExchange]:
        """One hash, and worker 0's tensors."""
        skeleton = self.sharding.skeleton
        tensors = [*skeleton.parameters(), *skeleton.buffers()]
        return opening_exchanges(bytes_by_format(tensors), self.group.size, hashes=1)

    @override
    def memory(self) -> list[MemoryItem]:
        units, size = self.sharding.units, self.group.size
        if size == 1:
            return []
        whole = max(unit.held for unit in units) if self.config.reshard_after_forward else sum(u.held for u in units)
        gathered = sum(unit.trained for unit in units) if self.batches > 1 else max(unit.trained for unit in units)
        return [
            MemoryItem("gathered weights", size * whole, "exchange"),
            MemoryItem("gradients, whole", size * gathered, "exchange"),
            MemoryItem("gradients on their way", size * max(unit.trained for unit in units), "exchange"),
            MemoryItem("the whole model", size * sum(unit.held for unit in units), "end"),
        ]

    @override
    def inner_state(self) -> Any:
        return without_meshes(super().inner_state())

    @override
    def load_inner_state(self, state: Any) -> None:
        trained = [parameter for group in self.param_groups for parameter in group["params"]]
        sharded = {
            index: {
                key: as_sharded(value, trained[index]) if isinstance(value, Tensor) else value
                for key, value in own.items()
            }
            for index, own in state["state"].items()
        }
        super().load_inner_state({**state, "state": sharded})

    @classmethod
    @override
    def regrouped(cls, outer: dict[str, Any]) -> dict[str, Any]:
        """Not built."""
        raise ValueError("with fsdp every worker has rows of its own: resume with as many workers as before")

    @override
    def weights(self) -> dict[str, Tensor]:
        return without_meshes(super().weights())

    @override
    def load_weights(self, weights: dict[str, Tensor]) -> None:
        like = self.model.state_dict()
        super().load_weights({name: as_sharded(rows, like[name]) for name, rows in weights.items()})

    def _sync(self, on: bool) -> None:
        for unit in self._units():
            unit.set_requires_gradient_sync(on, recurse=False)

    def _reshard(self) -> None:
        for unit in self._units():
            unit.reshard()

    def _units(self) -> list[Any]:
        return [module for module in self.model.modules() if hasattr(module, "set_requires_gradient_sync")]
