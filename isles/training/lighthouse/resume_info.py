"""Where a run's lighthouse stood and how many workers it started, for `isles resume`: RUN/lighthouse.json."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from isles.base.durable import write_text
from isles.base.parsing import Int, Port, Str, parse_json, read
from isles.training.records.rundir import as_json

NAME = "lighthouse.json"


@dataclass(frozen=True, kw_only=True)
class Stand:
    """host, port: as workers reach it. workers: started on this machine too."""

    host: Str
    port: Port
    workers: Annotated[Int, Field(ge=0)]

    def write(self, out: Path) -> None:
        write_text(out / NAME, as_json(asdict(self)) + "\n")


def read_stand(out: Path) -> Stand:
    """Read the stand of the run in `out`. ValueError, in one line, where its file is missing or damaged."""
    hint = f"start it with: isles lighthouse {out} --host HOST --port PORT"
    try:
        return read(Stand, parse_json((out / NAME).read_bytes()))
    except OSError:
        raise ValueError(f"{out / NAME}: is missing, so the lighthouse's address is not known; {hint}") from None
    except ValueError:
        raise ValueError(f"{out / NAME}: is damaged; {hint}") from None
