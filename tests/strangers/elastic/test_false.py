"""A lighthouse that vouches falsely for one pair: the pair refuses it, and its fingerprints tell everybody."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from isles.cli.elastic import status as command
from isles.membership.messages import Lookup, PeerAddress, spoken
from tests.training.elastic.runs import Run
from tests.training.elastic.test_runs import small

FALSE = "f" * 32


@pytest.mark.long
def test_a_lighthouse_that_vouches_for_another_one_to_one_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Views name the true one, as the others see: 0 exchanges nothing with 1, both with 2; the run goes on."""
    run = Run(
        small(tmp_path, 2000, 3, "run.log_every=1", "replicas.sync_every=1", "world.outer_deadline=1"), tmp_path / "run"
    )
    address_book = run.keeper.lighthouse._address_book
    find = address_book.find

    def falsely(asker: int, said: Lookup) -> PeerAddress:
        found = find(asker, said)
        return replace(found, certificates=(FALSE,)) if (asker, said.member) == (0, 1) and found.certificates else found

    monkeypatch.setattr(address_book, "find", falsely)
    monkeypatch.setattr(command, "end_in_order", lambda: None)  # pytest keeps its own handlers

    def shown() -> list[str]:
        capsys.readouterr()
        command.status(run.address, token=run.token)
        return capsys.readouterr().out.splitlines()

    assert shown()[0] == "waiting for the first view"
    for number in range(3):
        run.join()
        run.until(lambda number=number: len(run.workers) > number)
    run.until(lambda: run.keeper.coordinator.view is not None)
    named = run.keeper.coordinator.view.identities  # type: ignore[union-attr]
    assert len({*named}) == 3 and FALSE not in named
    why = f"worker 1: its fingerprint is {spoken(FALSE)}, but views name {spoken(named[1])}"
    run.until(lambda: any(line.startswith("refused ") and line.endswith(f"by worker 0: {why}") for line in shown()))
    head, heads, *rows = shown()
    assert head.startswith("round ") and "of 2000; view 0" in head
    table = [dict(zip(re.split(r"  +", heads), re.split(r"  +", row), strict=True)) for row in rows[:3]]
    assert [(row["fingerprint"], row["address"], row["role"], row["member"]) for row in table] == [
        (spoken(identity), "127.0.0.1", "in", str(member)) for member, identity in enumerate(named)
    ]
    assert sum("the lighthouse sees it at 127.0.0.1" in line for line in run.notices) == 3
    assert all(any(f"fingerprint: {spoken(one)};" in line for line in run.notices) for one in named)
    assert any(line.endswith(f"refuses {why}") for line in run.notices), "the lighthouse's person is told, too"
    way = [run.workers[number].transport.way for number in range(3)]  # type: ignore[attr-defined]
    run.until(lambda: way[0](2) == way[2](0) == way[1](2) == way[2](1) == "relayed")
    assert way[0](1) == ""
    for number in range(3):
        run.vanish(number)
    run.rest()
    run.stop()
