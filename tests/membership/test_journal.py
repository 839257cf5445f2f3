"""The journal: what is committed is there again, what a crash cut off is not, and damage is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from isles.membership.coordinator import RoundsCoordinator
from isles.membership.effects import Rules
from isles.membership.lighthouse import Journal
from tests.membership.test_nothing_lost import churned


def test_entries_come_back_in_order(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "run")
    assert journal.entries == []
    for number in range(3):
        journal.append({"event": "issue", "number": number})
    journal.commit()
    journal.close()
    again = Journal(tmp_path / "run")
    assert [entry["number"] for entry in again.entries] == [0, 1, 2]
    again.append({"event": "issue", "number": 3})
    again.close()
    assert len(Journal(tmp_path / "run").entries) == 4


def test_every_cut_of_the_last_line_is_mended(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for number in range(2):
        journal.append({"event": "issue", "number": number})
    journal.close()
    data = journal.path.read_bytes()
    for length in range(len(data) // 2 + 1, len(data)):
        journal.path.write_bytes(data[:length])
        cut = Journal(tmp_path)
        assert len(cut.entries) == 1
        cut.append({"event": "issue", "number": 9})
        cut.close()
        assert [entry["number"] for entry in Journal(tmp_path).entries] == [0, 9]


def test_damage_in_the_middle_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "members.jsonl").write_bytes(b'{"event":"issue","number":0}\n{"ev\n{"event":"issue","number":1}\n')
    with pytest.raises(ValueError, match="line 2 is damaged"):
        Journal(tmp_path)


@pytest.mark.parametrize("agrees", [False, True])
def test_a_membership_from_its_journal_is_the_same(agrees: bool) -> None:
    """After 60 events, outages among them: views, members, rounds, landings and every debt."""
    world = churned(agrees=agrees, founders=3, most=8, events=60, seed=3)
    before, after = world.lighthouse, RoundsCoordinator(world.rules, world.journal)
    assert before is not None
    assert after.view == before.view and after.newest_round == before.newest_round
    assert after.ledger.views == before.ledger.views
    assert after.backlog() == before.backlog()
    assert after.ballots.__dict__["_landed"].keys() == before.ballots.__dict__["_landed"].keys()
    for member, worker in before.workers.items():
        known = after.workers[member]
        assert (known.state, known.connected, known.call, known.round) == (
            worker.state,
            worker.connected,
            worker.call,
            worker.round,
        )


def test_an_entry_of_another_version_is_refused() -> None:
    with pytest.raises(ValueError, match="does not know"):
        RoundsCoordinator(Rules(founders=1, sync_every=1), [{"event": "tomorrow"}])
