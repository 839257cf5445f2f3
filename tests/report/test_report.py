"""The report of a run: what it says is what the run directory holds, and it needs nothing but itself."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from isles.cli.terminal import format_usage
from isles.report import write_report
from isles.report.units import format_bytes, format_count, format_number, format_percent, format_seconds
from tests.report.sample import write_records, write_sample


def svgs(page: str) -> list[ElementTree.Element]:
    """Every inline SVG, parsed: a broken one raises."""
    return [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, flags=re.S)]


def by_class(element: ElementTree.Element, tag: str, css: str) -> list[ElementTree.Element]:
    return [e for e in element.iter(tag) if css in e.get("class", "").split()]


def coordinates(polyline: ElementTree.Element) -> list[tuple[float, float]]:
    return [tuple(map(float, pair.split(","))) for pair in polyline.get("points", "").split()]  # type: ignore[misc]


def table(page: str) -> dict[str, str]:
    """Key of the summary -> what the page shows for it, the exact number included."""
    rows = re.findall(r'<tr data-key="(\w+)">.*?<td>(.*?)</td></tr>', page)
    return {key: html.unescape(re.sub(r"<[^>]+>", " ", shown)) for key, shown in rows}


def report(run_dir: Path) -> str:
    return write_report(run_dir).read_text(encoding="utf-8")


def test_numbers_shown_are_those_of_the_summary(tmp_path: Path) -> None:
    summary = write_sample(tmp_path, wall_seconds=4321.5, extra_key=[1, 2])
    assert write_report(str(tmp_path)) == tmp_path / "report.html"
    shown = table(report(tmp_path))
    for key in ("workers", "steps", "tokens", "parameters"):
        assert shown[key] == format_count(summary[key])
    for key in ("val_loss", "val_loss_replicas", "replica_std"):
        assert shown[key] == format_number(summary[key])
    for key in ("bytes_sent_per_worker", "bytes_received_per_worker", "ddp_bytes_per_worker"):
        assert shown[key].startswith(format_bytes(summary[key]))
        assert f"{summary[key]:,} bytes" in shown[key]
    for key in ("compute_seconds", "blocked_seconds"):
        assert shown[key] == format_seconds(summary[key])
    assert shown["wall_seconds"].split() == ["1", "h", "12", "min", "4,321.5", "s"]
    assert shown["compute_utilisation"] == format_percent(summary["compute_utilisation"])
    for key in ("method", "backend", "seed", "corpus_sha256", "isles_version"):
        assert shown[key] == str(summary[key])
    assert shown["extra_key"] == "[1, 2]"
    assert "virtual_seconds" not in shown  # null: a run on real links has no virtual clock


def test_heading_says_method_workers_steps_parameters(tmp_path: Path) -> None:
    write_sample(tmp_path, workers=1, steps=1)
    page = report(tmp_path)
    assert "<h1>noloco on 1 worker, 1 step</h1>" in page
    assert "1.23 million parameters" in page


def test_page_is_self_contained(tmp_path: Path) -> None:
    write_sample(tmp_path)
    page = report(tmp_path)
    assert "http:" not in page
    assert "https:" not in page
    assert not re.search(r"<(script|link|img|iframe|object)\b", page)
    assert not re.search(r"@import|url\((?!#)", page)
    assert "default-src 'none'" in page


def test_pictures_hold_the_data(tmp_path: Path) -> None:
    write_sample(tmp_path, workers=3, steps=200)
    loss, by_bytes, by_time, sent, time, rate = svgs(report(tmp_path))
    assert len(by_class(loss, "polyline", "worker")) == 3
    (mean,) = by_class(loss, "polyline", "mean")
    points = coordinates(mean)
    assert len(points) == 200
    assert points[0][1] < points[-1][1]  # y points down in SVG: the loss fell
    assert len(by_class(loss, "circle", "dot")) == 2  # steps 100 and 200; the summary's own loss is at step 200 too
    (ddp,) = by_class(sent, "polyline", "ddp")
    (own,) = by_class(sent, "polyline", "mean")
    assert coordinates(ddp)[-1][1] < coordinates(own)[-1][1]
    for cost in (by_bytes, by_time):
        (line,) = by_class(cost, "polyline", "mean")
        assert [y for _, y in coordinates(line)] == [y for _, y in points]  # the same losses
        assert [x for x, _ in coordinates(line)] == sorted(x for x, _ in coordinates(line))
    assert len(by_class(time, "rect", "compute")) == len(by_class(time, "rect", "blocked")) == 3
    (line,) = by_class(rate, "polyline", "mean")
    assert rate.get("aria-label") == "Learning rate against steps" and len(coordinates(line)) == 200


def test_time_bars_are_in_proportion(tmp_path: Path) -> None:
    write_sample(tmp_path, workers=1, steps=2)
    record = {"step": 3, "worker": 0, "loss": 1.0, "compute_seconds": 30.0, "blocked_seconds": 10.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    time = svgs(report(tmp_path))[-1]
    (compute,) = by_class(time, "rect", "compute")
    (blocked,) = by_class(time, "rect", "blocked")
    assert float(compute.get("width", 0)) == pytest.approx(3 * float(blocked.get("width", 0)), rel=1e-2)
    assert "75.0 % of 40.0 s computing" in ElementTree.tostring(time, encoding="unicode")


def test_the_spread_and_its_link_to_the_learning_rate(tmp_path: Path) -> None:
    """Both curves in one picture; the sample's spread is proportional to its rate, so they correlate fully."""
    write_sample(tmp_path, workers=2, steps=200)
    assert "no record of the spread of the replicas nor of when workers computed" in report(tmp_path)
    write_records(tmp_path, workers=2)
    page = report(tmp_path)
    assert "no record" not in page
    (spread,) = [svg for svg in svgs(page) if svg.get("aria-label") == "Spread of the replicas"]
    (std,), (rate,) = by_class(spread, "polyline", "mean"), by_class(spread, "polyline", "rate")
    assert coordinates(std) == coordinates(rate)  # scaled to one height
    assert "over 200 logged steps: 1.00." in page


def test_replicas_that_stay_equal(tmp_path: Path) -> None:
    write_sample(tmp_path, steps=5)
    with (tmp_path / "metrics.jsonl").open("a") as lines:
        lines.writelines(f'{{"step": {step}, "replica_std": 0.0}}\n' for step in range(1, 6))
    page = report(tmp_path)
    assert "The replicas were equal at every logged step." in page and "Spread of the replicas" in page


def test_lanes_show_the_last_exchanges_in_proportion(tmp_path: Path) -> None:
    """Twelve rounds of the sample's thirty: a lane a worker, waits drawn over the computing that includes them."""
    write_sample(tmp_path, workers=3, steps=20)
    write_records(tmp_path, workers=3)
    (lanes,) = [svg for svg in svgs(report(tmp_path)) if svg.get("aria-label") == "Timeline"]
    blocked, transfers = by_class(lanes, "rect", "blocked"), by_class(lanes, "rect", "transfer")
    assert len(blocked) == len(transfers) == 3 * 12
    order = [rect.get("class") for rect in lanes.iter("rect")]
    assert order.index("blocked") > order.index("compute")
    widths = [float(rect.get("width", 0)) for rect in (*blocked[:11], *transfers[:11])]
    assert widths[:11] == pytest.approx([widths[0]] * 11, abs=0.11)
    assert widths[11] == pytest.approx(2 * widths[0], rel=0.05)
    assert all(0 <= float(rect.get("x", 0)) <= 760 for rect in lanes.iter("rect"))


def test_many_lanes_are_cut(tmp_path: Path) -> None:
    write_sample(tmp_path, workers=20, steps=2)
    write_records(tmp_path, workers=20)
    assert "The first 16 of 20 workers." in report(tmp_path)


@pytest.mark.parametrize("text", ["", "[]\n", "no\n", '{"worker": 0, "start": 2, "end": 1}\n', '{"worker": "x"}\n'])
def test_a_timeline_of_no_use(tmp_path: Path, text: str) -> None:
    write_sample(tmp_path, steps=5)
    (tmp_path / "timeline.jsonl").write_text(text)
    assert "Timeline of the workers" not in report(tmp_path)


def test_losses_that_are_null_are_counted(tmp_path: Path) -> None:
    """A diverged run of an older version: what is left is drawn, what is gone is said."""
    write_sample(tmp_path, workers=2, steps=10, val_loss=None)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    lines = [{**line, "loss": None} if line["step"] > 5 else line for line in lines]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = report(tmp_path)
    assert "10 losses not finite" in page
    assert len(coordinates(by_class(svgs(page)[0], "polyline", "mean")[0])) == 5


def test_a_run_that_sent_nothing(tmp_path: Path) -> None:
    write_sample(tmp_path, workers=1, steps=5, bytes_sent_per_worker=0, ddp_bytes_per_worker=0)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({**line, "bytes_sent": 0}) + "\n" for line in lines))
    page = report(tmp_path)
    assert "Nothing was sent." in page and "Loss against bytes" not in page


def test_bytes_beside_data_parallel_in_words(tmp_path: Path) -> None:
    write_sample(tmp_path, bytes_sent_per_worker=1_000_000, ddp_bytes_per_worker=38_200_000)
    assert "<b>38.2 times less</b><span>than data parallel would have sent</span>" in report(tmp_path)
    write_sample(tmp_path, bytes_sent_per_worker=38_200_000, ddp_bytes_per_worker=38_200_000)
    assert "<b>as much</b><span>as data parallel would have sent</span>" in report(tmp_path)
    write_sample(tmp_path, bytes_sent_per_worker=0, ddp_bytes_per_worker=38_200_000)
    assert "<span>than data parallel" not in report(tmp_path)


def test_what_gpus_did_is_told(tmp_path: Path) -> None:
    """Means of the newest lines, in the page and in the line of progress; nothing of a CPU."""
    write_sample(tmp_path, workers=2)
    assert "mfu" not in report(tmp_path)
    newest = [
        {"step": 401, "worker": 0, "loss": 1.0, "bytes_sent": 8, "gradient_norm": 0.5,
         "tokens_per_second": 1e3, "mfu": 0.25, "memory_bytes": 1e9,
         "memory_peak_bytes": 2e9, "memory_reserved_bytes": 3e9},
        {"step": 401, "worker": 1, "loss": 1.0, "bytes_sent": 8, "gradient_norm": 0.7,
         "tokens_per_second": 3e3, "mfu": 0.35, "memory_bytes": 1e9,
         "memory_peak_bytes": 4e9, "memory_reserved_bytes": 5e9},
    ]  # fmt: skip
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in newest)
    shown = table(report(tmp_path))
    assert shown["mfu"] == "30.0 %" and shown["memory_peak_bytes"].startswith("3.00 GB")
    assert shown["tokens_per_second"] == "2,000"
    assert format_usage(newest) == "  gradient 0.6  4,000 tokens/s  MFU 30.0 %  peak 4.00 GB"
    assert "Norm of the gradient before clipping against steps" in report(tmp_path)
    assert format_usage([{"val_loss": 1.0}]) == ""


def test_a_run_that_still_goes_on(tmp_path: Path) -> None:
    write_sample(tmp_path, workers=3, steps=120, finished=False)
    with (tmp_path / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 121, "worker": 0, "lo')
    page = report(tmp_path)
    assert "<h1>noloco on 3 workers, 120 steps so far</h1>" in page
    assert "there is no summary.json" in page
    assert "could not be read" not in page  # a last line without its newline is being written, not broken
    assert len(svgs(page)) == 6
    assert "data parallel" not in page
    assert table(page)["steps"] == "120"


@pytest.mark.parametrize("name", ["config.toml", "metrics.jsonl", "summary.json"])
def test_each_file_alone_makes_a_page(tmp_path: Path, name: str) -> None:
    write_sample(tmp_path, steps=10)
    for file in tmp_path.iterdir():
        if file.name != name:
            file.unlink()
    assert "<h1>" in report(tmp_path)


@pytest.mark.parametrize("text", ["", "\n", "[]\n", "nonsense\n", '{"step": 1}\n', '{"step": "x", "worker": null}\n'])
def test_metrics_of_no_use(tmp_path: Path, text: str) -> None:
    write_sample(tmp_path, steps=10)
    (tmp_path / "metrics.jsonl").write_text(text)
    assert svgs(report(tmp_path)) == [] or "validation" in report(tmp_path)


def test_what_cannot_be_used_is_said(tmp_path: Path) -> None:
    write_sample(tmp_path, steps=20)
    with (tmp_path / "metrics.jsonl").open("a") as lines:
        lines.write('broken\n{"step": 21, "worker": 0, "loss": NaN}\n{"step": 22, "worker": 0, "loss": Infinity}\n')
    (tmp_path / "summary.json").write_text('{"method": "nolo')
    (tmp_path / "config.toml").write_text("a = = 1")
    page = report(tmp_path)
    assert "1 line of metrics.jsonl could not be read" in page
    assert "2 losses not finite" in page
    assert "summary.json is damaged" in page
    assert "config.toml is damaged" in page
    assert "a = = 1" in page
    svgs(page)


def test_summary_with_wrong_types_or_nan(tmp_path: Path) -> None:
    write_sample(
        tmp_path, steps=10, val_loss=float("nan"), steps_note="x", parameters="many", ddp_bytes_per_worker="no"
    )
    page = report(tmp_path)
    assert table(page)["val_loss"] == "NaN"
    assert table(page)["parameters"] == "many"
    svgs(page)


def test_disagreeing_bytes_are_said(tmp_path: Path) -> None:
    summary = write_sample(tmp_path)
    assert "summary.json disagree" not in report(tmp_path)
    write_sample(tmp_path, bytes_sent_per_worker=summary["bytes_sent_per_worker"] * 10)
    assert "summary.json disagree" in report(tmp_path)


def test_a_step_written_twice_counts_once(tmp_path: Path) -> None:
    lines = [{"step": s, "worker": 0, "loss": loss} for s, loss in ((1, 3.0), (2, 9.0), (2, 2.0), (3, 1.0))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (loss,) = svgs(report(tmp_path))
    (mean,) = by_class(loss, "polyline", "mean")
    ys = [y for _, y in coordinates(mean)]
    assert len(ys) == 3
    assert ys == sorted(ys)


def test_text_from_the_run_is_escaped(tmp_path: Path) -> None:
    write_sample(tmp_path, steps=10, method="<script>alert(1)</script>", odd='"><b>&')
    (tmp_path / "config.toml").write_text('# </pre><script>alert(2)</script>\nname = "<b>"\n')
    page = report(tmp_path)
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "&lt;/pre&gt;" in page


@pytest.mark.long
def test_many_lines_and_workers_stay_small(tmp_path: Path) -> None:
    write_sample(tmp_path, workers=32, steps=800)  # 26 thousand lines
    page = report(tmp_path)
    assert len(page) < 1_000_000
    loss, _, _, _, time = svgs(page)
    assert len(by_class(loss, "polyline", "worker")) == 32
    assert len(by_class(time, "rect", "compute")) == 32
    (mean,) = by_class(loss, "polyline", "mean")
    assert len(coordinates(mean)) == 400
    assert "The mean is averaged over 2 logged steps a point" in page
    assert "Cut off" not in page


def test_one_exploding_worker_does_not_flatten_the_others(tmp_path: Path) -> None:
    write_sample(tmp_path, workers=2, steps=300)
    with (tmp_path / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 301, "worker": 1, "loss": 1e9}\n')
    page = report(tmp_path)
    assert "the highest loss was 1000000000.0000" in page
    mean = by_class(svgs(page)[0], "polyline", "mean")[0]
    ys = [y for _, y in coordinates(mean)[:300]]
    assert max(ys) - min(ys) > 100  # pixels of 248: the curve of the first 300 steps still fills the picture


def test_writing_again_replaces_the_page(tmp_path: Path) -> None:
    write_sample(tmp_path, steps=10)
    report(tmp_path)
    write_sample(tmp_path, steps=20)
    assert "20 steps" in report(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "config.toml",
        "metrics.jsonl",
        "report.html",
        "summary.json",
    ]


def test_what_is_no_run_directory_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, words in (
        (tmp_path / "absent", "no run directory"),
        (tmp_path / "file", "is a file"),
        (tmp_path, "none of"),
    ):
        with pytest.raises(ValueError, match=words) as caught:
            write_report(path)
        assert "\n" not in str(caught.value)
        assert str(path) in str(caught.value)


def test_report_never_loads_torch(tmp_path: Path) -> None:
    write_sample(tmp_path, steps=5)
    code = (
        "import sys; from isles.report import write_report; write_report(sys.argv[1]);"
        "print([name for name in ('torch', 'numpy', 'resvg_py') if name in sys.modules])"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
