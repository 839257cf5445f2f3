"""A forest on disk: which experts are served together, as JSON beside their run directories.

    OUT/forests/m-ho-i-he.json    {"format": 1, "system": "hdee", "experts": [{"name", "run", "domains", ...}], ...}

Paths are relative to the file, so a folder may be moved or put together from several machines. An expert is a finished
run directory of `isles train` (config.toml, model.safetensors, summary.json); nothing else is needed to serve it.

`Served`: a forest with its models in memory, which scores sequences by each expert and by all.

tokens (N, T + 1)  --every expert-->  scores (E, N, T)  --mixture-->  perplexity
tokens (N, T)      --every expert, mixture-->  log-probabilities of the next token (N, V)  --generate-->  text
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isles.base.durable import write_text
from isles.base.parsing import parse_json
from isles.data import load_tokenizer
from isles.data.tokenizer import Tokenizer
from isles.experts import mixture
from isles.models import limits
from isles.training.config.reading import read_config
from isles.training.records.saved_run import SavedRun, load_saved

_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class ForestMember:
    """One expert. run: its directory. domains: what it was trained on, in order; empty where that was not by domain."""

    name: str
    run: Path
    domains: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Forest:
    """Experts that are served together. system: "hdee" (a posterior over all) or "smalltalk" (routers choose one).

    routers: as many as experts, in their order, where these choose; clusters: the file of the centres, where those do.
    prefix: tokens that either reads.
    """

    system: str
    experts: tuple[ForestMember, ...]
    routers: tuple[ForestMember, ...] = ()
    prefix: int = 0
    clusters: Path | None = None

    def __post_init__(self) -> None:
        names = [member.name for member in self.experts]
        if not names:
            raise ValueError("a forest without experts: name at least one finished run")
        if len(set(names)) < len(names):
            raise ValueError(f"a forest with two experts of one name ({', '.join(names)}): rename one")
        if self.routers and len(self.routers) != len(self.experts):
            raise ValueError(f"{len(self.routers)} routers for {len(self.experts)} experts: one each is needed")

    @property
    def gated(self) -> bool:
        """Whether a gate chooses among the experts; else all are mixed."""
        return bool(self.routers) or self.clusters is not None

    def check(self) -> None:
        """ValueError where an expert or router is not there as a finished run."""
        for member in (*self.experts, *self.routers):
            if not (member.run / "model.safetensors").is_file():
                raise ValueError(
                    f"expert {member.name!r} is missing: no model.safetensors in {member.run}; copy its run directory "
                    "there, or train it"
                )

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)

        def index(file: Path) -> str:
            return Path(os.path.relpath(file, path.parent)).as_posix()

        def member_record(member: ForestMember) -> dict[str, Any]:
            return {**asdict(member), "run": index(member.run)}

        record = {
            "format": _FORMAT,
            "system": self.system,
            "prefix": self.prefix,
            "experts": list(map(member_record, self.experts)),
            "routers": list(map(member_record, self.routers)),
            "clusters": None if self.clusters is None else index(self.clusters),
        }
        write_text(path, json.dumps(record, indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> Forest:
        """What `save` wrote. ValueError where it is missing or damaged, or an expert is."""
        try:
            record = parse_json(path.read_text(encoding="utf-8"))
            if record["format"] != _FORMAT:
                raise ValueError(f"format {record['format']} instead of {_FORMAT}")

            def member(entry: dict[str, Any]) -> ForestMember:
                return ForestMember(name=entry["name"], run=path.parent / entry["run"], domains=tuple(entry["domains"]))

            forest = cls(
                system=record["system"],
                prefix=record["prefix"],
                experts=tuple(map(member, record["experts"])),
                routers=tuple(map(member, record["routers"])),
                clusters=None if record.get("clusters") is None else path.parent / record["clusters"],
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: no forest can be read there ({error}); name the file of a forest") from error
        forest.check()
        return forest


def forest_of(runs: Sequence[Path]) -> Forest:
    """Finished runs as a forest, named like their directories."""
    forest = Forest(system="hdee", experts=tuple(ForestMember(name=run.resolve().name, run=run) for run in runs))
    forest.check()
    return forest


BATCH = 32  # sequences a forward pass

Weigh = Callable[[Tensor, Tensor], Tensor]


class Served:
    """Experts of any sizes with one tokenizer. ValueError where their tokenizers or vocabularies differ.

    context: the longest sequence that all of them can score, in tokens.
    """

    def __init__(self, names: Sequence[str], runs: Sequence[SavedRun]) -> None:
        self.names, self.runs = list(names), list(runs)
        first = self.runs[0]
        for name, run in zip(self.names[1:], self.runs[1:], strict=True):
            if run.tokenizer.fingerprint != first.tokenizer.fingerprint:
                raise ValueError(
                    f"experts {self.names[0]!r} ({first.tokenizer.name}) and {name!r} ({run.tokenizer.name}) have "
                    "different tokenizers: probabilities can only be mixed token by token; train one of them again"
                )
            mine, theirs = limits(first.config.model).vocab, limits(run.config.model).vocab
            if mine != theirs:
                raise ValueError(
                    f"experts {self.names[0]!r} and {name!r} have vocabularies of {mine} and {theirs} ids: set one "
                    "model.vocab for all"
                )
        self.tokenizer = first.tokenizer
        self.context = min(run.context for run in self.runs)

    @classmethod
    def load(cls, members: Sequence[ForestMember]) -> Served:
        """The models of `members`. ValueError where one is missing or damaged."""
        return cls([member.name for member in members], [load_saved(member.run) for member in members])

    def __len__(self) -> int:
        return len(self.runs)

    def only(self, indices: Sequence[int]) -> Served:
        """Some of the experts, in that order; the models are shared."""
        return Served([self.names[index] for index in indices], [self.runs[index] for index in indices])

    @torch.no_grad()
    def scores(self, tokens: Tensor) -> Tensor:
        """(E, N, T) float64 log-probabilities of each token of (N, T + 1) behind the first, given those before."""
        self._check(tokens.shape[1] - 1)
        return torch.stack([score(run, tokens) for run in self.runs])

    @torch.no_grad()
    def next_token(self, tokens: Tensor, log_prior: Tensor, weigh: Weigh = mixture.posterior) -> Tensor:
        """(N, V) float64: log of the mixed distribution of what follows (N, T). Experts at log 0 in the prior (E,) do
        not run. weigh: `mixture.posterior`, `last_token` or `constant`.
        """
        self._check(tokens.shape[1])
        indices = (log_prior > mixture.NEVER).nonzero()[:, 0].tolist()
        logs_ENTV = torch.stack([F.log_softmax(_wide(self.runs[index].logits(tokens)), -1).cpu() for index in indices])
        seen_ENT = logs_ENTV[:, :, :-1].gather(-1, tokens[None, :, 1:, None].expand(len(indices), -1, -1, 1))[..., 0]
        # One column more, for the token that comes: its weights are what the tokens before it left.
        weights_ENT = weigh(F.pad(seen_ENT.double(), (0, 1)), log_prior[indices])
        return mixture.mix(logs_ENTV[:, :, -1].double(), weights_ENT[:, :, -1, None])

    def logits(self, log_prior: Tensor) -> Callable[[Tensor], Tensor]:
        """`next_token` in the form that `isles.models.factory` calls: (1, T) to (1, 1, V)."""
        return lambda tokens: self.next_token(tokens, log_prior)[:, None]

    def average(self, weights: Sequence[float]) -> dict[str, Tensor]:
        """One set of parameters, sum_j w_j theta_j (BTM's): for experts of one shape that come from one seed.

        ValueError where the shapes differ, or the weights are not one each with sum 1.
        """
        if len(weights) != len(self) or abs(sum(weights) - 1) > 1e-6 or min(weights) < 0:
            raise ValueError(f"weights {list(weights)}: give {len(self)} shares of at least 0 that sum to 1")
        states: list[Mapping[str, Tensor]] = [run.model.state_dict() for run in self.runs]
        shapes = [{name: tensor.shape for name, tensor in state.items()} for state in states]
        for name, shape in zip(self.names[1:], shapes[1:], strict=True):
            if shape != shapes[0]:
                raise ValueError(
                    f"experts {self.names[0]!r} and {name!r} have different shapes: parameters can only be averaged "
                    "between equal models; mix their probabilities instead"
                )
        return {
            name: sum(
                (w * state[name].double() for w, state in zip(weights, states, strict=True)),
                torch.zeros((), dtype=torch.float32, device="cpu"),
            ).to(tensor.dtype)
            for name, tensor in states[0].items()
        }

    def _check(self, length: int) -> None:
        if length > self.context:
            raise ValueError(
                f"a sequence of {length} tokens is longer than the experts' shortest context of {self.context}; cut it"
            )


def tokenizer_of(member: ForestMember) -> Tokenizer:
    """An expert's, without its model. ValueError where it is missing."""
    data = read_config(str(member.run / "config.toml"), {}, []).data
    return load_tokenizer(data.tokenizer, data.vocab)


@torch.no_grad()
def score(run: SavedRun, tokens: Tensor) -> Tensor:
    """(N, T) float64 scores of (N, T + 1) by one model."""
    found = []
    for batch in tokens.split(BATCH):
        logits = _wide(run.logits(batch[:, :-1]))
        targets = batch[:, 1:].to(logits.device)
        found.append(-F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape))
    return torch.cat(found).double().cpu()


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
