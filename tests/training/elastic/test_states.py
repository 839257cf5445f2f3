"""States that a donor gives away: what it costs the donor, and what a joiner has of it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import isles
from isles.comm.errors import RendezvousFailed
from isles.comm.mesh import Mesh
from isles.membership.messages import Load
from isles.membership.state_transfer import (
    STATE,
    FetchRequest,
    StateNotFound,
    StateServer,
    StateUnavailable,
    fetch_state,
)
from isles.membership.tls_session import open_session
from isles.replicas.loop.outer import OuterSync
from isles.training.config.world import JoinState
from isles.training.elastic.leader import Bootstrap
from isles.training.elastic.states import FRESH, CatchUpLog, States
from isles.training.records.checkpoint import Checkpoints
from tests.membership.sessions import router


def trained(world: Mesh, width: int, steps: int, **options: Any) -> OuterSync:
    """A worker after so many inner steps; its state is of five vectors of the model's size."""
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(2)))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = isles.DiLoCo(model, inner, world.outer, sync_every=2, **options)
    for _ in range(steps):
        model(torch.ones(4, width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def resident() -> int:
    """Bytes of this process's own memory: what is mapped from files does not count."""
    fields = Path("/proc/self/statm").read_text().split()
    return (int(fields[1]) - int(fields[2])) * 4096


@contextmanager
def highest() -> Iterator[Callable[[], int]]:
    """The most `resident` that was seen since the block began."""
    seen, over = [resident()], threading.Event()

    def look() -> None:
        while not over.wait(0.001):
            seen.append(resident())

    looker = threading.Thread(target=look, daemon=True)
    looker.start()
    try:
        yield lambda: max(seen)
    finally:
        over.set()
        looker.join(5.0)


def handed_over(tmp_path: Path, kind: JoinState, **options: Any) -> tuple[OuterSync, OuterSync, States]:
    """A donor, and a joiner with its state."""

    def worker(world: Mesh) -> tuple[OuterSync, OuterSync, States]:
        donor, joiner = trained(world, 8, 4, **options), trained(world, 8, 0, **options)
        with router(tmp_path) as (mine, address, host):
            state_server = StateServer(host, "3", lambda notice: None)
            guest = open_session(mine.token, address)
            try:
                giving = States(donor, state_server, tmp_path, kind, lambda: 9)
                taking = States(joiner, StateServer(guest, "4", lambda notice: None), tmp_path, kind, lambda: 9)
                stop = threading.Event()
                rounds = threading.Thread(
                    target=lambda: [
                        giving.landed(2, {5: 1}, giving.wanted()) for _ in iter(lambda: stop.wait(0.01), True)
                    ]
                )
                rounds.start()
                try:
                    assert (taking.fetch(3, 20.0), taking.adopt(), taking.left_out) == (2, 2, {5: 1})
                finally:
                    stop.set()
                    rounds.join()
            finally:
                guest.close()
        return donor, joiner, taking

    return isles.run_virtual(worker, 1)[0]


def test_a_joiner_has_all_that_its_donor_trains_with(tmp_path: Path) -> None:
    donor, joiner, taken = handed_over(tmp_path, "full")
    assert not taken.lacks_moments and joiner.steps == donor.steps
    for state, same in zip(*(one.inner.state.values() for one in (donor, joiner)), strict=True):
        assert all(torch.equal(state[key], same[key]) for key in state)


def test_a_joiner_does_not_send_what_its_donor_holds_back(tmp_path: Path) -> None:
    """Error feedback is of one worker: the donor sends it with its next outer gradient, and nobody else does."""
    donor, joiner, _ = handed_over(tmp_path, "full", codec="topk:4", error_feedback="local")
    (own,), (other,) = donor.fragments, joiner.fragments
    assert own.residual is not None and own.residual.any()
    assert other.residual is not None and not other.residual.any()


def test_anchors_alone_are_a_third(tmp_path: Path) -> None:
    """With them the joiner has the donor's weights and outer momentum, and no moments."""
    full = handed_over(tmp_path / "full", "full")[2].taken
    donor, joiner, taken = handed_over(tmp_path, "anchors")
    assert taken.lacks_moments and not joiner.inner.state
    (own,), (other,) = donor.fragments, joiner.fragments
    assert own.digest == other.digest and torch.equal(own.vectors["momentum"], other.vectors["momentum"])
    for one, same in zip(donor.parameters, joiner.parameters, strict=True):
        assert torch.equal(one, same)
    assert taken.taken < 0.6 * full  # two vectors of five, and words


def test_a_donor_that_begins_with_another_s_state_gives_nothing_of_its_own(tmp_path: Path) -> None:
    """Who has followed it is told at once, so that nobody waits for who waits for it."""

    def worker(world: Mesh) -> None:
        donor = trained(world, 8, 4)
        with router(tmp_path) as (mine, address, host):
            state_server, guest = StateServer(host, "3", lambda notice: None), open_session(mine.token, address)

            def asked(what: str, seconds: float) -> str:
                request = FetchRequest(source="3", what=what, most=1 << 30, seconds=seconds)
                with pytest.raises(StateUnavailable) as why:
                    fetch_state(guest, request, tmp_path / "taken")
                return str(why.value)

            try:
                means, states = (
                    CatchUpLog(donor, state_server, tmp_path),
                    States(donor, state_server, tmp_path, "full", lambda: 9),
                )
                means.begins(3)
                assert states.landed(3, {}, [True, False])
                fetch_state(guest, FetchRequest(source="3", what=STATE, most=1 << 30, seconds=20.0), tmp_path / "taken")
                forgotten = threading.Timer(0.3, lambda: (states.forget(), means.forget()))
                forgotten.start()
                assert asked("mean-4", 60.0) == "there is none"
                assert "within" in asked(STATE, 0.5)
                means.begins(6)
                assert asked("mean-5", 60.0) == "there is none" and "within" in asked("mean-6", 0.5)
            finally:
                guest.close()
                state_server.close()

    isles.run_virtual(worker, 1)


@pytest.mark.long
def test_a_donor_of_100_mb_goes_on(tmp_path: Path) -> None:
    """It stands still for at most 1.5 times one copy of its state, and grows by at most 1.3 times the state."""

    def worker(world: Mesh) -> None:
        donor = trained(world, 1620, 4)
        state = [tensor for one in donor.inner.state.values() for tensor in one.values()]
        held = [*state, *donor.parameters, *donor.fragments[0].vectors.values(), donor.fragments[0].anchor]
        size = sum(tensor.nbytes for tensor in held)
        assert 100e6 < size < 110e6
        with router(tmp_path) as (mine, address, host):
            state_server, guest = StateServer(host, "3", lambda notice: None), open_session(mine.token, address)
            try:
                giving, ratios, growths = States(donor, state_server, tmp_path, "full", lambda: 9), [], []
                for trial in range(3):
                    began = time.thread_time()
                    copies = torch.cat([tensor.detach().reshape(-1) for tensor in held])
                    one_copy = time.thread_time() - began
                    del copies
                    before = resident()
                    with highest() as most:
                        taken = tmp_path / f"taken-{trial}"
                        asked = FetchRequest(source="3", what=STATE, most=1 << 30, seconds=20.0)
                        taking = threading.Thread(target=fetch_state, args=(guest, asked, taken))
                        taking.start()
                        while not state_server.is_requested(STATE):
                            time.sleep(0.001)
                        began = time.thread_time()
                        assert giving.landed(2 + trial * FRESH, {}, giving.wanted())
                        ratios.append((time.thread_time() - began) / one_copy)
                        taking.join(60.0)
                        assert taken.stat().st_size >= size
                        growths.append((most() - before) / size)
                    state_server.freeze(STATE)
                assert min(ratios) <= 1.5 and min(growths) <= 1.3, (ratios, growths)
            finally:
                guest.close()
                state_server.close()

    isles.run_virtual(worker, 1)


def kept_rounds(folder: Path, damaged: Sequence[int]) -> list[Any]:
    """Which is begun with of rounds 3 and 5, and what is told."""
    kept = Checkpoints(folder, "states")
    for round in (3, 5):
        kept.write_shard(round, 0, {"w": torch.zeros(100)})
        kept.commit(round, [0], {}, keep=0)
        if round in damaged:
            with kept.shard(round, 0).open("r+b") as file:
                file.seek(-1, os.SEEK_END)
                file.write(b"?")
    told: list[str] = []
    return [kept.newest_sound(told.append), *told]


def test_a_damaged_state_is_not_begun_with(tmp_path: Path) -> None:
    """But the one before, which is said; where there is none the run does not begin anew in its stead."""
    assert kept_rounds(tmp_path, []) == [5]
    assert kept_rounds(tmp_path, [3]) == [5]
    before, told = kept_rounds(tmp_path, [5])
    assert before == 3
    assert "step-5/worker-0.safetensors: is damaged, so the run goes on from round 3" in told
    with pytest.raises(ValueError, match="all states are damaged: restore one, or start a new run"):
        kept_rounds(tmp_path, [3, 5])
    assert Checkpoints(tmp_path / "none").newest_sound(print) is None


class Told:
    """A line to the lighthouse that names no donor, and whose kept state does not come."""

    def __init__(self, why: StateUnavailable) -> None:
        self.why, self.acts, self.notices, self.reloads, self.has = why, list[str](), list[str](), 0, -1
        whole: Any = self
        self.beginning = Bootstrap(whole, whole, whole, threading.Event(), self.notices.append, agrees=True)

    def take(self) -> bool:
        """Whether it has a state then, of a worker to whom none comes."""
        decisions, why = self.beginning._take(Load(1, -1)), None
        while True:
            try:
                said = next(decisions) if why is None else decisions.throw(why)
            except StopIteration as end:
                return end.value
            self.acts.append(said.kind)
            why = self.why if said.kind == "load" else None

    def reload(self) -> None:
        self.reloads += 1

    def loaded(self, load: Load, round: int, left_out: object) -> None:
        self.has = round


def test_nobody_begins_anew_where_a_state_is_kept() -> None:
    """It is asked for again; then the worker ends, and the state stays."""
    late = Told(StateUnavailable("nothing arrived within 60 s"))
    for _ in range(2):
        assert not late.take()
    assert late.acts == ["load"] * late.reloads and late.reloads == 2 and late.has == -1
    assert late.notices[-1].startswith(
        "could not fetch the state that the lighthouse saved (nothing arrived within 60 s)"
    )
    with pytest.raises(RendezvousFailed, match="RUN/states"):
        late.take()
    first = Told(StateNotFound("there is none"))
    assert first.take() and first.acts == ["load", "draw"] and first.has == 0
