"""How well the experts of one SMALLTALK seed do, beside dense models, on every domain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isles.experts import mixture
from isles.experts.domains import DomainText
from isles.experts.routing.assignment import purity
from isles.experts.routing.routing import Gate, growing, route
from isles.experts.served import Served, score
from isles.experts.smalltalk.seed import SmalltalkSeed
from isles.training.records.saved import SavedRun, load_run

DomainScores = dict[str, Tensor]
"""Of the sequences of one or more domains: the scores of "experts" (E, N, T) and of each dense model (N, T), and what
the gate says: "routed" and "prefix-P" (N,), "chances" (E, N) in logs, and the "growing" weights (E, N, T) in logs.
"""


def judge_seed(seed: SmalltalkSeed, texts: Mapping[str, DomainText]) -> dict[str, Any]:
    """Perplexities on all trained domains together and on each one, and how the gate divided them."""
    own, forest = seed.own, seed.forest()
    forest.check()
    forest.save(seed.folder / "forests" / "smalltalk.json")
    gate, experts = seed.gate(), Served.load(forest.experts)
    dense: dict[str, SavedRun] = {form: load_run(seed.folder / f"dense-{form}") for form in own.dense}
    by_domain = {
        name: _scored(seed, gate, experts, dense, text.sequences("test", own.sequences)) for name, text in texts.items()
    }
    trained = [name for name, text in texts.items() if text.domain.trained]
    seen = {key: torch.cat([by_domain[name][key] for name in trained], dim=_axis(key)) for key in by_domain[trained[0]]}
    routed_N = seen["routed"].numpy()
    label_N = np.repeat(np.arange(len(trained)), [len(by_domain[name]["routed"]) for name in trained])
    assignment = seed.assignment()
    pool = seed.pool([texts[name] for name in trained])
    return {
        "trained": _judged(seed, seen),
        "by_domain": {
            name: {**_judged(seed, scored), "alone": [mixture.perplexity(s) for s in scored["experts"]]}
            for name, scored in by_domain.items()
        },
        "routing": {
            "purity_training": purity(assignment.expert_of, pool.label),
            "purity_test": purity(routed_N, label_N),
            "loads_training": assignment.loads,
            "loads_test": np.bincount(routed_N, minlength=own.experts).tolist(),
            "entropy_test": float(-torch.xlogy(seen["chances"].exp(), seen["chances"].exp()).sum(0).mean()),
        },
        "purity_by_round": seed.purity_by_round(),
    }


def _scored(
    seed: SmalltalkSeed, gate: Gate, experts: Served, dense: Mapping[str, SavedRun], tokens: Tensor
) -> DomainScores:
    own = seed.own
    return {
        **{form: score(run, tokens) for form, run in dense.items()},
        **{f"prefix-{length}": route(gate, tokens, length) for length in own.prefixes},
        "experts": experts.scores(tokens),
        "routed": route(gate, tokens, own.prefix),
        "chances": gate.log_chances(gate.scores(tokens, own.prefix)),
        "growing": growing(gate, tokens, len(experts), own.reweigh_every),
    }


def _axis(key: str) -> int:
    """Along which the sequences lie."""
    return 1 if key in ("experts", "chances", "growing") else 0


def _judged(seed: SmalltalkSeed, scored: DomainScores) -> dict[str, Any]:
    """Perplexities on all tokens, and on those after the prefix (None where there are none)."""
    experts_ENT = scored["experts"]
    count, length = experts_ENT.shape[1:]

    def by(expert_of: Tensor) -> Tensor:
        return experts_ENT[expert_of, torch.arange(count, dtype=torch.int64, device="cpu")]

    ways: DomainScores = {form: scored[form] for form in seed.own.dense}
    ways["mixture"] = by(scored["routed"])
    ways |= {key: by(chosen) for key, chosen in scored.items() if key.startswith("prefix-")}
    # All experts by the gate's chances: E times the cost at inference.
    ways["weighted"] = mixture.mix(experts_ENT, mixture.constant(experts_ENT, scored["chances"]))
    ways["growing"] = mixture.mix(experts_ENT, scored["growing"])
    for kept in range(1, min(3, len(experts_ENT))):
        ways[f"growing-{kept}"] = mixture.mix(experts_ENT, mixture.top_k(scored["growing"], kept))
    ways["oracle"] = by(experts_ENT.sum(-1).argmax(0))
    # Another one of the E with equal chances, whatever the text: the mean over all choices.
    ways["random"] = experts_ENT.mean(0)
    behind = seed.own.prefix - 1
    after = {way: mixture.perplexity(scores[:, behind:]) for way, scores in ways.items()} if behind < length else None
    return {"all": {way: mixture.perplexity(scores) for way, scores in ways.items()}, "after_prefix": after}
