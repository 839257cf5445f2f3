"""A run that changes its version: two installed trees, of which one has the next minor version of the messages."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from isles.membership.messages import MESSAGES
from isles.membership.run_log import EXCHANGES
from tests.training.elastic.processes import Processes

PACKAGE = Path(__file__).parents[3] / "isles"


def next_version(folder: Path) -> list[str]:
    """What goes before a command so that a copy of this tree runs it, which has the next version, one more field in a
    message of the lighthouse, one more in a message of workers, and one more configuration key.
    """
    shutil.copytree(PACKAGE, folder / "isles", ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "isles" / "membership" / "messages.py"
    text, (major, minor) = path.read_text(encoding="utf-8"), MESSAGES
    for old, new in (
        (f"MESSAGES = ({major}, {minor})", f"MESSAGES = ({major}, {minor + 1})"),
        ("    skipped: Ints = ()\n", "    skipped: Ints = ()\n    load: Float = 0.5\n"),
        (
            "    proposal: Proposal | None\n    call: Int\n",
            "    proposal: Proposal | None\n    call: Int\n    hint: Str = 'x'\n",
        ),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")
    member = folder / "isles" / "membership" / "member.py"
    text = member.read_text(encoding="utf-8")
    positional = "tuple(sorted(self._skipped)), seen, self.seconds)"
    assert positional in text
    member.write_text(
        text.replace(positional, "tuple(sorted(self._skipped)), 0.5, seen, self.seconds)"), encoding="utf-8"
    )
    world = folder / "isles" / "training" / "config" / "world.py"
    text, key = world.read_text(encoding="utf-8"), "    trust_ratio: float = 10.0\n"
    assert text.count(key) == 1
    world.write_text(text.replace(key, f'{key}    """."""\n    newest: int = 7\n'), encoding="utf-8")
    version = folder / "isles" / "base" / "version.py"
    version.write_text(re.sub(r'"[0-9.]+"', '"9.9.9"', version.read_text(encoding="utf-8")), encoding="utf-8")
    return ["env", f"PYTHONPATH={folder}"]


def exchanges(world: Processes) -> list[tuple[int, ...]]:
    """The members of each complete exchange, as the lighthouse knows them."""
    lines = (world.out / EXCHANGES).read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return [tuple(sorted(one["members"])) for one in records if one.get("outcome") == "whole"]


@pytest.mark.long
def test_a_run_goes_on_with_the_next_version(tmp_path: Path) -> None:
    """Two workers of this version; a newer one is refused. The lighthouse goes on in the next version with the two, and
    a new worker and another old one exchange with them.
    """
    later = next_version(tmp_path / "later")
    world = Processes(tmp_path)
    try:
        workers = [world.join(), world.join()]
        world.until(lambda: (0, 1) in exchanges(world), 300.0)
        refused = world.join(on=later)
        assert refused.wait(300.0) == 2
        (line,) = re.findall("this run is of isles .*", world.logs())
        ours, theirs = (".".join(map(str, one)) for one in (MESSAGES, (MESSAGES[0], MESSAGES[1] + 1)))
        assert f"(messages {ours}), not isles 9.9.9 (messages {theirs}): install that version" in line
        world.put_out()
        before = len(exchanges(world))
        world.light = world.start("resume", str(world.out), "--workers", "0", on=later)
        world.until(lambda: (0, 1) in exchanges(world)[before:], 300.0)
        workers += [world.join(on=later), world.join()]
        pairs = ((0, 2), (0, 3), (2, 3))
        world.until(lambda: all(pair in exchanges(world) for pair in pairs), 300.0)
        assert [worker.poll() for worker in workers] == [None] * 4
        assert "Traceback" not in world.logs()
    finally:
        world.end()
