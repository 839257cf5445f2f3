"""One expert's training as an ordinary run: trained once, gone on with where it stopped, and described.

ExpertJob -> run.launch (any replica method, any workers) -> FOLDER/NAME/ (a run directory) + expert.json

A job's name says all that decides its weights within its folder, so two experts never share a run directory, and
systems that need the same expert share the run. Nothing crosses between jobs but the weights that one starts from.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from isles.experts.averages import make_average
from isles.models import flops_per_token, limits
from isles.parsing import parse_json
from isles.training.config.reading import read_config
from isles.training.config.sections import Config
from isles.training.records.checkpoint import Checkpoints
from isles.training.records.reshard.prepare import prepare
from isles.training.records.rundir import CONFIG, METRICS, SUMMARY, TIMELINE, held
from isles.training.running.run import launch

CARD, WEIGHTS = "expert.json", "model.safetensors"
# What may differ where a run was made on another machine: where things lie, and how its workers were run.
_PLACES = {"data": ("path", "cache"), "run": ("start", "loggers")}


@dataclass(frozen=True, kw_only=True)
class ExpertJob:
    """name: of the run directory. config: the whole run. role: "seed", "expert", "random" or "dense". domains: what the
    weights have seen since the seed, in order. parents: names of the jobs of the same folder whose average, by their
    posterior on the job's text, it starts from (`averages`; `run.start` says where that average lies).
    """

    name: str
    config: Config
    role: str
    domains: tuple[str, ...] = ()
    parents: tuple[str, ...] = ()

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the jobs that must be done before, all of the same folder."""
        start = self.config.run.start
        return self.parents or ((Path(start).name,) if start else ())

    @property
    def flops(self) -> float | None:
        """Training FLOPs by formula; None for a model of the user's own."""
        model = self.config.model
        return None if model.own is not None else float(flops_per_token(model.shape())) * self.tokens

    @property
    def tokens(self) -> int:
        config, context = self.config, limits(self.config.model).context
        sequences = config.data.batch_size_per_worker(config.world.workers) * config.world.workers
        return config.run.steps * sequences * config.inner.accumulation * context


class JobProgress:
    """What a person is told while jobs run; the command line shows it. Every call may be ignored."""

    def begin(self, name: str, workers: int, steps: int) -> None:
        """A run begins; several may be under way."""

    def line(self, name: str, line: dict[str, Any]) -> None:
        """A line of its metrics."""

    def end(self, name: str) -> None:
        """It ended."""

    def notice(self, text: str) -> None:
        """A remark."""


def configured(base: Config, *, steps: int, path: str, **sections: dict[str, Any]) -> Config:
    """`base` for a run of `steps` on the text of `path`, with other keys in some sections."""
    changes = {"data": {"path": path}, "run": {"steps": steps}}
    merged = {name: {**changes.get(name, {}), **sections.get(name, {})} for name in {*changes, *sections}}
    if getattr(base.replicas, "seed", None) == base.run.seed and "seed" in merged["run"]:
        merged["replicas"] = {"seed": merged["run"]["seed"]}  # it was not given apart, so it follows
    return replace(base, **{name: replace(getattr(base, name), **keys) for name, keys in merged.items()})


def train(job: ExpertJob, folder: Path, progress: JobProgress) -> dict[str, Any]:
    """The job's summary: of the run that is there already, or that is trained (on) now. ValueError where the directory
    holds a run of other settings. KeyboardInterrupt as in `launch`, with a checkpoint.
    """
    out = folder / job.name
    if (out / SUMMARY).is_file():
        _refuse_other(job, out)
        if not (out / WEIGHTS).is_file():
            raise ValueError(f"{out}: no {WEIGHTS} beside {SUMMARY}; copy the whole directory there, or remove it")
        return _carded(job, out)
    steps = Checkpoints(out).steps()
    if steps:
        _refuse_other(job, out)
    elif out.exists():  # cut off before its first checkpoint; held: ValueError while it still goes on
        with held(out):
            for name in (METRICS, TIMELINE, CONFIG):
                (out / name).unlink(missing_ok=True)
    if job.parents:
        make_average(job.parents, folder, Path(job.config.run.start), job.config.data)
    name = f"{folder.name}/{job.name}"
    progress.begin(name, job.config.world.workers, job.config.run.steps)
    resume = prepare(out, None).step if steps else None
    launch(job.config, out, partial(progress.line, name), progress.notice, resume)
    progress.end(name)
    return _carded(job, out)


def state(job: ExpertJob, folder: Path) -> str:
    """ "done", "stopped at step N", "waiting", or what is missing of a run that was done."""
    out = folder / job.name
    if (out / SUMMARY).is_file():
        return "done" if (out / WEIGHTS).is_file() else f"without {WEIGHTS}"
    steps = Checkpoints(out).steps()
    return f"stopped at step {steps[-1]}" if steps else "waiting"


def weights_sha256(run: Path) -> str:
    """Of model.safetensors; equal for equal weights."""
    with (run / WEIGHTS).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _carded(job: ExpertJob, out: Path) -> dict[str, Any]:
    summary = parse_json((out / SUMMARY).read_text(encoding="utf-8"))
    start = job.config.run.start
    facts = {
        "name": job.name,
        "role": job.role,
        "domains": list(job.domains),
        "tokens": summary["tokens"],
        "parameters": summary["parameters"],
        "flops": job.flops,
        "seed_sha256": weights_sha256(Path(start)) if start and (Path(start) / WEIGHTS).is_file() else None,
        "sha256": weights_sha256(out),
        "bytes_to_other_experts": 0,
    }
    if not (out / CARD).exists():
        (out / CARD).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    return {**summary, **facts}


def _refuse_other(job: ExpertJob, out: Path) -> None:
    there = read_config(str(out / CONFIG), {}, [])
    if _essence(there) != _essence(job.config):
        raise ValueError(f"{out}: holds a run of other settings; name another --out, or remove that directory")


def _essence(config: Config) -> dict[str, Any]:
    sections: dict[str, Any] = asdict(config)
    return sections | {
        section: {key: value for key, value in sections[section].items() if key not in keys}
        for section, keys in _PLACES.items()
    }
