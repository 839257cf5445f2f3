"""`isles plan paths` and `isles plan check`: what they print and write, what they refuse; they need no torch."""

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
from isles.cli.plans.paths import message_sizes
from isles.network.routing.plan import read_plan
from isles.network.routing.replay import Sizes
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
ASKED = ["--stages", "0,1/2,3/4,5", "--path-length", "2", "--task", "200ms", "--message", "100kB"]
ASKED += ["--microbatches", "2x2", "--budget", "500ms"]


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
        monkeypatch.setattr(sys, "argv", ["isles", "plan", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return int(caught.value.code or 0), *capsys.readouterr()

    return ask


@pytest.mark.parametrize("pipeline", ["drawn"], indirect=True)
def test_a_plan_is_written_drawn_and_checked(pipeline, tmp_path):
    code, out, err = pipeline("paths", "links.toml", *ASKED, "--cut", "2,4", "--out", "plan.json", "--seed", "3")
    assert (code, err) == (0, "")
    names = [line.split()[0] for line in out.splitlines() if line.startswith(("full", "random", "with"))]
    assert names == ["full", "random", "without", "with"]
    assert "No plan takes less than" in out and "33 % fewer stages alone" in out and "messages share their lines" in out
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
    code, out, _ = pipeline("paths", "links.toml", *ASKED, "--out", "plan.json", "--json")
    told = json.loads(out)
    assert code == 0 and [one["name"] for one in told["strategies"]] == ["full", "random", "without", "with"]
    plan = read_plan("plan.json")
    assert told["strategies"][3]["step_seconds"] >= max(told["lower_bounds_seconds"].values())
    # There and back, 8 microbatches of two stages with the loss at home: each hop twice.
    assert sum(told["strategies"][3]["bytes_sent_by_node"]) == 8 * 4 * 100_000
    assert len(told["strategies"][3]["bubble_by_node"]) == plan.problem.nodes


def test_a_message_is_that_of_the_boundary(pipeline):
    """2,000 tokens of 64 numbers: the stream; a tenth of it with places of a byte; all with ids of 4 bytes."""
    assert message_sizes("100kB", None, None)[0] == Sizes(forward=100_000, home=100_000, backward=100_000)
    assert message_sizes("100kB+350ms", None, None)[1] == pytest.approx(0.35)
    for words, boundary, codec, numbers in (
        ("2kx64", None, None, 64 * 4),
        ("2k x 64", "dct:0.9", None, 7 * (4 + 1)),
        ("2kx64", "dct:0.9", "fp16", 7 * (2 + 1)),
        ("2kx512", "dct:0.9", None, 52 * (4 + 2)),
    ):
        assert message_sizes(words, boundary, codec)[0].forward == pytest.approx(2000 * (numbers + 4), abs=32)  # a head
    asked = [*ASKED[:6], *ASKED[8:], "--out", "plan.json", "--message", "2kx64"]
    for more, says in (
        (["--boundary", "subspace:8"], "the loss is computed at the origin"),
        (["--message", "10kB", "--boundary", "dct:0.9"], "write TOKENSxWIDTH, such as 8kx4096"),
        (["--boundary", "topk:4"], 'kind = "topk:4" is not known'),
    ):
        code, _, err = pipeline("paths", "links.toml", *asked, *more)
        assert code == 2 and says in err and err.count("\n") == 1


def test_nodes_are_assigned_where_only_sizes_are_given(pipeline):
    asked = [*ASKED[2:], "--out", "plan.json"]
    assert pipeline("paths", "links.toml", "--stages", "2,2,2", *asked)[0] == 0
    assert [len(stage) for stage in read_plan("plan.json").problem.stages] == [2, 2, 2]


def test_nodes_have_speeds_of_their_own(pipeline):
    asked = ["paths", "links.toml", *ASKED[:4], *ASKED[6:], "--out", "plan.json"]
    assert pipeline(*asked, "--task", "14.04T on A100-40,A100-40,RTX 3060,A100-40,A100-40,A100-40*4")[0] == 0
    forward = read_plan("plan.json").problem.forward
    assert forward == pytest.approx([0.1, 0.1, 14.04 / (51 * 0.4), 0.1, 0.1, 0.4])
    loads = Counter(node for path in read_plan("plan.json").paths.values() for node in path)
    assert loads[2] < loads[3]


def test_every_broken_rule_is_said(pipeline, tmp_path):
    assert pipeline("paths", "links.toml", *ASKED, "--out", "plan.json")[0] == 0
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
        (["--path-length", "130%"], "--path-length 130%: write a number of stages, such as 4, or a share"),
        (["--microbatches", "0x2"], "--microbatches 0x2: write how many a node holds x waves"),
        (["--task", "1s,2s"], "--task has 2 values: give one, or one for each of 6 nodes"),
        (["--task", "0.4"], "--task = 0.4: has no unit: write 0.4ms or 0.4s"),
        (["--task", "0s"], "--task 0s: choose times above 0"),
        (["--task", "1T on A100-41"], "--task A100-41: "),
        (["--task", "1T on A100-40*0"], "--task A100-40*0: write how many times as slow"),
        (["--task", "fast"], "--task = 'fast': write a number and a unit"),
        (["--message", "33500"], "--message = 33500: has no unit: write 33500B, or 33500MB"),
        (["--message", "33.5M"], "--message = '33.5M': write a number and a unit, such as 12GiB"),
        (["--message", "1MB+350"], "--message = 350: has no unit"),
        (["--message", "0B"], "--message 0B: choose bytes above 0"),
        (["--costs", "forward=2"], "--costs forward=2: write multiples of a forward's time"),
        (["--budget", "-1s"], "a time must be 0 s or more"),
        (["--budget", "60"], "--budget = 60: has no unit: write 60ms or 60s"),
        (["--out", "."], "--out .: is a directory; name a file"),
        (["--cut", "4,2"], "--cut 4,2: give 2 growing numbers"),
        (["--out", "nowhere/plan.json"], "nowhere is no directory"),
    ],
)
def test_mistakes_are_one_line(pipeline, change, told):
    code, _out, err = pipeline("paths", "links.toml", *ASKED, "--out", "plan.json", *change)
    assert code == 2 and err.count("\n") == 1 and err.startswith("isles: ")
    assert any(part in err for part in told.split("|"))


def test_eleven_stages_are_too_many_to_assign_nodes_to(pipeline):
    code, _, err = pipeline("paths", "lan", "--stages", ",".join("1" * 11), *ASKED[2:], "--out", "plan.json")
    assert code == 2 and "11 stages: nodes are assigned to at most 10" in err and err.count("\n") == 1


@pytest.mark.long
def test_torch_is_not_loaded(tmp_path):
    (tmp_path / "links.toml").write_text(LINKS)
    asked = ["isles", "plan", "paths", "links.toml", *ASKED, "--out", "plan.json"]
    code = f"import sys; sys.argv = {asked!r}\nfrom isles import cli\ntry: cli.main()\nexcept SystemExit as end:\n"
    code += " assert not end.code, end.code\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, timeout=90)
