"""The report of a run or of a comparison, written from its directory alone. Never loads torch.

from isles.report import write_picture, write_report
print(write_report("runs/demo"))            # runs/demo/report.html
print(write_picture("runs/demo"))           # runs/demo/report.png, its pictures
"""

from __future__ import annotations

from pathlib import Path

from isles.base.durable import no_room, replacing
from isles.report.comparison import INDEX, TUNED, read_comparison, read_tuning, render_comparison, render_tuning
from isles.report.experts import RESULTS, read_results
from isles.report.experts import render as render_experts
from isles.report.page import render_page
from isles.report.rundir import read_run

__all__ = ["write_picture", "write_report"]


def write_report(folder: str | Path) -> Path:
    """Write `report.html` into a run directory, or into the folder of a comparison or of experts, and return its path.

    Works on a finished run and on one that is still going; numbers are shown in human units (decimal bytes, seconds).
    The page replaces an older one in one move, so a reader never meets half a page.

    Raises ValueError when `folder` is missing or is neither; OSError, which names the page, when it cannot be written.
    """
    folder = Path(folder)
    if (folder / INDEX).is_file():
        text = render_comparison(read_comparison(folder))
    elif (folder / TUNED).is_file():
        text = render_tuning(read_tuning(folder))
    elif (folder / RESULTS).is_file():
        text = render_experts(read_results(folder), folder.resolve().name)
    else:
        text = render_page(read_run(folder))
    return settled(folder / "report.html", text.encode())


def write_picture(folder: str | Path) -> Path:
    """Write `report.png` beside the page: its pictures, and for a comparison its table, for mails and slides. Loads
    matplotlib. ValueError as in `write_report`.
    """
    from isles.report.draw.png import comparison_picture, experts_picture, run_picture, tuning_picture

    folder = Path(folder)
    if (folder / INDEX).is_file():
        data = comparison_picture(read_comparison(folder))
    elif (folder / TUNED).is_file():
        data = tuning_picture(read_tuning(folder))
    elif (folder / RESULTS).is_file():
        data = experts_picture(read_results(folder))
    else:
        data = run_picture(read_run(folder))
    return settled(folder / "report.png", data)


def settled(path: Path, data: bytes) -> Path:
    """Write a file in one move; OSError that names it where that fails."""
    try:
        with replacing(path) as partial:
            partial.write_bytes(data)
    except OSError as error:
        raise OSError(f"{path}: {no_room(error) or 'cannot be written to'} ({error.strerror})") from error
    return path
