"""What a lighthouse knows of its run.

It reads the run's whole configuration itself, as any worker does. Settings stand apart from the code that they are for,
so that loads no torch: 200 MB that a lighthouse would hold for as long as its run goes on. A method or a model of one's
own is imported, and brings it.
"""

from __future__ import annotations

from dataclasses import dataclass

from isles.comm.elastic.orders import Rules
from isles.pipeline.config import PipelineConfig
from isles.training.config.reading import Tables, to_toml
from isles.training.config.sections import Config, RunConfig
from isles.training.config.world import WorldConfig
from isles.training.elastic.terms import elastic, rules


@dataclass(frozen=True, kw_only=True)
class Charter:
    """text: the whole configuration as TOML, which joiners get. rules: what follows from it, and from its method, for
    who is in which round.
    """

    text: str
    method: str
    world: WorldConfig
    run: RunConfig
    pipeline: PipelineConfig
    rules: Rules

    @property
    def replicas_in_all(self) -> int:
        """Replicas that the run begins with."""
        return self.rules.founders


def drawn_up(tables: Tables) -> Charter:
    """Of the run that `tables` ask for; what there is to warn of is warned of. ValueError, with the key and the mend,
    where workers cannot come and go in it.
    """
    return charter_of(elastic(tables))


def charter_of(config: Config) -> Charter:
    """All that the lighthouse of `config` is started with."""
    return Charter(
        text=to_toml(config),
        method=config.method,
        world=config.world,
        run=config.run,
        pipeline=config.pipeline,
        rules=rules(config),
    )
