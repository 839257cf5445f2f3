"""The lighthouse's count of what it carries, from looks at connections."""

from isles.comm.elastic.lasting.journalled import of_another_version
from isles.comm.elastic.links.relayed import RelayCounter
from isles.comm.tcp import Seen


def look(here: int, there: int, received: int) -> Seen:
    return Seen(f"10.0.0.1|{here} 10.0.0.2|{there}", True, 2 * received, 0.0, True, 0, None, received)


def test_connections_come_and_go_and_others_do_not_count() -> None:
    now: dict[int, Seen] = {}
    own = [0]
    counter = RelayCounter(29400, lambda: own[0], lambda: now)
    assert counter.relayed() == 0
    now |= {3: look(29400, 1, 100), 4: look(29400, 2, 50), 5: look(1234, 29400, 7000)}
    assert counter.relayed() == 150
    own[0] = 20
    now[3] = look(29400, 1, 300)
    assert counter.relayed() == 330
    del now[4]  # it is closed: what it brought still counts
    assert counter.relayed() == 330
    now[3] = look(29400, 1, 10)  # another one in its place
    assert counter.relayed() == 340


def test_a_lighthouse_that_is_lit_again_goes_on_from_what_it_noted() -> None:
    now = {3: look(29400, 1, 5_000_000)}
    counter, journal = RelayCounter(29400, lambda: 0, lambda: now), []
    for grown in (0, 30_000, 2_000_000, 40_000_000):  # the second is too little to be noted
        now[3] = look(29400, 1, 5_000_000 + grown)
        if (note := counter.note(counter.relayed())) is not None:
            of_another_version(note)  # nobody who reads the journal trips over it
            journal.append(note)
    assert [note["bytes"] for note in journal] == [5_000_000, 7_000_000, 45_000_000]
    now[3] = look(29400, 1, 100)
    again = RelayCounter(29400, lambda: 0, lambda: now, journal)
    assert again.relayed() == 45_000_100 and again.note(45_000_100) is None
