"""How a worker asks what becomes of a round that all land together, or none.

decided   who takes part in it, once no view is on its way that would change that
ruled     an answer is told, again and again, until the lighthouse has a word on it (`ballot`)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from isles.comm.elastic.ballot import NOTHING, Word
from isles.comm.elastic.member import Standing
from isles.comm.elastic.messages import Accusation, Done, Reload
from isles.comm.errors import CommError, DeadlinePassed, Diverged, Malformed, PeerSilent, Refused

if TYPE_CHECKING:
    from isles.comm.elastic.company import Company

_SOON = 0.3  # seconds until an answer is told again
_UNDECIDED = 3.0  # seconds for a view that is on its way
_LONGEST_REASON = 200


def decided(line: Company, round: int) -> Standing | None:
    """Who takes part in `round`. None where nobody can say now, or this worker has no part in it."""
    if line.has_answers:
        line.wait(lambda: line.member.group(round).decided or line.is_over, _UNDECIDED)
    standing = line.standing(round)
    return standing if line.has_answers and standing.decided and standing.view >= 0 else None


def ruled(line: Company, round: int, attempt: int, digest: int | None) -> Word | None:
    """What becomes of an attempt whose answer here has `digest`, or failed here. None where nobody can say now, this
    worker has no part in the run now, or the others landed what it has not got.
    """
    done = Done(round, attempt, NOTHING if digest is None else digest)
    word = line.words.newer(round, attempt)
    while word is None and not line.is_over:
        heard = line.ask(done)
        if isinstance(heard, Word):
            line.words.hear(heard)
        elif heard is None:
            break
        line.wait(lambda: line.words.newer(round, attempt) is not None or line.is_over, _SOON)
        word = line.words.newer(round, attempt)
    if word is not None and word.verdict == "land" and digest is None:
        line.ask(done)  # whoever was told of it begins with another's state
        return None
    return word


def accuse(line: Company, round: int, attempt: int, error: CommError) -> None:
    """Tell of whom a failure speaks. Who is gone the lighthouse sees itself."""
    peer, by = getattr(error, "peer", -1), getattr(error, "by", -1)
    if peer == line.seat:  # another one says so: that it accuses this worker is all that is known here
        peer, by = by, -1
    if isinstance(error, PeerSilent):
        line.ask(Accusation(round, attempt, error.rank, "late"))
    elif peer >= 0 and isinstance(error, DeadlinePassed):
        line.ask(Accusation(round, attempt, peer, "late"))
    elif peer >= 0 and isinstance(error, (Refused, Malformed, Diverged)):
        reason = "".join(one for one in str(error) if one.isprintable())
        line.ask(Accusation(round, attempt, peer, "refused", reason[:_LONGEST_REASON], by))


def stray(line: Company) -> None:
    """This worker has not what the others have: it is to begin with a state anew."""
    line.ask(Reload())
