"""The line at the start of a run on several machines: what a round takes, and from when silence is a loss."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from isles import run_virtual
from isles.comm.mesh import Mesh
from isles.comm.tcp import is_far
from isles.comm.transport import LinkEstimate
from isles.comm.virtual.cluster import VirtualTransport
from isles.replicas.loop.outer import OuterSync
from isles.training.setup import expectation
from isles.training.worker import trainer_of
from tests.training.runs import ON_VIRTUAL, Told, lines_of, run, tiny, write_text


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


def said(text: Path, out: Path, method: str, *assignments: str) -> list[str]:
    """The notices about rounds of a run of six steps."""
    told = Told()
    run(tiny(text, *assignments, method=method), out, told)
    return [notice for notice in told.notices if "counts as lost" in notice]


def through(monkeypatch: pytest.MonkeyPatch, rate: float | None, tries_soon: bool = True) -> None:
    monkeypatch.setattr(VirtualTransport, "link_estimate", lambda self: LinkEstimate(rate, tries_soon))


def test_a_round_is_what_the_counters_show(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of a round as in metrics.jsonl; its seconds at the rate of the line."""
    through(monkeypatch, 0.5e6)
    (line,) = said(text, tmp_path / "run", "noloco", "run.log_every=3")
    sent = [row["bytes_sent"] for row in lines_of(tmp_path / "run" / "metrics.jsonl") if row.get("worker") == 0]
    nbytes = sent[1] - sent[0]
    assert line == (
        f"a round, every 3 steps: {nbytes / 1e6:.3g} MB from a worker, about {nbytes / 62500:.2g} s at 0.5 Mbit/s (the "
        "slowest link of worker 0 so far); a worker silent for 60 s counts as lost (world.silence)"
    )


def test_what_is_not_known_is_said(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rate yet; a kernel that tries again late; a method that sends nothing. On one machine nothing is said."""
    assert said(text, tmp_path / "here", "noloco") == []
    through(monkeypatch, None, tries_soon=False)
    (line,) = said(text, tmp_path / "ddp", "ddp", "world.silence=40")
    assert line.startswith("a round, every step: ") and " at 10 Mbit/s (world.slowest_link); " in line
    assert "a worker silent for 40 s, or 80 s while a link is cut counts as lost" in line
    (line,) = said(text, tmp_path / "none", "none", "world.silence=40")
    assert line.startswith("a worker silent for 40 s")


def test_a_long_round_is_said_in_full(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As "about 1,200 s", not as 1.2e+03."""
    through(monkeypatch, 200.0)
    (line,) = said(text, tmp_path / "run", "ddp")
    assert "e+" not in line and re.search(r"about \d+,\d{3} s at 0\.0002 Mbit/s", line), line


@pytest.mark.long
@pytest.mark.parametrize("method", ON_VIRTUAL)
def test_every_method_has_one(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    through(monkeypatch, 0.5e6)
    assert len(said(text, tmp_path / "run", method)) == 1


def test_what_is_far() -> None:
    """Addresses of two machines are far, those of one are not."""
    assert is_far("10.0.0.1|40000 10.0.0.2|50000") and is_far("fe80::1|40000 fe80::2|50000")
    assert not is_far("127.0.0.1|40000 127.0.0.2|50000") and not is_far("10.0.0.1|40000 10.0.0.1|50000")


@pytest.mark.long
def test_real_processes_on_one_machine_are_near(text: Path, tmp_path: Path) -> None:
    """Over loopback there is nothing to say."""
    told = Told()
    run(tiny(text, "world.backend=distributed"), tmp_path / "run", told)
    assert not any("counts as lost" in notice for notice in told.notices)


def test_a_long_run_is_not_planned_to_its_end(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many steps are said as fast as a few, and in the same words."""
    asked: list[int] = []
    through(monkeypatch, 0.5e6)
    outline = OuterSync.outline
    monkeypatch.setattr(OuterSync, "outline", lambda self, steps: asked.append(steps) or outline(self, steps))

    def told(world: Mesh, steps: int) -> str:
        config = tiny(text, f"run.steps={steps}", method="noloco")
        return expectation(trainer_of(config, world).optimizer, config, LinkEstimate(0.5e6, True))

    short, long = (run_virtual(told, 3, args=(steps,)) for steps in (60, 60_000))
    assert short == long
    assert max(asked) <= 60
