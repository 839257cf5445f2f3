"""SparseLoCo (Sarfi et al., 2025, arXiv 2508.15706): DiLoCo of the largest entries, in 2 bits, with error feedback that
slowly forgets, and without outer momentum (the feedback's memory takes its place).

    every H inner steps:    a_i = (anchor - theta_i) + E_i;   c_i = 2 bits of the 64 largest of each 4096 of a_i
                            E_i <- 0.95 (a_i - c_i);          anchor <- anchor - lr mean_i c_i;   theta_i <- anchor

Defaults: those of the public runs. Chunks are 4096 neighbours in memory. Memory: anchor and E, 8 bytes a parameter.
"""

from __future__ import annotations

from isles.replicas.methods.config import SparseLoCoConfig
from isles.replicas.methods.fedavg import FedAvg


class SparseLoCo(FedAvg):
    """All workers leave each exchange with equal anchors and weights."""

    Config = SparseLoCoConfig
    is_linear = False
    config: SparseLoCoConfig
