"""Whose state a peer of a resumed swarm begins with."""

from __future__ import annotations

from isles.training.records.checkpoint import Checkpoints


def seat_of(checkpoints: Checkpoints, step: int, rank: int) -> int:
    """The worker whose state of `step` worker `rank` goes on from: its own; where it was lost before, that of a peer of
    the stage that it served. ValueError where nobody of that stage has saved.
    """
    seats = checkpoints.seats(step)
    if rank in seats:
        return rank
    stages = _stages(checkpoints, step)
    alike = [seat for seat in seats if stages[seat] == stages[rank]]
    if not alike:
        raise ValueError(
            f"after step {step} nobody of stage {stages[rank]} has saved: name an earlier step with --step"
        )
    return alike[0]


def newest_whole(checkpoints: Checkpoints) -> int | None:
    """The newest step after which somebody of every stage has saved; None: there is none."""
    for step in sorted(checkpoints.steps(), reverse=True):
        stages = _stages(checkpoints, step)
        if {stages[seat] for seat in checkpoints.seats(step)} == set(stages):
            return step
    return None


def _stages(checkpoints: Checkpoints, step: int) -> list[int]:
    """By worker, the stage that it served."""
    return checkpoints.read_shard(step, checkpoints.seats(step)[0])["step"]["stages"]
