"""The report of a run or of a comparison, written from its directory alone. Never loads torch.

from isles.report import write_picture, write_report
print(write_report("runs/demo"))            # runs/demo/report.html
print(write_picture("runs/demo"))           # runs/demo/report.png, its pictures
"""

from __future__ import annotations

from pathlib import Path

from isles.base.durable import no_room, replacing
from isles.report.comparison import INDEX, TUNED, comparison_report, read_comparison, read_tuning, tuning_report
from isles.report.experts import RESULTS, experts_report, read_results
from isles.report.page import Report, run_report
from isles.report.rundir import read_run

__all__ = ["write_picture", "write_report"]


def write_report(folder: str | Path) -> Path:
    """Write `report.html` into a run directory, or into the folder of a comparison or of experts, and return its path.

    Works on a finished run and on one that is still going; numbers are shown in human units (decimal bytes, seconds).
    The page replaces an older one in one move, so a reader never meets half a page.

    Raises ValueError when `folder` is missing or is neither; OSError, which names the page, when it cannot be written.
    """
    folder = Path(folder)
    return settled(folder / "report.html", _read(folder).page.encode())


def write_picture(folder: str | Path) -> Path:
    """Write `report.png` beside the page: its pictures, and for a comparison its table, for mails and slides. Raises as
    `write_report`.
    """
    from isles.report.draw.png import picture

    folder = Path(folder)
    return settled(folder / "report.png", picture(*_read(folder)[1:]))


def _read(folder: Path) -> Report:
    if (folder / INDEX).is_file():
        return comparison_report(read_comparison(folder))
    if (folder / TUNED).is_file():
        return tuning_report(read_tuning(folder))
    if (folder / RESULTS).is_file():
        return experts_report(read_results(folder), folder.resolve().name)
    return run_report(read_run(folder))


def settled(path: Path, data: bytes) -> Path:
    """Write a file in one move; OSError that names it where that fails."""
    try:
        with replacing(path) as partial:
            partial.write_bytes(data)
    except OSError as error:
        raise OSError(f"{path}: {no_room(error) or 'cannot be written to'} ({error.strerror})") from error
    return path
