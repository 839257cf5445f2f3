"""The picture beside the page: drawn from the same series, whatever of them there is."""

from __future__ import annotations

import io
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image, ImageChops

from isles.report import write_picture, write_report
from isles.report.draw.png import picture
from isles.report.draw.style import LIGHT
from isles.report.panels import Chart, Panel, Table
from tests.report.sample import write_records, write_sample


def colours(image: Image.Image) -> Counter[tuple[int, int, int]]:
    """How many pixels have each colour."""
    image = image.convert("RGB")
    return Counter({colour: count for count, colour in image.getcolors(maxcolors=image.width * image.height) or []})


def rgb(name: str) -> tuple[int, int, int]:
    text = LIGHT[name].removeprefix("#")
    return int(text[:2], 16), int(text[2:4], 16), int(text[4:], 16)


@pytest.mark.long
def test_a_run_is_drawn_whole(tmp_path: Path) -> None:
    """Every look that the page has is there; the same run gives the same bytes."""
    write_sample(tmp_path, workers=3, steps=60)
    bare = Image.open(write_picture(tmp_path)).size
    write_records(tmp_path, workers=3)
    path = write_picture(tmp_path)
    assert path == tmp_path / "report.png"
    found = colours(Image.open(path))
    assert all(found[rgb(name)] > 20 for name in ("mean", "dot", "ddp", "rate", "compute", "blocked", "transfer"))
    assert found[rgb("compute")] > 5 * found[rgb("blocked")] > 0
    width, height = Image.open(path).size
    assert width == bare[0] and height > bare[1]  # the spread and the lanes came in addition
    first = path.read_bytes()
    assert write_picture(tmp_path).read_bytes() == first
    assert not list(tmp_path.glob("report.png.*"))


def test_a_run_with_next_to_nothing(tmp_path: Path) -> None:
    write_sample(tmp_path, workers=1, steps=1, finished=False)
    (tmp_path / "metrics.jsonl").write_text("")
    assert Image.open(write_picture(tmp_path)).size[0] > 1000


@pytest.mark.parametrize("columns", [12, 0])
def test_no_words_are_cut(columns: int) -> None:
    """The edge stays free beside a long heading, line, legend and table: each still has room."""
    keys = [("mean", "a line of words"), ("dot", "and of dots")] * 8
    panel = Panel(heading="Loss", picture=Chart(title="Loss", x_label="step", lines=[]), keys=keys)
    table = Table(heads=["method", *["validation loss"] * columns], rows=[["noloco", *["4.0335 ± 0.1531"] * columns]])
    drawn = picture("WORDS of a heading " * 5, "words of a long line " * 20, [panel], table if columns else None)
    image = Image.open(io.BytesIO(drawn)).convert("RGB")
    inner = ImageChops.difference(image, Image.new("RGB", image.size, LIGHT["back"])).getbbox()
    assert inner is not None and inner[0] >= 29 and inner[1] >= 29
    assert inner[2] <= image.width - 29 and inner[3] <= image.height - 29
    assert colours(image)[rgb("text")] > 20 and image.width > columns * 15 * 6  # letters are more than 6 pixels wide


def test_characters_that_xml_has_not_are_question_marks() -> None:
    assert picture("a\x01b\x1b[2J", "\x00", []) == picture("a?b?[2J", "?", [])


def test_what_is_no_run_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no run directory"):
        write_picture(tmp_path / "absent")


CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)


@pytest.mark.skipif(not CHROMIUM, reason="no Chromium here: the page is not looked at in a browser")
def test_a_browser_shows_the_page(tmp_path: Path) -> None:
    """What the style sheet and the SVG promise arrives as pixels."""
    write_sample(tmp_path, workers=2, steps=60)
    write_records(tmp_path, workers=2)
    shot = tmp_path / "shot.png"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=900,2600"]
    command = [CHROMIUM, *options, f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={shot}"]
    subprocess.run([*command, write_report(tmp_path).as_uri()], check=True, capture_output=True, timeout=60)
    found = colours(Image.open(shot))
    assert all(found[rgb(name)] > 20 for name in ("mean", "dot", "ddp", "rate", "compute", "blocked", "transfer"))
