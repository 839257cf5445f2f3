"""SparseLoCo (Sarfi et al., 2025, arXiv 2508.15706): DiLoCo of the largest entries, in 2 bits, with error feedback that
slowly forgets, and without outer momentum (the feedback's memory takes its place).

    every H inner steps:    a_i = (anchor - theta_i) + E_i;   c_i = 2 bits of the 64 largest of each 4096 of a_i
                            E_i <- 0.95 (a_i - c_i);          anchor <- anchor - lr mean_i c_i;   theta_i <- anchor

Defaults: those of the public runs. Chunks are 4096 neighbours in memory. Memory: anchor and E, 8 bytes a parameter.
"""

from __future__ import annotations

from dataclasses import dataclass

from isles.replicas.methods.fedavg import FedAvg, FedAvgConfig
from isles.replicas.parts.interfaces import Feedback


@dataclass(frozen=True, kw_only=True)
class SparseLoCoConfig(FedAvgConfig):
    """Settings of `sparseloco`; defaults of the public runs."""

    sync_every: int = 30
    outer_lr: float = 0.4
    codec: str = "topk:64+int2"
    error_feedback: Feedback = "local"
    feedback_decay: float = 0.95


class SparseLoCo(FedAvg):
    """All workers leave each exchange with equal anchors and weights."""

    Config = SparseLoCoConfig
    is_linear = False
    config: SparseLoCoConfig
