"""Gates: which expert a sequence belongs to, from its first tokens alone; the prior over experts; balanced assignment.

routers     one small model an expert; the score is the prefix's log-likelihood (SMALLTALK LM)
clusters    the score is minus the squared distance to the expert's centre (c-BTM)

What is believed of the experts before a sequence begins: log P(j), (E,).

uniform    1/E
cached     P_1 = pi_1;  P_n = (1 - decay) P_{n-1} + decay pi_n  over sequences of validation text, then frozen
updating   the same rule on the text that is evaluated: the prior of a sequence comes from those before it

pi_n is the posterior of sequence n, computed with P_{n-1} as its prior (pi_1 with the uniform one). Statistic "end": at
the sequence's end, where it is nearly one-hot; "mean": its mean over the positions, which makes a smoother prior.
Everything stays in log space: an expert that one sequence rules out by 1000 nats is at log 0 as a number, and would
never come back.

Which expert trains on which sequence: balanced by capacity, the same on every machine.

Scores (N, E): log-likelihoods of each sequence under each router. Expert e takes N // E sequences, the first N mod E
experts one more. Sequences choose in the order of their best score, highest first (equal: the earlier sequence), and
take their best expert that has room (equal: the lower number). Greedy, so not always the largest total; it costs
O(N E log E + N log N) and no communication. (SMALLTALK LM, arXiv 2410.03529, section 2.2.)

The key of the order is the raw score: adding a constant to one row moves it in the order, though its choice is equal.

c-BTM's clusters (arXiv 2303.14177): which expert a text belongs to, by its words; no labels, no routers.

    embed(text) = SVD of tf-idf over words and signs, normalised
    centres     = balanced k-means on one share of the text (assignment by capacity, so clusters are equal in size)
    log P(j)    = log softmax_j (-|embed(text) - centre_j|^2 / tau)

Words are hashed into a fixed number of columns, so nothing but arrays has to be kept. Deviation: no list of stop words.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, get_args

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from torch import Tensor

from isles.base.parsing import parse_json
from isles.data.order import epoch_order
from isles.data.tokenizer import Tokenizer
from isles.experts import mixture
from isles.experts.forest import Forest, Served
from isles.experts.mixture import after, posterior, uniform

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

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


COLUMNS, DIMENSIONS, TAU, ROUNDS = 4096, 32, 0.1, 20
_WORDS = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True, eq=False)
class Clusters:
    """weight_F: inverse document frequencies. map_FD: words to dimensions. centre_ED."""

    weight_F: np.ndarray
    map_FD: np.ndarray
    centre_ED: np.ndarray

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """(N, D) of length 1; zeros for a text without known words."""
        embedded_ND = _counts(texts).multiply(self.weight_F).tocsr() @ self.map_FD
        return embedded_ND / np.maximum(np.linalg.norm(embedded_ND, axis=1, keepdims=True), 1e-12)

    def distances(self, texts: Sequence[str]) -> np.ndarray:
        """(N, E) squared, to each centre."""
        embedded_ND = self.embed(texts)
        return ((embedded_ND[:, None] - self.centre_ED[None]) ** 2).sum(-1)

    def save(self, path: Path) -> None:
        save_file({"weight": self.weight_F, "map": self.map_FD, "centre": self.centre_ED}, str(path))

    @classmethod
    def load(cls, path: Path) -> Clusters:
        """What `save` wrote. ValueError where it is missing or damaged."""
        try:
            arrays = load_file(str(path))
            return cls(arrays["weight"], arrays["map"], arrays["centre"])
        except (OSError, SafetensorError, KeyError) as error:
            raise ValueError(f"{path}: no clusters can be read there ({error}); make them again") from error


def clustered(texts: Sequence[str], experts: int, seed: int) -> Clusters:
    """Clusters of `texts`; the same for the same seed. ValueError: fewer texts than experts or dimensions."""
    if len(texts) < max(experts, 2):
        raise ValueError(f"{len(texts)} sequences cannot be parted into {experts} clusters: give more text")
    from scipy.sparse import diags
    from scipy.sparse.linalg import norm, svds

    counts_NF = _counts(texts)
    weight_F = np.log((1 + len(texts)) / (1 + (counts_NF > 0).sum(0).A1)) + 1
    weighted_NF = counts_NF.multiply(weight_F).tocsr()
    weighted_NF = diags(1 / np.maximum(norm(weighted_NF, axis=1), 1e-12)) @ weighted_NF
    dimensions = min(DIMENSIONS, len(texts) - 1)
    start = np.linspace(1.0, 2.0, min(weighted_NF.shape))  # a fixed one: the default is drawn
    _, _, right_DF = svds(weighted_NF, k=dimensions, v0=start)
    first = epoch_order(len(texts), seed=seed, epoch=0, share=3)[:experts].astype(np.int64)
    made = Clusters(weight_F, np.ascontiguousarray(right_DF.T), np.zeros((experts, dimensions)))
    embedded_ND = made.embed(texts)
    centre_ED = embedded_ND[first]
    chosen = np.full(len(texts), -1)
    for _ in range(ROUNDS):
        distance_NE = ((embedded_ND[:, None] - centre_ED[None]) ** 2).sum(-1)
        before, chosen = chosen, assign(-distance_NE)
        if np.array_equal(before, chosen):
            break
        centre_ED = np.stack([embedded_ND[chosen == expert].mean(0) for expert in range(experts)])
    return Clusters(made.weight_F, made.map_FD, centre_ED)


def texts_of(rows: np.ndarray, tokenizer: Tokenizer) -> list[str]:
    """Sequences of tokens (N, T) as text."""
    return [tokenizer.decode(row) for row in rows]


def _counts(texts: Sequence[str]) -> csr_matrix:
    """(N, F) how often each hashed word is in each text."""
    from scipy.sparse import csr_matrix

    words = [_WORDS.findall(text.lower()) for text in texts]
    rows = np.repeat(np.arange(len(texts)), [len(found) for found in words])
    columns = np.array([zlib.crc32(word.encode()) % COLUMNS for found in words for word in found], dtype=np.int64)
    return csr_matrix((np.ones(len(columns)), (rows, columns)), shape=(len(texts), COLUMNS))


_STEP = 1 / 4096  # nats: a 16-bit score reaches 16 nats a token
_NO_NUMBER = 65535  # so that a router that diverged is seen by all workers alike, and not taken for a sure one


class Gate(Protocol):
    """What decides. Higher scores are better."""

    def scores(self, tokens: Tensor, prefix: int) -> Tensor:
        """(E, N) float64 for sequences (N, T), of which the first `prefix` tokens are read; shorter ones whole."""

    def log_chances(self, scores_EN: Tensor) -> Tensor:
        """(E, N): what the scores mean as probabilities, in logs."""


class Routers:
    """A small model an expert."""

    def __init__(self, models: Served) -> None:
        self.models = models

    def scores(self, tokens: Tensor, prefix: int) -> Tensor:
        """Log-likelihood of the prefix behind its first token. ValueError where nothing is left to score."""
        length = min(prefix, tokens.shape[1])
        if length < 2:
            raise ValueError("routing needs a prompt of at least 2 tokens: give a longer one")
        return self.models.scores(tokens[:, :length]).sum(-1)

    def log_chances(self, scores_EN: Tensor) -> Tensor:
        """Bayes with a uniform prior."""
        return scores_EN.log_softmax(0)


class ByClusters:
    """Centres over words."""

    def __init__(self, clusters: Clusters, tokenizer: Tokenizer) -> None:
        self.clusters, self.tokenizer = clusters, tokenizer

    def scores(self, tokens: Tensor, prefix: int) -> Tensor:
        """Minus the squared distance to each centre."""
        texts = texts_of(tokens[:, :prefix].numpy(), self.tokenizer)
        return torch.from_numpy(-self.clusters.distances(texts).T)

    def log_chances(self, scores_EN: Tensor) -> Tensor:
        """c-BTM's weights."""
        return (scores_EN / TAU).log_softmax(0)


def gate_of(forest: Forest, tokenizer: Tokenizer) -> Gate | None:
    """The gate of a forest, its models loaded; None where all experts are mixed."""
    if forest.clusters is not None:
        return ByClusters(Clusters.load(Path(forest.clusters)), tokenizer)
    return Routers(Served.load(forest.routers)) if forest.routers else None


def route(gate: Gate, tokens: Tensor, prefix: int) -> Tensor:
    """(N,) the expert of each sequence, the lower number where two score the same."""
    return torch.from_numpy(assign(gate.scores(tokens, prefix).T.numpy(), "unbalanced"))


def weights_of(gate: Gate, tokens: Tensor, experts: int) -> Tensor:
    """(E, N) log-weights of what follows sequences (N, T), of which the gate reads all; uniform behind a single token,
    which says too little.
    """
    if tokens.shape[1] < 2:
        return mixture.uniform(experts)[:, None].expand(experts, len(tokens))
    return gate.log_chances(gate.scores(tokens, tokens.shape[1]))


def growing(gate: Gate, tokens: Tensor, experts: int, every: int) -> Tensor:
    """(E, N, T) log-weights of the tokens of (N, T + 1) behind the first, for `mixture.mix`: those of `weights_of` for
    the text so far, computed again after each `every` tokens. (c-BTM, arXiv 2303.14177, where `every` is 1.)
    """
    length = tokens.shape[1] - 1
    blocks = [weights_of(gate, tokens[:, : start + 1], experts) for start in range(0, length, every)]
    return torch.stack(blocks, dim=-1).repeat_interleave(every, dim=-1)[..., :length]


def to_wire(mean_N: Tensor) -> Tensor:
    """Mean log-probabilities a token (N,) as 16-bit fixed point, uint8 (2 N,): -score in steps of 1/4096 nat."""
    steps_N = (-mean_N.double() / _STEP).round().clamp(0, _NO_NUMBER - 1)
    steps_N = steps_N.masked_fill(mean_N.isnan(), _NO_NUMBER)
    return torch.from_numpy(steps_N.to(torch.int64).numpy().astype("<u2").view(np.uint8).copy())


def from_wire(wire: Tensor) -> np.ndarray:
    """(N,) float64 of `to_wire`, the same on every machine."""
    steps_N = wire.numpy().view("<u2")
    return np.where(steps_N == _NO_NUMBER, np.nan, -steps_N.astype(np.float64) * _STEP)


Statistic = Literal["end", "mean"]
DECAY = 0.3
CACHED_SEQUENCES = 100


def following(
    believed_E: Tensor, scores_ET: Tensor, *, first: bool, decay: float = DECAY, statistic: Statistic = "end"
) -> Tensor:
    """log P_n from log P_{n-1} and the scores of sequence n. first: it is the first one, so P_{n-1} leaves no trace."""
    one_E1T = scores_ET[:, None]
    if statistic == "end":
        log_pi = after(one_E1T, believed_E)[:, 0]
    else:
        log_pi = posterior(one_E1T, believed_E).logsumexp((1, 2))  # the mean, but for a constant
    log_pi = log_pi.log_softmax(0)
    if not first and decay < 1:
        log_pi = torch.logaddexp(math.log1p(-decay) + believed_E, math.log(decay) + log_pi)
    return log_pi.log_softmax(0)


def running(scores_ENT: Tensor, *, decay: float = DECAY, statistic: Statistic = "end") -> Tensor:
    """log P_n for n = 0..N, (E, N + 1): column n is what is believed before sequence n; the first is uniform.

    ValueError for a decay outside of (0, 1].
    """
    if not 0 < decay <= 1:
        raise ValueError(f"decay = {decay}: choose more than 0 and at most 1, such as {DECAY}")
    believed = [uniform(len(scores_ENT))]
    for n in range(scores_ENT.shape[1]):
        believed.append(following(believed[-1], scores_ENT[:, n], first=n == 0, decay=decay, statistic=statistic))
    return torch.stack(believed, dim=1)


def cached(scores_ENT: Tensor, *, decay: float = DECAY, statistic: Statistic = "end") -> Tensor:
    """The prior (E,) that sequences of validation text leave behind. ValueError where there is none."""
    if not scores_ENT.shape[1]:
        raise ValueError("a cached prior needs at least one sequence of validation text: raise validation_fraction")
    return running(scores_ENT, decay=decay, statistic=statistic)[:, -1]


def updating(scores_ENT: Tensor, *, decay: float = DECAY, statistic: Statistic = "end") -> Tensor:
    """The prior (E, N) of each sequence, from those before it."""
    return running(scores_ENT, decay=decay, statistic=statistic)[:, :-1]


def parse_prior(shares: str, experts: int) -> Tensor:
    """log P(j) (E,) from shares as a person writes them, "0.2,0.3,0.5". ValueError unless there are `experts` of them,
    each at least 0, that sum to 1.
    """
    try:
        found = torch.tensor([float(share) for share in shares.split(",")], dtype=torch.float64, device="cpu")
    except ValueError:
        found = torch.zeros(0, dtype=torch.float32, device="cpu")
    if len(found) != experts or not abs(float(found.sum()) - 1) < 1e-3 or float(found.min()) < 0:
        raise ValueError(
            f"shares {shares!r}: give {experts} numbers of at least 0 that sum to 1, with commas between them"
        )
    return (found / found.sum()).log()
