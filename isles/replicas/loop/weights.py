"""How much each worker counts in the mean (DiLoCo, section 2: g = sum_i w_i g_i, with w_i as large as its shard).

    equal      w_i = 1/N
    samples    w_i = n_i / sum n:  a worker scales what it sends by N w_i, before it is encoded, and the mean is theirs

The n_i are told once, before the first round, and not sent again: every worker gives its own to `OuterSync.weigh`.
"""

from __future__ import annotations

import math

import torch

from isles.comm.group import Group
from isles.comm.roster import FixedRoster, Roster
from isles.replicas.config import MethodConfig
from isles.replicas.loop.config import Weights
from isles.replicas.parts.interfaces import Composition


def weights_of(config: MethodConfig) -> Weights:
    """ "equal" for a method that knows nothing else."""
    return getattr(config, "weights", "equal")


def counts_alike(config: MethodConfig, parts: Composition, roster: Roster) -> bool:
    """Whether workers have equal weights, and need not tell of any. ValueError where they have not, and a scaled
    payload would not make the weighted mean.
    """
    if weights_of(config) == "equal":
        return True
    if not parts.mixing.agrees:
        why = "it takes no mean over all workers"
    elif parts.rule.needs_residual:
        why = "what does not travel stays a worker's own, and would be scaled too"
    elif parts.on_broken == "leave out":
        why = "who is left out would count in the divisor"
    elif parts.on_peer_failure == "solo" or not isinstance(roster, FixedRoster):
        why = "workers may be lost or change, and weights are of those of the start"
    else:
        return False
    raise ValueError(f'weights = "samples": {why}; choose "equal"')


def refuse_unweighed(weighed: bool) -> None:
    """ValueError before a round of workers that have not told their samples."""
    if not weighed:
        raise ValueError('weights = "samples": call optimizer.weigh(SAMPLES) on every worker, before the first round')


def agreed_factor(group: Group, samples: float) -> tuple[float, float]:
    """N w of this worker among those of `group`, who all ask at once, and how many times the smallest (but 0) the
    largest is. Bytes sent: 8 to each of the others. ValueError for what is no number of samples.
    """
    if not 0 <= samples < math.inf:
        raise ValueError(f"weigh({samples}): give this worker's number of samples, 0 or more")
    told = group.all_gather(torch.tensor([float(samples)], dtype=torch.float64, device="cpu"))
    total = math.fsum(float(each) for each in told)
    if not total > 0:
        raise ValueError("weigh(0) on all workers: at least one must have samples")
    positive = [float(each) for each in told if each > 0]
    return group.size * float(samples) / total, max(positive) / min(positive)
