"""`isles plan`: what it prints and writes, what it refuses, and that it needs no torch."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from isles import cli
from isles.report import noloco_sheets
from isles.report.planning import presets, sheet


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """plan(*arguments): (exit code, stdout, stderr) of the command, in this process."""

    def ask(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["isles", "plan", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return int(caught.value.code or 0), *capsys.readouterr()

    return ask


def test_table_5_as_json(plan):
    code, out, _ = plan("--preset", "eager-table5", "--json")
    rows = json.loads(out)["rows"]
    assert code == 0 and len(rows) == 24
    needs = {"50": 86.8, "80": 152.6, "90": 184.2, "95": 222.3, "99": 569.0}
    assert rows[0] == {"size": "1B", "method": "Data-Parallel", "bandwidth_gbps": needs}
    assert rows[-1]["size"] == "100B" and rows[-1]["method"] == "1-outer FP4 H100"
    assert list(rows[-1]["bandwidth_gbps"].values()) == [0.2, 0.3, 0.3, 0.3, 0.4]
    assert {row["method"] for row in rows} >= {"DiLoCo H100", "1-inner FP4 H30", "Streaming overlapped bf16"}


def test_table_5_as_people_read_it(plan, tmp_path: Path):
    code, out, _ = plan("--preset", "eager-table5", "--out", str(tmp_path / "new" / "folder"))
    assert code == 0 and "569.0" in out and "note: As printed" in out
    written = {path.suffix: path for path in (tmp_path / "new" / "folder").iterdir()}
    assert set(written) == {".csv", ".json", ".png", ".html"}
    rows = list(csv.reader(io.StringIO(written[".csv"].read_text())))
    assert rows[0] == ["size", "method", "50 %", "80 %", "90 %", "95 %", "99 %"] and len(rows) == 25
    assert rows[1] == ["1B", "Data-Parallel", "86.8", "152.6", "184.2", "222.3", "569.0"]
    page = written[".html"].read_text()
    assert page.count("<svg") == 3 and page.count("<polyline") == 24 and "http" not in page.replace("http-equiv", "")
    assert Image.open(written[".png"]).size[0] == 1300
    assert all(str(path) in out for path in written.values())


def test_json_with_out_keeps_stdout_clean(plan, tmp_path: Path):
    code, out, err = plan("--preset", "eager-table2", "--json", "--out", str(tmp_path))
    assert code == 0 and json.loads(out) == json.loads((tmp_path / "eager-table2.json").read_text())
    assert str(tmp_path / "eager-table2.csv") in err


@pytest.mark.parametrize("name", presets())
def test_every_preset_gives_a_whole_sheet(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(noloco_sheets, "_TREES", 20)  # fewer draws: their size is tested in tests/network
    monkeypatch.setattr(noloco_sheets, "_CROWDS", (2, 16, 64))
    made = sheet(name)
    assert made.name == name and made.table.rows and json.loads(json.dumps(made.data, allow_nan=False))["rows"]
    assert {len(row) for row in made.table.rows} == {len(made.table.heads)}


def test_list_of_presets(plan):
    code, out, _ = plan("--presets")
    assert code == 0 and all(name in out for name in presets())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--preset"),
        (["--preset", "eager-table6"], "did you mean 'eager-table5'"),
        (["--presets", "--json"], "give it alone"),
        (["--preset", "eager-table2", "--out", "/proc/none"], "--out"),
        (["--preset"], "requires an argument"),
    ],
)
def test_a_slip_is_one_line_with_the_mend(plan, arguments, words):
    code, _, err = plan(*arguments)
    assert code == 2 and words in err
    assert err.startswith("isles: ") and err.count("\n") == 1


def test_no_torch():
    code = (
        "import sys; from isles import cli; sys.argv = ['isles', 'plan', '--preset', 'noloco-quadratic', '--json']\n"
        "try: cli.main()\nexcept SystemExit: pass\nprint('torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr == "False\n" and json.loads(done.stdout)["rows"]
