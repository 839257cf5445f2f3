"""What strangers and bad members do to an elastic run, and by whom and with which words it is refused."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import pytest

from isles.comm.sockets.connection import LinkLost
from isles.comm.sockets.proof import TokenRefused
from isles.comm.tags import Tag
from isles.membership.keys import CONFIG, HELLO, LIGHTHOUSE, REPORTS, REQUESTS, signature, state_key
from isles.membership.lighthouse import JOINS
from isles.membership.messages import (
    Ack,
    AnnounceAddress,
    Beat,
    BeatReply,
    Done,
    Entry,
    Hello,
    Later,
    Leave,
    Lookup,
    Over,
    PeerReport,
    Proposal,
    Reload,
    RoundDecision,
    decode,
    encode,
)
from isles.membership.p2p.stream import CHUNK, PIECE, REFUSED, TAKEN, TICKET_SIZE, Head
from isles.membership.tls_session import open_session
from tests.strangers.callers import GARBAGE
from tests.strangers.elastic.attacker import NEVER, UNASKED, Attacker, other_run

By = Literal["engine", "joiner", "lighthouse", "victim"]
ANYBODY, OWN = "anybody", "own"


class Case(NamedTuple):
    """by: who refuses; member: in whose name that is counted, nobody's or the attacker's own; reason: as counted. `do`
    asserts what is answered.
    """

    name: str
    do: Callable[[Attacker], None]
    by: By
    reason: str = ""
    member: Literal["anybody", "own"] = ANYBODY


CASES: list[Case] = []


def case(by: By, reason: str = "", member: Literal["anybody", "own"] = ANYBODY) -> Callable[..., Callable[..., None]]:
    def add(do: Callable[[Attacker], None]) -> Callable[[Attacker], None]:
        CASES.append(Case(do.__name__.replace("_", " "), do, by, reason, member))
        return do

    return add


# Without the token: the engine does not let them in.

for name, said in GARBAGE.items():
    CASES.append(Case(f"{name}, before TLS", lambda one, said=said: one.raw(said), "engine"))
    if name in ("nothing", "zeros", "nested", "4 GB announced"):
        CASES.append(Case(f"{name}, inside TLS", lambda one, said=said: one.inside_tls(said), "engine"))


@case("engine")
def a_replayed_hello(one: Attacker) -> None:
    heard = one.overheard()
    assert len(heard) > 300  # through the handshake, and the secret
    one.raw(heard)


@case("engine")
def another_secret(one: Attacker) -> None:
    assert not one.enters(secret="0" * 32)


@case("engine")
def no_secret(one: Attacker) -> None:
    assert not one.enters(secret="")


@case("engine")
def the_secret_under_another_name(one: Attacker) -> None:
    assert not one.enters(speaker="node 0") and not one.enters(speaker="")


@case("engine")
def no_encryption(one: Attacker) -> None:
    assert not one.enters(tls=False)


@case("engine")
def another_fingerprint(one: Attacker) -> None:
    """A lighthouse of another certificate gets nothing: no secret, no session."""
    other = other_run(one.folder / f"other-{time.monotonic_ns()}")
    with pytest.raises(TokenRefused, match="is not the machine of this token"):
        open_session(other.token, one.address)


@case("engine")
def connections_broken_off(one: Attacker) -> None:
    for _ in range(10):
        with socket.create_connection((one.host, one.port), 10.0) as line:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@case("engine")
def eight_megabytes_in_one_message(one: Attacker) -> None:
    assert one.flood(REQUESTS, [bytes(8 << 20)], one.word, seconds=0.5) == [(None, None)]


# With the token, and no member.


@case("lighthouse", "a message that is not JSON")
def a_hello_that_nests(one: Attacker) -> None:
    assert one.ask(HELLO, b"[" * 60_000) == one.ask(HELLO, b'{"kind":' * 7_000) == NEVER


@case("lighthouse", "a message of 70000 bytes; at most 65536 are read")
def a_hello_that_is_long(one: Attacker) -> None:
    assert one.ask(HELLO, bytes(70_000)) == NEVER


@case("lighthouse", "a message that is not JSON")
def a_hello_with_a_number_without_end(one: Attacker) -> None:
    assert one.ask(HELLO, b"1" * 60_000) == NEVER


@case("lighthouse", "a message of the unknown kind 'leave'")
def an_order_for_a_hello(one: Attacker) -> None:
    assert one.ask(HELLO, encode(Leave())) == NEVER


@case("lighthouse", "Hello: its keys are version, corpus, session, certificates, messages, machine")
def a_hello_with_other_keys(one: Attacker) -> None:
    assert one.ask(HELLO, b'{"kind":"hello","version":"1","corpus":"a","session":"","__class__":"x"}') == NEVER


@case("lighthouse", "joins too often")
def joins_too_often(one: Attacker) -> None:
    answers = [one.hello() for _ in range(JOINS + 5)]
    assert isinstance(answers[-1], Later) and "from one address" in answers[-1].reason
    assert sum(isinstance(answer, Entry) for answer in answers) <= JOINS + 2


@case("lighthouse", "a message without the key of its member")
def no_seat(one: Attacker) -> None:
    assert one.ask(REQUESTS, encode(Beat())) == one.ask(REQUESTS, encode(Leave()), b"\xff" * 100) == NEVER


@case("lighthouse", "a message without the key of its member")
def a_seat_that_nobody_has(one: Attacker) -> None:
    assert one.ask(REQUESTS, encode(Beat()), partial(signature, 1 << 20, one.entry.key)) == NEVER


@case("lighthouse", "a message without the key of its member")
def the_seat_of_another(one: Attacker) -> None:
    assert one.ask(REQUESTS, encode(Leave()), partial(signature, one.victim, one.entry.key)) == NEVER


@case("victim", "a notification that is not the lighthouse's")
def orders_in_the_name_of_the_lighthouse(one: Attacker) -> None:
    for word in (None, b"", one.word, partial(signature, one.victim, one.entry.key)):
        for order in (
            Over("go home"),
            Proposal(9, 8, 1, (one.entry.member,), (one.victim,)),
            RoundDecision(1, "land", 0, (9,)),
        ):
            assert one.told(order, word) == NEVER


@case("engine")
def answers_in_place_of_the_lighthouse(one: Attacker) -> None:
    """Whatever it offers to serve there, nobody asks it: the victim, which beats each second, least of all."""
    with one.overhearing(
        REQUESTS, REPORTS, HELLO, CONFIG, state_key(LIGHTHOUSE), "isles/*", "isles/state/*", "**"
    ) as heard:
        time.sleep(2.0)
        assert one.ask(REQUESTS, encode(Lookup(one.victim)), one.word)[0] and not heard


@case("victim", "a message in another's name")
def a_call_in_the_name_of_another(one: Attacker) -> None:
    said, proof = one.called(one.victim)
    assert one.call(said, proof) == one.call(one.called(77)[0], proof) == one.call(said, bytes(16)) == NEVER


@case("victim", "a message of an impossible member")
def a_call_of_no_seat(one: Attacker) -> None:
    for member in (-1, 1 << 20, -(1 << 63), (1 << 63) - 1):
        assert one.call(*one.called(member)) == (None, b"later")
    assert one.call(*one.called(one.entry.member, island_rank=1)) == (None, b"later")


@case("victim", "no message of this library")
def a_call_of_another_library(one: Attacker) -> None:
    assert all(one.call(said, b"x") == NEVER for said in (b"", b"x", b"\xff" * 300))


@case("engine")
def a_pair_in_the_name_of_another(one: Attacker) -> None:
    """Neither with another's number, nor without what the lighthouse gives to who is to know it."""
    for member, word in ((one.victim, None), (77, None), (-1, None), (None, bytes(16))):
        with pytest.raises(LinkLost), one.paired(member=member, word=word):
            pass


@case("engine")
def a_ticket_of_nobody(one: Attacker) -> None:
    with pytest.raises(OSError):
        one.session.connect_by_ticket(bytes(TICKET_SIZE), 5.0)


# A member.


@case("lighthouse", "a round that this run does not have", OWN)
def a_beat_from_the_end_of_time(one: Attacker) -> None:
    for beat in (Beat(round=1 << 61), Beat(skipped=(-5,)), Beat(seen=((one.victim, 1 << 50),))):
        assert (
            one.ask(REQUESTS, encode(beat), one.word)
            == one.ask(REQUESTS, encode(Ack(0, True, beat)), one.word)
            == NEVER
        )


@case("lighthouse", "the work of an unknown member", OWN)
def the_work_of_nobody(one: Attacker) -> None:
    assert one.ask(REQUESTS, encode(Beat(seen=((1 << 40, 1),))), one.word) == NEVER


@case("lighthouse", "an answer for a round that no member is in", OWN)
def answers_of_rounds_that_nobody_is_in(one: Attacker) -> None:
    for said in (Done(1 << 40, 0, 5), Done(0, 0, 5), Done(1, 1 << 40, 5), PeerReport(-1, 0, one.victim, "refused")):
        assert one.ask(REQUESTS, encode(said), one.word) == NEVER


@case("lighthouse", "a message that no worker sends", OWN)
def a_word_of_the_lighthouse(one: Attacker) -> None:
    assert one.ask(REQUESTS, encode(RoundDecision(1, "land", 0, (one.entry.member,))), one.word) == NEVER


@case("lighthouse", "a message without a kind", OWN)
def words_that_are_none(one: Attacker) -> None:
    junk = [b"", b"{", b"null", b"\0" * 70_000, b'{"kind":"ack"}', b'{"kind":["beat"]}', b'{"kind":"__init__"}']
    assert all(one.ask(REQUESTS, said, one.word) == NEVER for said in junk)


@case("lighthouse", "an invalid address", OWN)
def addresses_that_are_none(one: Attacker) -> None:
    for port in (0, -1, 1 << 40):
        said = AnnounceAddress("127.0.0.1", port, "", one.own.token.fingerprint)
        assert one.ask(REQUESTS, encode(said), one.word) == NEVER


@case("lighthouse", "AnnounceAddress.certificate: String should match pattern '^[0-9a-f]{32}$'", OWN)
def a_certificate_that_is_none(one: Attacker) -> None:
    assert one.ask(REQUESTS, encode(AnnounceAddress("127.0.0.1", 9, "", "%%%")), one.word) == NEVER


@case("lighthouse", "another certificate than that with which it joined", OWN)
def another_certificate_than_before(one: Attacker) -> None:
    for said in (
        AnnounceAddress("127.0.0.1", 9, "", one.certificate),
        AnnounceAddress("", 0, "", one.own.token.fingerprint, 1),
    ):
        assert one.ask(REQUESTS, encode(said), one.word) == NEVER


@case("lighthouse", "an invalid report", OWN)
def a_report_of_two_megabytes(one: Attacker) -> None:
    assert one.ask(REPORTS, b"[" + b"0," * (1 << 20) + b"0]", one.word) == NEVER


@case("lighthouse", "it nests too deep", OWN)
def a_report_that_nests(one: Attacker) -> None:
    one.ask(REPORTS, b"[" * 500_000, one.word)


@case("victim", "pieces that do not fit together", OWN)
def lies_about_sizes(one: Attacker) -> None:
    for total, offset in ((5, 5), (5, -1), (-1, 0), (CHUNK + 5, 1), (1 << 62, 1 << 61), (-(1 << 63), 0)):
        assert one.mail(Head(PIECE, 1 << 40, offset, total, UNASKED)) == [(REFUSED, 1 << 40)]


@case("victim", "pieces that do not fit together", OWN)
def two_lengths_of_one_message(one: Attacker) -> None:
    pieces = [Head(PIECE, 1 << 40, CHUNK * number, CHUNK * (2 + number), UNASKED) for number in range(2)]
    assert one.mail(*pieces) == [(REFUSED, 1 << 40)]


@case("victim", "a message beyond the size limit", OWN)
def a_terabyte_announced(one: Attacker) -> None:
    assert one.mail(Head(PIECE, 1 << 40, 0, 1 << 40, UNASKED)) == [(REFUSED, 1 << 40)]


@case("engine")
def words_that_no_pair_says(one: Attacker) -> None:
    with one.paired() as stream, pytest.raises(LinkLost):
        stream.send(Head(200), b"", lambda *_: None)
        for _ in range(100):
            stream.wait(0.1, lambda *_: None)


@case("victim", "more unexpected messages than are buffered", OWN)
def sixty_four_megabytes_unasked(one: Attacker) -> None:
    """A quarter is kept. Then it is held back, by TCP, for as long as it likes to: what it could not send stays with
    it, but for what fits the kernels' buffers on the way.
    """
    heads = [Head(PIECE, (1 << 40) + number, 0, CHUNK, Tag("outer", 1 << 50, number)) for number in range(64)]
    left, said = one.flooded(heads, seconds=6.0)  # two leases
    assert left < 64 and 0 < [kind for kind, _ in said].count(TAKEN) <= 16, (left, said)


@case("lighthouse")
def reports_all_at_once(one: Attacker) -> None:
    one.flood(REPORTS, [bytes(1 << 20)] * 100, one.word)


@case("lighthouse")
def a_donor_who_gives_nothing(one: Attacker) -> None:
    """A word that may be said at any time: it costs a line."""
    assert one.ask(REQUESTS, encode(Reload()), one.word) == (b"", None)
    assert isinstance(decode(one.ask(REQUESTS, encode(Beat()), one.word)[0] or b""), BeatReply)


@case("lighthouse", "another version, text or number of workers")
def another_version(one: Attacker) -> None:
    answer = decode(one.ask(HELLO, encode(Hello("0.0.0", one.corpus, "", ("0" * 32,), (0, 0))))[0] or b"")
    assert "install that version" in answer.reason


@case("lighthouse", "another version, text or number of workers")
def a_hello_without_a_certificate(one: Attacker) -> None:
    answer = decode(one.ask(HELLO, encode(Hello(one.version, one.corpus, "", ())))[0] or b"")
    assert "show the certificate of each" in answer.reason
