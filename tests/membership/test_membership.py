"""Who is in which round, case by case: what the lighthouse orders, and what a worker promises."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from isles.membership.coordinator import RoundsCoordinator
from isles.membership.effects import Append, Effect, Notify, Reply, Rules
from isles.membership.member import MemberState
from isles.membership.messages import Ack, Beat, BeatReply, Done, Load, PeerReport, Proposal, Refusal, View
from isles.membership.round_commit import RoundDecision

READY = Beat(ready=0)


def told(orders: list[Effect], kind: type) -> list[tuple[int, Any]]:
    return [
        (order.member, order.message) for order in orders if isinstance(order, Notify) and type(order.message) is kind
    ]


def replies(orders: list[Effect]) -> list[Any]:
    return [order.message for order in orders if isinstance(order, Reply)]


def entries(orders: list[Effect]) -> list[dict[str, Any]]:
    return [order.entry for order in orders if isinstance(order, Append)]


def founded(members: int, *, agrees: bool = False) -> tuple[RoundsCoordinator, list[dict[str, Any]]]:
    """A run of so many founders in round 1, and its journal."""
    run = RoundsCoordinator(Rules(founders=members, sync_every=16, agrees=agrees, most=8))
    orders = [order for _ in range(members) for order in run.join(0.0, "a worker")]
    orders += [order for member in range(members) for order in run.beat(0.0, member, READY)]
    orders += [order for member in range(members) for order in run.beat(0.0, member, Beat(1, 0, 0))]
    assert run.view == View(0, 1, tuple(range(members)), (16,) * members)
    return run, entries(orders)


def promise(run: RoundsCoordinator, *members: int) -> list[Effect]:
    assert run.proposal is not None
    number = run.proposal.number
    return [
        order
        for member in members
        for order in run.ack(0.0, member, Ack(number, True, Beat(run.workers[member].round, 0, number - 1)))
    ]


def test_the_first_view_waits_for_its_founders() -> None:
    run = RoundsCoordinator(Rules(founders=2, sync_every=4))
    run.join(0.0, "one")
    assert told(run.join(0.0, "two"), Load) == [(1, Load(0, -1))]
    (answer,) = replies(run.beat(0.0, 0, READY))
    assert isinstance(answer, BeatReply) and answer.newest == -1
    (answer,) = replies(run.beat(0.0, 1, READY))
    assert answer.views == (View(0, 1, (0, 1), (4, 4)),) and answer.newest_round == 1


def test_who_was_to_begin_as_drawn_and_came_too_late_for_that_loads_from_a_member() -> None:
    """It said that it is ready after the first view was told, which goes on without it."""
    run = RoundsCoordinator(Rules(founders=2, sync_every=4))
    orders = [order for _ in range(4) for order in run.join(0.0, "a worker")]
    assert [load for _, load in told(orders, Load)] == [Load(0, -1)] * 4
    run.beat(0.0, 3, READY)
    orders = run.beat(0.0, 0, READY)
    assert run.view is not None and run.view.members == (0, 3)
    assert told(orders, Load) == [(1, Load(1, 0)), (2, Load(1, 3))]
    run.beat(0.0, 1, READY)
    assert run.workers[1].state == "outside" and run.proposal is None
    run.beat(0.0, 1, Beat(ready=1))
    assert run.workers[1].state == "ready" and run.proposal is not None


def test_who_was_to_begin_as_drawn_while_the_only_member_was_away_loads_from_it() -> None:
    run, _ = founded(1)
    run.disconnected(1.0, 0)
    assert told(run.join(1.0, "another"), Load) == [(1, Load(0, -1))]
    assert told(run.reconnected(2.0, 0), Load) == [(1, Load(1, 0))]


def test_a_change_is_for_three_rounds_ahead_and_waits_for_every_promise() -> None:
    run, _ = founded(3)
    run.beat(0.0, 1, Beat(4, 0, 0))
    orders = run.disconnected(1.0, 2)
    proposal = Proposal(1, 0, 7, (0, 1), lost=(2,))
    assert told(orders, Proposal) == [(0, proposal), (1, proposal)]
    assert entries(orders) == [{"event": "lost", "member": 2}, {"event": "issue", "number": 1}]
    assert told(promise(run, 0), View) == []
    orders = promise(run, 1)
    kinds = [type(order) for order in orders]
    assert kinds.index(Append) < kinds.index(Notify)  # the view is on the disk before anybody hears of it
    assert [member for member, _ in told(orders, View)] == [0, 1]
    assert run.view is not None and (run.view.since, run.view.members) == (7, (0, 1))


def test_who_is_there_already_makes_it_another_round() -> None:
    run, _ = founded(2)
    run.leave(0.0, 1)
    orders = run.ack(0.0, 0, Ack(1, False, Beat(6, 0, 0)))
    assert [message for _, message in told(orders, Proposal)] == [Proposal(2, 0, 9, (0,))] * 2
    assert told(run.ack(0.0, 1, Ack(1, True, Beat(1, 0, 0))), View) == []  # a promise for the old one is none for it


def test_a_leaver_votes_and_goes_on_until_the_view_begins() -> None:
    run, _ = founded(2)
    run.leave(0.0, 1)
    promise(run, 0)
    assert run.view is not None and run.view.number == 0
    promise(run, 1)
    assert run.view.members == (0,) and run.workers[1].state == "leaving"
    run.disconnected(0.0, 1)
    assert run.workers[1].state == "left"
    assert isinstance(replies(run.beat(0.0, 1, Beat(4)))[0], Refusal)


def test_who_leaves_while_its_connection_is_taken_for_broken_goes_at_once() -> None:
    """It would else come back and train on."""
    run, _ = founded(3)
    run.disconnected(0.0, 1)
    orders = run.leave(0.0, 1)
    assert entries(orders) == [{"event": "leave", "member": 1}] and run.workers[1].state == "left"
    run.reconnected(0.0, 1)
    promise(run, 0, 2)
    assert run.view is not None and run.view.members == (0, 2)
    (refusal,) = replies(run.beat(0.0, 1, Beat(2, 0, 0)))
    assert refusal == Refusal("member 1 is no longer in this run: join again")
    again = RoundsCoordinator(run.rules, [{"event": "join", "member": 0, "description": "", "certificates": []}])
    assert entries(again.leave(0.0, 0)) == [{"event": "leave", "member": 0}]


def test_who_could_not_come_back_to_a_suspended_lighthouse_is_waited_for() -> None:
    """It was started again, and suspended for 3 of the 8 seconds that members have to come back."""
    _, journal = founded(2)
    run = RoundsCoordinator(Rules(founders=2, sync_every=16), journal, until=8.0)
    run.postpone(3.0)
    assert entries(run.tick(10.9)) == []
    assert [entry["event"] for entry in entries(run.tick(11.0))][:2] == ["lost", "lost"]


def test_back_before_anybody_went_on_without() -> None:
    run, _ = founded(2)
    run.disconnected(0.0, 1)
    run.proposal = None  # not yet
    orders = run.reconnected(0.0, 1)
    assert entries(orders) == [{"event": "back", "member": 1}] and run.workers[1].call == 0
    run.disconnected(0.0, 1)
    run.reconnected(0.0, 1)  # somebody may have promised that view by now: begin again
    assert run.workers[1].call == 1 and run.workers[1].load == Load(1, 0, 0.0, "the next view was proposed without it")


def test_what_a_worker_got_before_it_took_anothers_state_it_does_not_have() -> None:
    """It tells of it late: after the view that went on without it, and before it begins again."""
    run, _ = founded(3)
    run.disconnected(0.0, 1)
    run.reconnected(1.0, 1)
    promise(run, 0, 2)
    assert run.view is not None and run.view.members == (0, 2) and run.workers[1].call == 1
    run.beat(1.0, 1, Beat(2, 0, 0, seen=((2, 1),)))
    run.beat(2.0, 1, Beat(2, 1, 1, seen=((0, 0),)))
    promise(run, 0, 2)
    assert run.view.members == (0, 1, 2)
    run.disconnected(3.0, 2)
    assert any(sample_range[:3] == (0, 2, 0) for sample_range in run.backlog())


def test_a_newcomer_loads_from_whoever_is_least_busy_and_then_from_another() -> None:
    run, _ = founded(2)
    for donor in (0, 1, 0):
        orders = run.join(0.0, "newcomer")
        member = len(run.workers) - 1
        assert told(orders, Load) == [(member, Load(0, donor))]
    assert told(run.reload(0.0, 4), Load) == [(4, Load(0, 1))]
    assert told(run.disconnected(0.0, 1), Load) == [(3, Load(0, 0)), (4, Load(0, 0))]
    run.beat(0.0, 2, READY)
    promise(run, 0)  # the view without the lost donor comes first
    assert run.proposal is not None and run.proposal.members == (0, 2)


def test_five_rounds_behind_is_better_off_with_anothers_state() -> None:
    run, _ = founded(3)
    for member in (0, 2):
        run.beat(0.0, member, Beat(6, 0, 0))
    run.beat(0.0, 1, Beat(2, 0, 0))
    assert run.workers[1].call == 0  # four
    for member in (0, 2):
        run.beat(0.0, member, Beat(7, 0, 0))
    run.beat(0.0, 1, Beat(2, 0, 0, skipped=(2,)))
    assert run.workers[1].call == 1 and run.proposal is not None and 1 in run.proposal.lost


@pytest.mark.parametrize("members", [3, 4, 5])
def test_who_says_alone_that_it_is_far_ahead_takes_nobodys_state(members: int) -> None:
    """All others would begin again with what it hands out."""
    run, _ = founded(members)
    run.beat(0.0, 0, Beat(1 << 40, 0, 0))
    for member in range(1, members):
        run.beat(0.0, member, Beat(2, 0, 0))
    assert run.members() == tuple(range(members))


def test_a_new_view_hides_nobody_who_is_behind() -> None:
    """It is as far behind as before; who begins with that view is not."""
    run, _ = founded(3)
    run.beat(0.0, 0, Beat(3, 0, 0))
    run.join(0.0, "newcomer")
    run.beat(0.0, 3, READY)
    promise(run, 0, 1, 2)
    assert run.view is not None and run.view.members == (0, 1, 2, 3) and run.view.since == 6
    run.beat(0.0, 0, Beat(7, 0, 1))
    run.beat(0.0, 2, Beat(7, 0, 1))
    run.beat(0.0, 1, Beat(2, 0, 1))
    assert [run.workers[member].call for member in range(4)] == [0, 1, 0, 0]


def test_inner_steps_follow_the_pace_from_a_half_to_an_eighth() -> None:
    run, _ = founded(4)
    for member, seconds in enumerate((1.0, 1.1, 2.0, 99.0)):
        run.beat(0.0, member, Beat(1, 0, 0, seconds=seconds))
    run.join(0.0, "newcomer")
    run.beat(0.0, 4, READY)
    promise(run, 0, 1, 2, 3)
    assert run.view is not None and run.view.steps == (16, 16, 12, 2, 16)  # the median is 1.55 s


def test_who_waits_for_its_first_round_begins_it_where_nobody_is_left_who_could() -> None:
    """The only veteran dies after the newcomer's view was agreed, and before it begins."""
    run, _ = founded(1)
    run.join(0.0, "newcomer")
    run.beat(0.0, 1, READY)
    promise(run, 0)
    assert run.view is not None and (run.view.since, run.newest_round) == (4, 1)
    run.disconnected(1.0, 0)
    promise(run, 1)
    assert run.view.members == (1,)
    (answer,) = replies(run.beat(2.0, 1, Beat(0, 0, 1)))
    newcomer = MemberState(1)
    newcomer.loaded(Load(0, 0), 1)
    newcomer.answered(newcomer.beat(), replace(answer, views=(View(1, 4, (0, 1), (16, 16)), *answer.views)))
    assert newcomer.first() == 4


def test_the_run_is_full() -> None:
    run, _ = founded(8)
    (refusal,) = replies(run.join(0.0, "one more"))
    assert isinstance(refusal, Refusal) and "--max-members" in refusal.reason
    run.disconnected(0.0, 3)
    run.join(0.0, "one more")
    assert run.workers[8].here


def test_unknown_seats_are_refused() -> None:
    run, _ = founded(1)
    for member in (7, -1):
        (refusal,) = replies(run.beat(0.0, member, READY))
        assert isinstance(refusal, Refusal) and "join again" in refusal.reason
        assert (
            run.disconnected(0.0, member)
            == run.reconnected(0.0, member)
            == run.leave(0.0, member)
            == run.reload(0.0, member)
            == []
        )
        assert run.done(0.0, member, Done(1, 0, 0)) == []


def test_after_a_restart_nothing_is_decided_until_it_is_clear_who_is_left() -> None:
    _, journal = founded(3)
    run = RoundsCoordinator(Rules(founders=3, sync_every=16), journal, until=6.0)
    assert entries(run.reconnected(1.0, 0)) == entries(run.reconnected(1.5, 1)) == [] and run.proposal is None
    assert run.tick(5.9) == []
    orders = run.tick(6.0)
    assert entries(orders)[0] == {"event": "lost", "member": 2}
    assert run.proposal is not None and run.proposal.members == (0, 1)


def test_the_journalled_word_holds_where_the_lighthouse_died_before_it_said_it() -> None:
    run, journal = founded(2, agrees=True)
    run.done(0.0, 0, Done(1, 0, 5))
    orders = run.done(0.0, 1, Done(1, 0, 5))
    decision = RoundDecision(1, "land", 0, (0, 1), view=0)
    assert told(orders, RoundDecision) == [(0, decision), (1, decision)]
    journal += entries(orders)  # and there it dies: nobody heard it
    again = RoundsCoordinator(run.rules, journal, until=9.0)
    again.reconnected(0.0, 0)
    again.tick(9.0)  # 1 has not come back: without the journal this would be another attempt, among 0 alone
    assert replies(again.done(10.0, 0, Done(1, 0, 5))) == [decision]


def test_a_loss_in_a_round_is_another_attempt_and_who_missed_a_landing_begins_again() -> None:
    run, _ = founded(3, agrees=True)
    run.done(0.0, 0, Done(1, 0, 5))
    assert told(run.disconnected(0.0, 2), RoundDecision) == [
        (member, RoundDecision(1, "retry", 1, (0, 1), view=0)) for member in (0, 1)
    ]
    run.reconnected(0.0, 2)
    run.done(0.0, 0, Done(1, 1, 6))
    orders = run.done(0.0, 1, Done(1, 1, 6))
    assert told(orders, RoundDecision)[0] == (0, RoundDecision(1, "land", 1, (0, 1), view=0))
    assert run.workers[2].call == 1 and run.workers[2].state == "outside"
    for member in (0, 1):
        run.beat(0.0, member, Beat(2, 0, 0))
    run.done(0.0, 0, Done(2, 0, 7))  # round 2 is among those two alone, without a word about it
    assert told(run.done(0.0, 1, Done(2, 0, 7)), RoundDecision)[0][1] == RoundDecision(
        2, "land", 0, (0, 1), view=run.ballots._view
    )


def test_late_and_refused_is_what_most_of_the_others_say() -> None:
    run, _ = founded(4, agrees=True)
    late = PeerReport(1, 0, 3, "late")
    run.report_peer(0.0, 0, late)
    assert told(run.report_peer(0.0, 0, late), RoundDecision) == []  # saying it twice is one voice
    assert told(run.report_peer(0.0, 1, late), RoundDecision)[0][1] == RoundDecision(1, "retry", 1, (0, 1, 2), view=0)
    again = PeerReport(1, 1, 2, "refused", "its share holds NaN")
    assert told(run.report_peer(0.0, 0, again), RoundDecision) == []
    assert told(run.report_peer(0.0, 1, again), RoundDecision)[0][1] == RoundDecision(1, "retry", 2, (0, 1), view=0)
    assert told(run.report_peer(0.0, 1, replace(again, attempt=2, member=0)), RoundDecision)[0][1].members == (0,)


# The worker's side


def settled_member(number: int = 0, members: tuple[int, ...] = (0, 1)) -> MemberState:
    """In round 1 of view 0, answered."""
    member = MemberState(number)
    member.loaded(Load(0, -1), 0)
    member.answered(member.beat(), answer(views=(View(0, 1, members, (4,) * len(members)),), newest_round=1))
    assert member.first() == 1
    member.start_round(1)
    member.answered(member.beat(), answer(round=1))
    return member


def answer(**values: Any) -> BeatReply:
    usual = {"round": 0, "issued": 0, "newest": 0, "newest_round": 1, "views": (), "proposal": None, "call": 0}
    return BeatReply(**{**usual, **values})


def test_who_promised_and_does_not_know_is_alone_and_reads_out_of_turn() -> None:
    member = settled_member()
    ack = member.proposed(Proposal(1, 0, 2, (0,), lost=(1,)))
    assert ack is not None and ack.promised
    assert member.lost(1) and not member.accept(1, (0, 1))
    assert member.start_round(2) is None and not member.group(2).decided and member.group(2).members == (0,)
    assert member.beat().skipped == (2,)
    member.receive_view(View(1, 2, (0,), (4,)))
    assert member.group(2).decided and member.group(2).view == 1
    assert member.start_round(2) is None  # the first answer is final


def test_who_is_left_out_of_a_view_that_begins_later_is_lost_until_then() -> None:
    """By a pushed view, and by one that came with an answer; who asked to leave is there until then."""
    for is_pushed in (True, False):
        member, view = settled_member(members=(0, 1, 2)), View(1, 4, (0,), (4,))
        member.proposed(Proposal(1, 0, 4, (0,), lost=(1,)))
        if is_pushed:
            member.receive_view(view)
        else:
            member.answered(member.beat(), answer(issued=1, newest=1, views=(view,)))
        assert member.group(1).decided and member.group(1).members == (0, 1, 2)
        assert member.lost(1) and not member.lost(2) and not member.accept(1, (0, 1)) and member.accept(1, (0, 2))
        for round in (2, 3):
            member.start_round(round)
            assert member.lost(1) and not member.lost(2)
        member.start_round(4)
        assert not member.lost(1) and member.group(4).members == (0,)


def test_a_promise_comes_too_late_for_a_round_that_has_begun() -> None:
    member = settled_member()
    member.start_round(2)
    member.group(3)  # asked ahead
    ack = member.proposed(Proposal(1, 0, 3, (0,)))
    assert ack is not None and not ack.promised
    assert member.group(3).members == (0, 1)


def test_an_old_answer_does_not_undo_a_promise_and_a_new_one_does() -> None:
    member = settled_member()
    member.proposed(Proposal(4, 0, 9, (0,)))
    member.answered(member.beat(), answer(issued=3))
    assert not member.group(9).decided
    member.answered(member.beat(), answer(issued=4))  # it came to nothing
    assert member.group(9).members == (0, 1)
    assert member.proposed(Proposal(4, 0, 11, (0,))) is None


def test_cells_are_read_one_round_beyond_what_the_lighthouse_has_answered() -> None:
    member = settled_member()
    assert member.start_round(2) is not None
    assert member.start_round(3) is None  # round 2 was told and never answered
    member.answered(Beat(3, 0, 0, skipped=(3,)), answer(round=3, newest_round=3))
    assert member.start_round(4) is not None and member.beat().skipped == ()


def test_a_pushed_view_counts_only_if_none_before_it_is_missing() -> None:
    member = settled_member()
    member.proposed(Proposal(2, 1, 6, (0,)))
    member.receive_view(View(2, 6, (0,), (4,)))
    assert not member.group(6).decided
    member.answered(member.beat(), answer(issued=2, newest=2, views=(View(1, 5, (0, 1)), View(2, 6, (0,)))))
    assert member.group(6).view == 2 and member.group(5).view == 1


def test_with_anothers_state_older_views_are_somebody_elses() -> None:
    member = settled_member()
    member.answered(member.beat(), answer(call=1))
    assert member.call == 1 and member.ready == 0
    member.loaded(Load(1, 1), 4)
    assert member.group(5).members == (0,) and member.first() is None
    assert member.beat().seen == ((1, 4),)
    member.answered(member.beat(), answer(issued=1, newest=1, newest_round=6, views=(View(1, 6, (0, 1), (4, 4)),)))
    assert member.first() == 6 and member.start_round(6) is not None


@pytest.mark.parametrize(("newest", "first"), [(5, None), (6, 6), (7, 6), (9, 8)])
def test_a_newcomer_begins_where_the_others_are(newest: int, first: int | None) -> None:
    member = MemberState(2)
    member.loaded(Load(0, 0), 3)
    view = View(1, 6, (0, 2), (4, 4))
    member.answered(member.beat(), answer(issued=1, newest=1, newest_round=newest, views=(view,)))
    assert member.first() == first
    if first is not None:
        member.start_round(first)
        assert member.beat().skipped == tuple(range(6, first))


def test_rounds_on_unassigned_data_are_bounded() -> None:
    """A member that says that it did more than 1,024 of them loads another state; more are not remembered."""
    run, _ = founded(3)
    orders = run.hear(0.0, 1, Beat(2000, 0, 0, tuple(range(2, 1100)))) or []
    assert {one.why for _, one in told(orders, Load)} == {"more than 1024 rounds on unassigned data"}
    for first in range(2, 19_000, 1000):
        run.hear(0.0, 1, Beat(20_000, 0, 0, tuple(range(first, first + 1000))))
    assert run.ledger.unassigned(1) == 2048
    with pytest.raises(ValueError, match="a skipped round that it has not begun"):
        run.hear(0.0, 2, Beat(5, 0, 0, (6,)))
