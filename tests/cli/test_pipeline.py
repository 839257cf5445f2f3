"""`isles pipeline plan` and `check`: what they print and write, what they refuse, and that they need no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

from isles import cli
from isles.cli.pipeline import _message_bytes
from isles.network.routing.plan import read_plan
from isles.report.draw import png

LINKS = """
bandwidth = [
  ["0", "8Mbit/s", "2Mbit/s", "4Mbit/s", "8Mbit/s", "1Mbit/s"],
  ["8Mbit/s", "0", "4Mbit/s", "4Mbit/s", "2Mbit/s", "8Mbit/s"],
  ["2Mbit/s", "4Mbit/s", "0", "8Mbit/s", "8Mbit/s", "8Mbit/s"],
  ["4Mbit/s", "4Mbit/s", "8Mbit/s", "0", "4Mbit/s", "2Mbit/s"],
  ["8Mbit/s", "2Mbit/s", "8Mbit/s", "4Mbit/s", "0", "4Mbit/s"],
  ["1Mbit/s", "8Mbit/s", "8Mbit/s", "2Mbit/s", "4Mbit/s", "0"],
]
latency = "50ms"
"""
ASKED = ["--stages", "0,1/2,3/4,5", "--path-length", "2", "--forward", "200ms", "--bytes", "100k"]
ASKED += ["--memory", "2", "--time-budget-s", "0.5"]


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, request):
    """pipeline(*arguments): (exit code, stdout, stderr) of the command, in this process and in a folder of its own.
    As "drawn" it writes its picture too.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "links.toml").write_text(LINKS)
    if not getattr(request, "param", ""):
        monkeypatch.setattr(png, "picture", lambda *_: b"")  # 0.3 s

    def ask(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["isles", "pipeline", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return int(caught.value.code or 0), *capsys.readouterr()

    return ask


@pytest.mark.parametrize("pipeline", ["drawn"], indirect=True)
def test_a_plan_is_written_drawn_and_checked(pipeline, tmp_path):
    code, out, err = pipeline("plan", "links.toml", *ASKED, "--cut", "2,4", "--out", "plan.json", "--seed", "3")
    assert (code, err) == (0, "")
    names = [line.split()[0] for line in out.splitlines() if line.startswith(("full", "random", "with"))]
    assert names == ["full", "random", "without", "with"]
    assert "No plan takes less than" in out and "33 % fewer stages alone" in out and "wait for each other" in out
    plan = read_plan("plan.json")
    assert plan.problem.microbatches == 8 and plan.cuts == (2, 4) and len(plan.paths) == 4
    with Image.open(tmp_path / "plan.png") as picture:
        picture.verify()
    for name in ("steps", "ways"):
        drawn = ElementTree.parse(tmp_path / f"plan.{name}.svg").getroot()
        assert drawn.tag == "{http://www.w3.org/2000/svg}svg" and len(list(drawn.iter())) > 30
    code, out, err = pipeline("check", "plan.json", "--links", "links.toml")
    assert code == 0 and out.startswith("plan.json: legal; a step takes")
    code, out, err = pipeline("check", "plan.json", "--links", "lan")
    assert code == 2 and "made for other links" in err and err.count("\n") == 1


def test_json_says_what_the_table_says(pipeline):
    code, out, _ = pipeline("plan", "links.toml", *ASKED, "--out", "plan.json", "--json")
    told = json.loads(out)
    assert code == 0 and [one["name"] for one in told["strategies"]] == ["full", "random", "without", "with"]
    plan = read_plan("plan.json")
    assert told["strategies"][3]["step_seconds"] >= max(told["lower_bounds_seconds"].values())
    # There and back, 8 microbatches of two stages with the loss at home: each hop twice.
    assert sum(told["strategies"][3]["bytes_sent_by_node"]) == 8 * 4 * 100_000
    assert len(told["strategies"][3]["bubble_by_node"]) == plan.problem.nodes


def test_a_message_is_that_of_the_boundary(pipeline):
    """2,000 tokens of 64 numbers: the stream; a tenth of it with places of a byte; all with ids of 4 bytes."""
    assert _message_bytes("100k", None, None, None, None) == 100_000
    assert _message_bytes(None, "2k", 64, None, None) == 2000 * (64 * 4 + 4)
    assert _message_bytes(None, "2k", 64, "dct:0.9", None) == 2000 * (7 * (4 + 1) + 4)
    assert _message_bytes(None, "2k", 64, "dct:0.9", "fp16") == 2000 * (7 * (2 + 1) + 4)
    assert _message_bytes(None, "2k", 512, "dct:0.9", None) == 2000 * (52 * (4 + 2) + 4)
    asked = [*ASKED[:6], *ASKED[8:], "--out", "plan.json", "--tokens", "2k", "--width", "64"]
    for more, says in (
        (["--boundary", "subspace:8"], "the loss is computed at the origin"),
        (["--bytes", "10k"], "give --bytes of a microbatch between stages, or --tokens"),
        (["--boundary", "topk:4"], 'boundary = "topk:4" is not known'),
    ):
        code, _, err = pipeline("plan", "links.toml", *asked, *more)
        assert code == 2 and says in err and err.count("\n") == 1


def test_nodes_are_assigned_where_only_sizes_are_given(pipeline):
    asked = [*ASKED[2:], "--out", "plan.json"]
    assert pipeline("plan", "links.toml", "--stages", "2,2,2", *asked)[0] == 0
    assert [len(stage) for stage in read_plan("plan.json").problem.stages] == [2, 2, 2]


def test_nodes_have_speeds_of_their_own(pipeline):
    asked = ["plan", "links.toml", *ASKED[:4], *ASKED[6:], "--out", "plan.json"]
    hardware = "A100-40,A100-40,RTX 3060,A100-40,A100-40,A100-40"
    assert pipeline(*asked, "--hardware", hardware, "--operations", "14.04T", "--step-factors", "1,1,1,1,1,4")[0] == 0
    forward = read_plan("plan.json").problem.forward
    assert forward == pytest.approx([0.1, 0.1, 14.04 / (51 * 0.4), 0.1, 0.1, 0.4])
    loads = Counter(node for path in read_plan("plan.json").paths.values() for node in path)
    assert loads[2] < loads[3]


def test_every_broken_rule_is_said(pipeline, tmp_path):
    assert pipeline("plan", "links.toml", *ASKED, "--out", "plan.json")[0] == 0
    table = json.loads((tmp_path / "plan.json").read_text())
    for one in table["paths"]:
        one["nodes"] = [one["origin"], 4]
    (tmp_path / "bad.json").write_text(json.dumps(table))
    code, _, err = pipeline("check", "bad.json")
    assert code == 2 and err == "isles: bad.json: node 4 is on the paths of 4 slots: it holds 2\n"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (["--stages", "0,1/2,3/4"], "latency must be|bandwidth must be a matrix of 5 x 5"),
        (["--stages", "0,1/2,2/4,5"], "stages must name the nodes 0, 1, 2 ... once each"),
        (["--stages", "two"], "--stages two: write whole numbers"),
        (["--stages", "1,1,1,1,1,1,0"], "--stages 1,1,1,1,1,1,0: write whole numbers from 1"),
        (["--path-length", "4"], "path_length = 4: there are 3 stages, choose 1 to 3"),
        (["--skip-ratio", "0.3"], "--path-length and --skip-ratio say the same"),
        (["--memory", "0"], "memory = 0: choose 1 or more"),
        (["--forward", "1,2"], "--forward has 2 values: give one, or one for each of 6 nodes"),
        (["--hardware", "A100-40"], "give --forward SECONDS or --hardware NAMES"),
        (["--operations", "1T"], "--hardware and --operations belong together"),
        (["--step-factors", "1,0"], "--step-factors 0: choose numbers above 0"),
        (["--forward", "fast"], "--forward = 'fast': write a number and a unit"),
        (["--bytes", "0"], "--bytes = 0: choose a number above 0"),
        (["--time-budget-s", "-1"], "--time-budget-s -1: choose seconds above 0"),
        (["--out", "."], "--out .: is a directory; name a file"),
        (["--cut", "4,2"], "--cut 4,2: give 2 growing numbers"),
        (["--out", "nowhere/plan.json"], "nowhere is no directory"),
    ],
)
def test_mistakes_are_one_line(pipeline, change, told):
    code, _out, err = pipeline("plan", "links.toml", *ASKED, "--out", "plan.json", *change)
    assert code == 2 and err.count("\n") == 1 and err.startswith("isles: ")
    assert any(part in err for part in told.split("|"))


def test_eleven_stages_are_too_many_to_assign_nodes_to(pipeline):
    code, _, err = pipeline("plan", "lan", "--stages", ",".join("1" * 11), *ASKED[2:], "--out", "plan.json")
    assert code == 2 and "11 stages: nodes are assigned to at most 10" in err and err.count("\n") == 1


@pytest.mark.long
def test_torch_is_not_loaded(tmp_path):
    (tmp_path / "links.toml").write_text(LINKS)
    asked = ["isles", "pipeline", "plan", "links.toml", *ASKED, "--out", "plan.json"]
    code = f"import sys; sys.argv = {asked!r}\nfrom isles import cli\ntry: cli.main()\nexcept SystemExit as end:\n"
    code += " assert not end.code, end.code\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, timeout=90)
