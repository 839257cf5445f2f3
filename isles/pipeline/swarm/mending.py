"""A stage that has lost all of its peers is served again, by somebody who makes it of its neighbours.

    wait     so many seconds for one who asks to come, where anybody still can
    agree    on who that is; where nobody has asked, one of a stage that keeps another peer goes there
    make     it takes what a peer of the stage before has and one of the stage behind, and is their mean by the norms of
             their gradients (`isles.pipeline.recovery`, CheckFree)

Nothing that was counted is worth anything then: the step begins again. The first stage and the last are not made anew,
for nobody else has what makes the stream of tokens, or scores of the stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from torch import Tensor

from isles.comm.errors import DeadlinePassed
from isles.pipeline.recovery import sources
from isles.pipeline.swarm.arrangement import NOWHERE, StageChange
from isles.pipeline.swarm.entering import welcome
from isles.pipeline.swarm.gifts import take
from isles.pipeline.swarm.swarm import StageLost, Swarm


def mend(swarm: Swarm, step: int, patience: float, *, comers: bool) -> list[StageChange]:
    """Have somebody serve every stage that has lost its peers, from now on; all who are left ask together. What has
    changed. step: under way. patience: seconds to wait. comers: whether somebody new may come now. StageLost where
    nobody can go there, or a neighbour is lost too.
    """
    if comers:
        _await_comers(swarm, patience)
    said = swarm.agreement.agree(swarm.asking)
    lost = [stage for stage in range(swarm.count) if not swarm.peers(stage)]
    for stage in lost:
        refuse(stage, lost, swarm.count)
    asked = swarm.may_come(peer for word in said.values() for peer in word) if comers else []
    changes = swarm.arrangement.rescue(swarm.agreement.members, asked, lost)
    for stage in set(lost) - {change.after for change in changes}:
        raise StageLost(stage, "no other stage has one to spare")
    swarm.rearrange(changes)
    welcome(swarm, step)
    return changes


def refuse(stage: int, lost: Sequence[int], stages: int) -> None:
    """StageLost where `stage` cannot be made of others than those that are lost."""
    if stage in (0, stages - 1):
        raise StageLost(stage, f"nobody else has its {'head' if stage else 'embedding'}")
    gone = [other for other in sources("checkfree", stage, stages) if other in lost]
    if gone:
        raise StageLost(stage, f"it would be made of stage {gone[0]}, which is lost too")


def take_neighbours(swarm: Swarm, stage: int) -> list[Tensor]:
    """What a peer of each stage has that `stage` is made of, as `isles.pipeline.swarm.gifts` gives it. StageLost where
    one is lost before it was given.
    """
    fresh = {change.peer for change in swarm.changes}
    found = []
    for source in sources("checkfree", stage, swarm.count):
        donors = [peer for peer in swarm.peers(source) if peer not in fresh]
        state = take(swarm.agreement.post, donors, swarm.agreement.patience)
        if state is None:
            raise StageLost(source)
        found.append(state)
    return found


def _await_comers(swarm: Swarm, patience: float) -> None:
    """Until one asks to come, or another peer waits no more."""
    post = swarm.agreement.post

    def is_over() -> bool:
        absent = {peer for peer, stage in enumerate(swarm.stages) if stage == NOWHERE}
        return bool(swarm.may_come(swarm.asking) or post.calls()) or absent <= post.mail.lost.keys()

    with suppress(DeadlinePassed):
        post.wait_for(is_over, patience)
