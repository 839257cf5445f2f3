"""What a lighthouse knows of its run. It knows no method, so it loads neither that nor torch.

    tables -> a process of its own: resolves and checks them, as that of any run, and ends -> Charter

The settings of a method stand beside its code, perhaps somebody's own, and every method loads torch: hundreds of
megabytes that a lighthouse would hold for as long as its run goes on.
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from isles.comm.elastic.orders import Rules
from isles.parsing import parse_json, parse_toml
from isles.pipeline.config import PipelineConfig
from isles.training.config.reading import Tables, sections
from isles.training.config.sections import RunConfig, WorldConfig

REFUSED = 2
"""Exit code of that process where the tables cannot be such a run; the line is what it printed."""
_LONGEST = 120.0  # seconds; torch takes a few


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


def draw_up(text: str, rules: Rules) -> Charter:
    """The charter of the run whose whole configuration is `text`."""
    tables = parse_toml(text)
    parts = {name: part for name, part in sections(tables).items() if name in ("world", "run", "pipeline")}
    return Charter(text=text, method=tables["replicas"]["method"], rules=rules, **parts)


def drawn_up(tables: Tables) -> Charter:
    """Of the run that `tables` ask for; what there is to warn of is warned of. ValueError, with the key and the mend,
    where workers cannot come and go in it.
    """
    module = "isles.training.elastic.lighthouse.drawing_up"
    try:
        done = subprocess.run(
            [sys.executable, "-m", module],
            input=json.dumps(tables),
            stdout=subprocess.PIPE,
            text=True,
            timeout=_LONGEST,
            check=False,
            process_group=0,  # Ctrl-C reaches this process alone, which ends the other
        )
    except subprocess.TimeoutExpired:
        raise OSError(f"the configuration took more than {_LONGEST:g} s: has this machine too little memory?") from None
    if done.returncode == REFUSED:
        raise ValueError(done.stdout.strip())
    if done.returncode:
        raise OSError(f"the process that reads the configuration ended with code {done.returncode}")
    told = parse_json(done.stdout)
    for line in told["warnings"]:
        warnings.warn(line, stacklevel=2)
    return draw_up(told["text"], Rules(**told["rules"]))


def as_told(text: str, rules: Rules, warned: Sequence[str]) -> Mapping[str, Any]:
    """What that process prints, as JSON."""
    return {"text": text, "rules": asdict(rules), "warnings": list(warned)}
