"""Which expert trains on which sequence: balanced by capacity, the same on every machine.

Scores (N, E): log-likelihoods of each sequence under each router. Expert e takes N // E sequences, the first N mod E
experts one more. Sequences choose in the order of their best score, highest first (equal: the earlier sequence), and
take their best expert that has room (equal: the lower number). Greedy, so not always the largest total; it costs
O(N E log E + N log N) and no communication. (SMALLTALK LM, arXiv 2410.03529, section 2.2.)

The key of the order is the raw score: adding a constant to one row moves it in the order, though its choice is equal.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from isles.base.parsing import parse_json

AssignmentRule = Literal["greedy", "sequential", "optimal", "unbalanced"]


def capacities(sequences: int, experts: int) -> np.ndarray:
    """(E,) sequences that each expert takes; their sum is `sequences`."""
    share, rest = divmod(sequences, experts)
    return np.array([share + (expert < rest) for expert in range(experts)], dtype=np.int64)


def assign(scores_NE: np.ndarray, rule: AssignmentRule = "greedy") -> np.ndarray:
    """(N,) the expert of each sequence.

    rule: "greedy" as the module says. "sequential": in the order of the rows, for comparison. "optimal": the largest
    total score at the same capacities (scipy, O(N^3)). "unbalanced": each its best, whatever the loads; what routing
    does at inference. ValueError for scores that are no numbers.
    """
    if rule not in get_args(AssignmentRule):
        raise ValueError(f"assignment = {rule!r} is not known; use one of {', '.join(get_args(AssignmentRule))}")
    scores_NE = np.asarray(scores_NE, dtype=np.float64)
    if not np.isfinite(scores_NE).all():
        raise ValueError("a router's score is no number: lower its learning rate (smalltalk.router_lr)")
    if rule == "unbalanced":
        return scores_NE.argmax(1)  # the first of equal ones
    sequences, experts = scores_NE.shape
    room = capacities(sequences, experts)
    if rule == "optimal":
        return _optimal(scores_NE, room)
    order = np.arange(sequences) if rule == "sequential" else np.argsort(-scores_NE.max(1), kind="stable")
    wishes = np.argsort(-scores_NE, axis=1, kind="stable").tolist()
    left, chosen = room.tolist(), np.empty(sequences, dtype=np.int64)
    for row in order.tolist():
        expert = next(expert for expert in wishes[row] if left[expert])
        left[expert] -= 1
        chosen[row] = expert
    return chosen


def _optimal(scores_NE: np.ndarray, room: np.ndarray) -> np.ndarray:
    from scipy.optimize import linear_sum_assignment

    slots = np.repeat(np.arange(len(room)), room)
    rows, columns = linear_sum_assignment(scores_NE[:, slots], maximize=True)
    chosen = np.empty(len(scores_NE), dtype=np.int64)
    chosen[rows] = slots[columns]
    return chosen


def purity(chosen_N: np.ndarray, label_N: np.ndarray) -> float:
    """Share of the sequences that carry the commonest label of their expert: 1 is a clean split by label."""
    common = sum(np.bincount(label_N[chosen_N == expert]).max() for expert in np.unique(chosen_N))
    return float(common / len(chosen_N))


@dataclass(frozen=True, eq=False)
class Assignment:
    """The outcome for a pool of sequences. expert_of: (N,). experts: E. It is what travels to the machines that train:
    one byte a sequence on the disk for up to 256 experts.
    """

    expert_of: np.ndarray
    experts: int

    @property
    def loads(self) -> list[int]:
        return np.bincount(self.expert_of, minlength=self.experts).tolist()

    @property
    def sha256(self) -> str:
        """Equal on all machines that computed the same assignment."""
        return digest(self.expert_of)

    def rows(self, expert: int) -> np.ndarray:
        """Indices of the sequences of `expert`, ascending."""
        return np.flatnonzero(self.expert_of == expert)

    def save(self, path: Path) -> None:
        """PATH (.npy) with the numbers and PATH.json with the loads and the hash."""
        kind = np.min_scalar_type(max(self.experts - 1, 0))
        facts = {"experts": self.experts, "sequences": len(self.expert_of), "loads": self.loads, "sha256": self.sha256}
        path.with_suffix(".json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        # The numbers last and at once: where they are there, the assignment is whole.
        partial = path.with_suffix(".partial.npy")
        np.save(partial, self.expert_of.astype(kind), allow_pickle=False)
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Assignment:
        """What `save` wrote. ValueError where it is missing or damaged."""
        try:
            facts = parse_json(path.with_suffix(".json").read_text(encoding="utf-8"))
            loaded = cls(np.load(path, allow_pickle=False).astype(np.int64), facts["experts"])
            whole = loaded.sha256 == facts["sha256"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: no assignment can be read there ({error}); partition again") from error
        if not whole:
            raise ValueError(f"{path}: damaged, its hash is another one; partition again, or copy it again")
        return loaded


def digest(expert_of: np.ndarray) -> str:
    """SHA-256 of an assignment, hex."""
    return hashlib.sha256(np.ascontiguousarray(expert_of, dtype="<i8").tobytes()).hexdigest()
