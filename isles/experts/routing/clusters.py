"""c-BTM's clusters (arXiv 2303.14177): which expert a text belongs to, by its words; no labels, no routers.

    embed(text) = SVD of tf-idf over words and signs, normalised
    centres     = balanced k-means on one share of the text (assignment by capacity, so clusters are equal in size)
    log P(j)    = log softmax_j (-|embed(text) - centre_j|^2 / tau)

Words are hashed into a fixed number of columns, so nothing but arrays has to be kept. Deviation: no list of stop words.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from isles.data.order import epoch_order
from isles.data.tokenizer import Tokenizer
from isles.experts.routing.assignment import assign

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

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
