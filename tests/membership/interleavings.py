"""Every way in which one round of a two-shot mean can go: messages in any order, deaths, crashes and exchanges that
fail at any point; also where a quorum is enough.

What is walked is the code of `isles.membership.round_commit`; only the mean's messages and the network are made up
here. A state is immutable, so all of them can be kept and none is looked at twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random

from isles.membership.round_commit import NOTHING, Ballot, RoundDecision, RoundState

Message = tuple[str, int, int, int]  # ("scatter" or "gather", attempt, from, to)


@dataclass(frozen=True)
class State:
    ballot: Ballot
    parts: tuple[RoundState, ...]
    living: frozenset[int]
    gathering: frozenset[tuple[int, int]]  # (attempt, member): it has all shards of others and sent its own on
    flying: frozenset[Message]
    arrived: frozenset[Message]
    deaths: int
    crashes: int
    failures: int = 0
    failed: frozenset[tuple[int, int]] = frozenset()  # (attempt, member): whose exchange has
    quorum: float = 0.0
    up: bool = True


@dataclass(frozen=True)
class Walk:
    """What was found. wrong: states in which two have landed different sets, or somebody living waits for ever. late:
    states in which somebody living knows that the others landed without it.
    """

    states: int
    ends: int
    wrong: tuple[State, ...]
    late: int = 0


def start(count: int, deaths: int, crashes: int, failures: int = 0, quorum: float = 0.0) -> State:
    members = tuple(range(count))
    if quorum:
        waiting = tuple(RoundState(member, 1, 0, (member,)) for member in members)
        ballot = Ballot(1, (members,), quorum=quorum)
        none = frozenset[Message]()
        return State(
            ballot, waiting, frozenset(members), frozenset(), none, none, deaths, crashes, failures, quorum=quorum
        )
    parts = tuple(RoundState(member, 1, 0, members) for member in members)
    flying = frozenset(message for member in members for message in _sends("scatter", parts[member]))
    none = frozenset[Message]()
    return State(Ballot(1, (members,)), parts, frozenset(members), frozenset(), flying, none, deaths, crashes, failures)


def walk(
    first: State,
    *,
    answered: Callable[[RoundState, int], RoundState] = RoundState.answered,
    stop_at_first: bool = False,
    most: int = 1 << 60,
) -> Walk:
    """All states that can follow `first`, `most` of them. answered: what a member does with an answer; a mutant may
    replace it.
    """
    seen: set[State] = set()
    stack = [first]
    wrong: list[State] = []
    ends = late = 0
    while stack and len(seen) < most:
        state = stack.pop()
        if state in seen:
            continue
        seen.add(state)
        landed = {(part.attempt, part.members) for part in state.parts if part.phase == "landed"}
        following = list(_following(state, answered))
        over = not any(faults_left(state) == faults_left(after) for after in following)
        ends += over
        phases = {state.parts[member].phase for member in state.living}
        late += "left out" in phases
        settled = {"landed", "left out"} if state.quorum else {"landed"}
        if len(landed) > 1 or (over and not phases <= settled):
            wrong.append(state)
            if stop_at_first:
                break
        stack += [after for after in following if after not in seen]
    return Walk(len(seen), ends, tuple(wrong), late)


def wander(state: State, random: Random) -> State:
    """One schedule to its end: each step one of those that are possible; faults come seldom, and stay at the end."""
    while True:
        kinds = [_network, _members, _lighthouse]
        random.shuffle(kinds)
        if random.random() < 0.05:
            kinds.insert(0, _faults)
        elif not state.up and random.random() < 0.1:
            kinds.insert(0, _restart)
        for kind in kinds:
            following = list(kind(state))
            if following:
                state = random.choice(following)
                break
        else:
            if state.up:
                return state
            state = replace(state, up=True)


def _members(state: State) -> Iterator[State]:
    for member in state.living:
        yield from _member(state, member, RoundState.answered)


def _restart(state: State) -> Iterator[State]:
    yield replace(state, up=True)


def faults_left(state: State) -> tuple[int, int, int]:
    return state.deaths, state.crashes, state.failures


def _following(state: State, answered: Callable[[RoundState, int], RoundState]) -> Iterator[State]:
    yield from _network(state)
    for member in state.living:
        yield from _member(state, member, answered)
    yield from _lighthouse(state)
    yield from _faults(state)


def _network(state: State) -> Iterator[State]:
    for message in state.flying:
        arrived = state.arrived | {message} if message[3] in state.living else state.arrived
        yield replace(state, flying=state.flying - {message}, arrived=arrived)


def _member(state: State, member: int, answered: Callable[[RoundState, int], RoundState]) -> Iterator[State]:
    part = state.parts[member]
    if part.phase == "exchanging" and state.quorum and part.attempt == 0:
        if state.up and state.ballot.add_share(member, 1) != state.ballot:
            yield replace(state, ballot=state.ballot.add_share(member, 1))
    elif (part.attempt, member) in state.failed:
        told = state.ballot.add_answer(part.attempt, member, NOTHING)
        if state.up and told != state.ballot and state.ballot.landed is None:
            yield replace(state, ballot=told)
    elif part.phase == "exchanging":
        if any((part.attempt, other) in state.failed for other in part.members):  # it waits in vain, up to its deadline
            yield replace(state, failed=state.failed | {(part.attempt, member)})
        gathering = (part.attempt, member) in state.gathering
        kind = "gather" if gathering else "scatter"
        if all((kind, part.attempt, other, member) in state.arrived for other in part.members if other != member):
            if gathering:
                yield _with_part(state, answered(part, part.attempt))
            else:
                flying = state.flying | set(_sends("gather", part))
                yield replace(state, gathering=state.gathering | {(part.attempt, member)}, flying=flying)
    if state.up:
        decisions = [state.ballot.decision(member)]
        if part.phase == "done" and state.ballot.landed is None:
            told = state.ballot.add_answer(part.attempt, member, 0)
            if told != state.ballot:
                yield replace(state, ballot=told)
    else:
        decisions = [_landed(state.parts[other]) for other in state.living if other != member]
    for decision in decisions:
        after = part if decision is None else part.apply(decision)
        if after != part:
            moved = _with_part(state, after)
            again = after.phase == "exchanging"
            yield replace(moved, flying=moved.flying | set(_sends("scatter", after))) if again else moved


def _landed(part: RoundState) -> RoundDecision | None:
    """The decision that a landed member could repeat to one that asks."""
    return RoundDecision(part.round, "land", part.attempt, part.members) if part.phase == "landed" else None


def _lighthouse(state: State) -> Iterator[State]:
    if state.up and (decision := state.ballot.decide(state.living)) is not None:
        yield replace(state, ballot=state.ballot.decided(decision))
    if state.up and state.quorum and not state.ballot.is_closing and len(state.ballot.attempts) == 1:
        yield replace(state, ballot=replace(state.ballot, is_closing=True))


def _faults(state: State) -> Iterator[State]:
    if state.deaths:
        for member in state.living:  # what it had sent arrives, or is lost with it
            dead = replace(state, living=state.living - {member}, deaths=state.deaths - 1)
            yield dead
            yield replace(dead, flying=frozenset(message for message in state.flying if message[2] != member))
    if state.failures:
        for part in state.parts:
            mark = (part.attempt, part.member)
            tries = part.phase == "exchanging" and not (state.quorum and part.attempt == 0)
            if part.member in state.living and tries and mark not in state.failed:
                yield replace(state, failed=state.failed | {mark}, failures=state.failures - 1)
    if not state.up:
        yield replace(state, up=True)
    elif state.crashes:  # its journal stays, what it heard is gone
        forgetful = replace(state.ballot, done=frozenset(), delivered=frozenset(), is_closing=False)
        yield replace(state, ballot=forgetful, crashes=state.crashes - 1, up=False)


def _with_part(state: State, part: RoundState) -> State:
    return replace(state, parts=tuple(part if old.member == part.member else old for old in state.parts))


def _sends(kind: str, part: RoundState) -> Iterator[Message]:
    return ((kind, part.attempt, part.member, other) for other in part.members if other != part.member)
