"""The ridge gate (as in DUME and IR3DE): which expert a text belongs to, by a linear map of its tokens' embeddings.

    A = sum_tokens x x^T,   B[:, j] = sum of x over the tokens of expert j's text;   W = (A + lambda I)^-1 B

with x a token's embedding and a 1; the columns of W are normalised. A text's tokens each vote for the largest entry of
x W, and the expert with most votes answers (equal: the lower number). No training: the sums are taken in one pass, and
an expert comes or goes by adding or subtracting its part. As x depends on the token alone, counts of tokens are enough.
"""

from __future__ import annotations

import numpy as np

LAMBDA = 1e-2


class RidgeGate:
    """embeddings: (V, D), of any one model that all agree on (the seed's)."""

    def __init__(self, embeddings: np.ndarray) -> None:
        ones = np.ones((len(embeddings), 1))
        self.features_VF = np.concatenate([embeddings.astype(np.float64), ones], axis=1)
        self.counts: dict[str, np.ndarray] = {}

    def add(self, name: str, tokens: np.ndarray) -> None:
        """An expert, by text that it was trained on: token ids of any shape. ValueError where there are none."""
        if not tokens.size:
            raise ValueError(f"expert {name!r}: no text to know it by; give some")
        self.counts[name] = np.bincount(tokens.ravel(), minlength=len(self.features_VF)).astype(np.float64)

    def weights(self) -> np.ndarray:
        """W (F, E), in the order in which the experts came."""
        counts_VE = np.stack(list(self.counts.values()), axis=1)
        weighted_VF = self.features_VF * counts_VE.sum(1)[:, None]
        gram_FF = self.features_VF.T @ weighted_VF + LAMBDA * np.eye(self.features_VF.shape[1])
        solved_FE = np.linalg.solve(gram_FF, self.features_VF.T @ counts_VE)
        return solved_FE / np.linalg.norm(solved_FE, axis=0, keepdims=True)

    def route(self, tokens_NT: np.ndarray) -> np.ndarray:
        """(N,) the expert of each sequence."""
        choice_V = (self.features_VF @ self.weights()).argmax(1)
        votes_NE = (choice_V[tokens_NT][..., None] == np.arange(len(self.counts))).sum(1)
        return votes_NE.argmax(1)
