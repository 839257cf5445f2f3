"""`by_file`: disjoint shares of the documents, one a worker."""

from __future__ import annotations

import numpy as np


def document_shares(bounds: np.ndarray, workers: int) -> np.ndarray:
    """(workers + 1,) token offsets; worker w holds the documents in [offsets[w], offsets[w + 1]).

    Shares are runs of neighbouring documents, cut at the document bounds nearest to an even division of the tokens;
    every worker gets at least one document. Neighbours in path order are alike, so shares differ in kind: that is what
    `by_file` is for. `bounds`: (D + 1,), as in a TokenStream. ValueError: fewer documents than workers.
    """
    documents = len(bounds) - 1
    if documents < workers:
        raise ValueError(
            f'data.split = "by_file" cannot share {documents} documents among {workers} workers; use data.split = '
            '"iid", fewer workers or more files'
        )
    cuts = [0]
    for worker in range(1, workers):
        even = bounds[-1] * worker / workers
        above = int(np.searchsorted(bounds, even))
        nearest = above if bounds[above] - even < even - bounds[above - 1] else above - 1
        cuts.append(min(max(nearest, cuts[-1] + 1), documents - (workers - worker)))
    cuts.append(documents)
    return np.asarray(bounds)[cuts]
