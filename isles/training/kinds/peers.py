"""What swarms and clusters share: workers that agree among themselves, and go on when others fail."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from isles.training.kinds import WorldKind
from isles.training.records.checkpoint import Checkpoints

if TYPE_CHECKING:
    from isles.training.config.sections import Config


class PeerWorld(WorldKind):
    """See `WorldKind`."""

    has_peers = True
    situations = ("peers that come and go",)

    @override
    def refuse_reshard(self, config: Config, run: Path, step: int) -> None:
        raise ValueError(
            f"{run}: after step {step} workers {', '.join(map(str, Checkpoints(run).seats(step)))} saved; clusters and "
            "swarms resume with all workers of before, clusters from a checkpoint that all wrote (--step names an "
            "earlier one)"
        )


def absent(run: Path, step: int, config: Config) -> str:
    """Ranks of those who have not saved."""
    saved = Checkpoints(run).seats(step)
    return ", ".join(str(worker) for worker in range(config.world.workers) if worker not in saved)
