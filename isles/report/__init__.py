"""The report of a run: one self-contained HTML page, written from the run directory alone. Never loads torch.

from isles.report import write_report
print(write_report("runs/demo"))            # runs/demo/report.html
"""

from __future__ import annotations

import os
from pathlib import Path

from isles.report.page import render_page
from isles.report.rundir import read_run

__all__ = ["write_report"]


def write_report(run_dir: str | Path) -> Path:
    """Write `report.html` into a run directory and return its path.

    Works on a finished run and on one that is still going; numbers are shown in human units (decimal bytes, seconds).
    The page replaces an older one in one move, so a reader never meets half a page.

    Raises ValueError when `run_dir` is missing or is not a run directory.
    """
    run = read_run(run_dir)
    page = run.path / "report.html"
    unfinished = run.path / f"report.html.{os.getpid()}"
    unfinished.write_text(render_page(run), encoding="utf-8")
    os.replace(unfinished, page)
    return page
