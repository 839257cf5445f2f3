"""What HDEE and SMALLTALK share as programs: a directory, its texts, its jobs, going on where it stopped."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from isles.experts.domains import Domain, DomainText, keep_texts, known_texts, read_domains
from isles.experts.evaluation import mean_of
from isles.experts.jobs import ExpertJob, ExpertTask, JobProgress, run_tasks, state, train
from isles.experts.reading import ExperimentConfig, keep, make_directory, refuse_others
from isles.models import limits
from isles.models.factory import placement

RESULTS = "results.json"
Own = TypeVar("Own")


class System(ABC, Generic[Own]):
    """One directory of experts. ValueError where the words cannot be met; nothing is trained before that is known."""

    held_out: tuple[str, ...] = ()
    """Default domains that are only evaluated."""

    def __init__(self, asked: ExperimentConfig[Own], out: Path) -> None:
        self.asked, self.own, self.base, self.out = asked, asked.own, asked.base, out
        self.context = limits(asked.base.model).context
        self.check()
        refuse_others(asked, out)
        if not asked.domains:
            make_directory(out)  # the default ones are written there
        characters: int = self.own.characters  # type: ignore[attr-defined]
        self.domains: list[Domain] = read_domains(asked.domains, out / "domains", characters, self.held_out)

    def __reduce__(self) -> tuple[Any, ...]:
        """A process of its own gets the words, and reads the texts itself."""
        return type(self), (self.asked, self.out)

    @cached_property
    def texts(self) -> dict[str, DomainText]:
        """The text of every domain, read when it is first asked for. ValueError where one is (nearly) empty, or
        another one than OUT was made with.
        """
        return self._read(self.domains)

    def _read(self, domains: Iterable[Domain]) -> dict[str, DomainText]:
        known = known_texts(self.out)
        texts = {domain.name: DomainText(domain, self.base.data, self.context) for domain in domains}
        for name, text in texts.items():
            if known.get(name, text.corpus.sha256) != text.corpus.sha256:
                raise ValueError(
                    f"domain {name!r}: {text.domain.path} holds another text than {self.out} was made with: put that "
                    "one back, or name another --out"
                )
        return texts

    def _bind(self, texts: Mapping[str, DomainText]) -> None:
        """From now on OUT is of these settings and texts."""
        keep(self.asked, self.out)
        keep_texts(self.out, {name: text.corpus.sha256 for name, text in texts.items()})

    @property
    def trained(self) -> list[DomainText]:
        """The texts that are trained on."""
        return [text for text in self.texts.values() if text.domain.trained]

    def check(self) -> None:
        """ValueError where the settings cannot work; before the first file is written."""

    def remarks(self) -> list[str]:
        """What works, but may not be what was meant; told before the first run."""
        return []

    @abstractmethod
    def placed_jobs(self) -> list[tuple[str, ExpertJob]]:
        """(folder below OUT, job) of every run, in an order in which each finds what it starts from."""

    def prepare(self, folder: str, progress: JobProgress) -> None:
        """Make the texts in `folder` (below OUT) that its jobs read."""

    @abstractmethod
    def evaluate(self, progress: JobProgress) -> dict[str, Any]:
        """Judge what was trained, write forests and OUT/results.json."""

    def jobs(self) -> dict[str, tuple[ExpertJob, str]]:
        """(job, state) of every run by its path below OUT."""
        return {f"{folder}/{job.name}": (job, state(job, self.out / folder)) for folder, job in self.placed_jobs()}

    def train(self, progress: JobProgress, only: Sequence[str] = (), at_once: int = 1) -> bool:
        """Train what is not done yet, `at_once` runs at a time; with `only` these jobs alone (paths below OUT), for
        which no more has to be here than what they read: their text, and the run that they start from. True when all
        are done.

        ValueError: unknown job, an empty domain, one whose text has changed, or the run that a job starts from is not
        there. Only when these are known to be well does OUT belong to these settings.
        """
        jobs = self.jobs()
        for name in only:
            if name not in jobs:
                raise ValueError(f"--job {name}: no such run; --jobs lists them")
        if not only:
            for remark in self.remarks():
                progress.notice(remark)
        wanted = {name: job for name, (job, _) in jobs.items() if not only or name in only}
        tasks = self._tasks(wanted)
        paths = {job.config.data.path for job in wanted.values()}
        # All of them: an empty domain is found before hours are spent on the others.
        self._bind(self._read(domain for domain in self.domains if domain.path in paths) if only else self.texts)
        progress.notice(f"device: {placement(self.base.model, self.base.world.workers)}")
        run_tasks(tasks, at_once, progress)
        return all(state == "done" for _, state in self.jobs().values())

    def _tasks(self, wanted: Mapping[str, ExpertJob]) -> list[ExpertTask]:
        """The wanted runs, and before them the texts that are not there yet. ValueError as in `train`."""
        runs: list[ExpertTask] = []
        unmade: set[str] = set()
        for name, job in wanted.items():
            folder = (self.out / name).parent
            needs = {f"{folder.name}/{need}": folder / need for need in job.needs}
            for need, run in needs.items():
                start = Path(job.config.run.start)
                if not any(need in wanted or (one / "model.safetensors").is_file() for one in (run, start)):
                    raise ValueError(f"{name} starts from {run}, which is not there: train it, or copy it there, first")
            if (path := Path(job.config.data.path)).is_relative_to(folder) and not path.exists():
                unmade.add(folder.name)
            runs.append(ExpertTask(name=name, work=partial(train, job, folder), needs=(folder.name, *needs)))
        texts = [ExpertTask(name=folder, work=partial(self.prepare, folder)) for folder in sorted(unmade)]
        return [*texts, *runs]

    def write_results(self, records: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """Keep what was measured, a record a seed and `more`, and give it back."""
        results = {
            "system": self.asked.system,
            "seeds": list(self.own.seeds),  # type: ignore[attr-defined]
            "domains": [{"name": domain.name, "difficulty": domain.difficulty} for domain in self.domains],
            "mean": mean_of(records),
            "by_seed": records,
            **more,
        }
        (self.out / RESULTS).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        return results
