"""What a system will cost, before it is trained: budgets, FLOPs and bytes by formula. Reads and writes nothing.

The expert systems by name: what their section holds, and the program behind it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from isles.base.errors import unknown_name
from isles.experts import hdee, smalltalk
from isles.experts.domains import TRAINED, Domain, read_domains
from isles.experts.hdee import Hdee, HdeeConfig
from isles.experts.jobs import ExpertJob
from isles.experts.meters import score_bytes
from isles.experts.reading import ExperimentConfig
from isles.experts.smalltalk import SmalltalkConfig
from isles.experts.smalltalk_run import Smalltalk
from isles.experts.system import System
from isles.models import flops_per_token, limits, parameters
from isles.training.config.sections import Config


def planned(asked: ExperimentConfig[Any]) -> dict[str, Any]:
    """JSON-able: {"system", "runs", "flops", "bytes"}, of HDEE also "budget". ValueError for what would be refused."""
    return _hdee(asked) if asked.system == "hdee" else _smalltalk(asked)


def _hdee(asked: ExperimentConfig[hdee.HdeeConfig]) -> dict[str, Any]:
    own, base = asked.own, asked.base
    if asked.domains:
        domains = read_domains(asked.domains, Path(), 0)
    else:
        domains = [Domain(name=f"default-{d}", path="-", difficulty=d) for d in TRAINED]
    made = hdee.plan(own, base, domains, own.seeds[0], Path())
    cells = [hdee.run_group(own, base, variant) for variant in own.variants]
    crossing = hdee.traffic(own, base)
    return {
        "system": "hdee",
        "runs": list(map(_job_record, made.jobs)),
        "budget": {cell.variant: cell.ratio for cell in cells},
        "flops": {"all runs of one seed": sum(job.flops or 0.0 for job in made.jobs)},
        "bytes": {
            "between experts in training": crossing.between_experts,
            "seed to the medium expert's machine": crossing.start[1],
            "medium expert back": crossing.result[1],
            "a scored token, experts apart": crossing.scoring_per_token,
            "a generated token, experts apart": crossing.generating_per_token,
        },
    }


def _smalltalk(asked: ExperimentConfig[SmalltalkConfig]) -> dict[str, Any]:
    own, base = asked.own, asked.base
    context = limits(base.model).context
    smalltalk.check(own, base.model, context)
    jobs = smalltalk.expert_jobs(own, base, Path("segments"), Path("pool"))
    experts = [job for job in jobs if job.role == "expert"]
    found: dict[str, Any] = {
        "system": "smalltalk",
        "runs": list(map(_job_record, jobs)),
        "flops": {
            "experts": sum(job.flops or 0.0 for job in experts),
            "a sequence at inference": float(context * flops_per_token(base.model.shape(), backward=False)),
        },
        "bytes": {"between experts in training": 0, "an expert, at the end": 4 * parameters(base.model.shape())},
    }
    if own.gate == "routers":
        _add_routers(found, own, base, context)
    return found


def _add_routers(found: dict[str, Any], own: SmalltalkConfig, base: Config, context: int) -> None:
    """What the routers add to a SMALLTALK plan; clusters run no model and exchange nothing."""
    routers = smalltalk.router_flops(own, base.model, context)
    drawn = own.experts * own.round_sequences
    scores = score_bytes(drawn, own.experts)
    found["flops"] |= {
        "routers": own.rounds * drawn * (routers.length - 1) * routers.per_token,
        "scoring in the rounds": routers.rounds(own),
        "scoring a million sequences of the pool": 1_000_000 * routers.reading,
        "the routing of a sequence": routers.reading,
    }
    found["bytes"] |= {
        "scores a router sends in a round": scores["sent"],
        "scores a router receives in a round": scores["received"],
        "scores a router makes in a round (the paper's count)": scores["made"],
    }


def _job_record(job: ExpertJob) -> dict[str, Any]:
    return {"name": job.name, "role": job.role, "steps": job.config.run.steps, "tokens": job.tokens, "flops": job.flops}


SYSTEMS: dict[str, tuple[type, type[System[Any]]]] = {
    "hdee": (HdeeConfig, Hdee),
    "smalltalk": (SmalltalkConfig, Smalltalk),
}


def settings(name: str) -> type:
    """The class of the section [name]. ValueError for a system that is not known."""
    if name not in SYSTEMS:
        raise ValueError(unknown_name("system", name, SYSTEMS))
    return SYSTEMS[name][0]


def opened(asked: ExperimentConfig[Any], out: Path) -> System[Any]:
    """The program for a request, in its directory."""
    return SYSTEMS[asked.system][1](asked, out)
